"""Check the state of optimizers that train shards, and let their state dicts hold whole state.

An optimizer that was created before ``thunder.jit`` trains the shards, which are the same objects. But state that it
has for whole parameters, such as momenta, does not fit their rows, or broadcasts to them without an error. So each
optimizer is checked before its first step on shards, and again after it has loaded a state. Later steps cost one
look-up.

After an optimizer's first step, its ``state_dict`` has entries that record which rows they hold, like that of a model
(see [Note: Two kinds of entries] in ``row_pieces``), because ``dcp.save`` and ``torch.save`` would mistake plain rows for
whole state. Entries that are loaded become rows again at the next step.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..runtime.bucket import Bucket
from ..runtime.shard_grads import plain
from .row_pieces import RowPiece, as_entry, refuse_unshared, rows_from

__all__ = ["SHARD_OF", "mark_as_shard"]

SHARD_OF = "_fsdp_shard_of"
"""The attribute of a shard with the first name and the shape of the unsharded parameter."""

_PLACE = "_fsdp_place"
"""The attribute of a shard with its :class:`_Place`."""

_marks = 0  # number of marked shards in this process; when it grows, optimizers are checked again
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


class _Place:
    """The bucket and index of a shard. As an attribute, it prevents pickling the shard as if it were the parameter."""

    def __init__(self, bucket: Bucket, index: int) -> None:
        self._bucket = weakref.ref(bucket)
        self._index = index
        self._name = bucket.spec.params[index].name

    def find(self) -> tuple[Bucket, int] | None:
        """Return bucket and index, or ``None`` if the model is gone."""
        bucket = self._bucket()
        return None if bucket is None else (bucket, self._index)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"parameter {self._name!r} of a sharded model cannot be pickled: it holds this rank's rows. Save "
            f"model.state_dict() or full_state_dict(model), or its rows: p.detach()"
        )


def mark_as_shard(bucket: Bucket, index: int) -> None:
    """Mark ``bucket.params[index]`` as a shard of its parameter."""
    global _marks
    param, spec = bucket.params[index], bucket.spec.params[index]
    setattr(param, SHARD_OF, (spec.name, spec.shape))
    setattr(param, _PLACE, _Place(bucket, index))
    _marks += 1


def _refuse_whole_state(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _checked.get(optimizer) == _marks:
        return
    is_rows = not hasattr(optimizer, "owns")  # WholeParameters has whole state for rows
    if is_rows:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if hasattr(param, SHARD_OF):
                    _check_state(optimizer, param, *getattr(param, SHARD_OF))
    if optimizer not in _checked:
        optimizer.register_load_state_dict_post_hook(_forget)
        if is_rows:
            optimizer.register_state_dict_post_hook(_hold_entries)
    _checked[optimizer] = _marks


def _check_state(optimizer: torch.optim.Optimizer, param: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    state = optimizer.state.get(param, {})
    for key, value in state.items():
        if isinstance(value, (DTensor, RowPiece)):
            place = _place_of(param)
            try:
                state[key] = value if place is None else rows_from(*place, value, as_rows=True)
            except ValueError as error:
                raise ValueError(f"{type(optimizer).__name__}: state {key!r} of parameter {name!r}: {error}") from None
        elif isinstance(value, torch.Tensor) and value.ndim and value.shape == shape != param.shape:
            raise ValueError(
                f"{type(optimizer).__name__}: state {key!r} of parameter {name!r} has the shape {tuple(shape)} of the "
                f"unsharded parameter, but the optimizer now trains this rank's rows {tuple(param.shape)}: it was created "
                f"and stepped before thunder.jit, or has loaded the state of an unsharded run. Create a new optimizer, and "
                f"load its state with thunder_fsdp_sched.load_checkpoint"
            )


def _hold_entries(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace plain rows in a state with entries that record which rows they hold."""
    states = dict(state_dict["state"])
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for param, number in zip(group["params"], saved["params"], strict=True):
            place = _place_of(param)
            if place is not None and number in states:
                refuse_unshared(place[0])
                states[number] = {
                    key: as_entry(*place, plain(value), as_rows=True) if _is_rows(value, param) else value
                    for key, value in states[number].items()
                }
    return {**state_dict, "state": states}


def _place_of(param: torch.Tensor) -> tuple[Bucket, int] | None:
    place: _Place | None = getattr(param, _PLACE, None)
    return None if place is None else place.find()


def _is_rows(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, (DTensor, RowPiece)) and value.shape == param.shape


def _forget(optimizer: torch.optim.Optimizer) -> None:
    _checked[optimizer] = -1


register_optimizer_step_pre_hook(_refuse_whole_state)
