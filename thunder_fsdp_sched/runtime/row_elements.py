"""Operators that act on each element by itself, and the operands of any operator on :class:`RowDTensor`.

See [Note: Operators on rows] in ``row_operators``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from .row_dtensor import DTENSORS, RowDTensor, local_rows, replicated
from .rows import Rows

# Explicit lists, because an operator that is not listed may read other rows. torch's tag `pointwise` is no proof:
# `aten::equal` has it (torch 2.13).

_ELEMENTWISE = """
    abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clone copy copysign cos cosh deg2rad digamma div elu
    empty_like eq erf erfc erfinv exp exp2 expm1 fill floor floor_divide fmax fmin fmod frac full_like ge gelu gt hardshrink
    hardsigmoid hardswish hardtanh heaviside hypot isinf isnan isneginf isposinf le leaky_relu lerp lgamma lift_fresh log
    log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill maximum
    minimum mish mul nan_to_num ne neg nextafter ones_like polygamma pow rad2deg reciprocal relu remainder round rsqrt rsub
    sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt sub tan tanh threshold trunc xlogy zero zeros_like
    _to_copy detach
    elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward logit_backward
    mish_backward sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward
"""
"""Functions that compute each element of their result from the elements at the same position of their operands, and that
``_foreach_`` operators apply to each item of their lists."""

_ELEMENTWISE_OVERLOADS = {torch.ops.aten.where.self, torch.ops.aten.max.other, torch.ops.aten.min.other}

_FUSED = {f"aten::_fused_{name}_" for name in ("adagrad", "adam", "adamw", "sgd")}

_elementwise = frozenset(_ELEMENTWISE.split())


def acts_on_elements(func: Any) -> bool:
    """Return whether an operator acts on each element of tensors, or of the items of lists, by itself, in place or not."""
    name = func._schema.name.removeprefix("aten::")
    name = name if name.endswith("__") else name.removesuffix("_")
    if name.startswith("_foreach_"):
        return name.removeprefix("_foreach_") in _elementwise and "out" not in func._overloadname
    return name in _elementwise or func in _ELEMENTWISE_OVERLOADS or func._schema.name in _FUSED


def on_elements(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on this rank's rows of all operands."""
    values = [*args, *kwargs.values()]
    written = _written(func, len(args), tuple(kwargs))
    rows: Sequence[Rows | None]
    operands, rows = _unwrapped(values, written) or _aligned(func, values, written)
    result = func(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :], strict=True)))
    if not written:
        if isinstance(values[0], (list, tuple)):
            return [local if of is None else RowDTensor.wrap(local, of) for local, of in zip(result, rows, strict=True)]
        return RowDTensor.wrap(result, cast(Rows, rows[0]))
    for place in written:  # below autograd, operators count no versions
        torch.autograd.graph.increment_version(operands[place])
        if isinstance(values[place], (list, tuple)):  # nor does autograd for those of lists
            torch.autograd.graph.increment_version(values[place])
    return None if result is None else values[written[0]]


@functools.cache
def _written(func: Any, number: int, names: tuple[str, ...]) -> list[int]:
    """Return the places of the operands that an operator writes, among positional operands and those with names."""
    arguments = func._schema.arguments
    places = {argument.name: place for place, argument in enumerate(arguments[:number])}
    places |= {name: number + place for place, name in enumerate(names)}
    infos = {argument.name: argument.alias_info for argument in arguments}
    return [place for name, place in places.items() if (info := infos[name]) is not None and info.is_write]


def _unwrapped(values: Sequence[Any], written: list[int]) -> tuple[list[Any], list[Rows]] | None:
    """Return this rank's rows of all operands, and those of the results, if they are all alike or numbers.

    Optimizers have thousands of parameters, so comprehensions unwrap the items of lists.
    """
    rows: list[Rows] = []
    operands: list[Any] = []
    for value in values:
        is_list = isinstance(value, (list, tuple))
        items = value if is_list else (value,)
        if set(map(type, items)) == _ROW_DTENSOR:
            found = [item._spec.rows for item in items]
            rows = rows or found
            if len(rows) != len(found) or not all(map(operator.is_, rows, found)):
                return None
            local = [item._local_tensor for item in items]
            operands.append(local if is_list else local[0])
        elif all(map(_is_number, items)):
            operands.append(value)
        else:
            return None
    if not rows or (written and operands[written[0]] is values[written[0]]):
        return None
    return operands, rows


_ROW_DTENSOR = {RowDTensor}


def _is_number(item: Any) -> bool:
    return not isinstance(item, torch.Tensor) or (item.ndim == 0 and not isinstance(item, DTENSORS))


def _aligned(func: Any, values: Sequence[Any], written: list[int]) -> tuple[list[Any], list[Rows | None]]:
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
