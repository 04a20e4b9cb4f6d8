"""The operators of :class:`RowDTensor`, except those that only act on rows of equal operands.

[Note: Operators on rows]
Each operator is one of these; nothing is ever gathered silently:

- Operators on elements, such as ``add_``, ``_foreach_lerp_`` or ``_fused_adamw_``, run on this rank's rows of all operands.
  Their results are rows, so the state that an optimizer makes by ``zeros_like`` is, too.
- Reductions of the whole tensor to a number, such as ``sum()`` or ``norm()``, and ``torch.equal`` combine the results of all
  ranks. Numbers are replicated DTensors: whatever is read from them is the same on all ranks.
- All others raise an error that names ``full_tensor()``, unless this rank has all rows.

The kind of an operator, and whether it succeeds, depend only on shapes and cuts, which all ranks know. So an operator
fails on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ...errors import coded_error
from ...runtime.row_dtensor import DTENSORS, RowDTensor, local_rows, replicated
from ...runtime.row_elements import on_elements
from ...runtime.rows import Rows
from . import exchange

aten = torch.ops.aten

Handler = Callable[..., Any]

_LINEAR = (aten.sum.default, aten.mean.default)

_COMBINED_BY: dict[Any, Callable[..., torch.Tensor]] = {
    aten.sum.default: torch.sum,
    aten.max.default: torch.amax,
    aten.min.default: torch.amin,
    aten.all.default: torch.all,
    aten.any.default: torch.any,
}
"""Reductions, and the function that combines the results of all ranks, stacked in the first dimension."""


def rule_for(func: Any) -> Handler:
    """Return the function that runs an operator that does not act on elements."""
    if func in _HANDLERS:
        return _HANDLERS[func]
    if func in _COMBINED_BY:
        return _reduce
    schema = func._schema
    if schema.returns and schema.returns[0].alias_info is not None and not schema.is_mutable:
        return _view
    return run_on_single_rank


#
# Operators on elements
#


def aligned(func: Any, values: Sequence[Any], written: list[int]) -> tuple[list[Any], list[Rows | None]]:
    """Return this rank's part of operands of different types, and the rows of the results.

    Items at the same position of all lists belong together. Some may be plain.
    """
    are_lists = [isinstance(v, (list, tuple)) and bool(v) and isinstance(v[0], torch.Tensor) for v in values]
    number = max((len(v) for v, is_list in zip(values, are_lists, strict=True) if is_list), default=0)
    lists = (v if is_list else [local_rows(v)] * number for v, is_list in zip(values, are_lists, strict=True))
    columns: Iterable[Sequence[Any]] = zip(*lists, strict=True) if number else [values]
    parts, all_rows = [], []
    for column in columns:
        part, rows = _align(func, column)
        if written and rows is not None and not isinstance(column[written[0]], RowDTensor):
            raise coded_error(
                RuntimeError,
                "parameter.rows-written-into-other-tensor",
                operator=func,
                label=rows.label,
                shape=tuple(rows.shape),
                other=_described(column[written[0]]),
            )
        parts.append(part)
        all_rows.append(rows)
    by_operand = zip(zip(*parts, strict=True), are_lists, strict=True)
    return [list(items) if is_list else items[0] for items, is_list in by_operand], all_rows


def _align(func: Any, values: Sequence[Any]) -> tuple[list[Any], Rows | None]:
    """Return this rank's part of each operand, and the rows of the result: ``None`` if there are none among them.

    Raises:
        RuntimeError: an operand is a plain tensor, is distributed otherwise, or has other rows.
    """
    rows = next((value.rows for value in values if isinstance(value, RowDTensor)), None)
    if rows is None:
        return [local_rows(v) if isinstance(v, torch.Tensor) and not v.ndim else v for v in values], None
    return [_part(func, value, rows) if isinstance(value, torch.Tensor) else value for value in values], rows


def _part(func: Any, tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the part of an operand that belongs to this rank's rows of the result."""
    if isinstance(tensor, RowDTensor):
        if tensor.rows == rows:
            return tensor._local_tensor
    elif isinstance(tensor, DTENSORS):
        if tensor.device_mesh == rows.ranks.mesh(tensor.device.type):
            if all(placement.is_replicate() for placement in tensor.placements):
                if not tensor.ndim:
                    return tensor._local_tensor
                if tensor.shape == rows.shape:
                    return rows.of(tensor._local_tensor)
            if tensor.shape == rows.shape and rows.is_even and tuple(tensor.placements) == rows.placements:
                return tensor._local_tensor
    elif tensor.numel() == 1 and tensor.ndim <= len(rows.shape):
        return tensor  # a number
    raise coded_error(
        RuntimeError,
        "parameter.rows-mixed-with-other-tensor",
        operator=func,
        label=rows.label,
        shape=tuple(rows.shape),
        other=_described(tensor),
    )


def _described(tensor: Any) -> str:
    if isinstance(tensor, DTENSORS):
        return f"a DTensor of shape {tuple(tensor.shape)} and placements {tensor.placements}"
    return f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}"


def _view(func: Any, tensor: RowDTensor, *args: Any, **kwargs: Any) -> Any:
    """View a tensor in its own shape, as ``p[:]`` and autograd do; other views need all rows on this rank."""
    view = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args, **kwargs)
    if not isinstance(view, torch.Tensor) or view.shape != tensor.shape or view.dtype != tensor.dtype:
        return run_on_single_rank(func, tensor, *args, **kwargs)
    if not view.is_contiguous() or view.is_conj() or view.is_neg():
        return run_on_single_rank(func, tensor, *args, **kwargs)
    return RowDTensor.wrap(tensor._local_tensor.view_as(tensor._local_tensor), tensor.rows)


def _as_numbers(func: Any, tensor: RowDTensor) -> RowDTensor:
    """View complex numbers as pairs of real ones, or the reverse: a row stays a row, and a 0-dim tensor is one."""
    shape = func(torch.empty(tensor.shape or (1,), dtype=tensor.dtype, device="meta")).shape
    bucket, index = tensor.rows.in_bucket or (None, 0)
    if func is aten.view_as_complex.default and bucket is not None and not bucket.rows[index].shape:
        shape = torch.Size()
    return RowDTensor.wrap(func(tensor._local_tensor), tensor.rows.reshaped(shape))


def _put(func: Any, tensor: Any, indices: Sequence[Any], value: torch.Tensor, accumulate: bool = False) -> Any:
    """Fill a tensor where a mask of its shape is true, ``p[mask] = 0``; otherwise as an operator that needs all rows."""
    [mask, *others] = indices
    is_mask = isinstance(mask, RowDTensor) and mask.dtype is torch.bool and mask.shape == tensor.shape
    if not is_mask or others or value.ndim or accumulate or not isinstance(tensor, RowDTensor):
        return run_on_single_rank(func, tensor, indices, value, accumulate)
    return on_elements(aten.masked_fill_.Tensor, tensor, mask, value)


def _new(func: Any, tensor: RowDTensor, size: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """Create a tensor with the same rows."""
    if tuple(size) != tensor.shape:
        return run_on_single_rank(func, tensor, size, *args, **kwargs)
    if func is aten.new_empty_strided.default:  # autograd, for a copy of a gradient
        func, args = aten.new_empty.default, ()
    local = tensor._local_tensor
    return RowDTensor.wrap(func(local, local.shape, *args, **kwargs), tensor.rows)


#
# Reductions
#


def _reduce(func: Any, tensor: RowDTensor, *, dtype: torch.dtype | None = None) -> Any:
    """Reduce the rows of all ranks to a number: a collective."""
    rows, needs_grad = tensor.rows, torch.is_grad_enabled() and tensor.requires_grad
    if needs_grad and func in _LINEAR:
        # torch computes its gradient as a plain tensor, which may be whole or rows.
        raise coded_error(NotImplementedError, "parameter.operator-without-gradient", operator=func, label=rows.label)
    tensor = cast(RowDTensor, tensor.detach())
    options = {} if dtype is None else {"dtype": dtype}
    # On the whole shape, so that it raises the same errors on all ranks.
    expected = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), **options).dtype
    wide = torch.promote_types(expected, torch.float32)
    if func is aten.mean.default:
        return (tensor.sum(dtype=wide) / tensor.numel()).to(expected)
    _check_shared(func, rows)
    local = tensor._local_tensor
    part = func(local, **options) if rows.start < rows.end else local.new_zeros((), dtype=expected)
    parts = exchange(rows, part, str(func))[rows.holders]
    if parts.is_floating_point():
        parts = parts.to(wide)
    return replicated(_COMBINED_BY[func](parts, 0).to(expected), tensor.device_mesh)


def _check_shared(func: Any, rows: Rows) -> None:
    """Raise an error for a number that not all ranks would have, because other ranks have other parameters."""
    if not rows.is_on_all_ranks:
        raise coded_error(
            RuntimeError,
            "parameter.value-missing-on-other-ranks",
            operator=func,
            label=rows.label,
            ranks=list(rows.ranks.group.global_ranks),
        )


def _norms(func: Any, tensors: Sequence[Any], order: Any = 2, dtype: torch.dtype | None = None) -> list[Any]:
    """Compute the norms of a list of tensors; one collective for each process group."""
    norms: list[Any] = [None] * len(tensors)
    by_group: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, RowDTensor) and tensor.numel():
            _check_shared(func, tensor.rows)
            by_group.setdefault(tensor.rows.ranks.group, []).append(number)
        elif isinstance(tensor, RowDTensor):
            none = torch.linalg.vector_norm(tensor._local_tensor, order, dtype=dtype)
            norms[number] = replicated(none, tensor.device_mesh)
        else:
            norms[number] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
    for numbers in by_group.values():
        sharded = [tensors[number] for number in numbers]
        wide = torch.float64 if any(t.dtype in (torch.float64, torch.complex128) for t in sharded) else torch.float32
        neutral = torch.inf if order < 0 else 0
        rows = [
            t._local_tensor if t._local_tensor.numel() else t._local_tensor.new_full((1,), neutral) for t in sharded
        ]
        parts = torch.stack([norm.to(wide) for norm in torch._foreach_norm(rows, order, dtype=dtype)])
        labels = [tensor.rows.label for tensor in sharded]
        parts = exchange(sharded[0].rows, parts, str(func), *labels)
        combined = parts.sum(0) if order == 0 else torch.linalg.vector_norm(parts, order, 0)
        for number, tensor, norm in zip(numbers, sharded, combined.unbind(), strict=True):
            norms[number] = replicated(norm.to(dtype or tensor.dtype.to_real()), tensor.device_mesh)
    return norms


def _norm(func: Any, tensor: RowDTensor, order: Any = 2, *dims: Any, dtype: torch.dtype | None = None) -> Any:
    if any(dims):
        return run_on_single_rank(func, tensor, order, *dims, dtype=dtype)
    return _norms(func, [tensor], order, dtype)[0]


def _compare(func: Any, one: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    if func is aten.equal.default and one.shape != other.shape:
        return False
    (own, others), rows = _align(func, (one, other))
    assert rows is not None
    _check_shared(func, rows)
    is_equal = torch.tensor(func(own, others, *args, **kwargs), device=own.device)
    return bool(exchange(rows, is_equal, str(func)).all())


#
# Others
#


def run_on_single_rank(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator if this rank has all rows of its tensors; otherwise refuse it."""
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
        raise coded_error(RuntimeError, "parameter.rows-overwritten-by-data-parallel", operator=func, label=rows.label)
    raise coded_error(
        NotImplementedError,
        "parameter.operator-needs-other-rows",
        operator=func,
        label=rows.label,
        shape=tuple(rows.shape),
    )


def _check_finite(func: Any, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, scale: torch.Tensor) -> None:
    """Unscale gradients, and tell every rank whether one of them is not finite on any rank (``GradScaler``)."""
    _refuse_error_feedback(grads)
    locals_ = [local_rows(g) for g in grads]
    func([g for g in locals_ if g.numel()] or locals_, found_inf, scale)
    of_groups = {id(g.rows.ranks): g.rows for g in grads if isinstance(g, RowDTensor)}.values()
    if not any(rows.is_on_all_ranks for rows in of_groups):
        buckets = [rows.in_bucket[0] for rows in of_groups if rows.in_bucket is not None]
        for control in {id(bucket.base.control): bucket.base.control for bucket in buckets}.values():
            (maximum,) = control.reduce("GradScaler", [found_inf.item()], dist.ReduceOp.MAX)
            found_inf.fill_(maximum)
        return
    for rows in sorted(of_groups, key=lambda rows: rows.ranks.group.size):  # the group of all ranks comes last
        group = rows.ranks.group
        group.check_sends(found_inf.device, "the result of GradScaler")
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group.process_group)


def _refuse_error_feedback(grads: Sequence[torch.Tensor]) -> None:
    """Raise an error for gradients with error feedback: it is in units of the scaled loss, and the scale changes."""
    for grad in grads:
        in_bucket = grad.rows.in_bucket if isinstance(grad, RowDTensor) else None
        if in_bucket is not None and (spec := in_bucket[0].base.spec).has_error_feedback:
            raise coded_error(RuntimeError, "encoding.error-feedback-with-grad-scaler", bucket=spec.name)


_HANDLERS: dict[Any, Handler] = {
    aten._foreach_norm.Scalar: _norms,
    aten.linalg_vector_norm.default: _norm,
    aten.mean.default: _reduce,
    aten.equal.default: _compare,
    aten.allclose.default: _compare,
    aten.view_as_real.default: _as_numbers,
    aten.view_as_complex.default: _as_numbers,
    aten.index_put_.default: _put,
    aten.new_empty.default: _new,
    aten.new_zeros.default: _new,
    aten.new_ones.default: _new,
    aten.new_full.default: _new,
    aten.new_empty_strided.default: _new,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _check_finite,
    aten.is_same_size.default: lambda func, one, other: one.shape == other.shape,
    aten.is_pinned.default: lambda func, tensor, *args: tensor._local_tensor.is_pinned(),
    aten.detach_.default: lambda func, tensor: tensor,
}
