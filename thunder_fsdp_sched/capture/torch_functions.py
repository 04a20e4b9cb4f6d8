"""Calls of torch's functions in forms that Thunder does not know: replaced by others, run as they are, or refused."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
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
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.torch import _torch_to_thunder_function_map
from torch.utils._pytree import tree_leaves

from ..extensions import load
from ..ir.gradients import WRONG_GRADIENTS, is_wrong_of_complex
from ..ir.inspection import is_inexact, python_type_of
from ..private_interpreter import call_interpreted
from .leaves import Leaves
from .refusals import count_refused, refusal


def look_aside(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what to call in place of a function, with the same wrapped arguments; ``None`` for those that Thunder knows."""
    name = function.name.removeprefix("torch_") if isinstance(function, Symbol) else _BUILTIN.get(id(function))
    if name in _REPLACED or name in _IN_PLACE_WITHOUT_RULE:
        from .torch_replacements import replacement  # here, because most programs call none of them

        if (found := replacement(function, name, args, kwargs)) is not None:
            return found
    if name in _NAMED and get_interpreterruntimectx().frame_stack[-1].code is not _call.__code__:
        return partial(_named, _NAMED[name], _selecting(name, args, kwargs) or function)
    if "input" in kwargs and not args and id(function) in _MAPPED and _begins_with_input(function):
        return partial(_first_by_position, function)  # Thunder gives this parameter another name
    return None


def _selecting(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what to call in place of ``max`` along a dimension, so that equal elements do not share the gradient."""
    dim = unwrap(kwargs.get("dim", args[1] if len(args) > 1 else None))
    if name != "max" or type(dim) is not int or not (args and is_inexact(unwrap(args[0])) and unwrap(args[0]).ndim):
        return None
    from .torch_replacements import max_along

    return max_along


def _is_of_torch(function: Any) -> bool:
    """Return whether Thunder has a function of its own in place of this one, or should have."""
    return isinstance(function, Symbol) or id(function) in _MAPPED or _is_operator(function)


def _may_change(value: Any) -> bool:
    """Return whether the program may change a value, or a part of it, after it has passed it to torch."""
    return type(value) in (list, dict) or (type(value) is tuple and any(map(_may_change, value)))


def _with_own_lists(traced: Callable[..., Any], *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Call Thunder's function with copies of lists: the trace keeps them, and the program may append to them later."""
    lists = {id(value): value for value in (*args, *kwargs.values()) if _may_change(value.value)}
    recursively_proxy(*lists.values())
    kept = [(value, value.value) for value in lists.values()]
    for value, items in kept:
        value.value = _copied(items)
    try:
        return traced(*args, **kwargs)
    finally:
        for value, items in kept:
            value.value = items


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def may_require_grad(value: Any) -> bool:
    """Return whether a value is a tensor for which ``requires_grad`` is true or not known."""
    from .tensor_attributes import requires_grad

    return isinstance(value, TensorProxy) and requires_grad(value) is not False


def _wrong_result(
    function: Any, args: Sequence[WrappedValue], kwargs: Mapping[str, WrappedValue]
) -> tuple[str, str] | None:
    """Return why Thunder computes something else than torch in a call, and what to do instead; ``None`` for others."""
    if isinstance(function, Symbol) and function.name == "unfold":
        return (
            "Thunder takes Tensor.unfold for torch.nn.functional.unfold, which computes something else",
            "Index or slice the tensor, or leave leaf_modules at its default, with which unfold runs as it is",
        )
    if args and isinstance(args[0].value, TensorProxy) and _indexes_by_bools(function, args):
        return (
            "Thunder takes bools in an index for the numbers 0 and 1",
            "Index by the positions of those that are true, or by a slice",
        )
    if function is torch.nn.functional.cross_entropy and _smooths(args, kwargs):
        return (
            "Thunder adds the smoothing terms of ignored targets to a cross entropy",
            "Leave out label_smoothing, or leave leaf_modules at its default, with which cross_entropy runs as it is",
        )
    return None


def checked(
    leaves: Leaves | None,
    function: Any,
    fallback: Any,
    args: Sequence[WrappedValue],
    kwargs: Mapping[str, WrappedValue],
) -> Any:
    """Return what to call in place of a function: with copies of lists, and as it is, or an error, where Thunder is wrong.

    Args:
        leaves: the leaves of the module, if functions that cannot be traced run as they are.
        fallback: what is called in place of the function otherwise.
    """
    if fallback is not None and _is_of_torch(function):
        if callable(fallback) and any(_may_change(value.value) for value in (*args, *kwargs.values())):
            fallback = partial(_with_own_lists, fallback)
        if leaves is not None:
            return partial(_call_or_run_as_it_is, leaves, function, fallback)
    wrong = _wrong_result(function, args, kwargs)
    return fallback if wrong is None else do_raise(refusal(*wrong))


def name_of(function: Any) -> str:
    """Return the name of a function of torch, or of Thunder's."""
    return function.name if isinstance(function, Symbol) else getattr(function, "__name__", "")


def _indexes_by_bools(function: Any, args: Sequence[WrappedValue]) -> bool:
    """Return whether a call reads or writes a part of a tensor that a bool, or a list of them, selects."""
    if name_of(function).strip("_") not in ("getitem", "setitem"):
        return False
    index = unwrap(args[1])
    return any(map(_is_mask, index if isinstance(index, tuple) else (index,)))


def _is_mask(index: Any) -> bool:
    while isinstance(index, list | tuple) and index:
        index = index[0]
    return python_type_of(index) is bool


def _smooths(args: Sequence[WrappedValue], kwargs: Mapping[str, WrappedValue]) -> bool:
    """Return whether a cross entropy, of which some targets may be ignored, smooths labels."""
    given = inspect.signature(torch.nn.functional.cross_entropy).bind(*args, **kwargs).arguments
    smoothing, target = (unwrap(given[name]) if name in given else 0.0 for name in ("label_smoothing", "target"))
    return smoothing != 0.0 and not is_inexact(target)


def _has_tensor_by_keyword(function: Any, kwargs: Mapping[str, WrappedValue]) -> bool:
    """Return whether Thunder calls torch for the gradient of a function, but cannot with these keyword arguments."""
    symbol = function if isinstance(function, Symbol) else _torch_to_thunder_function_map.get(function)
    return getattr(symbol, "is_prim", False) and any(is_inexact(unwrap(value)) for value in kwargs.values())


def _is_operator(function: Any) -> bool:
    """Return whether a function is an operator of Thunder's tensors, such as ``TensorProxy.__mod__``."""
    return isinstance(function, FunctionType) and function.__qualname__ == f"TensorProxy.{function.__name__}"


def _call_or_run_as_it_is(
    leaves: Leaves, function: Any, traced: Any, *args: WrappedValue, **kwargs: WrappedValue
) -> Any:
    """Call Thunder's function; where it fails, trace torch's as a single operator: see [Note: Functions as leaves].

    Args:
        function: one that :func:`_is_of_torch`.
        traced: what calls Thunder's function with wrapped arguments, or the signal that it has raised an error.
    """
    run_as_it_is, runtime = "extras.leaf_modules.choose:run_as_it_is", get_interpreterruntimectx()
    trace, refused = get_jit_ctx().computation_trace, count_refused()
    former, number = [(scope, len(scope)) for scope in trace.scopes if scope is not None], len(trace.scopes)

    def undo() -> None:
        del trace.scopes[number:]
        for scope, length in former:
            del scope[length:]

    name = name_of(function)
    wrong = _wrong_result(function, args, kwargs)
    values = tree_leaves([unwrap(value) for value in (*args, *kwargs.values())])
    is_wrong = name in WRONG_GRADIENTS or is_wrong_of_complex(name, values)
    is_wrong |= _has_tensor_by_keyword(function, kwargs)
    if wrong or name in _WITHOUT_RULE or (is_wrong and any(map(may_require_grad, values))):
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
_WITHOUT_RULE = frozenset(
    ("flip", "fractional_max_pool2d", "fractional_max_pool3d", "heaviside", "imag", "index_add", "lerp", "minimum")
    + ("multi_margin_loss", "real", "remainder", "soft_margin_loss")
)
"""Names of functions with which Thunder fails as soon as it differentiates a trace, or whose results are wrong."""

_IN_PLACE_WITHOUT_RULE = frozenset(f"{name}_" for name in _WITHOUT_RULE if hasattr(torch.Tensor, f"{name}_"))
"""Names of the methods that do the same in place, which ``torch_replacements`` replaces."""

_NAMED = {
    name: collections.namedtuple(name, ("values", "indices"))
    for name in ("cummax", "cummin", "kthvalue", "max", "median", "min", "mode", "nanmedian", "sort", "topk")
} | {"aminmax": collections.namedtuple("aminmax", ("min", "max"))}
"""Named tuples like those that torch's functions return, where Thunder's return tuples. Torch's own types are not used,
because Thunder cannot print them in a trace."""

_FUNCTIONAL = frozenset(
    ("alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "gumbel_softmax")
    + ("batch_norm", "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "instance_norm")
    + ("max_pool1d", "multi_head_attention_forward", "nll_loss", "normalize", "scaled_dot_product_attention")
)
_REPLACED = _FUNCTIONAL.union(
    (
        "argmin",
        "as_tensor",
        "celu",
        "chunk",
        "clamp",
        "clamp_",
        "elu",
        "eye",
        "isfinite",
        "linspace",
        "norm",
        "relu",
        "relu_",
        "repeat_interleave",
        "reshape",
        "selu",
        "tensor",
    ),
    ("unbind",),
)
"""Names of functions that ``torch_replacements`` replaces, some of them in some forms."""

_BUILTIN = {
    id(function): name
    for name in (*_NAMED, *_REPLACED)
    for module in ((torch.nn.functional,) if name in _FUNCTIONAL else (torch, torch.nn.functional))
    if (function := getattr(module, name, None)) is not None
}


def _named(kind: Any, function: Any, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    result = call_interpreted(_call, wrap_const(function), *args, **kwargs)
    return interpreter_needs_wrap(kind._make)(result) if isinstance(getattr(result, "value", None), tuple) else result


def _begins_with_input(function: Any) -> bool:
    return isinstance(function, FunctionType) and function.__code__.co_varnames[:1] == ("input",)


def _first_by_position(function: Any, *, input: WrappedValue, **kwargs: WrappedValue) -> Any:
    return call_interpreted(_call, wrap_const(function), input, **kwargs)


def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call Thunder's function: :func:`look_aside` leaves calls from here alone."""
    return function(*args, **kwargs)
