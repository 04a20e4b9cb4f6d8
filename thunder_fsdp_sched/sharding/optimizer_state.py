"""Optimizer state that was loaded, as rows.

[Note: Optimizers on rows]
The user's optimizer steps, on parameters, gradients and state that are DTensors. State that it makes from a parameter, by
``torch.zeros_like(p)`` for instance, is rows by itself (see [Note: Operators on rows] in ``row_operators``). So hooks,
closures, schedulers and derived classes see what they see in an unsharded run, and ``state_dict`` has DTensors.

Loaded state may be cut otherwise: ``torch.distributed.checkpoint.state_dict`` cuts whole state evenly, and ``torch.load``
gives a :class:`RowPiece`. It becomes rows before the next step. ``load_state_dict`` gives an optimizer a new dictionary of
state, so a step needs to look at the state only if that has changed.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ..runtime.row_dtensor import RowDTensor
from .state_entries import RowPiece, rows_from

_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
"""The dictionary of state of each optimizer that was found to be rows."""


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
    place = rows.place
    if not isinstance(value, (DTensor, RowPiece)) or place is None:
        return value
    if isinstance(value, RowDTensor) and value.rows.has_cuts_of(rows):
        return value
    if isinstance(value, DTensor) and all(placement.is_replicate() for placement in value.placements):
        return value
    if isinstance(value, DTensor) and value.shape != rows.shape and value.shape[:1] == rows.shape[:1]:
        rows = rows.reshaped(value.shape)
        return RowDTensor.wrap(rows.of(value.full_tensor()), rows)
    try:
        return RowDTensor.wrap(rows_from(*place, value), rows)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
