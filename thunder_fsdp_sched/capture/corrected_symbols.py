"""Activations whose decomposition by Thunder hides NaN, or has gradients that are NaN where torch's are finite.

Each symbol has the id of Thunder's, so executors claim it in the same way. What an executor decomposes, or fuses, has the
values and gradients of torch: ``relu(nan)`` is NaN, and the exponential of a large input is not multiplied by zero.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import thunder.torch as ltorch
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, unwrap
from thunder.core.jit_ext import recursively_proxy
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol

from ..private_interpreter import call_recording


def relu(a: TensorProxy) -> TensorProxy:
    return ltorch.where(ltorch.le(a, 0), 0, a)


def elu(a: TensorProxy, alpha: float = 1.0) -> TensorProxy:
    return _exponential_below_zero(a, 1.0, alpha)


def celu(a: TensorProxy, alpha: float = 1.0) -> TensorProxy:
    return _exponential_below_zero(a, alpha, alpha)


def selu(a: TensorProxy) -> TensorProxy:
    return ltorch.mul(1.0507009873554805, elu(a, 1.6732632423543772))


def _exponential_below_zero(a: TensorProxy, divisor: float, factor: float) -> TensorProxy:
    is_above = ltorch.gt(a, 0)
    below = ltorch.true_divide(ltorch.where(is_above, 0, a), divisor)
    return ltorch.where(is_above, a, ltorch.mul(factor, ltorch.expm1(below)))


def _with_meta(symbol: Symbol, meta: Callable[..., TensorProxy]) -> Symbol:
    decorated = ltorch.torchsymbol(id=symbol.id)(meta).meta
    return dataclasses.replace(symbol, meta=decorated, _module=ltorch, _hash=hash(symbol))


CORRECTED: dict[str, tuple[Symbol, Symbol]] = {
    function.__name__: (symbol := getattr(ltorch, function.__name__), _with_meta(symbol, function))
    for function in (celu, elu, relu, selu)
}
"""Thunder's symbol, and the one in its place, by name."""


def corrected(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what calls the symbol with wrapped arguments; ``None`` if Thunder refuses them."""
    former, symbol = CORRECTED[name]
    named = {"a" if key == "input" else key: value for key, value in kwargs.items()}
    if "a" in named:
        args = (named.pop("a"), *args)
    try:
        given = inspect.signature(former.meta).bind(*args, **named).arguments
    except TypeError:
        return None
    inplace = given.pop("inplace", None)
    return partial(_call, symbol, tuple(given.values()), inplace is not None and bool(unwrap(inplace)))


def _call(symbol: Symbol, given: Sequence[WrappedValue], is_in_place: bool, /, *args: Any, **kwargs: Any) -> Any:
    recursively_proxy(*given)
    result = call_recording(symbol, *given)
    if not is_in_place or isinstance(result, INTERPRETER_SIGNALS):
        return result
    return call_recording(ltorch.copy_, given[0], result)
