"""The memory of slots in a trace: how many bytes are in use at once, what may share a slot, which buckets forward retains.

[Note: Gradients in the place of their parameters]
In backward each parameter of a bucket is read for the last time before its gradient is written or copied into the slot
of the reduction. Both have the same offset in the bucket, so the reduction can use the slot of the gather: the
gradients then need no memory of their own while other parameters of the bucket are still read. That saves a slot, and
no collective has to be waited for earlier. It is done where the trace shows that it is safe, only for parameters and
gradients of one dtype, and only if it makes the arena smaller.

A kept bucket (ZeRO-2) is gathered in forward into its private slot, and backward reads what forward has saved of it.
There the same rule applies to both traces together: the gradients of kept buckets need no memory at all. From the first
gradient on, the slot no longer holds the parameters (``Bucket.gathered_in_forward``), so another backward of the same
forward, or one after an exception, gathers them again into the slot, which the saved tensors are views of.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, Slot
from ..runtime.window import WINDOW_OPEN
from .inspection import args_of
from .liveness import Liveness, SlotRange, peak_bytes
from .operands import Issue, bucket_of
from .symbols import (
    GRAD_WRITERS,
    fsdp_all_gather,
    fsdp_params_unchanged,
    fsdp_reduce_scatter,
    fsdp_release,
    residency_marks,
    window_of,
)

__all__ = [
    "arena_allocations",
    "filling_bytes",
    "grads_over_kept_params",
    "grads_over_params",
    "peak_live_bytes",
    "retained_by_forward",
    "shared_slots",
    "slots_in_use",
]


def retained_by_forward(forward: TraceCtx) -> dict[Bucket, Slot]:
    """Return the buckets that are still resident in shared slots after a marked forward trace, with their slots."""
    gathers = (b for b in forward.bound_symbols if b.sym is fsdp_all_gather)
    return {bucket_of(b).primary: Issue(b).slot for b in gathers if "followed_by" in residency_marks(b)}


def grads_over_params(ranges: Iterable[SlotRange]) -> dict[SlotRange, SlotRange]:
    """Return the reductions that can use the slot of a gather of their bucket, each with that gather.

    See [Note: Gradients in the place of their parameters].

    Args:
        ranges: those of shared slots, in the order of their issues.
    """
    gathers: dict[Bucket, SlotRange] = {}
    found = {}
    for live in ranges:
        if live.is_gather:
            gathers[live.bucket.primary] = live
            continue
        gather = gathers.get(live.bucket)
        if gather is not None and gather.start < live.start <= gather.end and _may_replace(live, gather):
            found[live] = gathers.pop(live.bucket)
    return found


def grads_over_kept_params(forward: TraceCtx, backward: TraceCtx) -> set[int]:
    """Return the positions of the reductions of a backward trace that can use the private slot of their bucket.

    Those under ``no_sync`` leave the parameters for the next micro-batch if forward's gather takes part in a window. See
    [Note: Gradients in the place of their parameters].

    Args:
        forward: its forward trace with slots.
        backward: the sorted backward trace, with or without slots.
    """
    begin = len(forward.bound_symbols)
    guards = {bucket_of(b): i for i, b in enumerate(backward.bound_symbols, begin) if b.sym is fsdp_params_unchanged}
    left = {
        bucket_of(bsym)
        for bsym in forward.bound_symbols
        if bsym.sym is fsdp_all_gather and window_of(bsym) == WINDOW_OPEN
    }
    gathers: dict[Bucket, SlotRange] = {}
    found = set()
    for live in Liveness(forward.bound_symbols, backward.bound_symbols).slots.values():
        if live.issue < begin and live.is_gather and live.slot is live.bucket.private_slot:
            if live.bucket not in left:
                gathers[live.bucket] = live
        elif live.issue >= begin and live.bucket in gathers:
            gather = gathers.pop(live.bucket)  # one reduction at most, and none after another gather
            # A gradient that backward receives may be reduced before the guard, which may gather the bucket again.
            if not live.is_gather and guards.get(live.bucket, -1) < live.start and _may_replace(live, gather):
                found.add(live.issue - begin)
    return found


def _may_replace(reduction: SlotRange, gather: SlotRange) -> bool:
    """Return whether each gradient is written after the last read of its parameter, and can take its place."""
    spec = reduction.bucket.spec
    writes = [reduction.last_access.get(index, reduction.issue) for index in gather.last_access]
    return (
        spec.param_dtype == spec.reduce_dtype
        and gather.end < reduction.issue
        and all(read < write for read, write in zip(gather.last_access.values(), writes, strict=True))
    )


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


def slots_in_use(live: Liveness, length: int) -> list[int]:
    """Return the bytes of arenas that hold unsharded parameters or gradients at each position, each byte counted once.

    Args:
        live: the liveness of traces with slots.
        length: the number of positions.
    """
    changes: dict[int, tuple[list[Slot], list[Slot]]] = {}
    for used in live.slots.values():
        if used.slot is not None:
            changes.setdefault(max(used.start, 0), ([], []))[0].append(used.slot)
            changes.setdefault(used.end + 1, ([], []))[1].append(used.slot)
    found: list[int] = []
    in_use: Counter[Slot] = Counter()
    nbytes = 0
    for position in range(length):
        if position in changes:
            begin, end = changes[position]
            in_use.update(begin)
            in_use.subtract(end)
            nbytes = _union_bytes(slot for slot, count in in_use.items() if count)
        found.append(nbytes)
    return found


def _union_bytes(slots: Iterable[Slot]) -> int:
    ends: dict[Arena, int] = {}
    total = 0
    for slot in sorted(slots, key=lambda slot: slot.offset):
        end = ends.get(slot.arena, 0)
        total += max(0, slot.end - max(slot.offset, end))
        ends[slot.arena] = max(end, slot.end)
    return total


def shared_slots(trace: TraceCtx) -> tuple[int, int]:
    """Return the bytes of arena that the shared slots of a trace occupy, and a lower bound for any allocation."""
    ends: dict[Arena, int] = {}
    for bsym in trace.bound_symbols:
        if bsym.sym in (fsdp_all_gather, fsdp_reduce_scatter):
            slot = Issue(bsym).slot
            if slot is not bucket_of(bsym).private_slot:
                ends[slot.arena] = max(ends.get(slot.arena, 0), slot.end)
    return sum(ends.values()), peak_live_bytes(trace)


def arena_allocations(bsyms: Sequence[BoundSymbol]) -> dict[Arena, list[tuple[int, int]]]:
    """Return for each arena the positions, first and last included, between which its memory is allocated.

    An arena that ``fsdp_release`` frees is allocated from its next use on; one that nothing frees, all the time.

    Args:
        bsyms: those of the traces of a step, with slots.
    """
    begins: dict[Arena, int] = {}
    found: dict[Arena, list[tuple[int, int]]] = defaultdict(list)
    for position, bsym in enumerate(bsyms):
        if bsym.sym is fsdp_release:
            for arena in {slot.arena for slot in bsym.args} & begins.keys():
                found[arena].append((begins.pop(arena), position))
        elif bsym.sym in (fsdp_all_gather, fsdp_reduce_scatter) or bsym.sym.name in GRAD_WRITERS:
            if (slot := Issue(bsym).planned_slot) is not None:
                begins.setdefault(slot.arena, position)
    for arena, begin in begins.items():
        since = begin if arena in found else 0
        found[arena].append((since, len(bsyms) - 1))
    return dict(found)


def filling_bytes(trace: TraceCtx, *, without: Collection[int] = ()) -> int:
    """Return the peak bytes of slots that hold gradients whose reductions have not been issued yet.

    A reduction counts as issued right after its last gradient, as in a sorted trace.

    Args:
        without: positions of reductions that do not count.
    """
    live = Liveness(trace.bound_symbols)
    counted = [r for r in live.slots.values() if r.grads and r.issue not in without]
    filling = ((r, live.defined(args_of(trace.bound_symbols[r.issue]))) for r in counted)
    return peak_bytes((r.start, last_grad, r.nbytes) for r, last_grad in filling)
