"""Calls of functions that are kept whole, traced as the kernels that torch runs for them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from thunder.core import dtypes
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import Symbol
from thunder.core.transforms import get_grad, put_grad

from ..ir.observation import describe
from ..private_thunder import shape_of, torch_function_of
from .symbols import cached, call_operator, device_of
from .torch_program import TorchProgram, torch_program


class KernelCall(NamedTuple):
    """A call of a function that is kept whole."""

    program: TorchProgram
    inputs: Sequence[TensorProxy]

    def execute(self) -> Any:
        """Record what torch runs for the function in the current trace, and return the result."""
        return self.program.run(call_operator, self.inputs, None)[0]

    def differentiate(self) -> Any:
        """Record the same and the gradients of the arguments, and return the result."""
        result, grads = self.program.run(call_operator, self.inputs, get_grad)
        for argument, grad in zip(self.inputs, grads, strict=True):
            if grad is not None:
                put_grad(argument, grad)
        return result


def call_of(symbol: Symbol, differentiable: frozenset[str], args: Any, kwargs: Any) -> KernelCall | None:
    """Return what torch runs for a call of a function; ``None`` if Thunder decomposes it.

    The arguments go to torch by name, except the first, because Thunder leaves out some of torch's.
    """
    bound = inspect.signature(symbol.meta).bind(*args, **kwargs).arguments
    given = {name: argument for name, argument in bound.items() if argument is not None}
    first, *named = given
    leaves, spec = tree_flatten((tuple(given.values()), {}))
    inputs = {leaf.name: leaf for leaf in leaves if isinstance(leaf, TensorProxy)}
    wanted = {
        p.name
        for name, p in given.items()
        if (name == first or name in differentiable) and isinstance(p, TensorProxy) and dtypes.is_inexact_dtype(p.dtype)
    }
    others = [p for name, p in inputs.items() if name not in wanted and dtypes.is_inexact_dtype(p.dtype)]
    if any(p is not given.get("weight") for p in others):
        return None  # such as a mask that is learned: torch has another kernel for it, or none
    if any(map(_is_symbolic, leaves)) or (arguments := describe(leaves, {})) is None:
        return None
    # That of hardswish has no path.
    function = torch_function_of(symbol.id) or getattr(torch.nn.functional, symbol.name)
    flags = tuple([name in wanted for name in inputs])
    program = cached(torch_program, function, arguments, spec, device_of(inputs.values()), tuple(named), flags)
    return None if program is None else KernelCall(program, tuple(inputs.values()))


def _is_symbolic(leaf: Any) -> bool:
    if isinstance(leaf, TensorProxy):
        return any(isinstance(size, NumberProxy) for size in shape_of(leaf))
    return isinstance(leaf, NumberProxy)
