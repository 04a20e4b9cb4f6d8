"""The operators of :class:`RowDTensor`.

[Note: Operators on rows]
Each operator is one of these; nothing is ever gathered silently:

- Operators on elements, such as ``add_``, ``_foreach_lerp_`` or ``_fused_adamw_``, run on this rank's rows of all operands.
  Their results are rows, so the state that an optimizer makes by ``zeros_like`` is, too.
- Views run on this rank's rows if each row of the result lies in the memory of one rank's rows.
- Reductions and others within rows, such as ``mean(1)`` or ``softmax(-1)``, run on this rank's rows. Reductions over rows,
  such as ``norm()`` or ``amax(0)``, combine the results of all ranks, and return replicated DTensors: whatever is read from
  them is the same on all ranks.
- Operators that fill a tensor with random numbers draw those of the whole tensor and keep the rows, so that with equal
  seeds on all ranks the result is that of the unsharded tensor.
- All others raise an error, unless this rank has all rows.

Which of these it is, and whether it succeeds, depends on shapes and cuts only, which all ranks know. So an operator fails
on all ranks or on none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ...runtime.row_dtensor import DTENSORS, RowDTensor, local_rows, replicated
from ...runtime.row_elements import on_elements
from ...runtime.rows import Rows
from .collectives import exchange, gather
from .operands import align, run_on_single_rank

aten = torch.ops.aten

Handler = Callable[..., Any]

_COMBINED_BY: dict[Any, Callable[[torch.Tensor, int], torch.Tensor]] = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.dim_IntList), torch.sum),
    **dict.fromkeys((aten.prod.default, aten.prod.dim_int), torch.prod),
    **dict.fromkeys((aten.amax.default, aten.max.default), torch.amax),
    **dict.fromkeys((aten.amin.default, aten.min.default), torch.amin),
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), torch.all),
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), torch.any),
}
"""Reductions, and the function that combines the results of all ranks, stacked in the first dimension."""

_NORM = aten.linalg_vector_norm.default
_MEANS = (aten.mean.default, aten.mean.dim)
_SPREADS = (aten.var.correction, aten.std.correction)
_LINEAR = (*_MEANS, aten.sum.default, aten.sum.dim_IntList)

_REDUCTIONS = frozenset((_NORM, *_MEANS, *_SPREADS, *_COMBINED_BY))

_WITHIN_ROWS = frozenset(
    (aten._softmax.default, aten._log_softmax.default, aten.logsumexp.default, aten.argmax.default, aten.argmin.default)
    + (aten.max.dim, aten.min.dim, aten.median.dim, aten.sort.default, aten.sort.stable, aten.topk.default)
    + (aten.cumsum.default, aten.cumprod.default, aten.flip.default)
)
"""Operators that treat each row by itself, unless the first dimension is among their dims."""

_DRAWING = frozenset(
    ("cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
    + ("rand_like", "randint_like", "randn_like")
)
"""Functions that fill a tensor with random numbers, whatever it held before."""


def rule_for(func: Any) -> Handler:
    """Return what runs an operator that does not act on elements."""
    if func in _HANDLERS:
        return _HANDLERS[func]
    if func in _REDUCTIONS or func in _WITHIN_ROWS:
        return _reduce
    schema = func._schema
    if schema.name.removeprefix("aten::") in _DRAWING and "out" not in func._overloadname:
        return _draw
    if schema.returns and schema.returns[0].alias_info is not None and not schema.is_mutable:
        return _view
    return run_on_single_rank


#
# Views
#


def _view(func: Any, tensor: RowDTensor, *args: Any, **kwargs: Any) -> Any:
    """View this rank's rows as the operator would view the whole tensor."""
    # On the whole shape, so that it raises the same errors on all ranks. A 0-dim tensor counts as one row.
    strides = tensor._local_tensor.stride()[: tensor.ndim]
    whole = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
    result = tree_map_only(torch.Tensor, functools.partial(_rows_of_view, tensor), func(whole, *args, **kwargs))
    if any(leaf is None for leaf in tree_leaves(result)):
        return run_on_single_rank(func, tensor, *args, **kwargs)
    return result


def _rows_of_view(tensor: RowDTensor, view: torch.Tensor) -> RowDTensor | None:
    """Return this rank's rows of a view of the whole tensor; ``None`` if ranks do not have whole rows of it.

    Args:
        view: sizes and strides of the view; it has no memory.
    """
    rows, local = tensor.rows, tensor._local_tensor
    if view.dtype != tensor.dtype or view.is_conj() or view.is_neg():
        return None
    length, new_length = (len(t) if t.ndim else 1 for t in (tensor, view))
    # The memory from one row to the next, and what a row of the view takes of it.
    step = local.stride(0)
    new_step = step if length == new_length == 1 or not view.ndim else view.stride(0)
    sizes, strides, begin = view.shape[1:], view.stride()[1:], view.storage_offset()
    end = begin + 1 + sum(max(0, size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    borders = [start * step for start in rows.starts]
    if length * step != new_length * new_step or end > new_step or any(border % new_step for border in borders):
        return None
    new_rows = rows.reshaped(view.shape, [border // new_step for border in borders])
    own = local.as_strided(new_rows.local_shape, (new_step, *strides), local.storage_offset() + begin)
    return RowDTensor.wrap(own, new_rows)


#
# Reductions
#


def _reduce(func: Any, tensor: RowDTensor, *args: Any, **kwargs: Any) -> Any:
    """Compute within each row, or reduce the rows of all ranks: a collective."""
    rows, local, needs_grad = tensor.rows, tensor._local_tensor, torch.is_grad_enabled() and tensor.requires_grad
    tensor = cast(RowDTensor, tensor.detach())
    # On the whole shape, so that it raises the same errors on all ranks.
    expected = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args, **kwargs)
    dims = _dims_of(func, tensor.ndim, args)
    if dims and 0 not in dims:
        results = func(local, *args, **kwargs)
        return tree_map(lambda own, whole: RowDTensor.wrap(own, rows.reshaped(whole.shape)), results, expected)
    if func in _WITHIN_ROWS:
        return run_on_single_rank(func, tensor, *args, **kwargs)
    if needs_grad and func in _LINEAR:
        # The gradient that torch computes of it is a plain tensor, of which nobody knows whether it is whole.
        raise NotImplementedError(
            f"{func} of {rows.label!r} has no gradient: in a loss, use the methods p.sum() or p.mean() without arguments, "
            f"or p.full_tensor(); elsewhere, torch.no_grad() or p.detach()"
        )
    if len(set(dims)) in (0, tensor.ndim):
        _check_shared(func, rows)
    keepdim = expected.ndim == tensor.ndim
    number = tensor.numel() // max(1, expected.numel())
    wide = torch.promote_types(expected.dtype, torch.float32)
    if func in _MEANS:
        return (tensor.sum(dims or None, keepdim, dtype=wide) / number).to(expected.dtype)
    if func in _SPREADS:
        correction = kwargs.get("correction")
        divisor = max(0, number - (1 if correction is None else correction))
        centered = tensor - tensor.mean(dims or None, keepdim=True)
        deviation = torch.linalg.vector_norm(centered, 2, dims or None, keepdim) / math.sqrt(divisor)
        return deviation if func is aten.std.correction else deviation.square()
    if rows.start < rows.end:
        part = func(local if tensor.ndim else local[0], *args, **kwargs)
    else:
        part = local.new_zeros(expected.shape, dtype=expected.dtype)
    parts = exchange(rows, part, str(func))[rows.holders]
    if parts.is_floating_point():
        parts = parts.to(wide)
    combined = _norm_of(parts, *args[:1]) if func is _NORM else _COMBINED_BY[func](parts, 0)
    return replicated(combined.to(expected.dtype), tensor.device_mesh)


def _dims_of(func: Any, ndim: int, args: Sequence[Any]) -> list[int]:
    """Return the dimensions over which an operator computes; none if they are not given."""
    arguments = func._schema.arguments[1:]
    given = dict(zip((argument.name for argument in arguments), args, strict=False))
    dims = next((given.get(a.name, a.default_value) for a in arguments if a.name in ("dim", "dims")), None)
    return [dim % ndim if ndim else 0 for dim in ([dims] if isinstance(dims, int) else dims or ())]


def _norm_of(norms: torch.Tensor, order: Any = 2) -> torch.Tensor:
    """Return the norm of a tensor from the norms of its parts, along the first dimension."""
    return norms.sum(0) if order == 0 else torch.linalg.vector_norm(norms, order, 0)


def _check_shared(func: Any, rows: Rows) -> None:
    """Raise an error for a number that not all ranks would have, because other ranks have other parameters."""
    if not rows.is_on_all_ranks:
        raise RuntimeError(
            f"{func}: {rows.label!r} is sharded over ranks {list(rows.ranks.group.global_ranks)} alone "
            f"(process_group_for), so other ranks would not get its value. thunder_fsdp_sched.clip_grad_norm_(model, ...) "
            f"counts such parameters right; p.full_tensor() gives the whole tensor on these ranks"
        )


def _norms(func: Any, tensors: Sequence[Any], order: Any = 2, dtype: torch.dtype | None = None) -> list[Any]:
    """Compute the norms of a list of tensors; one collective for each process group."""
    norms: list[Any] = [None] * len(tensors)
    by_group: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, RowDTensor) and tensor.numel():
            _check_shared(func, tensor.rows)
            by_group.setdefault(tensor.rows.ranks.group, []).append(number)
        else:
            norms[number] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
    for numbers in by_group.values():
        sharded = [tensors[number] for number in numbers]
        wide = torch.float64 if any(t.dtype in (torch.float64, torch.complex128) for t in sharded) else torch.float32
        neutral = torch.inf if order < 0 else 0
        rows = [
            t._local_tensor if t._local_tensor.numel() else t._local_tensor.new_full((1,), neutral) for t in sharded
        ]
        parts = torch.stack([norm.to(wide) for norm in func(rows, order, dtype=dtype)])
        labels = [tensor.rows.label for tensor in sharded]
        combined = _norm_of(exchange(sharded[0].rows, parts, str(func), *labels), order)
        for number, tensor, norm in zip(numbers, sharded, combined.unbind(), strict=True):
            norms[number] = replicated(norm.to(dtype or tensor.dtype.to_real()), tensor.device_mesh)
    return norms


def _compare(func: Any, one: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    if func is aten.equal.default and one.shape != other.shape:
        return False
    (own, others), rows = align(func, (one, other))
    assert rows is not None
    _check_shared(func, rows)
    is_equal = torch.tensor(func(own, others, *args, **kwargs), device=own.device)
    return bool(exchange(rows, is_equal, str(func)).all())


def _item(func: Any, tensor: RowDTensor) -> Any:
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    _check_shared(func, tensor.rows)
    return gather(tensor.rows, tensor._local_tensor).item()


#
# Others
#


def _put_where(func: Any, tensor: RowDTensor, indices: Sequence[Any], value: torch.Tensor, *args: Any) -> Any:
    """Assign a number to elements that a mask chooses: ``p[p > 1] = 1``."""
    mask, *others = indices
    if tensor.shape == (1,) and not isinstance(mask, DTENSORS):  # what torch makes of a 0-dim tensor and mask
        if len(tensor._local_tensor):
            func(tensor._local_tensor, indices, value, *args)
        return tensor
    if others or mask is None or mask.dtype is not torch.bool or mask.shape != tensor.shape or args:
        return run_on_single_rank(func, tensor, indices, value, *args)
    return on_elements(aten.masked_fill_.Tensor, tensor, mask, value.reshape(()))


def _new(func: Any, tensor: RowDTensor, size: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """Create a tensor like this one; with another size it is replicated."""
    if func is aten.new_empty_strided.default:  # autograd, for a copy of a gradient
        func, args = aten.new_empty.default, ()
    local = tensor._local_tensor
    if tuple(size) == tensor.shape:
        return RowDTensor.wrap(func(local, local.shape, *args, **kwargs), tensor.rows)
    return replicated(func(local, size, *args, **kwargs), tensor.device_mesh)


def _draw(func: Any, tensor: RowDTensor, *args: Any, **kwargs: Any) -> Any:
    """Draw random numbers for the whole tensor on every rank, and keep the rows."""
    whole = tensor._local_tensor.new_empty(tensor.shape)
    drawn = tensor.rows.of(func(whole, *args, **kwargs))
    if not func._schema.is_mutable:
        return RowDTensor.wrap(drawn.clone(), tensor.rows)
    tensor._local_tensor.copy_(drawn)
    torch.autograd.graph.increment_version(tensor._local_tensor)
    return tensor


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
            raise RuntimeError(
                f"GradScaler: the gradients of bucket {spec.name!r} have error feedback, in units of the scaled loss. Give "
                f"fsdp(comm_policy=CommPolicy(..., error_feedback=False)), or train in bfloat16, which needs no scaler"
            )


_HANDLERS: dict[Any, Handler] = {
    aten._foreach_norm.Scalar: _norms,
    aten._local_scalar_dense.default: _item,
    aten.allclose.default: _compare,
    aten.equal.default: _compare,
    aten._unsafe_view.default: _view,
    aten.index_put_.default: _put_where,
    aten.bernoulli.p: _draw,  # other overloads read probabilities
    aten.bernoulli_.float: _draw,
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
