"""Functions of torch in forms that Thunder does not know, by others that it knows; the interpreter interprets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from thunder.core.interpreter import unwrap, wrap_const
from thunder.core.proxies import TensorProxy

from ..errors import coded_error
from ..ir.inspection import python_type_of
from ..private_interpreter import call_interpreted
from . import random_functions


def replacement(function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what to call in place of a function with this name, with the same wrapped arguments, in such a form."""
    if function is torch.as_tensor:
        return partial(call_interpreted, as_tensor)
    if function is torch.eye:
        return partial(call_interpreted, eye, wrap_const(torch.get_default_dtype()))
    if function is torch.nn.functional.scaled_dot_product_attention and "enable_gqa" in kwargs:
        return partial(call_interpreted, grouped_attention)
    if function is torch.nn.functional.nll_loss and "ignore_index" not in kwargs:
        return partial(call_interpreted, nll_loss)
    if name.startswith("binary_cross_entropy") and any(
        isinstance(unwrap(value), TensorProxy) for value in (*args[2:], *kwargs.values())
    ):
        return partial(call_interpreted, binary_cross_entropy, wrap_const(function))
    if function is torch.nn.functional.multi_head_attention_forward:
        return partial(call_interpreted, attention_of_heads)
    if (draws := random_functions.look_aside(function, args, kwargs)) is not None:
        return draws
    if function is torch.tensor and (dtype := torch.get_default_dtype()) is not torch.float32:
        data = unwrap(kwargs.get("data", args[0] if args else None))
        kind = python_type_of(data)
        if "dtype" not in kwargs and kind in (float, complex):  # of which Thunder makes one in float32
            return partial(call_interpreted, tensor_of, wrap_const(dtype.to_complex() if kind is complex else dtype))
    if name.endswith("_"):
        return partial(call_interpreted, in_place, wrap_const(name[:-1]))
    if name == "reshape" and "shape" in kwargs:
        return partial(call_interpreted, reshape, wrap_const(function))
    if name == "norm" and unwrap(kwargs.get("p", args[1] if len(args) > 1 else None)) != "nuc":
        return partial(call_interpreted, norm)  # Thunder calls torch.linalg.norm, which of a matrix is another one
    if name == "repeat_interleave" and "output_size" in kwargs:
        return partial(call_interpreted, repeat_interleave)
    return None


def repeat_interleave(
    tensor: torch.Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> torch.Tensor:
    return torch.repeat_interleave(tensor, repeats, dim)  # the size is a hint


def grouped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, enable_gqa: bool = False, **kwargs: Any
) -> torch.Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)


def nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    # Thunder has other parameters, and None for ignore_index, at which its gradient fails.
    reduction = _reduction(size_average, reduce, reduction)
    return torch.nn.functional.nll_loss(input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)


def binary_cross_entropy(
    function: Callable[..., torch.Tensor],
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    # Thunder takes the gradient from torch, which has none for weights.
    if pos_weight is None:
        loss = function(input, target, reduction="none")
    else:
        loss = (1 - target) * input - (1 + (pos_weight - 1) * target) * torch.nn.functional.logsigmoid(input)
    if weight is not None:
        loss = loss * weight
    reduction = _reduction(size_average, reduce, reduction)
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    if reduce is None and size_average is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


_attention = torch.nn.functional.multi_head_attention_forward
attention_of_heads = FunctionType(_attention.__code__, _attention.__globals__, None, _attention.__defaults__)
"""The function of torch, which Thunder would run as one operator, and differentiate only if it returns weights."""


def in_place(name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor.copy_(getattr(tensor, name)(*args, **kwargs))


def norm(
    tensor: torch.Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    order = 2 if p is None or p == "fro" else p
    return torch.linalg.vector_norm(tensor, order, dim, keepdim, dtype=dtype)


def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data if dtype is None and device is None else data.to(device=device, dtype=dtype)
    return torch.tensor(data, dtype=dtype, device=device) if dtype is not None else torch.tensor(data, device=device)


def tensor_of(dtype: torch.dtype, data: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype, **kwargs)


def eye(
    default_dtype: Any,
    n: int,
    m: int | None = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    if requires_grad:
        raise coded_error(NotImplementedError, "module.eye-requires-grad")
    rows = torch.arange(n, device=device)
    columns = torch.arange(n if m is None else m, device=device)
    return (rows[:, None] == columns[None, :]).to(default_dtype if dtype is None else dtype)


def reshape(function: Callable[..., torch.Tensor], tensor: torch.Tensor, *, shape: Any) -> torch.Tensor:
    return function(tensor, shape)
