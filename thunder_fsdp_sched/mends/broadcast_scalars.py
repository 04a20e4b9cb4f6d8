"""Broadcast operands without dimensions, so that their gradients are sums."""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

from ..ir.gradients import requiring_gradient, with_gradient
from ..ir.inspection import args_of, recording, swap_args, with_bound_symbols

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
