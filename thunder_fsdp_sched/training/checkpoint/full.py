"""State dicts of whole parameters."""

from __future__ import annotations

import torch
from thunder.core.module import ThunderModule

from ...transform import find_jitted

__all__ = ["full_state_dict"]


def full_state_dict(model: ThunderModule) -> dict[str, torch.Tensor]:
    """Return whole parameters under the keys of the original, unsharded module; a collective.

    It is the result of ``model.original_state_dict()``, with the keys that ``load_state_dict(strict=True)`` of the
    original module expects: including tied names, and without the leading dot that Thunder 0.2.6 adds to names of the
    root module.
    """
    model, _ = find_jitted(model)
    entries = {key.removeprefix("."): value for key, value in model.original_state_dict().items()}
    for name, tied in model._get_shared_names().items():
        known = next((entries[other] for other in tied if other in entries), None)
        if known is not None:
            entries.setdefault(name, known)
    return entries
