"""The operators of :class:`RowDTensor`.

[Note: Operators on rows]
Each operator is one of these; nothing is ever gathered silently:

- Operators on elements, such as ``add_``, ``_foreach_lerp_`` or ``_fused_adamw_``, run on this rank's rows of all operands.
  Their results are rows, so the state that an optimizer makes by ``zeros_like`` is, too. An optimizer's step consists of
  them, so they take a fast path, which unwraps operands with the same rows without looking at them one by one.
- Operators on whole rows, such as ``mean(1)`` or ``softmax(-1)``, and views of them, run on this rank's rows.
- Reductions over the rows, such as ``norm()`` or ``amax(0)``, combine the results of all ranks, with one collective. They
  return replicated DTensors: whatever is read from them is the same on all ranks.
- Operators that fill a tensor with random numbers draw those of the whole tensor and keep the rows, so that with equal
  seeds on all ranks the result is that of the unsharded tensor.
- All others raise an error, unless this rank has all rows.

Which of these it is, and whether it succeeds, depends on shapes and cuts only, which all ranks know. So an operator fails
on all ranks or on none.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .operator_kinds import DRAWING, ROW_VIEWS, ROWWISE, acts_on_elements, acts_on_items
from .row_dtensor import RowDTensor, local_rows, replicated
from .row_operands import align, check_written, dims_of, run_on_single_rank, with_rows
from .row_reductions import compare, item, norms, reduce_or_run_on_rows
from .rows import Rows

__all__ = ["RowDTensor", "run_operator"]

aten = torch.ops.aten

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator with at least one :class:`RowDTensor` among its operands; see [Note: Operators on rows].

    Raises:
        NotImplementedError: it needs rows of other ranks.
        RuntimeError: an operand is a plain tensor, or has other rows.
    """
    return _handler_of(func)(func, args, kwargs)


@functools.cache
def _handler_of(func: Any) -> Handler:
    if func in _HANDLERS:
        return _HANDLERS[func]
    if acts_on_elements(func):
        return _on_elements
    if acts_on_items(func):
        return _on_items
    if func in ROWWISE:
        return reduce_or_run_on_rows
    if func in ROW_VIEWS:
        return _view_rows
    if func in DRAWING:
        return _draw
    return run_on_single_rank


#
# Operators on elements
#


def _on_elements(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    rows: Any = None
    operands = []
    for arg in args:
        if type(arg) is RowDTensor:
            if rows is None:
                rows = arg.rows
            elif arg.rows is not rows:
                return _on_aligned_elements(func, args, kwargs)
            operands.append(arg._local_tensor)
        elif isinstance(arg, torch.Tensor) and (arg.ndim or isinstance(arg, DTensor)):
            return _on_aligned_elements(func, args, kwargs)
        else:
            operands.append(arg)
    first = args[0]
    if rows is None or (kwargs and any(isinstance(value, torch.Tensor) for value in kwargs.values())):
        return _on_aligned_elements(func, args, kwargs)
    if not func._schema.is_mutable:
        return with_rows(func(*operands, **kwargs), rows)
    if type(first) is not RowDTensor:
        return _on_aligned_elements(func, args, kwargs)
    func(*operands, **kwargs)
    torch.autograd.graph.increment_version(first._local_tensor)  # below autograd, operators count no versions
    return first


def _on_aligned_elements(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on elements whose operands have different shapes or types."""
    names = list(kwargs)
    values = [*args, *kwargs.values()]
    operands, rows = align(func, values)
    if func._schema.is_mutable:
        changed = kwargs["out"] if "out" in kwargs else args[0]
        check_written(func, changed, rows)
    result = func(*operands[: len(args)], **dict(zip(names, operands[len(args) :], strict=True)))
    if func._schema.is_mutable:
        torch.autograd.graph.increment_version(local_rows(changed))
        return changed
    return with_rows(result, rows)


#
# Operators on the elements of lists of tensors
#


def _on_items(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    # With thousands of parameters a Python loop takes as long as the operator, so loops are in C or comprehensions.
    specs: list[Any] = []
    operands: list[Any] = []
    for arg in args:
        is_list = isinstance(arg, (list, tuple))
        kinds = set(map(type, arg)) if is_list else {type(arg)}
        if is_list and kinds == _ROW_DTENSOR:
            found = [tensor._spec for tensor in arg]
            if not specs:
                specs = found
            elif not all(map(operator.is_, specs, found)):  # they may be of another dtype
                if not all(map(operator.is_, map(_ROWS, specs), map(_ROWS, found))):
                    return _on_aligned_items(func, args, kwargs)
            operands.append([tensor._local_tensor for tensor in arg])
        elif any(issubclass(kind, torch.Tensor) for kind in kinds) and not _are_numbers(arg if is_list else [arg]):
            return _on_aligned_items(func, args, kwargs)
        else:
            operands.append(arg)
    if not specs:
        return _on_aligned_items(func, args, kwargs)
    result = func(*operands, **kwargs)
    if func._schema.is_mutable:
        _count_writes(func, operands, args)
        return result
    return [
        RowDTensor.of_spec(local, spec) if local.dtype is spec.tensor_meta.dtype else with_rows(local, spec.rows)
        for local, spec in zip(result, specs, strict=True)
    ]


_ROWS = operator.attrgetter("rows")
_ROW_DTENSOR = {RowDTensor}


def _are_numbers(tensors: Sequence[torch.Tensor]) -> bool:
    return not any(tensor.ndim or isinstance(tensor, DTensor) for tensor in tensors)


def _on_aligned_items(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists whose items differ in their type or shape; some may be plain at the same positions."""
    is_list = [isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], torch.Tensor) for arg in args]
    lists = [arg for arg, listed in zip(args, is_list, strict=True) if listed]
    numbers = [arg for arg, listed in zip(args, is_list, strict=True) if not listed and isinstance(arg, torch.Tensor)]
    parts: list[list[torch.Tensor]] = [[] for _ in lists]
    all_rows: list[Rows | None] = []
    for items in zip(*lists, strict=True):
        aligned, rows = list(items), None
        if any(isinstance(item, DTensor) for item in items):
            aligned, rows = align(func, [*items, *numbers])
            if func._schema.is_mutable:
                check_written(func, items[0], rows)
        all_rows.append(rows)
        for part, own in zip(parts, aligned, strict=False):
            part.append(own)
    filled = iter(parts)
    operands = [next(filled) if listed else local_rows(arg) for arg, listed in zip(args, is_list, strict=True)]
    result = func(*operands, **kwargs)
    if func._schema.is_mutable:
        _count_writes(func, operands, args)
        return result
    return [own if rows is None else with_rows(own, rows) for own, rows in zip(result, all_rows, strict=True)]


def _count_writes(func: Any, operands: Sequence[Any], args: Sequence[Any]) -> None:
    """Count a new version of each tensor of the lists that an operator writes, as autograd does for other operators."""
    for number in _written(func):
        torch.autograd.graph.increment_version(operands[number])
        if func._schema.name.startswith("aten::_fused"):  # torch counts none
            torch.autograd.graph.increment_version(args[number])


@functools.cache
def _written(func: Any) -> list[int]:
    """Return the positions of the arguments that an operator writes."""
    infos = [(number, argument.alias_info) for number, argument in enumerate(func._schema.arguments)]
    return [number for number, info in infos if info is not None and info.is_write]


#
# Views of rows
#


def _view_rows(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, rows, local = args[0], args[0].rows, args[0]._local_tensor
    if not tensor.ndim:
        return _view(func, args, kwargs)
    expected = func(torch.empty(tensor.shape, device="meta"), *args[1:], **kwargs)
    dims = dims_of(func, args, kwargs, added=func is aten.unsqueeze.default)
    if func is aten.permute.default and dims[0] == 0:
        dims = []
    if 0 not in dims:
        return with_rows(func(local, *args[1:], **kwargs), rows.reshaped((tensor.shape[0], *expected.shape[1:])))
    if func is aten.slice.Tensor and expected.shape == tensor.shape:
        return with_rows(aten.alias.default(local), rows)
    return run_on_single_rank(func, args, kwargs)


def _view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """View rows in another shape, in which each rank has whole rows, too."""
    tensor, rows, local = args[0], args[0].rows, args[0]._local_tensor
    shape = func(torch.empty(tensor.shape, device="meta"), *args[1:], **kwargs).shape
    if shape == tensor.shape:
        return with_rows(aten.alias.default(local), rows)
    if func is aten.expand.default:
        if len(shape) == tensor.ndim and shape[:1] == tensor.shape[:1]:
            return with_rows(local.expand(len(local), *shape[1:]), rows.reshaped(shape))
        return run_on_single_rank(func, args, kwargs)
    if len(shape) + tensor.ndim == 1 and shape.numel() == 1:  # a 0-dim tensor counts as one row
        return with_rows(aten.alias.default(local), rows.reshaped(shape))
    old, new = math.prod(tensor.shape[1:]), math.prod(shape[1:])
    if not tensor.ndim or not shape or not new or any(start * old % new for start in rows.starts):
        return run_on_single_rank(func, args, kwargs)
    other = rows.reshaped(shape, [start * old // new for start in rows.starts])
    return with_rows(func(local, list(other.local_shape)), other)


def _put_where(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Assign a number to elements that a mask chooses: ``p[p > 1] = 1``."""
    tensor, (*others, mask), value = args[0], args[1], args[2]
    if tensor.shape == (1,) and not isinstance(mask, DTensor):  # what torch makes of a 0-dim tensor and mask
        if len(tensor._local_tensor):
            func(tensor._local_tensor, *args[1:], **kwargs)
        return tensor
    if others or mask is None or mask.dtype is not torch.bool or mask.shape != tensor.shape or args[3:] or kwargs:
        return run_on_single_rank(func, args, kwargs)
    return _on_elements(aten.masked_fill_.Tensor, (tensor, mask, value.reshape(())), {})


def _squeeze(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    dims = [dim for dim, length in enumerate(args[0].shape) if length == 1]
    return _view_rows(aten.squeeze.dims, (args[0], dims), {})


#
# Others
#


def _new(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Create a tensor like this one; with another size it is replicated."""
    tensor, size = args[0], torch.Size(args[1])
    local = tensor._local_tensor
    if func is aten.new_empty_strided.default:
        return with_rows(local.new_empty(local.shape, **kwargs), tensor.rows)
    if size == tensor.shape:
        return with_rows(func(local, local.shape, *args[2:], **kwargs), tensor.rows)
    return replicated(func(local, size, *args[2:], **kwargs), tensor.device_mesh)


def _draw(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Draw random numbers for the whole tensor on every rank, and keep the rows."""
    tensor = args[0]
    whole = tensor._local_tensor.new_empty(tensor.shape)
    drawn = tensor.rows.of(func(whole, *args[1:], **kwargs))
    if not func._schema.is_mutable:
        return with_rows(drawn.clone(), tensor.rows)
    tensor._local_tensor.copy_(drawn)
    torch.autograd.graph.increment_version(tensor._local_tensor)
    return tensor


def _check_finite(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Unscale gradients, and tell every rank whether one of them is not finite on any rank (``GradScaler``)."""
    grads, found_inf, *rest = args
    locals_ = [local_rows(g) for g in grads]
    func([g for g in locals_ if g.numel()] or locals_, found_inf, *rest, **kwargs)
    of_groups = {id(g.rows.ranks): g.rows for g in grads if isinstance(g, RowDTensor)}.values()
    if not any(rows.is_on_all_ranks for rows in of_groups):
        buckets = [rows.place[0] for rows in of_groups if rows.place is not None]
        for control in {id(bucket.base.control): bucket.base.control for bucket in buckets}.values():
            (maximum,) = control.reduce("GradScaler", [found_inf.item()], dist.ReduceOp.MAX)
            found_inf.fill_(maximum)
        return
    for rows in sorted(of_groups, key=lambda rows: rows.ranks.group.size):  # the group of all ranks comes last
        group = rows.ranks.group
        group.check_sends(found_inf.device, "the result of GradScaler")
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group.process_group)


_HANDLERS: dict[Any, Handler] = {
    aten._foreach_norm.Scalar: norms,
    aten._local_scalar_dense.default: item,
    aten.allclose.default: compare,
    aten.equal.default: compare,
    aten.expand.default: _view,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.squeeze.default: _squeeze,
    aten.index_put_.default: _put_where,
    aten.new_empty.default: _new,
    aten.new_zeros.default: _new,
    aten.new_ones.default: _new,
    aten.new_full.default: _new,
    aten.new_empty_strided.default: _new,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _check_finite,
    aten.is_same_size.default: lambda func, args, kwargs: args[0].shape == args[1].shape,
    aten.is_pinned.default: lambda func, args, kwargs: args[0]._local_tensor.is_pinned(),
    aten.detach_.default: lambda func, args, kwargs: args[0],
}

RowDTensor.run_operator = staticmethod(run_operator)
