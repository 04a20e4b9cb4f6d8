"""Operators of torch that act row by row: explicit lists, because an operator that is not listed may read other rows.

torch's tag ``pointwise`` is no proof: ``aten::equal`` has it (torch 2.13).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

aten = torch.ops.aten

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
"""Functions that compute each element of their result from the elements at the same position of their operands."""

_ELEMENTWISE_OVERLOADS = {aten.where.self, aten.max.other, aten.min.other}

_FOREACH = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor frac
    lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan
    tanh trunc zero
"""
"""Those that ``_foreach`` operators apply to each item of their lists."""

_FUSED = "_fused_adagrad _fused_adam _fused_adamw _fused_sgd"

_elementwise = frozenset(_ELEMENTWISE.split())
_of_items = frozenset([*(f"_foreach_{name}" for name in _FOREACH.split()), *_FUSED.split()])


@functools.cache
def acts_on_elements(func: Any) -> bool:
    """Return whether an operator acts on each element by itself, in place or not."""
    return _function(func) in _elementwise or func in _ELEMENTWISE_OVERLOADS


@functools.cache
def acts_on_items(func: Any) -> bool:
    """Return whether an operator acts on each element of the items of lists by itself, in place or not."""
    return _function(func) in _of_items and "out" not in func._overloadname


def _function(func: Any) -> str:
    name: str = func._schema.name.removeprefix("aten::")
    return name if name.endswith("__") else name.removesuffix("_")


REDUCING = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.dim_IntList), torch.Tensor.sum),
    **dict.fromkeys((aten.prod.default, aten.prod.dim_int), torch.Tensor.prod),
    **dict.fromkeys((aten.amax.default, aten.max.default), torch.Tensor.amax),
    **dict.fromkeys((aten.amin.default, aten.min.default), torch.Tensor.amin),
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), torch.Tensor.all),
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), torch.Tensor.any),
}
"""Reductions, and the method that reduces the results of parts of a tensor, stacked in the first dimension."""

ROWWISE = frozenset(REDUCING) | {
    aten._log_softmax.default,
    aten._softmax.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.cumprod.default,
    aten.cumsum.default,
    aten.flip.default,
    aten.linalg_vector_norm.default,
    aten.logsumexp.default,
    aten.max.dim,
    aten.mean.default,
    aten.mean.dim,
    aten.median.dim,
    aten.min.dim,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
    aten.var.correction,
    aten.std.correction,
}
"""Operators that treat each row by itself, unless the first dimension is among their dims."""

ROW_VIEWS = frozenset(
    {
        aten.alias.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.transpose.int,
        aten.unsqueeze.default,
    }
)
"""Operators that return a view of each row, unless the first dimension is among their dims."""

DRAWING = frozenset(
    {
        aten.bernoulli.p,
        aten.bernoulli_.float,
        aten.cauchy_.default,
        aten.exponential_.default,
        aten.geometric_.default,
        aten.log_normal_.default,
        aten.normal_.default,
        aten.rand_like.default,
        aten.randint_like.default,
        aten.randint_like.low_dtype,
        aten.randn_like.default,
        aten.random_.default,
        getattr(aten.random_, "from"),
        aten.random_.to,
        aten.uniform_.default,
    }
)
"""Operators that fill a tensor with random numbers, whatever it held before."""
