"""Detect optimizer state of whole parameters, created before ``thunder.jit`` or loaded from an unsharded run.

An optimizer that was created before ``thunder.jit`` trains the shards, which are the same objects. But state that it
has for whole parameters, such as momenta, does not fit their rows, or broadcasts to them without an error. So each
optimizer is checked before its first step on shards, and again after it has loaded a state. Later steps cost one
look-up.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["SHARD_OF", "mark_as_shard"]

SHARD_OF = "_fsdp_shard_of"
"""Attribute of a parameter that is a shard: the leading name and the shape of the unsharded one."""

_marks = 0  # of shards, in this process: optimizers are checked again when there are more
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def mark_as_shard(param: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    """Notes of which parameter ``param`` is a shard."""
    global _marks
    setattr(param, SHARD_OF, (name, shape))
    _marks += 1


def _refuse_whole_state(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _checked.get(optimizer) == _marks:
        return
    if not hasattr(optimizer, "owns"):  # WholeParameters has whole state for rows
        for group in optimizer.param_groups:
            for param in group["params"]:
                if hasattr(param, SHARD_OF):
                    _check_state(optimizer, param, *getattr(param, SHARD_OF))
    if optimizer not in _checked:
        optimizer.register_load_state_dict_post_hook(_forget)
    _checked[optimizer] = _marks


def _check_state(optimizer: torch.optim.Optimizer, param: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    for key, value in optimizer.state.get(param, {}).items():
        if isinstance(value, torch.Tensor) and value.ndim and value.shape == shape != param.shape:
            raise ValueError(
                f"{type(optimizer).__name__}: state {key!r} of parameter {name!r} has the shape {tuple(shape)} of the "
                f"unsharded parameter, but the optimizer now trains this rank's rows {tuple(param.shape)}: it was made and "
                f"stepped before thunder.jit, or has loaded the state of an unsharded run. Make it anew, and load its state "
                f"by thunder_fsdp_sched.load_checkpoint"
            )


def _forget(optimizer: torch.optim.Optimizer) -> None:
    _checked[optimizer] = -1


register_optimizer_step_pre_hook(_refuse_whole_state)
