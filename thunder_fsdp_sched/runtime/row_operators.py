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
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..private_api import reduces_found_infs
from .operator_kinds import DRAWING, REDUCING, ROW_VIEWS, ROWWISE, acts_on_elements, acts_on_items
from .row_dtensor import RowDTensor, local_rows, replicated
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
        return _on_rows
    if func in ROW_VIEWS:
        return _view_rows
    if func in DRAWING:
        return _draw
    return _on_single_rank


def _on_single_rank(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on tensors of which this rank has all rows; others refuse it."""
    wholes: dict[int, RowDTensor] = {}

    def whole(tensor: RowDTensor) -> DTensor:
        if tensor.rows.ranks.group.size > 1:
            _refuse(func, args, kwargs)
        result = replicated(tensor._local_tensor.view(tensor.shape), tensor.device_mesh)
        wholes[id(result)] = tensor
        return result

    args, kwargs = tree_map_only(RowDTensor, whole, (args, kwargs))
    return tree_map_only(DTensor, lambda result: wholes.get(id(result), result), func(*args, **kwargs))


def _refuse(func: Any, args: Any, kwargs: Any) -> NoReturn:
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
        return _wrapped(func(*operands, **kwargs), rows)
    if type(first) is not RowDTensor:
        return _on_aligned_elements(func, args, kwargs)
    func(*operands, **kwargs)
    torch.autograd.graph.increment_version(first._local_tensor)  # below autograd, operators count no versions
    return first


def _wrapped(local: torch.Tensor, rows: Rows) -> RowDTensor:
    return RowDTensor.of_spec(local, rows.spec(local.dtype, local.device.type))


def _on_aligned_elements(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on elements whose operands have different shapes or types."""
    names = list(kwargs)
    values = [*args, *kwargs.values()]
    operands, rows = _align(func, values)
    if func._schema.is_mutable:
        changed = kwargs["out"] if "out" in kwargs else args[0]
        _check_written(func, changed, rows)
    result = func(*operands[: len(args)], **dict(zip(names, operands[len(args) :], strict=True)))
    if func._schema.is_mutable:
        torch.autograd.graph.increment_version(local_rows(changed))
        return changed
    return _wrapped(result, rows)


def _check_written(func: Any, written: Any, rows: Rows) -> None:
    if not isinstance(written, RowDTensor) or written.shape != rows.shape:
        raise RuntimeError(
            f"{func} would write rows of {rows.label!r}, of shape {tuple(rows.shape)}, into {_described(written)}: make it "
            f"by torch.zeros_like(p) or another operator on the parameter, so that it has the same rows"
        )


def _align(func: Any, values: Sequence[Any]) -> tuple[list[Any], Rows]:
    """Return this rank's part of each operand, and the rows of the result.

    Raises:
        RuntimeError: an operand is a plain tensor, is distributed otherwise, or has other rows.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    known = [tensor.rows for tensor in tensors if isinstance(tensor, RowDTensor)]
    rows = max(known, key=lambda r: (len(r.shape), r.shape[:1])).reshaped(shape)
    if rows.starts[-1] != (shape or (1,))[0]:
        return _refuse(func, values, {})  # a single row is broadcast to other ranks
    return [_part(func, value, rows) if isinstance(value, torch.Tensor) else value for value in values], rows


def _part(func: Any, tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the part of an operand that belongs to this rank's rows of the result."""
    lacks_rows = tensor.ndim < len(rows.shape) or (tensor.shape[:1] == (1,) and rows.shape[:1] != (1,))
    if isinstance(tensor, RowDTensor):
        if tensor.rows.has_cuts_of(rows) and not lacks_rows:
            return tensor._local_tensor
        _refuse(func, (tensor,), {})
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


#
# Operators on the elements of lists of tensors
#


def _on_items(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    # With thousands of parameters a Python loop takes as long as the operator, so loops are in C or comprehensions.
    specs: list[Any] = []
    operands: list[Any] = []
    for arg in args:
        kinds = set(map(type, arg)) if isinstance(arg, (list, tuple)) else {type(arg)}
        if kinds == _ROW_DTENSOR and arg is not args:
            found = [tensor._spec for tensor in arg]
            if not specs:
                specs = found
            elif not all(map(operator.is_, specs, found)):  # they may be of another dtype
                if not all(map(operator.is_, map(_ROWS, specs), map(_ROWS, found))):
                    return _on_aligned_items(func, args, kwargs)
            operands.append([tensor._local_tensor for tensor in arg])
        elif any(issubclass(kind, DTensor) for kind in kinds) or (torch.Tensor in kinds and not _are_numbers(arg)):
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
        RowDTensor.of_spec(local, spec) if local.dtype is spec.tensor_meta.dtype else _wrapped(local, spec.rows)
        for local, spec in zip(result, specs, strict=True)
    ]


_ROWS = operator.attrgetter("rows")
_ROW_DTENSOR = {RowDTensor}


def _are_numbers(tensors: Any) -> bool:
    return not any(tensor.ndim for tensor in tensors) if isinstance(tensors, (list, tuple)) else not tensors.ndim


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
            aligned, rows = _align(func, [*items, *numbers])
            if func._schema.is_mutable:
                _check_written(func, items[0], rows)
        all_rows.append(rows)
        for part, item in zip(parts, aligned, strict=False):
            part.append(item)
    filled = iter(parts)
    operands = [next(filled) if listed else local_rows(arg) for arg, listed in zip(args, is_list, strict=True)]
    result = func(*operands, **kwargs)
    if func._schema.is_mutable:
        _count_writes(func, operands, args)
        return result
    return [item if rows is None else _wrapped(item, rows) for item, rows in zip(result, all_rows, strict=True)]


def _count_writes(func: Any, operands: Sequence[Any], args: Sequence[Any]) -> None:
    """Count a new version of each tensor of the lists that an operator writes, as autograd does for other operators."""
    for number in _written(func):
        torch.autograd.graph.increment_version(operands[number])
        if func._schema.name.startswith("aten::_fused"):  # torch counts none
            torch.autograd.graph.increment_version(args[number])


@functools.cache
def _written(func: Any) -> list[int]:
    """Return the positions of the arguments that an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return [
        number
        for number, arg in arguments
        if arg.alias_info is not None and arg.alias_info.is_write and not arg.kwarg_only
    ]


#
# Operators on whole rows, and reductions over rows
#


def _on_rows(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, rows = args[0], args[0].rows
    # On the whole shape, so that it raises the same errors on all ranks.
    expected = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args[1:], **kwargs)
    dims = _dims(func, args, kwargs)
    if dims and 0 not in dims:
        result = func(tensor._local_tensor, *args[1:], **kwargs)
        return tree_map_only(
            torch.Tensor, lambda local: _wrapped(local, rows.reshaped((tensor.shape[0], *local.shape[1:]))), result
        )
    is_whole = len(set(dims)) in (0, tensor.ndim)
    if func not in _REDUCTIONS or (is_whole and expected.numel() != 1):
        return _on_single_rank(func, args, kwargs)
    if torch.is_grad_enabled() and tensor.requires_grad and func in _LINEAR:
        # The gradient that torch computes of it is a plain tensor, of which nobody knows whether it is whole.
        raise NotImplementedError(
            f"{func} of {rows.label!r} has no gradient: in a loss, use the methods p.sum() or p.mean() without arguments, "
            f"or p.full_tensor(); elsewhere, torch.no_grad() or p.detach()"
        )
    if is_whole:
        _check_shared(func, rows)
    return replicated(_reduced(func, args, kwargs, expected), tensor.device_mesh)


def _reduced(func: Any, args: Sequence[Any], kwargs: dict[str, Any], expected: torch.Tensor) -> torch.Tensor:
    """Reduce each rank's rows, and the results of all ranks; a collective."""
    tensor, rows, local = args[0], args[0].rows, args[0]._local_tensor
    reduce = _mean_and_variance if func in _SPREADS else func
    if not tensor.numel():
        return func(local.new_empty(tensor.shape), *args[1:], **kwargs)
    if not tensor.ndim and len(local):
        local = local.reshape(())
    if rows.start < rows.end:
        part = reduce(local, *args[1:], **kwargs)
    else:
        part = local.new_zeros((2,) * (func in _SPREADS) + tuple(expected.shape), dtype=expected.dtype)
    parts = rows.exchange(part, str(func))[rows.holders]
    if parts.dtype in (torch.bfloat16, torch.float16):
        parts = parts.float()
    weights = torch.tensor([length / rows.starts[-1] for length in rows.lengths if length], dtype=torch.float64)
    weights = weights.to(parts.device).view(-1, *(1 for _ in expected.shape))
    if func is _VECTOR_NORM:
        combined = _norm_of(parts, args[1] if len(args) > 1 else kwargs.get("ord", 2))
    elif func in _MEANS:
        combined = (parts * weights).sum(0)
    elif func in _SPREADS:
        means, variances = parts.double().unbind(1)
        combined = ((variances + (means - (means * weights).sum(0)).square()) * weights).sum(0)
        number, correction = tensor.numel() // expected.numel(), kwargs.get("correction", 1)
        combined = combined * number / combined.new_tensor(max(0, number - (1 if correction is None else correction)))
        combined = combined.sqrt() if func is aten.std.correction else combined
    else:
        combine: Any = REDUCING[func]
        combined = combine(parts, 0)
    return combined.to(expected.dtype)


def _mean_and_variance(local: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    dims = tuple(range(local.ndim)) if dim is None else dim
    return torch.stack([local.mean(dims, keepdim), local.var(dims, correction=0, keepdim=keepdim)])


def _norm_of(norms: torch.Tensor, order: Any) -> torch.Tensor:
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


def _norms(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Compute the norms of a list of tensors; one collective for each process group."""
    tensors, order = args[0], args[1] if len(args) > 1 else 2
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
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
        parts = sharded[0]._local_tensor.new_full((len(sharded),), torch.inf if order < 0 else 0, dtype=wide)
        here = [place for place, tensor in enumerate(sharded) if tensor._local_tensor.numel()]
        if here:
            local = func([sharded[place]._local_tensor for place in here], order, dtype=dtype)
            parts[here] = torch.stack([norm.to(wide) for norm in local])
        labels = [tensor.rows.label for tensor in sharded]
        combined = _norm_of(sharded[0].rows.exchange(parts, str(func), *labels), order)
        for number, tensor, norm in zip(numbers, sharded, combined.unbind(), strict=True):
            norms[number] = replicated(norm.to(dtype or _real(tensor.dtype)), tensor.device_mesh)
    return norms


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _equal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if func is aten.equal.default and args[0].shape != args[1].shape:
        return False
    (one, other), rows = _align(func, args[:2])
    _check_shared(func, rows)
    is_equal = torch.tensor(func(one, other, *args[2:], **kwargs), device=one.device)
    return bool(rows.exchange(is_equal, str(func)).all())


def _item(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, rows = args[0], args[0].rows
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    _check_shared(func, rows)
    local = tensor._local_tensor.reshape(-1)
    part = local[0] if len(local) else local.new_zeros(())
    return rows.exchange(part, str(func))[rows.holders[0]].item()


#
# Views of rows
#


def _view_rows(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor, rows, local = args[0], args[0].rows, args[0]._local_tensor
    if not tensor.ndim:
        return _view(func, args, kwargs)
    expected = func(torch.empty(tensor.shape, device="meta"), *args[1:], **kwargs)
    dims = _dims(func, args, kwargs, added=func is aten.unsqueeze.default)
    if func is aten.permute.default and dims[0] == 0:
        dims = []
    if 0 not in dims:
        return _wrapped(func(local, *args[1:], **kwargs), rows.reshaped((tensor.shape[0], *expected.shape[1:])))
    if func is aten.slice.Tensor and expected.shape == tensor.shape:
        return _wrapped(aten.alias.default(local), rows)
    return _on_single_rank(func, args, kwargs)


def _view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """View rows in another shape, in which each rank has whole rows, too."""
    tensor, rows, local = args[0], args[0].rows, args[0]._local_tensor
    shape = func(torch.empty(tensor.shape, device="meta"), *args[1:], **kwargs).shape
    if shape == tensor.shape:
        return _wrapped(aten.alias.default(local), rows)
    if func is aten.expand.default:
        if len(shape) == tensor.ndim and shape[:1] == tensor.shape[:1]:
            return _wrapped(local.expand(len(local), *shape[1:]), rows.reshaped(shape))
        return _on_single_rank(func, args, kwargs)
    if len(shape) + tensor.ndim == 1 and shape.numel() == 1:  # a 0-dim tensor counts as one row
        return _wrapped(aten.alias.default(local), rows.reshaped(shape))
    old, new = math.prod(tensor.shape[1:]), math.prod(shape[1:])
    if not tensor.ndim or not shape or not new or any(start * old % new for start in rows.starts):
        return _on_single_rank(func, args, kwargs)
    other = rows.reshaped(shape, [start * old // new for start in rows.starts])
    return _wrapped(func(local, list(other.local_shape)), other)


def _put_where(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Assign a number to elements that a mask chooses: ``p[p > 1] = 1``."""
    tensor, (*others, mask), value = args[0], args[1], args[2]
    if tensor.shape == (1,) and not isinstance(mask, DTensor):  # what torch makes of a 0-dim tensor and mask
        if len(tensor._local_tensor):
            func(tensor._local_tensor, *args[1:], **kwargs)
        return tensor
    if others or mask is None or mask.dtype is not torch.bool or mask.shape != tensor.shape or args[3:] or kwargs:
        return _on_single_rank(func, args, kwargs)
    return _on_elements(aten.masked_fill_.Tensor, (tensor, mask, value.reshape(())), {})


def _squeeze(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    dims = [dim for dim, length in enumerate(args[0].shape) if length == 1]
    return _view_rows(aten.squeeze.dims, (args[0], dims), {})


def _dims(func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, added: bool = False) -> list[int]:
    """Return the dimensions over which an operator computes or that it moves; none if it has no such argument."""
    ndim = args[0].ndim + added
    found: list[int] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims", "dim0", "dim1"):
            dims = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
            found += [dims] if isinstance(dims, int) else dims or ()
    return [dim % ndim if ndim else 0 for dim in found]


#
# Others
#


def _new(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Create a tensor like this one; with another size it is replicated."""
    tensor, size = args[0], torch.Size(args[1])
    local = tensor._local_tensor
    if func is aten.new_empty_strided.default:
        return _wrapped(local.new_empty(local.shape, **kwargs), tensor.rows)
    if size == tensor.shape:
        return _wrapped(func(local, local.shape, *args[2:], **kwargs), tensor.rows)
    return replicated(func(local, size, *args[2:], **kwargs), tensor.device_mesh)


def _draw(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Draw random numbers for the whole tensor on every rank, and keep the rows."""
    tensor = args[0]
    whole = tensor._local_tensor.new_empty(tensor.shape)
    drawn = tensor.rows.of(func(whole, *args[1:], **kwargs))
    if not func._schema.is_mutable:
        return _wrapped(drawn.clone(), tensor.rows)
    tensor._local_tensor.copy_(drawn)
    torch.autograd.graph.increment_version(tensor._local_tensor)
    return tensor


def _check_finite(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Unscale gradients, and tell every rank whether one of them is not finite on any rank (``GradScaler``)."""
    grads, found_inf, *rest = args
    locals_ = [local_rows(g) for g in grads]
    func([g for g in locals_ if g.numel()] or locals_, found_inf, *rest, **kwargs)
    of_groups = {id(g.rows.ranks): g.rows for g in grads if isinstance(g, RowDTensor)}.values()
    if not any(rows.is_on_all_ranks for rows in of_groups) and not reduces_found_infs():
        raise RuntimeError(
            "GradScaler: none of these gradients is sharded over all ranks, so ranks would not agree on skipping a step. "
            "Use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
        )
    for rows in sorted(of_groups, key=lambda rows: rows.ranks.group.size):  # the group of all ranks comes last
        group = rows.ranks.group
        group.check_sends(found_inf.device, "the result of GradScaler")
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group.process_group)


_VECTOR_NORM = aten.linalg_vector_norm.default
_MEANS = (aten.mean.default, aten.mean.dim)
_LINEAR = (*_MEANS, aten.sum.default, aten.sum.dim_IntList)
_SPREADS = (aten.var.correction, aten.std.correction)
_REDUCTIONS = frozenset((_VECTOR_NORM, *_MEANS, *_SPREADS, *REDUCING))

_HANDLERS: dict[Any, Handler] = {
    aten._foreach_norm.Scalar: _norms,
    aten._local_scalar_dense.default: _item,
    aten.allclose.default: _equal,
    aten.equal.default: _equal,
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
