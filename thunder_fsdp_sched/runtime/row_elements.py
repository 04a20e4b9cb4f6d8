"""Run elementwise operators on :class:`RowDTensor`, such as those of optimizers.

See [Note: Operators on rows] in ``extras.row_operators.operators``, which has the rules for all others.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ..extensions import load
from .row_dtensor import DTENSORS, RowDTensor
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
    _to_copy
    elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward logit_backward
    mish_backward sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward
"""
"""Elementwise functions, which ``_foreach_`` operators apply to each item of their lists."""

_ELEMENTWISE_OVERLOADS = {torch.ops.aten.where.self, torch.ops.aten.max.other, torch.ops.aten.min.other}

_FUSED = {f"aten::_fused_{name}_" for name in ("adagrad", "adam", "adamw", "sgd")}

_elementwise = frozenset(_ELEMENTWISE.split())


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator with at least one :class:`RowDTensor` among its operands; see [Note: Operators on rows].

    Raises:
        NotImplementedError: it needs rows of other ranks.
        RuntimeError: an operand is a plain tensor, or has other rows.
    """
    return _rule_for(func)(func, *args, **kwargs)


@functools.cache
def _rule_for(func: Any) -> Callable[..., Any]:
    if acts_on_elements(func):
        return on_elements
    rule: Callable[..., Any] = load("extras.row_operators.operators:rule_for")(func)
    return rule


def acts_on_elements(func: Any) -> bool:
    """Return whether an operator is elementwise, on tensors or on the items of lists, in place or not."""
    name = func._schema.name.removeprefix("aten::")
    name = name if name.endswith("__") else name.removesuffix("_")
    if name.startswith("_foreach_"):
        return name.removeprefix("_foreach_") in _elementwise and "out" not in func._overloadname
    return name in _elementwise or func in _ELEMENTWISE_OVERLOADS or func._schema.name in _FUSED


def on_elements(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on this rank's rows of all operands."""
    if (own := _rows_alone(args, kwargs)) is not None:
        result = func(*own, **kwargs)
        if not (written := _written(func, len(args), ())):
            return RowDTensor.wrap(result, args[0]._spec.rows)
        torch.autograd.graph.increment_version([own[position] for position in written])  # see below
        return args[written[0]]
    values = [*args, *kwargs.values()]
    written = _written(func, len(args), tuple(kwargs))
    rows: Sequence[Rows | None]
    operands, rows = _unwrapped(values, written) or load("extras.row_operators.operators:aligned")(
        func, values, written
    )
    result = func(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :], strict=True)))
    if not written:
        if isinstance(values[0], (list, tuple)):
            return [local if of is None else RowDTensor.wrap(local, of) for local, of in zip(result, rows, strict=True)]
        return RowDTensor.wrap(result, cast(Rows, rows[0]))
    for position in written:  # operators below autograd do not change versions
        torch.autograd.graph.increment_version(operands[position])
        if isinstance(values[position], (list, tuple)):  # autograd does not change those of lists either
            torch.autograd.graph.increment_version(values[position])
    return None if result is None else values[written[0]]


@functools.cache
def _written(func: Any, number: int, names: tuple[str, ...]) -> list[int]:
    """Return the positions of the operands that an operator writes, among positional operands and those with names."""
    arguments = func._schema.arguments
    positions = {argument.name: position for position, argument in enumerate(arguments[:number])}
    positions |= {name: number + position for position, name in enumerate(names)}
    infos = {argument.name: argument.alias_info for argument in arguments}
    return [position for name, position in positions.items() if (info := infos[name]) is not None and info.is_write]


def _rows_alone(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return the arguments with this rank's rows, if the first is rows and all others are such rows or Python numbers.

    That suffices for most operators, which would spend most of their time on telling other arguments apart.
    """
    if type(args[0]) is not RowDTensor or any(isinstance(value, _TENSORS) for value in kwargs.values()):
        return None
    rows = args[0]._spec.rows  # type: ignore[attr-defined]
    operands = []
    for value in args:
        if type(value) is RowDTensor and value._spec.rows is rows:  # type: ignore[attr-defined]
            operands.append(value._local_tensor)
        elif isinstance(value, _TENSORS):
            return None
        else:
            operands.append(value)
    return operands


def _unwrapped(values: Sequence[Any], written: list[int]) -> tuple[list[Any], list[Rows]] | None:
    """Return this rank's rows of all operands, and the rows of the results, if they are all equal or numbers.

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
_TENSORS = (torch.Tensor, list, tuple)


def _is_number(item: Any) -> bool:
    return not isinstance(item, torch.Tensor) or (item.ndim == 0 and not isinstance(item, DTENSORS))


RowDTensor.run_operator = staticmethod(run_operator)
