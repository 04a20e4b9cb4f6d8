"""Functions of torch in forms that Thunder does not know, written with functions that it knows, for the interpreter."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import dtypes
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, unwrap, wrap_const
from thunder.core.proxies import TensorProxy

from ..errors import coded_error
from ..ir.inspection import is_inexact, python_type_of
from ..private_interpreter import call_interpreted, call_recording
from ..private_thunder import shape_of
from .corrected_symbols import CORRECTED, corrected
from .random_replacements import RANDOM


def replacement(function: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what to call in place of a function, with the same wrapped arguments; ``None`` if Thunder knows this form."""
    if function is torch.as_tensor:
        return partial(call_interpreted, as_tensor)
    if function is torch.eye:
        return partial(call_interpreted, eye, wrap_const(torch.get_default_dtype()))
    if function is F.scaled_dot_product_attention and "enable_gqa" in kwargs:
        return partial(call_interpreted, grouped_attention)
    if name in CORRECTED:
        return corrected(name, args, kwargs)
    given = [unwrap(value) for value in (*args, *kwargs.values())]
    if name in ("cross_entropy", "nll_loss") and any(getattr(value, "dtype", None) is dtypes.uint8 for value in given):
        return partial(call_interpreted, with_long_target, wrap_const(function))
    if name in _WITHOUT_GRADIENT and given and is_inexact(given[0]):
        return partial(call_interpreted, _WITHOUT_GRADIENT[name])
    if function is torch.linspace and dtypes.is_float_dtype(
        dtypes.to_dtype(unwrap(kwargs.get("dtype"))) or dtypes.float32
    ):
        return partial(call_interpreted, linspace, wrap_const(torch.get_default_dtype()))
    if function is F.nll_loss and "ignore_index" not in kwargs:
        return partial(call_interpreted, nll_loss)
    if (
        (right := _WITH_OTHER_GRADIENT.get(name))
        and given
        and is_inexact(given[0])
        and unwrap(kwargs.get("out")) is None
    ):
        return partial(call_interpreted, right)
    if name.startswith("binary_cross_entropy") and any(
        isinstance(unwrap(value), TensorProxy) for value in (*args[2:], *kwargs.values())
    ):
        return partial(call_interpreted, binary_cross_entropy, wrap_const(function))
    if function in _WITH_STATISTICS and (instead := _of_statistics(function, args, kwargs)) is not None:
        return partial(call_interpreted, instead)
    if function is F.multi_head_attention_forward:
        return partial(call_interpreted, attention_of_heads)
    if (draws := RANDOM.get(id(function))) is not None:
        is_in_place = bool(unwrap(kwargs.get("inplace", args[3] if len(args) > 3 else False)))
        return partial(call_interpreted, draws) if function is not F.dropout or is_in_place else None
    if function is torch.tensor and (dtype := torch.get_default_dtype()) is not torch.float32:
        data = unwrap(kwargs.get("data", args[0] if args else None))
        kind = python_type_of(data)
        if "dtype" not in kwargs and kind in (float, complex):  # Thunder ignores the default dtype
            return partial(call_interpreted, tensor_of, wrap_const(dtype.to_complex() if kind is complex else dtype))
    if name.endswith("_"):
        return partial(_in_place, name[:-1])
    if name == "reshape" and "shape" in kwargs:
        return partial(call_interpreted, reshape, wrap_const(function))
    if name == "norm" and unwrap(kwargs.get("p", args[1] if len(args) > 1 else None)) != "nuc":
        return partial(call_interpreted, norm)  # Thunder calls torch.linalg.norm, another norm for matrices
    if (parts := _PARTS.get(name)) and _has_parts(parts, args, kwargs):
        return partial(call_interpreted, parts)
    if name == "repeat_interleave" and "output_size" in kwargs:
        return partial(call_interpreted, repeat_interleave)
    return None


def _has_parts(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of ``chunk`` or ``unbind`` is valid, and divides a dimension of known size."""
    try:
        bound = inspect.signature(function).bind(
            *map(unwrap, args), **{key: unwrap(value) for key, value in kwargs.items()}
        )
    except TypeError:
        return False
    bound.apply_defaults()
    tensor, *chunks, dim = bound.args
    if not (
        isinstance(tensor, TensorProxy) and {*map(type, (*chunks, dim))} == {int} and -tensor.ndim <= dim < tensor.ndim
    ):
        return False
    size = shape_of(tensor)[dim]
    return type(size) is int and (size > 0 or not chunks) and all(number > 1 for number in chunks)


# Thunder implements these by slices, each of which pads its gradient to the size of the input. The gradient of a split is a
# single concatenation.


def chunk(input: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    return tuple(torch.split(input, -(-input.shape[dim] // chunks), dim))


def unbind(input: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    return tuple([part.squeeze(dim) for part in torch.split(input, 1, dim)]) if input.shape[dim] else ()


_PARTS: dict[str, Callable[..., Any]] = {"chunk": chunk, "unbind": unbind}


def _of_statistics(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what to call with running statistics, if Thunder updates them differently from torch."""
    try:
        given = inspect.signature(_WITH_STATISTICS[function]).bind(*args, **kwargs).arguments
    except TypeError:
        return None
    input, mean, training = (unwrap(given.get(name)) for name in ("input", "running_mean", "training"))
    is_other = function is F.instance_norm or (training and isinstance(input, TensorProxy) and 0 in shape_of(input))
    return _WITH_STATISTICS[function] if mean is not None and is_other else None


def instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not use_input_stats:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    values, dims = input.detach(), tuple(range(2, input.dim()))  # Thunder changes copies of the statistics
    running_mean.copy_((1 - momentum) * running_mean + momentum * values.mean(dims).mean(0))
    running_var.copy_((1 - momentum) * running_var + momentum * values.var(dims).mean(0))
    return F.instance_norm(input, None, None, weight, bias, True, momentum, eps)


def batch_norm_of_nothing(
    input: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    # An empty batch makes Thunder's running statistics NaN, and leaves torch's as they are.
    return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)


_WITH_STATISTICS = {F.batch_norm: batch_norm_of_nothing, F.instance_norm: instance_norm}


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
    return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


def nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    # Thunder's function has other parameters, and fails in backward with its default, None, for ignore_index.
    reduction = _reduction(size_average, reduce, reduction)
    return F.nll_loss(input, target, weight=weight, ignore_index=ignore_index, reduction=reduction)


def with_long_target(
    function: Callable[..., torch.Tensor], input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    if input.dim() > 2:
        raise RuntimeError("expected scalar type Long but found Byte")  # as torch does
    return function(input, target.long(), *args, **kwargs)  # torch would index by bytes as by a mask


def argmin(input: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    return torch.argmax(-input, dim, keepdim)


def isfinite(input: torch.Tensor) -> torch.Tensor:
    return input.abs() < math.inf


_WITHOUT_GRADIENT = {"argmin": argmin, "isfinite": isfinite}
"""Functions with which Thunder cannot differentiate a trace."""


# Thunder's gradients of these differ from torch's at elements that equal a bound or each other, and are NaN for zeros.


def clamp(input: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:
    if min is None and max is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")  # as torch does
    if min is not None:
        input = torch.where((input < min) | (min != min), min, input)
    if max is not None:
        input = torch.where((input > max) | (max != max), max, input)
    return input


def max_along(input: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    indices = torch.argmax(input, dim, keepdim=True)
    values = torch.gather(input, dim, indices)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def max_pool1d(
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    size, step, pad, gap = [
        value[0] if isinstance(value, (list, tuple)) else value for value in (kernel_size, stride, padding, dilation)
    ]
    pool: Any = F.max_pool2d
    step = size if step is None else step
    pooled = pool(input.unsqueeze(-2), (1, size), (1, step), (0, pad), (1, gap), ceil_mode, return_indices)
    return (pooled[0].squeeze(-2), pooled[1].squeeze(-2)) if return_indices else pooled.squeeze(-2)


def normalize(input: torch.Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: None = None) -> torch.Tensor:
    return input / torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp(min=eps)


_WITH_OTHER_GRADIENT: dict[str, Callable[..., Any]] = {"clamp": clamp, "max_pool1d": max_pool1d, "normalize": normalize}
"""Functions of which Thunder computes another gradient at some elements; ``max`` is chosen by ``torch_functions``."""


def linspace(
    default_dtype: Any, start: Any, end: Any, steps: int, *, dtype: Any = None, device: Any = None
) -> torch.Tensor:
    positions = torch.arange(steps, device=device).to(default_dtype if dtype is None else dtype)
    step = (end - start) / max(steps - 1, 1)
    return torch.where(positions < max(steps // 2, 1), start + positions * step, end - (steps - 1 - positions) * step)


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
    # Thunder calls torch's backward, which has no gradients for weights.
    if pos_weight is None:
        loss = function(input, target, reduction="none")
    else:
        loss = (1 - target) * input - (1 + (pos_weight - 1) * target) * F.logsigmoid(input)
    if weight is not None:
        loss = loss * weight
    reduction = _reduction(size_average, reduce, reduction)
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    if reduce is None and size_average is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


_attention = F.multi_head_attention_forward
attention_of_heads = FunctionType(_attention.__code__, _attention.__globals__, None, _attention.__defaults__)
"""A copy of torch's function. Thunder would run the original as one operator, with a gradient only if it returns weights."""


def _in_place(name: str, tensor: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Write what a method returns, with wrapped values; the copy is on the program's line, which errors name."""
    result = call_interpreted(_method, wrap_const(name), tensor, *args, **kwargs)
    if isinstance(result, INTERPRETER_SIGNALS):
        return result
    return call_recording(ltorch.copy_, tensor, result)


def _method(name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return getattr(tensor, name)(*args, **kwargs)


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
