"""Checks before each step of an optimizer that trains a sharded model.

See [Note: One owner for each parameter] in ``training.whole_parameters`` for the optimizers that shards do not suffice for.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..runtime.row_dtensor import RowDTensor
from .former_parameters import refuse_former
from .state_entries import state_to_rows

_NEED_WHOLE = (torch.optim.Muon, torch.optim.Adafactor)


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
    if isinstance(optimizer, _NEED_WHOLE) and (param := _first(p for p in sharded if p.rows.is_cut)) is not None:
        raise ValueError(
            f"{cls} needs whole parameters, but was given rows of {param.rows.label!r}, which is sharded: create it with "
            f"thunder_fsdp_sched.WholeParameters({cls}, model, params, ...)"
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
