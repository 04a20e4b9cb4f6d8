"""Calls of torch's functions that Thunder does not know in this form, by others that it knows."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    do_raise,
    get_interpreterruntimectx,
    interpreter_needs_wrap,
    unwrap,
    wrap_const,
)
from thunder.core.jit_ext import get_jit_ctx, recursively_proxy
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.torch import _torch_to_thunder_function_map
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import coded_error
from ..extensions import load
from ..ir.gradients import WRONG_GRADIENTS
from ..private_interpreter import call_interpreted
from . import random_functions
from .leaves import Leaves
from .refusals import count_refused, refusal
from .torch_types import requires_grad


def look_aside(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what to call in place of a function, with the same wrapped arguments; ``None`` for those that Thunder knows."""
    if function is torch.eye:
        return partial(call_interpreted, _eye, wrap_const(torch.get_default_dtype()))
    if function is torch.nn.functional.scaled_dot_product_attention and "enable_gqa" in kwargs:
        return partial(call_interpreted, _grouped_attention)
    if function is torch.nn.functional.multi_head_attention_forward:
        return partial(call_interpreted, _attention_of_heads)
    if (draws := random_functions.look_aside(function, args, kwargs)) is not None:
        return draws
    if function is torch.tensor and (dtype := torch.get_default_dtype()) is not torch.float32:
        data = unwrap(kwargs.get("data", args[0] if args else None))
        kind = data.python_type if isinstance(data, NumberProxy) else type(data)
        if "dtype" not in kwargs and kind in (float, complex):  # of which Thunder makes one in float32
            return partial(call_interpreted, _tensor, wrap_const(dtype.to_complex() if kind is complex else dtype))
    name = function.name.removeprefix("torch_") if isinstance(function, Symbol) else _BUILTIN.get(id(function))
    if name == "reshape" and "shape" in kwargs:
        return partial(call_interpreted, _reshape, wrap_const(function))
    if name == "norm" and unwrap(kwargs.get("p", args[1] if len(args) > 1 else None)) != "nuc":
        return partial(call_interpreted, _norm)  # Thunder calls torch.linalg.norm, which of a matrix is another one
    if name == "repeat_interleave" and "output_size" in kwargs:
        return partial(call_interpreted, _repeat_interleave)
    if name in _NAMED and get_interpreterruntimectx().frame_stack[-1].code is not _call.__code__:
        return partial(_named, _NAMED[name], function)
    return None


def is_of_torch(function: Any) -> bool:
    """Return whether Thunder has a function of its own in place of this one, or should have."""
    return isinstance(function, Symbol) or id(function) in _MAPPED or _is_operator(function)


def with_own_lists(traced: Callable[..., Any], *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Call Thunder's function with copies of lists: the trace keeps them, and the program may append to them later."""
    lists = {id(value): value for value in (*args, *kwargs.values()) if type(value.value) is list}
    recursively_proxy(*lists.values())
    kept = [(value, value.value) for value in lists.values()]
    for value, items in kept:
        value.value = list(items)
    try:
        return traced(*args, **kwargs)
    finally:
        for value, items in kept:
            value.value = items


def _needs_gradient(args: Sequence[WrappedValue], kwargs: Mapping[str, WrappedValue]) -> bool:
    values = tree_leaves([unwrap(value) for value in (*args, *kwargs.values())])
    return any(isinstance(value, TensorProxy) and requires_grad(value) is not False for value in values)


def wrong_result(
    function: Any, args: Sequence[WrappedValue], kwargs: Mapping[str, WrappedValue]
) -> tuple[str, str] | None:
    """Return why Thunder computes something else in place of a call, and what to do instead; ``None`` for others."""
    if isinstance(function, Symbol) and function.name == "unfold":
        return (
            "Thunder takes Tensor.unfold for torch.nn.functional.unfold, which computes something else",
            "Index or slice the tensor, or leave leaf_modules at its default, with which unfold runs as it is",
        )
    if function is torch.nn.functional.cross_entropy and _smooths(args, kwargs):
        return (
            "Thunder adds the smoothing terms of ignored targets to a cross entropy",
            "Leave out label_smoothing, or leave leaf_modules at its default, with which cross_entropy runs as it is",
        )
    return None


def _smooths(args: Sequence[WrappedValue], kwargs: Mapping[str, WrappedValue]) -> bool:
    """Return whether a cross entropy, of which some targets may be ignored, smooths labels."""
    given = inspect.signature(torch.nn.functional.cross_entropy).bind(*args, **kwargs).arguments
    smoothing, target = (unwrap(given[name]) if name in given else 0.0 for name in ("label_smoothing", "target"))
    return smoothing != 0.0 and not (isinstance(target, TensorProxy) and dtypes.is_inexact_dtype(target.dtype))


def _is_operator(function: Any) -> bool:
    """Return whether a function is an operator of Thunder's tensors, such as ``TensorProxy.__mod__``."""
    return isinstance(function, FunctionType) and function.__qualname__ == f"TensorProxy.{function.__name__}"


def call_or_run_as_it_is(
    leaves: Leaves, function: Any, traced: Any, *args: WrappedValue, **kwargs: WrappedValue
) -> Any:
    """Call Thunder's function; where it fails, trace torch's as a single operator: see [Note: Functions as leaves].

    Args:
        function: one that :func:`is_of_torch`.
        traced: what calls Thunder's function with wrapped arguments, or the signal that it has raised an error.
    """
    run_as_it_is, runtime = "extras.leaf_modules.functions:run_as_it_is", get_interpreterruntimectx()
    trace, refused = get_jit_ctx().computation_trace, count_refused()
    former, number = [(scope, len(scope)) for scope in trace.scopes if scope is not None], len(trace.scopes)

    def undo() -> None:
        del trace.scopes[number:]
        for scope, length in former:
            del scope[length:]

    name = function.name if isinstance(function, Symbol) else getattr(function, "__name__", "")
    wrong = wrong_result(function, args, kwargs)
    if wrong or name in _WITHOUT_RULE or (name in WRONG_GRADIENTS and _needs_gradient(args, kwargs)):
        if (result := load(run_as_it_is)(leaves, function, None, *args, **kwargs)) is not None:
            return result
        undo()
        if wrong:
            return do_raise(refusal(*wrong))
    result = traced(*args, **kwargs) if callable(traced) else traced
    if result is not INTERPRETER_SIGNALS.EXCEPTION_RAISED or count_refused() > refused:
        return result
    error = runtime.curexc
    undo()  # what Thunder has traced before it has failed
    if (instead := load(run_as_it_is)(leaves, function, error, *args, **kwargs)) is not None:
        return instead
    undo()
    runtime.curexc = error
    return result


_MAPPED = frozenset({*map(id, _torch_to_thunder_function_map), id(torch.as_tensor)})
_WITHOUT_RULE = frozenset({"flip", "index_add", "lerp", "minimum", "remainder"})
"""Names of functions with which Thunder fails as soon as it differentiates a trace, or whose results are wrong."""

_NAMED = {
    name: collections.namedtuple(name, ("values", "indices"))
    for name in ("cummax", "cummin", "kthvalue", "max", "median", "min", "mode", "nanmedian", "sort", "topk")
}
"""Named tuples like those that torch's functions return, where Thunder's return tuples. Forward cannot return torch's own
types: Thunder's programs do not print them."""

_BUILTIN = {id(getattr(torch, name)): name for name in (*_NAMED, "norm", "repeat_interleave", "reshape")}


def with_plain_containers(output: WrappedValue) -> Any:
    """Return what the outermost forward returns, wrapped, with tuples for torch's named ones, and dicts for ordered ones.

    Other named tuples are refused: a trace cannot make them.
    """
    named = [type(value) for value in tree_leaves(unwrap(output), is_leaf=_is_named) if _is_named(value)]
    if foreign := [kind for kind in named if kind not in _NAMED.values() and kind.__module__ != "torch.return_types"]:
        what = f"forward returns a named tuple ({foreign[0].__name__}), which a trace cannot make"
        return do_raise(refusal(what, "Return a dataclass, a dictionary or a plain tuple"))
    is_plain = not named and not any(map(_is_ordered, tree_leaves(unwrap(output), is_leaf=_is_ordered)))
    return output if is_plain else interpreter_needs_wrap(_plain)(output)


def _plain(output: Any) -> Any:
    def convert(value: Any) -> Any:
        if _is_ordered(value):
            return {key: _plain(item) for key, item in value.items()}
        return tuple(value) if _is_named(value) else value

    return tree_map(convert, output, is_leaf=lambda value: _is_named(value) or _is_ordered(value))


def _is_ordered(value: Any) -> bool:
    return type(value) is collections.OrderedDict


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and type(value) is not tuple and type(value) is not torch.Size


def _named(kind: Any, function: Any, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    result = call_interpreted(_call, wrap_const(function), *args, **kwargs)
    return interpreter_needs_wrap(kind._make)(result) if isinstance(getattr(result, "value", None), tuple) else result


def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call Thunder's function: :func:`look_aside` leaves calls from here alone."""
    return function(*args, **kwargs)


def _repeat_interleave(
    tensor: torch.Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> torch.Tensor:
    return torch.repeat_interleave(tensor, repeats, dim)  # the size is a hint


def _grouped_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, enable_gqa: bool = False, **kwargs: Any
) -> torch.Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)


_attention = torch.nn.functional.multi_head_attention_forward
_attention_of_heads = FunctionType(_attention.__code__, _attention.__globals__, None, _attention.__defaults__)
"""The function of torch, which Thunder would run as one operator, and differentiate only if it returns weights."""


def _norm(
    tensor: torch.Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    order = 2 if p is None or p == "fro" else p
    return torch.linalg.vector_norm(tensor, order, dim, keepdim, dtype=dtype)


def _tensor(dtype: torch.dtype, data: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype, **kwargs)


def _eye(
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


def _reshape(function: Callable[..., torch.Tensor], tensor: torch.Tensor, *, shape: Any) -> torch.Tensor:
    return function(tensor, shape)
