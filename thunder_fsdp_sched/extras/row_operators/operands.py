"""The operands of an operator on :class:`RowDTensor` that are not all alike: this rank's part of each of them.

See [Note: Operators on rows] in ``operators``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ...runtime.row_dtensor import DTENSORS, RowDTensor, local_rows, replicated
from ...runtime.rows import Rows


def aligned(func: Any, values: Sequence[Any], written: list[int]) -> tuple[list[Any], list[Rows | None]]:
    """Return this rank's part of operands of different types or shapes, and the rows of the results.

    Items at the same position of all lists belong together. Some may be plain.
    """
    are_lists = [isinstance(v, (list, tuple)) and bool(v) and isinstance(v[0], torch.Tensor) for v in values]
    number = max((len(v) for v, is_list in zip(values, are_lists, strict=True) if is_list), default=0)
    lists = (v if is_list else [local_rows(v)] * number for v, is_list in zip(values, are_lists, strict=True))
    columns: Iterable[Sequence[Any]] = zip(*lists, strict=True) if number else [values]
    parts, all_rows = [], []
    for column in columns:
        part, rows = align(func, column)
        if written and rows is not None:
            _check_written(func, column[written[0]], rows)
        parts.append(part)
        all_rows.append(rows)
    by_operand = zip(zip(*parts, strict=True), are_lists, strict=True)
    return [list(items) if is_list else items[0] for items, is_list in by_operand], all_rows


def _check_written(func: Any, written: Any, rows: Rows) -> None:
    if not isinstance(written, RowDTensor) or written.shape != rows.shape:
        raise RuntimeError(
            f"{func} would write rows of {rows.label!r}, of shape {tuple(rows.shape)}, into {_described(written)}: make it "
            f"by torch.zeros_like(p) or another operator on the parameter, so that it has the same rows"
        )


def align(func: Any, values: Sequence[Any]) -> tuple[list[Any], Rows | None]:
    """Return this rank's part of each operand, and the rows of the result: ``None`` if there are none among them.

    Raises:
        RuntimeError: an operand is a plain tensor, is distributed otherwise, or has other rows.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    known = [tensor.rows for tensor in tensors if isinstance(tensor, RowDTensor)]
    if not known:
        return [local_rows(v) if isinstance(v, torch.Tensor) and not v.ndim else v for v in values], None
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    rows = max(known, key=lambda r: (len(r.shape), r.shape[:1])).reshaped(shape)
    if rows.starts[-1] != (shape or (1,))[0]:
        refuse(func, known[0])  # a single row is broadcast to other ranks
    return [_part(func, value, rows) if isinstance(value, torch.Tensor) else value for value in values], rows


def _part(func: Any, tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the part of an operand that belongs to this rank's rows of the result."""
    lacks_rows = tensor.ndim < len(rows.shape) or (tensor.shape[:1] == (1,) and rows.shape[:1] != (1,))
    if isinstance(tensor, RowDTensor):
        if tensor.rows.has_cuts_of(rows) and not lacks_rows:
            return tensor._local_tensor
        refuse(func, tensor.rows)
    if isinstance(tensor, DTENSORS) and tensor.device_mesh == rows.ranks.mesh(tensor.device.type):
        if all(placement.is_replicate() for placement in tensor.placements):
            return tensor._local_tensor if lacks_rows else rows.of(tensor._local_tensor)
        if rows.is_even and tuple(tensor.placements) == rows.placements and not lacks_rows:
            return tensor._local_tensor
    if not isinstance(tensor, DTENSORS) and tensor.numel() == 1:
        return tensor  # a number
    raise RuntimeError(
        f"{func} mixes rows of {rows.label!r}, of shape {tuple(rows.shape)}, with {_described(tensor)}. Pass a whole tensor "
        f"that all ranks have as torch.distributed.tensor.distribute_tensor(whole, p.device_mesh), and combine this rank's "
        f"rows of it with p.to_local(). State of an optimizer that was stepped before thunder.jit, or that was saved by an "
        f"unsharded run, is loaded by thunder_fsdp_sched.load_checkpoint or by "
        f"torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
    )


def _described(tensor: Any) -> str:
    if isinstance(tensor, DTENSORS):
        return f"a DTensor of shape {tuple(tensor.shape)} and placements {tensor.placements}"
    return f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}"


def run_on_single_rank(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on tensors of which this rank has all rows; others refuse it."""
    wholes: dict[int, RowDTensor] = {}

    def whole(tensor: RowDTensor) -> DTensor:
        if tensor.rows.ranks.group.size > 1:
            refuse(func, tensor.rows)
        result = replicated(tensor._local_tensor.view(tensor.shape), tensor.device_mesh)
        wholes[id(result)] = tensor
        return result

    result = func(*tree_map_only(RowDTensor, whole, args), **tree_map_only(RowDTensor, whole, kwargs))
    return tree_map_only(DTensor, lambda one: wholes.get(id(one), one), result)


def refuse(func: Any, rows: Rows) -> NoReturn:
    if func.namespace in ("c10d", "_c10d_functional"):
        raise RuntimeError(
            f"{func} of {rows.label!r}, of which each rank has other rows: DistributedDataParallel would copy the rows of "
            f"one rank to all others. Use a collective on to_local() if that is what you want"
        )
    raise NotImplementedError(
        f"{func} of {rows.label!r}, of shape {tuple(rows.shape)}, needs rows of other ranks, or is not known to act on "
        f"rows. Nothing is gathered silently. Use this rank's rows, to_local(), or gather the whole tensor on all ranks, "
        f"full_tensor(), and pass a whole result back as torch.distributed.tensor.distribute_tensor(whole, "
        f"p.device_mesh), which operators on elements accept (p.copy_(...)). Initialize parameters before thunder.jit or "
        f"inside unsharded(model); optimizers that need whole parameters run in thunder_fsdp_sched.WholeParameters"
    )
