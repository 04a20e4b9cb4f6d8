"""ZeRO-2 keeps what forward gathered, so nothing would notice that a parameter changes before backward: an error."""

from __future__ import annotations

import time
from collections.abc import Collection

from thunder.core.symbol import BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx

from ..buffers import Bucket
from ..symbols import fsdp_all_gather, fsdp_params_unchanged
from ..traces import forward_part, return_of, with_bound_symbols

__all__ = ["guard_kept"]


def guard_kept(trace: TraceCtx, *, kept: Collection[Bucket]) -> TraceCtx:
    """Makes backward hold the shards of every kept bucket: autograd compares the versions of what it saved.

    Under ZeRO-3 backward holds them anyway, to gather them again.
    """
    started = time.perf_counter()
    gathers = [b for b in trace.bound_symbols if b.sym is fsdp_all_gather and b.args[0].whole in kept]
    if not gathers or all(forward_part(trace)[:-1]):
        return trace
    new = with_bound_symbols(trace, trace.bound_symbols[:-1], "fsdp: guard kept buckets", started)
    with tracectx(new):
        for gather in gathers:
            guard = fsdp_params_unchanged.bind(gather.args[0], *gather.args[2:], output=None)
            guard.tags.add(BoundSymbolTag.BACKWARD)
            new.bound_symbols.append(guard)
    new.bound_symbols.append(return_of(trace))
    return new
