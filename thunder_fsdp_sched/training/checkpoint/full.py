"""State dicts of whole parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from thunder.core.module import ThunderModule
from torch.distributed.tensor import DTensor

from ...sharding.sharded_module import ShardedModule
from ...transform import find_jitted

__all__ = ["full_state_dict", "gather_entries"]


def full_state_dict(model: ThunderModule) -> dict[str, torch.Tensor]:
    """Return whole parameters under the keys of the original, unsharded module; a collective.

    It is the result of ``model.original_state_dict()``, which ``load_state_dict(strict=True)`` of the original module
    accepts.
    """
    model, _ = find_jitted(model)
    return dict(model.original_state_dict())


def gather_entries(entries: Mapping[str, Any], sharded: ShardedModule | None, *, keeps: bool) -> dict[str, Any]:
    """Gather the DTensors of a state dict one by one; a collective.

    Args:
        sharded: tells which names are those of one parameter, whose values share memory.
        keeps: return tensors in host memory on this rank, else ``None`` in place of each tensor.
    """
    leading = {name: name if sharded is None else sharded.names_of(name)[0] for name in entries}
    whole: dict[str, Any] = {}  # by leading name
    for name, value in entries.items():
        if leading[name] not in whole:
            if isinstance(value, DTensor):
                value = value.full_tensor()
            if isinstance(value, torch.Tensor):
                value = value.detach().cpu() if keeps else None
            whole[leading[name]] = value
    return {name: whole[leading[name]] for name in entries}
