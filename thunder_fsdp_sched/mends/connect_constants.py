"""Pass gradients of zeros through operators whose results Thunder takes for constants.

[Note: Gradients of zeros]
In torch, ``floor`` and ``dropout`` with a probability of 1 pass gradients of zeros on. Thunder passes none, and where no
other way leads to a parameter, its gradient is ``None``: optimizers skip it, although in eager mode they would decay it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable

import thunder.torch as ltorch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transforms import get_grad, put_grad

from ..ir.effects import Effects
from ..ir.gradients import PIECEWISE_CONSTANT, requiring_gradient, with_gradient
from ..ir.inspection import args_of, defined_by, nested, outs_of, recording, swap_args, with_bound_symbols
from ..ir.registry import executor, register

_CONSTANT = frozenset({PrimIDs.CEIL, PrimIDs.FLOOR, PrimIDs.ROUND, PrimIDs.TRUNC})


def _effects(bsym: BoundSymbol) -> Effects:
    aliases = {bsym.output.name: (bsym.args[1].name,)}
    return Effects(aliases=aliases)


def register_value(name: str, gradient: Callable[[TensorProxy, TensorProxy], TensorProxy]) -> Symbol:
    """Register a symbol of an old and a new tensor, which returns the new one with a gradient for the old one.

    Args:
        gradient: takes the old tensor and the gradient of the result.
    """
    symbol = register(name, lambda old, new: new, _effects, lambda old, new: TensorProxy(like=new))

    def differentiate(old: TensorProxy, new: TensorProxy) -> TensorProxy:
        out: TensorProxy = symbol(old, new)
        put_grad(old, gradient(old, get_grad(out)))
        return out

    executor.register_implementation(symbol, symbol, grad_transform=differentiate)
    return symbol


fsdp_zero_gradient = register_value("fsdp_zero_gradient", lambda old, grad: ltorch.zeros_like(grad, dtype=old.dtype))


def connect_constants(trace: TraceCtx) -> TraceCtx:
    """Let operators such as ``floor`` pass gradients of zeros on; see [Note: Gradients of zeros].

    Runs on the computation before it is differentiated. Before::

        t2 = ltorch.floor(t1)
        t3 = ltorch.mul(t2, y)

    After::

        t2 = ltorch.floor(t1)
        t4 = fsdp_zero_gradient(t1, t2)
        t3 = ltorch.mul(t4, y)
    """
    needing, swaps = requiring_gradient(trace), dict[str, Proxy]()
    new = with_bound_symbols(trace, (), "fsdp: connect constants")
    with tracectx(new):
        for bsym in trace.bound_symbols:
            bsym = swap_args(bsym, swaps)
            new.bound_symbols.append(bsym)
            if needing.isdisjoint(args_of(bsym)):
                continue
            needing.update(with_gradient(bsym))
            if bsym.sym.name not in PIECEWISE_CONSTANT:
                continue
            read = {arg.name: arg for arg in bsym.flat_proxy_args if arg.name in needing}
            connected = _connected([bsym], read)
            for result in defined_by(bsym):
                if result.name in needing and result.name not in connected:
                    with recording(new, bsym) as added:
                        swaps[result.name] = functools.reduce(_connect, read.values(), result)
                    new.bound_symbols += added
                    needing.update(name for each in added for name in outs_of(each))
            for constant in nested([bsym]):
                for out in defined_by(constant):
                    if out.name in swaps or constant.sym.id in _CONSTANT:
                        out.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    return new


def _connect(result: TensorProxy, operand: TensorProxy) -> TensorProxy:
    """Return the result of an elementwise operator with a gradient of zeros for one of its operands."""
    whole = operand if operand.shape == result.shape else ltorch.expand(operand, tuple(result.shape))
    connected: TensorProxy = fsdp_zero_gradient(whole, result)
    return connected


def _connected(bsyms: Iterable[BoundSymbol], needing: Collection[str]) -> set[str]:
    """Return the names of the values to which Thunder knows a gradient, of which ``needing`` are known."""
    found = set(needing)
    for bsym in bsyms:
        if bsym.subsymbols:
            found |= _connected(bsym.subsymbols, found)
        elif not found.isdisjoint(args_of(bsym)) and bsym.sym.id not in _CONSTANT:
            found.update(with_gradient(bsym))
    return found
