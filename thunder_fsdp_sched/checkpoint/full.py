"""State dicts of whole parameters."""

from __future__ import annotations

import torch
from thunder.core.module import ThunderModule

__all__ = ["full_state_dict"]


def full_state_dict(model: ThunderModule) -> dict[str, torch.Tensor]:
    """The state dict of the original, unsharded module: whole parameters under the original module's keys; a collective.

    It is what ``model.original_state_dict()`` gives, with the keys that ``load_state_dict(strict=True)`` of the original
    module wants: tied names included, and no dot in front of what the root module owns (as Thunder 0.2.6 has it).
    """
    entries = {key.removeprefix("."): value for key, value in model.original_state_dict().items()}
    for name, tied in model._get_shared_names().items():
        known = next((entries[other] for other in tied if other in entries), None)
        if known is not None:
            entries.setdefault(name, known)
    return entries
