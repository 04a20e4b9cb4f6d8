"""Calls of functions that are kept whole, traced as the kernels that torch runs for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from thunder.core.devices import to_device
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import Symbol
from thunder.core.transforms import get_grad, put_grad
from torch.utils._pytree import tree_map

from ..ir.inspection import is_inexact
from ..ir.observation import attention_backends, describe, fake_arguments, fake_mode, identity_of, named_arguments
from ..private_thunder import shape_of, torch_function_of
from ..private_torch import schema_of
from .executor import executor
from .torch_program import TorchProgram, torch_program

_MAX_CACHED = 1_000
"""How many calls are cached; a model has a few dozen."""

_cache: dict[Any, Any] = {}


def cached(make: Callable[..., Any], function: Any, arguments: Sequence[Any], spec: Any, *others: Any) -> Any:
    """Return ``make(function, arguments, spec, *others)``, made once for equal calls.

    Args:
        arguments: as ``observation.describe`` returns them.
    """
    key = make, function, identity_of(arguments), spec, others, attention_backends()
    if key not in _cache:
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        _cache[key] = make(function, arguments, spec, *others)
    return _cache[key]


def device_of(tensors: Iterable[TensorProxy]) -> str:
    """Return the device type of the fake tensors: that of ``tensors``; a CPU for several types, or meta tensors only."""
    found = {tensor.device.type for tensor in tensors} - {"meta"}
    return found.pop() if len(found) == 1 else "cpu"


def call_operator(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a call of a base operator in the current trace, and return its results."""
    return _symbol_of(operator)(*args, **kwargs)


@cache
def _symbol_of(operator: Any) -> Symbol:
    def meta(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        arguments = describe(leaves, {})
        assert arguments is not None, operator
        tensors = [leaf for leaf in leaves if isinstance(leaf, TensorProxy)]
        found = cached(_results_of, operator, arguments, spec, device_of(tensors))

        def proxy(result: _Result | None) -> TensorProxy | None:
            if result is None:
                return None
            if not tensors:  # a constant, such as the minus infinity of a mask
                device = to_device(kwargs["device"])
                return TensorProxy(shape=result.shape, dtype=result.dtype, device=device, requires_grad=False)
            return TensorProxy(like=max(tensors, key=_decides_device), shape=result.shape, dtype=result.dtype)

        return tuple(map(proxy, found)) if type(found) is tuple else proxy(found)

    base = getattr(operator, "__wrapped__", operator)
    if base is not torch.reshape:  # ranks compare numbers by the names of the arguments
        meta.__signature__ = _signature_of(base)  # type: ignore[attr-defined]
    # A name stands for one function in a trace. The prefix tells it from Thunder's own operator of that name, and the
    # overload from other overloads.
    name, _, overload = operator.__name__.strip("_").partition(".")
    name = f"torch_{name}" if overload in ("", "default", "Tensor") else f"torch_{name}_{overload}"
    return executor.register_operator(name, meta=meta, fn=operator)


def _decides_device(tensor: TensorProxy) -> tuple[bool, bool]:
    """Return a key that is greatest for the tensor on whose device torch computes."""
    return tensor.ndim > 0, tensor.device.type != "cpu"


def _signature_of(operator: Any) -> inspect.Signature:
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    defaults = named_arguments(operator, (), {})
    return inspect.Signature(
        [
            inspect.Parameter(a.name, kinds[a.kwarg_only], default=defaults.get(a.name, inspect.Parameter.empty))
            for a in schema_of(operator).arguments
        ]
    )


class _Result(NamedTuple):
    """A tensor that an operator returns; ``None`` stands for one that an output mask leaves out."""

    shape: tuple[int, ...]
    dtype: Any


def _results_of(operator: Any, arguments: Sequence[Any], spec: Any, device: str) -> Any:
    with fake_mode(device):
        args, kwargs = fake_arguments(arguments, spec)
        found = operator(*args, **kwargs)
    return tree_map(lambda t: _Result(tuple(t.shape), to_dtype(t.dtype)) if isinstance(t, torch.Tensor) else t, found)


class KernelCall(NamedTuple):
    """A call of a function that is kept whole."""

    program: TorchProgram
    inputs: Sequence[TensorProxy]

    def execute(self) -> Any:
        """Record torch's forward operators in the current trace, and return the result."""
        return self.program.run(call_operator, self.inputs, None)[0]

    def differentiate(self) -> Any:
        """Record forward and the gradients of the arguments, and return the result."""
        result, grads = self.program.run(call_operator, self.inputs, get_grad)
        for argument, grad in zip(self.inputs, grads, strict=True):
            if grad is not None:
                put_grad(argument, grad)
        return result


def call_of(
    symbol: Symbol, function: Callable[..., Any] | None, differentiable: frozenset[str] | None, args: Any, kwargs: Any
) -> KernelCall | None:
    """Return torch's operators for a call of a function; ``None`` if Thunder decomposes it.

    Torch gets the arguments by name, because Thunder omits some of torch's. The first argument and a second operand are
    positional, because Thunder has other names for them.

    Args:
        function: torch's function; ``None`` for that of the symbol.
        differentiable: names of the arguments that get gradients, besides the first. With ``None``, all get them, and torch
            gets the arguments as they are.
    """
    passed: Any
    if differentiable is None:
        given, named, passed = {**dict(enumerate(args)), **kwargs}, list(kwargs), (args, kwargs)
    else:
        bound = inspect.signature(symbol.meta).bind(*args, **kwargs).arguments
        given = {name: argument for name, argument in bound.items() if argument is not None}
        first = next(iter(given))
        named = [name for name in given if name not in (first, "b")]
        passed = [argument for name, argument in given.items() if name == first or name in differentiable]
    leaves, spec = tree_flatten((tuple(given.values()), {}))
    inputs = {leaf.name: leaf for leaf in leaves if isinstance(leaf, TensorProxy)}
    wanted = {p.name for p in tree_flatten(passed)[0] if is_inexact(p)}
    others = [p for name, p in inputs.items() if name not in wanted and is_inexact(p)]
    if any(p is not given.get("weight") for p in others):
        return None  # such as a learned mask, for which torch has another kernel, or none
    if any(map(_is_symbolic, leaves)) or (arguments := describe(leaves, {})) is None:
        return None
    # The id of hardswish, `torch.hardswish`, names no function.
    function = function or torch_function_of(symbol.id) or getattr(torch.nn.functional, symbol.name)
    flags = tuple([name in wanted for name in inputs])
    program = cached(torch_program, function, arguments, spec, device_of(inputs.values()), tuple(named), flags)
    return None if program is None else KernelCall(program, tuple(inputs.values()))


def _is_symbolic(leaf: Any) -> bool:
    if isinstance(leaf, TensorProxy):
        return any(isinstance(size, NumberProxy) for size in shape_of(leaf))
    return isinstance(leaf, NumberProxy)
