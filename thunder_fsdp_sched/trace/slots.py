"""The memory of slots in a trace: how many bytes are in use at once, what may share a slot, which buckets forward retains.

[Note: Gradients in the place of their parameters]
In backward each parameter of a bucket is read for the last time before its gradient is written or copied into the slot
of the reduction. Both have the same offset in the bucket, so the reduction can use the slot of the gather: the
gradients then need no memory of their own while other parameters of the bucket are still read. That saves a slot, and
no collective has to be waited for earlier. It is done where the trace shows that it is safe, only for parameters and
gradients of one dtype, and only if it makes the arena smaller.
"""

from __future__ import annotations

from collections.abc import Iterable

from thunder.core.trace import TraceCtx

from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, Slot
from .inspection import args_of
from .liveness import Liveness, SlotRange, peak_bytes
from .operands import Issue, bucket_of
from .symbols import fsdp_all_gather, fsdp_reduce_scatter, residency_marks

__all__ = ["filling_bytes", "grads_over_params", "peak_live_bytes", "retained_by_forward", "shared_slots"]


def retained_by_forward(forward: TraceCtx) -> dict[Bucket, Slot]:
    """Return the buckets that are still resident in shared slots after a marked forward trace, with their slots."""
    gathers = (b for b in forward.bound_symbols if b.sym is fsdp_all_gather)
    return {bucket_of(b): Issue(b).slot for b in gathers if "followed_by" in residency_marks(b)}


def grads_over_params(ranges: Iterable[SlotRange]) -> dict[SlotRange, SlotRange]:
    """Return the reductions that can use the slot of a gather of their bucket, each with that gather.

    See [Note: Gradients in the place of their parameters].

    Args:
        ranges: those of shared slots, in the order of their issues.
    """
    gathers: dict[Bucket, SlotRange] = {}
    found = {}
    for live in ranges:
        spec = live.bucket.spec
        if live.is_gather:
            gathers[live.bucket] = live
            continue
        gather = gathers.get(live.bucket)
        if gather is None or not gather.start < live.start <= gather.end or spec.param_dtype != spec.reduce_dtype:
            continue
        writes = [live.last_access.get(index, live.issue) for index in gather.last_access]
        if gather.end < live.issue and all(r < w for r, w in zip(gather.last_access.values(), writes, strict=True)):
            found[live] = gathers.pop(live.bucket)
    return found


def peak_live_bytes(trace: TraceCtx) -> int:
    """Return the peak bytes of unsharded parameters and gradients in shared slots: a lower bound for any arena.

    Where gradients have the place of their parameters, both count once.
    """
    ranges = Liveness(trace.bound_symbols).slots.values()
    shared = [live for live in ranges if live.slot is None or live.slot is not live.bucket.private_slot]
    ends = {
        gather: reduction.start - 1
        for reduction, gather in grads_over_params(shared).items()
        if gather.slot is not None and reduction.slot is not None and gather.slot.overlaps(reduction.slot)
    }
    return peak_bytes((live.start, ends.get(live, live.end), live.nbytes) for live in shared)


def shared_slots(trace: TraceCtx) -> tuple[int, int]:
    """Return the bytes of arena that the shared slots of a trace occupy, and a lower bound for any allocation."""
    ends: dict[Arena, int] = {}
    for bsym in trace.bound_symbols:
        if bsym.sym in (fsdp_all_gather, fsdp_reduce_scatter):
            slot = Issue(bsym).slot
            if slot is not bucket_of(bsym).private_slot:
                ends[slot.arena] = max(ends.get(slot.arena, 0), slot.end)
    return sum(ends.values()), peak_live_bytes(trace)


def filling_bytes(trace: TraceCtx) -> int:
    """Return the peak bytes of slots that hold gradients whose reductions have not been issued yet.

    A reduction counts as issued right after its last gradient, as in a sorted trace.
    """
    live = Liveness(trace.bound_symbols)
    filling = ((r, live.defined(args_of(trace.bound_symbols[r.issue]))) for r in live.slots.values() if r.grads)
    return peak_bytes((r.start, last_grad, r.nbytes) for r, last_grad in filling)
