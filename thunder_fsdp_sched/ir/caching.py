"""Traces of bound symbols whose copies keep what was found out about them."""

from __future__ import annotations

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..private_thunder import CachingBoundSymbol
from .registry import executor


def caching(bsym: BoundSymbol) -> CachingBoundSymbol:
    """Return a bound symbol whose copies keep what was found out about it; the same if it is one."""
    return CachingBoundSymbol.of(bsym, prints_itself=bsym.sym.executor is executor)


def with_caches(trace: TraceCtx) -> TraceCtx:
    """Replace the bound symbols of a trace by equal ones whose copies keep what was found out about them; return it."""
    trace.bound_symbols = list(map(caching, trace.bound_symbols))
    return trace
