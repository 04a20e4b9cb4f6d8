"""The part of an operator's operands that belongs to this rank's rows, and operators that cannot run on rows.

See [Note: Operators on rows] in ``row_operators``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .row_dtensor import RowDTensor, replicated
from .rows import Rows


def with_rows(local: torch.Tensor, rows: Rows) -> RowDTensor:
    return RowDTensor.of_spec(local, rows.spec(local.dtype, local.device.type))


def check_written(func: Any, written: Any, rows: Rows) -> None:
    if not isinstance(written, RowDTensor) or written.shape != rows.shape:
        raise RuntimeError(
            f"{func} would write rows of {rows.label!r}, of shape {tuple(rows.shape)}, into {_described(written)}: make it "
            f"by torch.zeros_like(p) or another operator on the parameter, so that it has the same rows"
        )


def align(func: Any, values: Sequence[Any]) -> tuple[list[Any], Rows]:
    """Return this rank's part of each operand, and the rows of the result.

    Raises:
        RuntimeError: an operand is a plain tensor, is distributed otherwise, or has other rows.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    known = [tensor.rows for tensor in tensors if isinstance(tensor, RowDTensor)]
    rows = max(known, key=lambda r: (len(r.shape), r.shape[:1])).reshaped(shape)
    if rows.starts[-1] != (shape or (1,))[0]:
        return refuse(func, values, {})  # a single row is broadcast to other ranks
    return [_part(func, value, rows) if isinstance(value, torch.Tensor) else value for value in values], rows


def _part(func: Any, tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the part of an operand that belongs to this rank's rows of the result."""
    lacks_rows = tensor.ndim < len(rows.shape) or (tensor.shape[:1] == (1,) and rows.shape[:1] != (1,))
    if isinstance(tensor, RowDTensor):
        if tensor.rows.has_cuts_of(rows) and not lacks_rows:
            return tensor._local_tensor
        refuse(func, (tensor,), {})
    if isinstance(tensor, DTensor) and tensor.device_mesh == rows.ranks.mesh(tensor.device.type):
        if all(placement.is_replicate() for placement in tensor.placements):
            return tensor._local_tensor if lacks_rows else rows.of(tensor._local_tensor)
        if rows.is_even and tuple(tensor.placements) == rows.placements and not lacks_rows:
            return tensor._local_tensor
    if not isinstance(tensor, DTensor) and tensor.numel() == 1:
        return tensor  # a number
    raise RuntimeError(
        f"{func} mixes rows of {rows.label!r}, of shape {tuple(rows.shape)}, with {_described(tensor)}. Pass a whole tensor "
        f"that all ranks have as torch.distributed.tensor.distribute_tensor(whole, p.device_mesh), and combine this rank's "
        f"rows of it with p.to_local(). State of an optimizer that was stepped before thunder.jit, or that was saved by an "
        f"unsharded run, is loaded by thunder_fsdp_sched.load_checkpoint or by "
        f"torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
    )


def _described(tensor: Any) -> str:
    if isinstance(tensor, DTensor):
        return f"a DTensor of shape {tuple(tensor.shape)} and placements {tensor.placements}"
    return f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}"


def dims_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, added: bool = False) -> list[int]:
    """Return the dimensions over which an operator computes or that it moves; none if it has no such argument."""
    ndim = args[0].ndim + added
    found: list[int] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims", "dim0", "dim1"):
            dims = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
            found += [dims] if isinstance(dims, int) else dims or ()
    return [dim % ndim if ndim else 0 for dim in found]


def run_on_single_rank(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on tensors of which this rank has all rows; others refuse it."""
    wholes: dict[int, RowDTensor] = {}

    def whole(tensor: RowDTensor) -> DTensor:
        if tensor.rows.ranks.group.size > 1:
            refuse(func, args, kwargs)
        result = replicated(tensor._local_tensor.view(tensor.shape), tensor.device_mesh)
        wholes[id(result)] = tensor
        return result

    args, kwargs = tree_map_only(RowDTensor, whole, (args, kwargs))
    return tree_map_only(DTensor, lambda result: wholes.get(id(result), result), func(*args, **kwargs))


def refuse(func: Any, args: Any, kwargs: Any) -> NoReturn:
    rows = next(leaf.rows for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RowDTensor))
    if func.namespace in ("c10d", "_c10d_functional"):
        raise RuntimeError(
            f"{func} of {rows.label!r}, of which each rank has other rows: DistributedDataParallel would copy the rows of "
            f"one rank to all others. Use a collective on to_local() if that is what you want"
        )
    raise NotImplementedError(
        f"{func} of {rows.label!r}, of shape {tuple(rows.shape)}, needs rows of other ranks, which are not gathered "
        f"silently. Use this rank's rows, to_local(), or gather the whole tensor on all ranks, full_tensor(), and pass a "
        f"whole result back as torch.distributed.tensor.distribute_tensor(whole, p.device_mesh), which operators on "
        f"elements accept (p.copy_(...)). Initialize parameters before thunder.jit or inside unsharded(model); optimizers "
        f"that need whole parameters run in thunder_fsdp_sched.WholeParameters"
    )
