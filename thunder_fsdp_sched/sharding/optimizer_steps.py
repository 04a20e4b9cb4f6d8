"""Preparation of each optimizer step, whose parameters, gradients and state are rows.

[Note: Optimizers on rows]
The user's own optimizer steps, on parameters, gradients and state that are DTensors. State that it makes from a
parameter, for instance by ``torch.zeros_like(p)``, has the same rows (see [Note: Operators on rows] in
``extras.row_operators``). So hooks, closures, schedulers and derived classes see what they see in an unsharded run, and
``state_dict`` has DTensors. torch's elementwise optimizers step on the rows as plain tensors: see [Note: Steps on plain
rows] in ``plain_steps``.

Loaded state may be cut differently: ``torch.distributed.checkpoint.state_dict`` cuts whole state evenly, and
``torch.load`` returns a :class:`RowPiece`. It is converted to the parameter's rows before the next step.
``load_state_dict`` gives an optimizer a new dictionary of state, so a step checks the state only if that has changed.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..errors import coded_error
from ..extensions import load
from ..runtime.row_dtensor import DTENSORS, RowDTensor
from .former_parameters import refuse_former
from .plain_steps import on_plain_rows
from .refusals import refuse_compilation

_NEED_WHOLE = (torch.optim.Muon, torch.optim.Adafactor)
"""See [Note: One owner for each parameter] in ``extras.training.whole_parameters``."""

_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
"""The dictionary of state of each optimizer that is known to consist of rows."""


def prepare_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Refuse optimizers that would not train the model, and cut their state like the parameters.

    Returns:
        the arguments that replace those of the step, if any: see [Note: Steps on plain rows] in ``plain_steps``.

    Raises:
        RuntimeError: it has parameters from before ``thunder.jit``.
        ValueError: it would mistake rows for whole parameters.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    refuse_former(params)
    sharded = [param for param in params if isinstance(param, RowDTensor)]
    # Dynamo takes a RowDTensor for a DTensor, and leaves the graph to ask.
    if sharded or (torch.compiler.is_dynamo_compiling() and any(isinstance(param, DTENSORS) for param in params)):
        refuse_compilation(
            f"{type(optimizer).__name__}.step with sharded parameters",
            "call optimizer.step() uncompiled, with foreach=True or fused=True, which launch one kernel for many parameters",
        )
    _refuse_rows(optimizer, sharded)
    state_to_rows(optimizer)
    if len(args) > 1 or kwargs.get("closure") is not None:  # a closure computes gradients later
        return None
    _warn_of_unreduced(optimizer, sharded)
    stand_in = on_plain_rows(optimizer) if sharded else None
    return None if stand_in is None else ((stand_in,), kwargs)


def state_to_rows(optimizer: torch.optim.Optimizer) -> None:
    """Turn loaded state into rows of the parameters; a collective if it is cut differently.

    Raises:
        ValueError: state has another shape, or is that of an unsharded parameter; it names the parameter.
    """
    if _checked.get(optimizer) is optimizer.state:
        return
    if not hasattr(optimizer, "owns"):  # WholeParameters has whole state for rows
        of_rows = ((p, state) for p, state in optimizer.state.items() if isinstance(p, RowDTensor))
        others = [(p, state, key) for p, state in of_rows for key in state if not _is_cut_like(p, state[key])]
        as_rows: Any = load("extras.state_dicts.entries:as_rows") if others else None
        for param, state, key in others:
            what = f"{type(optimizer).__name__}: state {key!r} of parameter {param.rows.label!r}"
            state[key] = tree_map_only(torch.Tensor, partial(as_rows, param, what), state[key])
    _checked[optimizer] = optimizer.state


def _is_cut_like(param: RowDTensor, value: Any) -> bool:
    """Return whether a value of an optimizer's state needs no other rows: it has those of its parameter, or is a number."""
    if isinstance(value, RowDTensor):
        return value.rows.has_cuts_of(param.rows)
    return type(value) is torch.Tensor and not value.ndim


def _refuse_rows(optimizer: torch.optim.Optimizer, sharded: Sequence[RowDTensor]) -> None:
    """Raise an error on all ranks for optimizers of torch that would mistake rows for whole parameters."""
    cls = type(optimizer).__name__
    if (why := _mixes_ranks(optimizer)) and (
        param := _first(p for p in sharded if p.rows.ranks.group.size > 1)
    ) is not None:
        raise coded_error(ValueError, "optimizer.mixes-ranks", optimizer=cls, reason=why, parameter=param.rows.label)
    if _needs_whole(optimizer) and (param := _first(p for p in sharded if p.rows.is_cut)) is not None:
        raise coded_error(ValueError, "optimizer.needs-whole-parameters", optimizer=cls, parameter=param.rows.label)
    if isinstance(optimizer, torch.optim.Rprop) and (param := _first(p for p in sharded if not p.ndim)) is not None:
        raise coded_error(
            ValueError, "optimizer.scalar-parameter-on-one-rank", optimizer=cls, parameter=param.rows.label
        )


def _needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    # Those of torchao make states as DTensors that are cut evenly.
    return isinstance(optimizer, _NEED_WHOLE) or any(
        c.__module__.startswith("torchao.") for c in type(optimizer).__mro__
    )


def _mixes_ranks(optimizer: torch.optim.Optimizer) -> str:
    """Return why an optimizer can never train shards; empty if it can."""
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
    param = _first(p for p in sharded if (found := p.rows.in_bucket) and found[1] in found[0].accumulation.params)
    if param is not None:
        warnings.warn(
            f"{type(optimizer).__name__}.step: no sharded parameter has a gradient, those of {param.rows.label!r} and "
            f"others have accumulated under no_sync and are not reduced: call backward of the last micro-batch outside of "
            f"no_sync",
            stacklevel=4,
        )


def _first(params: Iterable[RowDTensor]) -> RowDTensor | None:
    return next(iter(params), None)
