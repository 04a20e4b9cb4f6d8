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


def _on_contiguous(operator: Any) -> Callable[..., Any]:
    """Return a function that copies those tensor arguments that are not contiguous, and calls an operator."""

    @functools.wraps(operator)
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*(a.contiguous() if isinstance(a, Tensor) else a for a in args), **kwargs)

    return call


def _on_contiguous_heads(operator: Any) -> Callable[..., Any]:
    """Return a function that copies those tensor arguments whose last dimension has strides, and calls an operator."""

    @functools.wraps(operator)
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*(a.contiguous() if isinstance(a, Tensor) and a.stride(-1) != 1 else a for a in args), **kwargs)

    return call


FOR_ALL_STRIDES: dict[Any, Callable[..., Any]] = {
    _aten.view.default: torch.reshape,
    _aten._unsafe_view.default: torch.reshape,
    **{
        operator: _on_contiguous(operator)
        for operator in (
            _aten.native_layer_norm_backward.default,
            _aten.native_group_norm.default,
            _aten.native_group_norm_backward.default,
        )
    },
    **{
        operator: _on_contiguous_heads(operator)
        for operator in (
            _aten._scaled_dot_product_flash_attention_for_cpu.default,
            _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        )
    },
}
"""Functions by the operators that they replace."""
