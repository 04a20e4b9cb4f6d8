"""Entries of state dicts and loaded state of optimizers: which rows of a whole tensor this rank has.

[Note: Entries of state dicts]
An entry is a DTensor (:class:`RowDTensor`) that shares the memory of the parameter. torch.distributed.checkpoint (DCP)
saves it as a chunk of the whole tensor, so a checkpoint does not depend on how it was sharded. Pickled and loaded, for
instance by ``torch.save`` and ``torch.load``, an entry with uneven rows is a :class:`RowPiece`.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard

from ...runtime.bucket import Bucket
from ...runtime.row_dtensor import DTENSORS, RowDTensor
from ...runtime.rows import Rows
from .row_piece import RowPiece


def refuse_unshared(bucket: Bucket) -> None:
    """Raise an error if ranks have different parameters under one name, of which a checkpoint would keep only one.

    Raises:
        ValueError: names the parameter and its ranks.
    """
    if not bucket.is_on_all_ranks:
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


def as_rows(param: RowDTensor, what: str, value: torch.Tensor) -> torch.Tensor:
    """Return a value of an optimizer's state with the rows of its parameter, if it is a part of a whole one.

    Raises:
        ValueError: it has another shape, or is that of an unsharded parameter; it names the parameter.
    """
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
