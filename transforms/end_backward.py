"""A backward says when it has run to its end: only then are gradients of earlier ``no_sync`` backwards dropped."""

from __future__ import annotations

import time

from thunder.core.trace import TraceCtx, tracectx

from ..operands import bucket_of
from ..symbols import fsdp_accumulate_grads, fsdp_backward_done, fsdp_reduce_scatter, fsdp_reduce_unreduced
from ..traces import return_of, with_bound_symbols

__all__ = ["end_backward"]


def end_backward(trace: TraceCtx, *, no_sync: bool) -> TraceCtx:
    """Put ``fsdp_backward_done`` before the return of a backward trace, for the buckets whose gradients it takes.

    Runs last, so that nothing that may fail comes after it. Other traces stay as they are. See [Note: What an exception
    leaves] in ``buffers``.
    """
    started = time.perf_counter()
    takers = (fsdp_accumulate_grads,) if no_sync else (fsdp_reduce_scatter, fsdp_reduce_unreduced)
    buckets = [bucket_of(b) for b in trace.bound_symbols if b.sym in takers]
    if not buckets:
        return trace
    new = with_bound_symbols(trace, trace.bound_symbols[:-1], "fsdp: end of backward", started)
    with tracectx(new):
        new.bound_symbols += [fsdp_backward_done.bind(no_sync, *buckets, output=None), return_of(trace)]
    return new
