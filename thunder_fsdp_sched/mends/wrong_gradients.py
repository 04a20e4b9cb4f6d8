"""Repair or refuse operators for which Thunder loses a gradient, or computes a wrong one.

[Note: Gradients of zeros]
In torch, ``floor``, rounded quotients, ``x**0`` and ``dropout`` with a probability of 1 pass on gradients of zeros. Thunder
passes none, or some that are not finite where it divides by zero. If no other path leads to a parameter, its gradient is
``None``, and optimizers skip it, although in eager mode they would decay it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transforms import get_grad, put_grad

from ..errors import coded_error
from ..ir.effects import Effects
from ..ir.gradients import (
    LOST_IN_SEQUENCES,
    PIECEWISE_CONSTANT,
    WRONG_GRADIENTS,
    is_wrong_of_complex,
    needing_gradient,
    requiring_gradient,
    with_gradient,
)
from ..ir.inspection import (
    args_of,
    defined_by,
    names,
    nested,
    outs_of,
    recording,
    source_of,
    swap_args,
    with_bound_symbols,
)
from ..ir.registry import executor, register

_CONSTANT = frozenset({PrimIDs.CEIL, PrimIDs.FLOOR, PrimIDs.ROUND, PrimIDs.TRUNC})


def _effects(bsym: BoundSymbol) -> Effects:
    aliases = {bsym.output.name: (bsym.args[1].name,)}
    return Effects(aliases=aliases)


def register_value(
    name: str, gradient: Callable[[TensorProxy, TensorProxy], TensorProxy], *, passes_on: bool = False
) -> Symbol:
    """Register a symbol of an old and a new tensor, which returns the new one with a gradient for the old one.

    Args:
        gradient: takes the old tensor and the gradient of the result.
        passes_on: whether the new tensor gets the gradient of the result as well.
    """
    symbol = register(name, lambda old, new: new, _effects, lambda old, new: TensorProxy(like=new))

    def differentiate(old: TensorProxy, new: TensorProxy) -> TensorProxy:
        out: TensorProxy = symbol(old, new)
        grad = get_grad(out)
        put_grad(old, gradient(old, grad))
        if passes_on:
            put_grad(new, grad)
        return out

    executor.register_implementation(symbol, symbol, grad_transform=differentiate)
    return symbol


fsdp_zero_gradient = register_value(
    "fsdp_zero_gradient", lambda old, grad: ltorch.zeros_like(grad, dtype=old.dtype), passes_on=True
)


def connect_constants(trace: TraceCtx) -> TraceCtx:
    """Let operators such as ``floor`` pass on gradients of zeros; see [Note: Gradients of zeros].

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
            connected = set(read) if _is_constant(bsym) else _connected([bsym], read)
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


def _is_constant(bsym: BoundSymbol) -> bool:
    """Return whether a quotient is rounded or an exponent is zero: torch's gradients are zeros, even at zero."""
    if bsym.sym.name == "div":
        return bsym.kwargs.get("rounding_mode") is not None
    return bsym.sym.name == "pow" and type(bsym.args[1]) in (int, float) and bsym.args[1] == 0


def _connect(result: TensorProxy, operand: TensorProxy) -> TensorProxy:
    """Return the result of an elementwise operator with a gradient of zeros for one of its operands."""
    whole = operand if operand.shape == result.shape else ltorch.expand(operand, tuple(result.shape))
    connected: TensorProxy = fsdp_zero_gradient(whole, result)
    return connected


def _connected(bsyms: Iterable[BoundSymbol], needing: Collection[str]) -> set[str]:
    """Return ``needing``, and the names of the values through which Thunder passes gradients to them."""
    found = set(needing)
    for bsym in bsyms:
        if bsym.subsymbols:
            found |= _connected(bsym.subsymbols, found)
        elif not found.isdisjoint(args_of(bsym)) and bsym.sym.id not in _CONSTANT:
            found.update(with_gradient(bsym))
    return found


_BINARY = frozenset({
    PrimIDs.ADD, PrimIDs.ATAN2, PrimIDs.DIV, PrimIDs.FMOD, PrimIDs.MAXIMUM, PrimIDs.MINIMUM, PrimIDs.MUL, PrimIDs.NEXTAFTER,
    PrimIDs.POW, PrimIDs.REMAINDER, PrimIDs.SUB, PrimIDs.ZETA,
})  # fmt: skip
_ELEMENTWISE = _BINARY | {PrimIDs.LERP, PrimIDs.WHERE}
"""Prims with several operands of one shape, except tensors on a CPU without dimensions."""


def broadcast_scalars(trace: TraceCtx) -> TraceCtx:
    """Broadcast operands without dimensions that have a gradient to the shape of the result.

    Runs on the computation after ``insert_unshard``, and before it is differentiated. Thunder lets elementwise prims read a
    tensor without dimensions on a CPU as if it were a number, and then does not sum its gradient, which has the shape of the
    result. Does nothing if there are no such operands. Before::

        t2 = prims.mul(y, t1)  # y: "cpu f32[2, 2]", t1: "cpu f32[]"

    After::

        t3 = prims.broadcast_in_dim(t1, (2, 2), ())
        t2 = prims.mul(y, t3)
    """
    new = with_bound_symbols(trace, (), "fsdp: broadcast scalars")
    with tracectx(new):
        new.bound_symbols = _broadcast(trace.bound_symbols, requiring_gradient(trace), new)
    return new if _differ(new.bound_symbols, trace.bound_symbols) else trace


def _broadcast(bsyms: Sequence[BoundSymbol], needing: set[str], trace: TraceCtx) -> list[BoundSymbol]:
    """Return bound symbols with broadcasts before those that need them, also among their subsymbols.

    Args:
        needing: the names of the values so far that need a gradient.
    """
    found = []
    for bsym in bsyms:
        if needing.isdisjoint(args_of(bsym)) or not (results := with_gradient(bsym)):
            found.append(bsym)
            continue
        if bsym.sym.id in _ELEMENTWISE and bsym.output.ndim:
            scalars = {p.name: p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy) and not p.ndim}
            with recording(trace, bsym) as added:
                swaps: dict[str, Proxy] = {
                    name: prims.broadcast_in_dim(scalar, bsym.output.shape, ())
                    for name, scalar in scalars.items()
                    if name in needing
                }
            found += added
            bsym = swap_args(bsym, swaps)
        elif bsym.subsymbols:
            inner = _broadcast(bsym.subsymbols, needing, trace)
            bsym = bsym.from_bsym(subsymbols=inner) if _differ(inner, bsym.subsymbols) else bsym
        found.append(bsym)
        needing.update(results)
    return found


def _differ(one: Sequence[BoundSymbol], other: Sequence[BoundSymbol]) -> bool:
    return len(one) != len(other) or any(a is not b for a, b in zip(one, other, strict=True))


def refuse_wrong_gradients(trace: TraceCtx) -> TraceCtx:
    """Raise NotImplementedError for operators for which Thunder silently loses a gradient, or computes a wrong one.

    Runs on the computation before it is differentiated. Changes nothing. For ``index_put``, Thunder returns the
    gradient of the values as that of the first index. Tensors in a list or tuple (``hstack``, ``lstm_cell``) get no
    gradient. That of ``prod`` is NaN for elements that are zero. Most operators that read complex values have wrong
    gradients.
    """
    bsyms = [bsym for bsym in trace.bound_symbols if bsym.sym.name in WRONG_GRADIENTS or _is_wrong_of_complex(bsym)]
    needing = needing_gradient(trace) if bsyms else frozenset()
    for bsym in bsyms:
        name, where = bsym.sym.name, f" ({source})" if (source := source_of(bsym)) else ""
        read: Iterable[str] = names(bsym.flat_proxy_args)
        if name in LOST_IN_SEQUENCES:
            read = names(
                tree_iter([each for each in (*bsym.args, *bsym.kwargs.values()) if isinstance(each, list | tuple)])
            )
            error = coded_error(NotImplementedError, "trace.no-gradient-of-sequence", operator=name, where=where)
        elif name == "index_put":
            read = [(bsym.args[2] if len(bsym.args) > 2 else bsym.kwargs["values"]).name]
            error = coded_error(NotImplementedError, "trace.no-gradient-of-values", operator=name, where=where)
        elif name == "prod":
            error = coded_error(NotImplementedError, "trace.wrong-gradient-of-prod", where=where)
        else:
            error = coded_error(NotImplementedError, "trace.wrong-gradient-of-complex", operator=name, where=where)
        if not needing.isdisjoint(read):
            raise error
    return trace


def _is_wrong_of_complex(bsym: BoundSymbol) -> bool:
    is_operator = bsym.sym.id is not PrimIDs.RETURN and not bsym.sym.name.startswith("fsdp_")
    return is_operator and is_wrong_of_complex(bsym.sym.name, tree_iter((bsym.args, bsym.kwargs)))
