"""Entries of state dicts and state of optimizers: which rows of a whole tensor this rank has, and checks before steps.

[Note: Entries of state dicts]
An entry is a DTensor (:class:`RowDTensor`) that shares the memory of the parameter. torch.distributed.checkpoint (DCP)
saves it as a chunk of the whole tensor, so a checkpoint does not depend on how it was sharded. Pickled and loaded, for
instance by ``torch.save`` and ``torch.load``, an entry with uneven rows is a :class:`RowPiece`.

[Note: Optimizers on rows]
The user's optimizer steps, on parameters, gradients and state that are DTensors. State that it makes from a parameter, by
``torch.zeros_like(p)`` for instance, is rows by itself (see [Note: Operators on rows] in ``row_operators``). So hooks,
closures, schedulers and derived classes see what they see in an unsharded run, and ``state_dict`` has DTensors.

Loaded state may be cut otherwise: ``torch.distributed.checkpoint.state_dict`` cuts whole state evenly, and ``torch.load``
gives a :class:`RowPiece`. It becomes rows before the next step. ``load_state_dict`` gives an optimizer a new dictionary of
state, so a step needs to look at the state only if that has changed.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_map_only

from ..runtime.bucket import Bucket
from ..runtime.row_dtensor import DTENSORS, RowDTensor
from ..runtime.row_dtensor import RowPiece as RowPiece
from ..runtime.rows import Rows
from .former_parameters import refuse_former

_NEED_WHOLE = (torch.optim.Muon, torch.optim.Adafactor)
"""See [Note: One owner for each parameter] in ``training.whole_parameters``."""

_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
"""The dictionary of state of each optimizer that was found to be rows."""


def refuse_unshared(bucket: Bucket) -> None:
    """Raise an error if ranks have different parameters under one name, of which a checkpoint would keep only one.

    Raises:
        ValueError: names the parameter and its ranks.
    """
    if bucket.control is not None and not bucket.control.is_on_all_ranks(bucket):
        raise ValueError(
            f"checkpoint: {bucket.spec.params[0].name!r} is sharded over ranks {list(bucket.ranks.group.global_ranks)} "
            f"alone (process_group_for), and the others hold another parameter of this name: a checkpoint keeps one "
            f"of each name. Give parameters that differ by rank names that do, experts.0 and experts.1"
        )


def rows_from(rows: Rows, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows, as a view, of a state dict's value for a parameter.

    A DTensor that is sharded otherwise is gathered, and its rows are copied: then all ranks must call this.

    Args:
        value: a whole tensor, or an entry with at least this rank's rows.

    Raises:
        ValueError: it has another shape, or other rows.
    """
    if value.shape != rows.shape:
        are_rows = value.shape == rows.local_shape and type(value) in (torch.Tensor, torch.nn.Parameter)
        raise ValueError(
            f"the unsharded parameter has shape {tuple(rows.shape)}, the entry {tuple(value.shape)}"
            + ", which are this rank's rows: load the DTensor, or copy them, p.to_local().copy_(rows)" * are_rows
        )
    value = value.detach()
    if isinstance(value, RowDTensor) and value.rows == rows:
        return value._local_tensor
    if isinstance(value, DTENSORS):
        is_even = rows.is_even and value.placements[-1] == Shard(0) and not isinstance(value, RowDTensor)
        is_same = is_even and value.device_mesh.shape[-1] == rows.ranks.group.size
        return value.to_local() if is_same else rows.of(value.full_tensor()).clone()
    if not isinstance(value, RowPiece):
        return rows.of(value)
    local, first = value.to_local(), value.start
    if rows.start == rows.end:
        return local.new_empty(rows.local_shape)
    if first <= rows.start and rows.end <= first + len(local):
        return local[rows.start - first : rows.end - first]
    raise ValueError(
        f"this rank needs rows [{rows.start}, {rows.end}) of {tuple(rows.shape)}, but the entry holds others: it is of "
        f"another rank, or sharded otherwise. Load it by dcp.load into state_dict(), or give whole tensors (full_tensor())"
    )


def state_to_rows(optimizer: torch.optim.Optimizer) -> None:
    """Turn loaded state into rows of the parameters; a collective if it is cut otherwise.

    Raises:
        ValueError: state has another shape, or is that of an unsharded parameter; it names the parameter.
    """
    if _checked.get(optimizer) is optimizer.state:
        return
    if not hasattr(optimizer, "owns"):  # WholeParameters has whole state for rows
        for param, state in optimizer.state.items():
            if isinstance(param, RowDTensor):
                for key, value in state.items():
                    as_rows = partial(
                        _as_rows, param, f"{type(optimizer).__name__}: state {key!r} of parameter {param.rows.label!r}"
                    )
                    state[key] = tree_map_only(torch.Tensor, as_rows, value)
    _checked[optimizer] = optimizer.state


def _as_rows(param: RowDTensor, what: str, value: torch.Tensor) -> torch.Tensor:
    rows = param.rows
    if value.ndim and value.shape == rows.shape and type(value) is torch.Tensor:
        raise ValueError(
            f"{what} has the shape {tuple(rows.shape)} of the unsharded parameter, but it trains this rank's rows "
            f"{rows.local_shape}: it has loaded the state of an unsharded run. Create a new optimizer, and load its state "
            f"with thunder_fsdp_sched.load_checkpoint"
        )
    if not isinstance(value, (*DTENSORS, RowPiece)):
        return value
    if isinstance(value, RowDTensor) and value.rows.has_cuts_of(rows):
        return value
    if isinstance(value, DTENSORS) and all(placement.is_replicate() for placement in value.placements):
        return value
    if isinstance(value, DTENSORS) and value.shape != rows.shape and value.shape[:1] == rows.shape[:1]:
        rows = rows.reshaped(value.shape)
        return RowDTensor.wrap(rows.of(value.full_tensor()), rows)
    try:
        return RowDTensor.wrap(rows_from(rows, value), rows)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


#
# Before each step of an optimizer
#


def check_before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse optimizers that would train something else than the model, and give their state the rows of parameters.

    Raises:
        RuntimeError: it has parameters from before ``thunder.jit``.
        ValueError: it would mistake rows for whole parameters.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    refuse_former(params)
    sharded = [param for param in params if isinstance(param, RowDTensor)]
    _refuse_rows(optimizer, sharded)
    state_to_rows(optimizer)
    if len(args) <= 1 and kwargs.get("closure") is None:  # a closure computes gradients later
        _warn_of_unreduced(optimizer, sharded)


def _refuse_rows(optimizer: torch.optim.Optimizer, sharded: Sequence[RowDTensor]) -> None:
    """Raise an error on all ranks for optimizers of torch that would mistake rows for whole parameters."""
    cls = type(optimizer).__name__
    if (why := _mixes_ranks(optimizer)) and (
        param := _first(p for p in sharded if p.rows.ranks.group.size > 1)
    ) is not None:
        raise ValueError(
            f"{cls} {why}, but was given rows of {param.rows.label!r}, which is sharded. Use AdamW, or an optimizer that "
            f"treats each parameter by itself, by thunder_fsdp_sched.WholeParameters"
        )
    if _needs_whole(optimizer) and (param := _first(p for p in sharded if p.rows.is_cut)) is not None:
        raise ValueError(
            f"{cls} needs whole parameters, but was given rows of {param.rows.label!r}, which is sharded: create it with "
            f"thunder_fsdp_sched.WholeParameters({cls}, model, params, ...)"
        )


def _needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    # Those of torchao make states as DTensors that are cut evenly.
    return isinstance(optimizer, _NEED_WHOLE) or any(
        c.__module__.startswith("torchao.") for c in type(optimizer).__mro__
    )


def _mixes_ranks(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer cannot train shards in any way; empty if it can."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return "computes one direction and step size for all parameters"
    # Importing it takes longer than all of this package.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return "copies what one rank has updated to all others"
    return ""


def _warn_of_unreduced(optimizer: torch.optim.Optimizer, sharded: Sequence[RowDTensor]) -> None:
    """Warn of a step that changes nothing because all gradients of sharded parameters are still unreduced."""
    if any(param.grad is not None for param in sharded):
        return
    param = _first(
        p for p in sharded if (place := p.rows.place) is not None and place[1] in place[0].accumulation.params
    )
    if param is not None:
        warnings.warn(
            f"{type(optimizer).__name__}.step: no sharded parameter has a gradient, those of {param.rows.label!r} and "
            f"others have accumulated under no_sync and are not reduced: call backward of the last micro-batch outside of "
            f"no_sync",
            stacklevel=4,
        )


def _first(params: Iterable[RowDTensor]) -> RowDTensor | None:
    return next(iter(params), None)
