"""ZeRO-2 keeps what forward gathered, so nothing would notice that a parameter changes before backward: an error."""

from __future__ import annotations

import time
from collections.abc import Collection

from thunder.core.symbol import BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx

from ..buffers import Bucket
from ..operands import Gather, bucket_of
from ..symbols import fsdp_all_gather, fsdp_params_unchanged
from ..traces import args_of, forward_part, outs_of, return_of, with_bound_symbols

__all__ = ["guard_kept", "guard_first"]


def guard_kept(trace: TraceCtx, *, kept: Collection[Bucket]) -> TraceCtx:
    """Makes backward hold the shards of every kept bucket: autograd compares the versions of what it saved.

    Under ZeRO-3 backward holds them anyway, to gather them again. At run time a guard also gathers a bucket again that an
    aborted forward, or an evaluation, may have overwritten since (``guard_first``).
    """
    started = time.perf_counter()
    gathers = [b for b in trace.bound_symbols if b.sym is fsdp_all_gather and bucket_of(b).whole in kept]
    if not gathers or all(forward_part(trace)[:-1]):
        return trace
    new = with_bound_symbols(trace, trace.bound_symbols[:-1], "fsdp: guard kept buckets", started)
    with tracectx(new):
        for gather in gathers:
            guard = fsdp_params_unchanged.bind(bucket_of(gather), *Gather(gather).shards, output=None)
            guard.tags.add(BoundSymbolTag.BACKWARD)
            new.bound_symbols.append(guard)
    new.bound_symbols.append(return_of(trace))
    return new


def guard_first(trace: TraceCtx) -> TraceCtx:
    """Move the guards of a backward trace to its begin, right after the shards that they check are unpacked.

    Runs on the split trace, before communication is sorted: until then a fusion executor may move them. Without guards the
    trace stays as it is.
    """
    started = time.perf_counter()
    guards = [b for b in trace.bound_symbols if b.sym is fsdp_params_unchanged]
    if not guards:
        return trace
    checked = {arg for guard in guards for arg in args_of(guard)}
    others = [b for b in trace.bound_symbols if b.sym is not fsdp_params_unchanged]
    begin = 1 + max((i for i, b in enumerate(others) if checked.intersection(outs_of(b))), default=-1)
    return with_bound_symbols(
        trace, [*others[:begin], *guards, *others[begin:]], "fsdp: guard kept buckets first", started
    )
