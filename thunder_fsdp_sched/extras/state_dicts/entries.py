"""Entries of state dicts and loaded state of optimizers: which rows of a whole tensor this rank has.

[Note: Entries of state dicts]
An entry is a DTensor (:class:`RowDTensor`) that shares the memory of the parameter. torch.distributed.checkpoint (DCP)
saves it as a chunk of the whole tensor, so a checkpoint does not depend on how it was sharded. When it is pickled and
loaded, for instance by ``torch.save`` and ``torch.load``, an entry with uneven rows becomes a :class:`RowPiece`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from ...errors import coded_error
from ...runtime.bucket import Bucket
from ...runtime.row_dtensor import DTENSORS, RowDTensor
from ...runtime.rows import Rows
from ...sharding.module_parameters import Entry, ModuleParameters
from .row_piece import RowPiece


def refuse_unshared(bucket: Bucket) -> None:
    """Raise an error if ranks have different parameters under one name, of which a checkpoint would keep only one.

    Raises:
        ValueError: names the parameter and its ranks.
    """
    if not bucket.is_on_all_ranks:
        raise coded_error(
            ValueError,
            "checkpoint.parameter-differs-by-rank",
            name=bucket.spec.params[0].name,
            ranks=list(bucket.ranks.group.global_ranks),
        )


def rows_from(rows: Rows, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a parameter's value in a state dict, as a view.

    A DTensor that is sharded otherwise is gathered, and its rows are copied: then all ranks must call this.

    Args:
        value: a whole tensor, or an entry with at least this rank's rows.

    Raises:
        ValueError: it has another shape, or other rows.
    """
    if value.shape != rows.shape:
        are_rows = value.shape == rows.local_shape and type(value) in (torch.Tensor, torch.nn.Parameter)
        expected, got = tuple(rows.shape), tuple(value.shape)
        if are_rows:
            raise coded_error(ValueError, "state-dict.entry-is-own-rows", expected=expected, got=got)
        raise coded_error(ValueError, "state-dict.entry-of-other-shape", expected=expected, got=got)
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
    raise coded_error(
        ValueError, "state-dict.entry-lacks-needed-rows", start=rows.start, end=rows.end, shape=tuple(rows.shape)
    )


def as_rows(param: RowDTensor, what: str, value: torch.Tensor) -> torch.Tensor:
    """Return a value of an optimizer's state, cut to the rows of its parameter if it is a tensor sharded otherwise.

    Raises:
        ValueError: it has another shape, or is the state of an unsharded parameter; the message names the parameter.
    """
    rows = param.rows
    if value.ndim and value.shape == rows.shape and type(value) is torch.Tensor:
        raise coded_error(
            ValueError,
            "optimizer.state-of-unsharded-run",
            state=what,
            shape=tuple(rows.shape),
            local_shape=rows.local_shape,
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
        raise coded_error(ValueError, "optimizer.state-does-not-fit-rows", state=what, error=error) from None


def put_entries(params: ModuleParameters, own: Mapping[str, Entry], state_dict: dict[str, Any], prefix: str) -> None:
    """Replace plain rows of a module's own parameters in a state dict with entries that record which rows they hold."""
    for leaf, entry in own.items():
        if not params.is_whole(entry):
            bucket, index = entry.bucket, entry.index
            if entry.param is not entry.shard:
                params.check()
            if not params.is_gathering:
                refuse_unshared(bucket)
            state_dict[prefix + leaf] = RowDTensor.entry(bucket.shard_views[index], bucket.rows[index])


def shard_loaded_entries(
    params: ModuleParameters,
    below: Sequence[tuple[str, Entry]],
    state_dict: dict[str, Any],
    prefix: str,
    *,
    assigns: bool,
) -> None:
    """Replace loaded entries with this rank's rows, all of them before torch copies the first into its shard.

    Args:
        below: the names and entries of the parameters of a module and of those in it.
        assigns: whether ``load_state_dict(assign=True)`` was called.
    """
    if assigns and not params.has_whole:
        for name in state_dict:
            if name.startswith(prefix):
                raise coded_error(ValueError, "state-dict.assign-to-sharded-parameter", name=name)
    errors = []
    for name, entry in below:
        value = state_dict.get(prefix + name)
        try:
            if isinstance(value, torch.Tensor) and not params.is_whole(entry):
                rows = entry.bucket.rows[entry.index]
                state_dict[prefix + name] = RowDTensor.wrap(rows_from(rows, value), rows)
        except ValueError as error:
            errors.append(f"size mismatch for {prefix + name}: {error}")
    if errors:
        raise RuntimeError("Error(s) in loading state_dict:\n\t" + "\n\t".join(errors))
