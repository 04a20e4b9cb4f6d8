"""Assign memory to every gather and reduction of a sorted trace, as little as prefetch and liveness allow.

[Note: Interval allocation]
A gather holds its slot from its issue to the last consumer of its parameters, views included. A reduction holds its
slot from the first gradient that is written in place (from its issue if none is) to its wait, or to the issue of the
all-reduce across replicas.

Ranges of the arena are assigned one by one, each at the lowest offset that is free during its whole live range. Several
orders are tried: largest first (greedy by size, Pisarchyk and Lee 2020, arXiv:2001.03288), by start, by area, and by
end from the back. The order that needs the least memory wins. Buckets of equal size get exactly as many slots as are
live at once. With several sizes the result may exceed the lower bound, which is the most bytes live at once;
``shared_slots`` returns both.

[Note: Gradients in the place of their parameters]
In backward each parameter of a bucket is read for the last time before its gradient is written or copied into the slot
of the reduction. Both have the same offset in the bucket, so the reduction can use the slot of the gather: the
gradients then need no memory of their own while other parameters of the bucket are still read. That saves a slot, and
no collective has to be waited for earlier. It is done where the trace shows that it is safe, only for parameters and
gradients of one dtype, and only if it makes the arena smaller.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, Slot, slot_bytes
from ..trace.inspection import Aliases, args_of, has_backward, outs_of, with_bound_symbols
from ..trace.operands import Issue, Reduction, Wait, bucket_of
from ..trace.symbols import (
    GRAD_WRITERS,
    fsdp_all_gather,
    fsdp_all_reduce,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
    is_resident,
    payload,
    residency_marks,
)

__all__ = [
    "filling_bytes",
    "grads_over_params",
    "retained_by_forward",
    "live_ranges",
    "peak_live_bytes",
    "assign_slots",
    "shared_slots",
    "slot_bytes_of",
]


BEFORE_TRACE = -1
"""The start of the live range of a bucket that is resident when the trace begins: before the first position."""

_RESIDENCY_GROWTH = 1 / 32
"""How much larger backward's arena may grow to keep forward's buckets resident, as a share of its bytes. The edge
pieces of a block have a little more padding than the block itself."""


@dataclass(eq=False)
class LiveRange:
    """The positions in a trace, first and last included, between which a collective's unsharded buffer is in use.

    Attributes:
        grads: positions of the bound symbols that write gradients into the buffer before the reduction is issued.
        last_access: a position for each index in the bucket. For a gather, the last read of the parameter, or the wait if
            nothing reads it. For a reduction, the write of the gradient, if it is written in place.
    """

    bucket: Bucket
    start: int
    end: int
    nbytes: int
    grads: list[int] = field(default_factory=list)
    last_access: dict[int, int] = field(default_factory=dict)


def assign_slots(
    trace: TraceCtx,
    *,
    kept: Collection[Bucket] = (),
    arena_of: Callable[[Bucket], Arena] = lambda bucket: bucket.arena,
    forward: TraceCtx | None = None,
    max_bytes: int | None = None,
) -> TraceCtx:
    """Assign a slot to each ``fsdp_all_gather`` and ``fsdp_reduce_scatter``, and to the writes of their gradients.

    Runs after ``sort_communication`` or ``replay_schedule``, which fix the live ranges, and before
    ``mark_retained_by_forward`` or ``reuse_from_forward``. A trace without communication keeps its bound symbols. Before::

        ft148 = fsdp_all_gather(bucket_blocks_1, None, t_blocks_1_weight, again=False)  # 16,384 bytes float32
        (t109,) = fsdp_wait_params(bucket_blocks_0, ft146)
        t110 = torch.nn.functional.linear(x, t109, None)
        ft150 = fsdp_all_gather(bucket_blocks_2, None, t_blocks_2_weight, again=False)  # 16,384 bytes float32

    After: block 2 reuses the slot of block 0, whose last consumer has run::

        ft148 = fsdp_all_gather(bucket_blocks_1, slot_1, t_blocks_1_weight, again=False)  # 16,384 bytes float32
        (t109,) = fsdp_wait_params(bucket_blocks_0, ft146)
        t110 = torch.nn.functional.linear(x, t109, None)
        ft150 = fsdp_all_gather(bucket_blocks_2, slot_0, t_blocks_2_weight, again=False)  # 16,384 bytes float32

    See [Note: Interval allocation].

    Args:
        kept: buckets that stay unsharded (ZeRO-2). They are gathered into private slots. The others, and all gradients,
            share an arena.
        arena_of: returns a bucket's arena. Pass another arena to try out a plan without changing the real one.
        forward: for a backward trace, its forward trace after ``mark_retained_by_forward``. See
            [Note: Buckets left by forward] in ``reuse_from_forward``.
        max_bytes: limit (bytes) up to which the arena may grow to keep forward's buckets resident.
    """
    started = time.perf_counter()
    ranges = live_ranges(trace)
    private = {i for i, r in ranges.items() if r.bucket.base in kept and trace.bound_symbols[i].sym is fsdp_all_gather}
    shared = {i: r for i, r in ranges.items() if i not in private}
    gather_of = grads_over_params(trace, shared)
    offsets = _assign_offsets(list(shared.values()), gather_of, {})
    gathers = [r for i, r in shared.items() if trace.bound_symbols[i].sym is fsdp_all_gather]
    residents: dict[LiveRange, tuple[int, int]] = {}
    fixed: dict[LiveRange, int] = {}  # offsets of ranges that stay resident from forward
    limit, most = _arena_end(offsets), _peak_bytes(gathers)
    if has_backward(trace):
        residents = {r: (r.start, len(trace.bound_symbols)) for r in reversed(gathers)}
    elif forward is not None:
        retained = retained_by_forward(forward)
        needed = max([limit, *(slot.end for slot in retained.values())])
        limit = needed + int(needed * _RESIDENCY_GROWTH)
        limit = limit if max_bytes is None else max(needed, min(limit, max_bytes))
        most = max(most, peak_live_bytes(forward))
        first = {r.bucket: r for r in reversed(gathers)}
        residents = {r: (BEFORE_TRACE, r.end) for r in reversed(first.values()) if r.bucket in retained}
        fixed = {r: retained[r.bucket].offset for r in residents}

    def assign() -> dict[LiveRange, int] | None:
        if _peak_bytes(gathers) > most:
            return None
        preset = {r: offset for r, offset in fixed.items() if r.start == BEFORE_TRACE}
        assigned = _assign_offsets(list(shared.values()), gather_of, preset)
        return assigned if _arena_end(assigned) <= limit else None

    offsets = _extend_ranges(residents, assign) or offsets
    bsyms = list(trace.bound_symbols)
    for position, live in ranges.items():
        if position in private:
            slot = live.bucket.ensure_private_slot()
        else:
            slot = arena_of(live.bucket).slot(offsets[live], live.nbytes)
        for user in (*live.grads, position):
            bsyms[user] = Issue(bsyms[user]).with_slot(slot, live.bucket)
    return with_bound_symbols(trace, bsyms, "fsdp: assign slots", started)


def retained_by_forward(forward: TraceCtx) -> dict[Bucket, Slot]:
    """Return the buckets that are still resident in shared slots after a marked forward trace, with their slots."""
    gathers = (b for b in forward.bound_symbols if b.sym is fsdp_all_gather)
    return {bucket_of(b): Issue(b).slot for b in gathers if "followed_by" in residency_marks(b)}


def live_ranges(trace: TraceCtx) -> dict[int, LiveRange]:
    """Return the live range of each gather and reduction, keyed by the position of its issue in the trace.

    The live range of a bucket that forward left in its slot starts before the trace, at ``BEFORE_TRACE``.
    """
    ranges: dict[int, LiveRange] = {}
    issued: dict[str, LiveRange] = {}
    owner: dict[str, tuple[LiveRange, int]] = {}
    written: dict[str, int] = {}
    aliases = Aliases()
    for position, bsym in enumerate(trace.bound_symbols):
        if bsym.sym in (fsdp_all_gather, fsdp_reduce_scatter):
            grads = [written[arg] for arg in args_of(bsym) if arg in written]
            start = BEFORE_TRACE if is_resident(bsym) else min([*grads, position])
            live = LiveRange(bucket_of(bsym), start, position, slot_bytes_of(bsym), grads)
            if bsym.sym is fsdp_reduce_scatter:
                live.last_access = {
                    i: written[g.name]
                    for i, g in enumerate(Reduction(bsym).grads)
                    if g is not None and g.name in written
                }
            ranges[position] = issued[bsym.output.name] = live
        elif bsym.sym in (fsdp_wait_params, fsdp_wait_grads, fsdp_all_reduce):
            flight = issued.get(Wait(bsym).future.name)
            if flight is None:  # it waits for an all-reduce, which holds no slot
                continue
            flight.end = position
            if bsym.sym is fsdp_wait_params:
                flight.last_access = dict.fromkeys(range(len(bsym.output)), position)
                owner.update({param.name: (flight, index) for index, param in enumerate(bsym.output)})
        else:
            if bsym.sym.name in GRAD_WRITERS:
                written[bsym.output.name] = position
            aliases.add(bsym)
        if bsym.sym.id is not PrimIDs.DEL:
            for arg in args_of(bsym):
                for root in aliases.roots(arg):
                    if root in owner:
                        live, index = owner[root]
                        live.end = live.last_access[index] = position
    return ranges


def grads_over_params(trace: TraceCtx, ranges: dict[int, LiveRange]) -> dict[LiveRange, LiveRange]:
    """Return the reductions that can use the slot of a gather of their bucket, each with that gather.

    See [Note: Gradients in the place of their parameters].

    Args:
        ranges: the result of :func:`live_ranges`, without ranges in private slots.
    """
    gathers: dict[Bucket, LiveRange] = {}
    found = {}
    for position, live in sorted(ranges.items()):
        spec = live.bucket.spec
        if trace.bound_symbols[position].sym is fsdp_all_gather:
            gathers[live.bucket] = live
            continue
        gather = gathers.get(live.bucket)
        if gather is None or not gather.start < live.start <= gather.end or spec.param_dtype != spec.reduce_dtype:
            continue
        writes = [live.last_access.get(index, position) for index in gather.last_access]
        if gather.end < position and all(r < w for r, w in zip(gather.last_access.values(), writes, strict=True)):
            found[live] = gathers.pop(live.bucket)
    return found


def slot_bytes_of(issue: BoundSymbol) -> int:
    """Return the bytes of the slot that a gather or a reduction needs, including alignment and staging."""
    spec = bucket_of(issue).spec
    return slot_bytes(spec, payload(issue.sym.name, spec)[1])


def shared_slots(trace: TraceCtx) -> tuple[int, int]:
    """Return the bytes of arena that the shared slots of a trace occupy, and a lower bound for any allocation."""
    issues = (fsdp_all_gather, fsdp_reduce_scatter)
    ends: dict[Arena, int] = {}
    for bucket, slot in ((bucket_of(b), Issue(b).slot) for b in trace.bound_symbols if b.sym in issues):
        if slot is not bucket.private_slot:
            ends[slot.arena] = max(ends.get(slot.arena, 0), slot.end)
    return sum(ends.values()), peak_live_bytes(trace)


def peak_live_bytes(trace: TraceCtx) -> int:
    """Return the peak bytes of unsharded parameters and gradients in shared slots: a lower bound for any arena."""
    ranges = live_ranges(trace)
    slots = {i: Issue(trace.bound_symbols[i]).planned_slot for i in ranges}
    shared = {i: r for i, r in ranges.items() if slots[i] is None or slots[i] is not r.bucket.private_slot}
    slot_of = {r: slots[i] for i, r in shared.items()}
    for reduction, gather in grads_over_params(trace, shared).items():
        taken, needed = slot_of[gather], slot_of[reduction]
        if taken is not None and needed is not None and taken.overlaps(needed):
            gather.end = reduction.start - 1
    return _peak_bytes(shared.values())


def filling_bytes(trace: TraceCtx) -> int:
    """Return the peak bytes of slots that hold gradients whose reductions have not been issued yet.

    A reduction counts as issued right after its last gradient, as in a sorted trace.
    """
    produced = {out: position for position, bsym in enumerate(trace.bound_symbols) for out in outs_of(bsym)}
    spans = []
    for position, live in live_ranges(trace).items():
        if live.grads:
            last = max(produced.get(arg, -1) for arg in args_of(trace.bound_symbols[position]))
            spans.append((live.start, last, live.nbytes))
    return _peak_of_spans(spans)


def _peak_bytes(ranges: Iterable[LiveRange]) -> int:
    return _peak_of_spans((r.start, r.end, r.nbytes) for r in ranges)


def _peak_of_spans(spans: Iterable[tuple[int, int, int]]) -> int:
    """Return the largest sum of bytes at one position, of spans ``(start, end, bytes)`` with both ends included."""
    changes: dict[int, int] = {}
    for start, end, nbytes in spans:
        changes[start] = changes.get(start, 0) + nbytes
        changes[end + 1] = changes.get(end + 1, 0) - nbytes
    return max(itertools.accumulate((changes[position] for position in sorted(changes)), initial=0))


def _extend_ranges(
    spans: dict[LiveRange, tuple[int, int]], assign: Callable[[], dict[LiveRange, int] | None]
) -> dict[LiveRange, int] | None:
    """Stretch live ranges to the given spans, in order, as many as ``assign`` finds offsets for.

    Where one more does not fit, it may replace the previous one if it is larger.
    """
    before = {live: (live.start, live.end) for live in spans}
    found = None

    def fit(chosen: list[LiveRange]) -> bool:
        nonlocal found
        for live, (start, end) in (before | {live: spans[live] for live in chosen}).items():
            live.start, live.end = start, end
        offsets = assign()
        found = offsets or found
        return offsets is not None

    candidates = list(spans)
    chosen = candidates[: bisect_left(range(1, len(candidates) + 1), True, key=lambda n: not fit(candidates[:n]))]
    for live in candidates[len(chosen) :]:
        if fit([*chosen, live]):
            chosen.append(live)
        elif chosen and chosen[-1].nbytes < live.nbytes and fit([*chosen[:-1], live]):
            chosen[-1] = live
        else:
            break
    return found


def _assign_offsets(
    ranges: list[LiveRange], gather_of: dict[LiveRange, LiveRange], fixed: dict[LiveRange, int]
) -> dict[LiveRange, int]:
    """Return an offset for each range, with gradients in the place of their parameters if that needs less memory."""
    offsets = _allocate(ranges, fixed)
    over = {r: g for r, g in gather_of.items() if g not in fixed or r.nbytes <= g.nbytes}
    both = {r: LiveRange(g.bucket, g.start, r.end, max(g.nbytes, r.nbytes)) for r, g in over.items()}
    alone = [r for r in ranges if r not in over and r not in over.values()]
    preset = {both[r]: fixed[g] for r, g in over.items() if g in fixed}
    joined = _allocate([*alone, *both.values()], {r: o for r, o in fixed.items() if r in alone} | preset)
    if _arena_end(joined) < _arena_end(offsets):
        offsets = joined
        for reduction, gather in over.items():
            offsets[reduction] = offsets[gather] = joined[both[reduction]]
    return offsets


def _allocate(ranges: list[LiveRange], fixed: dict[LiveRange, int]) -> dict[LiveRange, int]:
    """Return an offset for each range; those in ``fixed`` keep theirs."""
    active: list[LiveRange] = []
    neighbours: dict[LiveRange, list[LiveRange]] = {live: [] for live in ranges}
    for live in sorted(ranges, key=lambda r: r.start):
        active = [other for other in active if other.end >= live.start]
        for other in active:
            if other.bucket.arena is live.bucket.arena:
                neighbours[other].append(live)
                neighbours[live].append(other)
        active.append(live)
    free = [live for live in ranges if live not in fixed]
    return min((_first_fit(sorted(free, key=order), neighbours, fixed) for order in _ORDERS), key=_arena_end)


def _arena_end(offsets: dict[LiveRange, int]) -> int:
    return max((live.nbytes + offset for live, offset in offsets.items()), default=0)


_ORDERS: tuple[Callable[[LiveRange], tuple[int, ...]], ...] = (
    lambda r: (-r.nbytes, r.start),
    lambda r: (-r.nbytes, r.start - r.end, r.start),
    lambda r: (r.start, -r.nbytes),
    lambda r: ((r.start - r.end) * r.nbytes, r.start),
    lambda r: (-r.end, r.start),
)


def _first_fit(
    ranges: list[LiveRange], neighbours: dict[LiveRange, list[LiveRange]], fixed: dict[LiveRange, int]
) -> dict[LiveRange, int]:
    """Assign each range, in this order, the lowest offset that is free during its whole live range."""
    offsets = dict(fixed)
    for live in ranges:
        taken = sorted((offsets[n], offsets[n] + n.nbytes) for n in neighbours[live] if n in offsets)
        offset = 0
        for begin, end in taken:
            if begin - offset >= live.nbytes:
                break
            offset = max(offset, end)
        offsets[live] = offset
    return offsets
