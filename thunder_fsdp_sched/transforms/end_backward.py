"""Mark the end of backward: only a backward that gets there drops the gradients of earlier ``no_sync`` backwards."""

from __future__ import annotations

from thunder.core.trace import TraceCtx

from ..ir.effects import effects
from ..ir.inspection import before_return
from ..ir.symbols import fsdp_backward_done


def end_backward(trace: TraceCtx, *, no_sync: bool) -> TraceCtx:
    """Insert ``fsdp_backward_done`` before the return of backward, with the buckets whose gradients it handles.

    Runs on the backward trace after ``insert_agreement`` and before Thunder's ``del_last_used``. No statement that can
    fail follows it. Does nothing if the trace neither reduces nor accumulates gradients. Before::

        (t144,) = fsdp_wait_grads(bucket_blocks_0, ft155)
        return (None, t144, t138, t129)

    After::

        (t144,) = fsdp_wait_grads(bucket_blocks_0, ft155)
        fsdp_backward_done(False, bucket_blocks_2, bucket_blocks_1, bucket_blocks_0)
        return (None, t144, t138, t129)

    See [Note: State after an exception] in ``memory``.
    """
    buckets = [e.bucket for e in map(effects, trace.bound_symbols) if (e.leaves if no_sync else e.collects or e.runs)]
    if not buckets:
        return trace
    done = fsdp_backward_done.bind(no_sync, *buckets, output=None)
    return before_return(trace, done, pass_name="fsdp: end of backward")
