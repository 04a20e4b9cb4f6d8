"""Base operators of torch that are wrong, or fail, for some strides of their inputs, as functions that are right for all.

Autograd calls them after it has chosen them for the strides at hand; a trace calls them for any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _copying(operator: Any, fits: Callable[[Tensor], bool]) -> Callable[..., Any]:
    """Return a function that makes those tensor arguments contiguous that do not fit, and calls an operator."""

    @functools.wraps(operator)
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*(a.contiguous() if isinstance(a, Tensor) and not fits(a) else a for a in args), **kwargs)

    return call


def _has_adjacent_elements(tensor: Tensor) -> bool:
    """Return whether the elements of each head lie next to each other."""
    return tensor.stride(-1) == 1


FOR_ALL_STRIDES: dict[Any, Callable[..., Any]] = {
    _aten.view.default: torch.reshape,
    _aten._unsafe_view.default: torch.reshape,
    **{
        operator: _copying(operator, Tensor.is_contiguous)
        for operator in (
            _aten.native_layer_norm_backward.default,
            _aten.native_group_norm.default,
            _aten.native_group_norm_backward.default,
        )
    },
    **{
        operator: _copying(operator, _has_adjacent_elements)
        for operator in (
            _aten._scaled_dot_product_flash_attention_for_cpu.default,
            _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        )
    },
}
"""Functions by the operators that they replace."""
