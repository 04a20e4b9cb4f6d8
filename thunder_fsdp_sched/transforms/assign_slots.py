"""Assign memory to every gather and reduction of a sorted trace, as little as prefetch and liveness allow.

[Note: Interval allocation]
A gather holds its slot from its issue to the last consumer of its parameters, views included. A reduction holds its
slot from the first gradient that is written in place (from its issue if none is) to its wait, or to the issue of the
all-reduce across replicas.

Ranges of the arena are assigned one by one, each at the lowest offset that is free during its whole live range. Several
orders are tried: largest first (greedy by size, Pisarchyk and Lee 2020, arXiv:2001.03288), by start, by area, and by
end from the back. The order that needs the least memory wins. Buckets of equal size get exactly as many slots as are
live at once. With several sizes the result may exceed the lower bound, which is the most bytes live at once;
``step_memory`` reports both.

[Note: Room for the first gradients]
Backward begins with the gradients of the bucket that forward gathered last, often that of a large head, while the
buckets gathered before it are still resident. Gradients in a wider dtype than parameters do not fit into the range of
their parameters, and the next range holds another bucket. So forward's layout is mirrored if the arena then has to grow
less: with these parameters at the top, their gradients extend into the memory that backward adds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from thunder.core.trace import TraceCtx

from ..ir.analysis import BEFORE_TRACE, Analysis, Lifetime, peak_bytes
from ..ir.effects import effects
from ..ir.inspection import has_backward, with_bound_symbols
from ..ir.slots import grads_over_params, peak_live_bytes, retained_by_forward
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, slot_bytes

_RESIDENCY_GROWTH = 1 / 32
"""How much larger backward's arena may grow to keep forward's buckets resident, as a share of its bytes. The edge
pieces of a block have a little more padding than the block itself."""


def assign_slots(
    trace: TraceCtx,
    *,
    kept_buckets: Collection[Bucket] = (),
    arena_of: Callable[[Bucket], Arena] = lambda bucket: bucket.arena,
    forward: TraceCtx | None = None,
    reuses: bool = True,
    release: bool = False,
    trains: bool = True,
    backward_arena: bool = False,
) -> TraceCtx:
    """Assign a slot to each ``fsdp_all_gather`` and ``fsdp_reduce_scatter``, and to the writes of their gradients.

    Runs after ``sort_communication`` or ``replay_schedule``, which fix the live ranges, and before
    ``reuse_from_forward``. A trace without communication keeps its bound symbols. Before::

        ft148 = fsdp_all_gather(bucket_blocks_1, None, t_blocks_1_weight, reuse_cast=False)  # 16,384 bytes float32
        (t109,) = fsdp_wait_params(bucket_blocks_0, ft146)
        t110 = torch.nn.functional.linear(x, t109, None)
        ft150 = fsdp_all_gather(bucket_blocks_2, None, t_blocks_2_weight, reuse_cast=False)  # 16,384 bytes float32

    After: block 2 reuses the slot of block 0, whose last consumer has run::

        ft148 = fsdp_all_gather(bucket_blocks_1, slot_1, t_blocks_1_weight, reuse_cast=False)  # 16,384 bytes float32
        (t109,) = fsdp_wait_params(bucket_blocks_0, ft146)
        t110 = torch.nn.functional.linear(x, t109, None)
        ft150 = fsdp_all_gather(bucket_blocks_2, slot_0, t_blocks_2_weight, reuse_cast=False)  # 16,384 bytes float32

    See [Note: Interval allocation].

    Args:
        kept_buckets: the buckets that stay unsharded (ZeRO-2). They are gathered into private slots, where their
            gradients replace them if that is safe. The others, and all other gradients, share an arena.
        arena_of: returns a bucket's arena. Pass another arena to try out a plan without changing the real one.
        forward: for a backward trace, its forward trace with slots.
        reuses: whether backward may reuse forward's buckets: [Note: Buckets left by forward] in ``reuse_from_forward``.
        release: whether a step frees the memory; one without a backward then gathers kept buckets like the others.
        trains: whether the step has a backward.
        backward_arena: whether only backward allocates memory for its slots that do not fit into forward's memory. See
            [Note: Memory that only backward needs] in ``release_slots``.
    """
    if release and not trains:
        kept_buckets = ()  # private slots may hold the buckets of a forward whose backward is still to come
    ranges = Analysis(trace).slots
    private = {issue for issue, live in ranges.items() if live.is_gather and live.bucket.base in kept_buckets}
    if kept_buckets and forward is not None:
        from ..ir.kept_slots import grads_over_kept_params  # here, because ZeRO-3 keeps no bucket

        private |= grads_over_kept_params(forward, trace)
    arena_split = _bytes_of_forward(forward, arena_of) if backward_arena and forward is not None else None
    shared = _SharedSlots([live for issue, live in ranges.items() if issue not in private], arena_split)
    offsets = _offsets(trace, shared, forward if reuses else None, trains=trains)
    bsyms = list(trace.bound_symbols)
    for issue, live in ranges.items():
        if issue in private:
            slot = live.bucket.private_slot
        elif arena_split is None or offsets[issue] < arena_split:
            slot = arena_of(live.bucket).slot(offsets[issue], live.nbytes)
        else:
            slot = arena_of(live.bucket).extension.slot(offsets[issue] - arena_split, live.nbytes)
        for user in (*live.writes, issue):
            _, _, *others = bsyms[user].args
            bsyms[user] = bsyms[user].from_bsym(args=(live.bucket, slot, *others))
    return with_bound_symbols(trace, bsyms, "fsdp: assign slots")


def _bytes_of_forward(forward: TraceCtx, arena_of: Callable[[Bucket], Arena]) -> int:
    """Return the bytes of arena that the shared slots of a forward trace occupy."""
    used = ((e.bucket, e.uses) for e in map(effects, forward.bound_symbols))
    return max((slot.end for bucket, slot in used if bucket and slot and slot.arena is arena_of(bucket)), default=0)


class _Resident(NamedTuple):
    """A bucket that is resident longer than it is read: up to the end of forward, or from the start of backward.

    ``offset`` (bytes) is where forward left it, and where it must stay.
    """

    live: Lifetime
    offset: int | None = None


class _ArenaLimits(NamedTuple):
    """Limits (bytes) on the arena, and on the gathered buckets that are live at once."""

    arena_bytes: int
    gathered_bytes: int


def _offsets(trace: TraceCtx, shared: _SharedSlots, forward: TraceCtx | None, *, trains: bool) -> dict[int, int]:
    """Return the offset of each shared slot by its issue, with as many buckets resident longer as fit.

    A bucket that does not fit in addition may replace the previous one if it is larger.
    """
    best = shared.offsets()
    assert best is not None
    ranges = shared.ranges.values()
    arena_bytes, gathered_bytes = _end(ranges, best), _gathered_bytes(ranges)
    gathers = [live for live in reversed(ranges) if live.is_gather]
    candidates: list[_Resident] = []
    if trains and has_backward(trace):
        candidates = [_Resident(replace(live, last=len(trace.bound_symbols))) for live in gathers]
    elif forward is not None:
        retained = retained_by_forward(forward)
        needed = max([arena_bytes, *(slot.end for slot in retained.values())])
        arena_bytes = needed + int(needed * _RESIDENCY_GROWTH)
        gathered_bytes = max(gathered_bytes, peak_live_bytes(forward))
        first = {live.bucket.primary: live for live in gathers}
        candidates = [
            _Resident(replace(live, first=BEFORE_TRACE), retained[primary].offset)
            for primary, live in reversed(first.items())
            if primary in retained
        ]
    limits = _ArenaLimits(arena_bytes, gathered_bytes)

    @cache
    def offsets_with(number: int) -> dict[int, int] | None:
        return shared.offsets(candidates[:number], limits)

    number = bisect_left(range(1, len(candidates) + 1), True, key=lambda number: offsets_with(number) is None)
    best = (offsets_with(number) if number else None) or best
    chosen = candidates[:number]
    for candidate in candidates[number:]:
        more = [*chosen, candidate]
        offsets = shared.offsets(more, limits)
        if offsets is None and chosen and chosen[-1].live.nbytes < candidate.live.nbytes:
            more = [*chosen[:-1], candidate]
            offsets = shared.offsets(more, limits)
        if offsets is None:
            break
        chosen, best = more, offsets
    if forward is None and chosen:
        # See [Note: Room for the first gradients].
        layouts = best, _mirrored(ranges, best)
        return min(layouts, key=lambda offsets: max(_end(ranges, offsets), _end_of_first_grads(chosen, offsets)))
    return best


def _mirrored(ranges: Collection[Lifetime], offsets: Mapping[int, int]) -> dict[int, int]:
    """Return the offsets with the top of each arena at the bottom."""
    ends: dict[Arena, int] = defaultdict(int)
    for live in ranges:
        ends[live.bucket.arena] = max(ends[live.bucket.arena], offsets[live.issue] + live.nbytes)
    return {live.issue: ends[live.bucket.arena] - offsets[live.issue] - live.nbytes for live in ranges}


def _end_of_first_grads(resident: Sequence[_Resident], offsets: Mapping[int, int]) -> int:
    """Return where the gradients of the first resident bucket would end beside the others, at forward's offsets."""
    spec = resident[0].live.bucket.spec
    grads = replace(resident[0].live, nbytes=slot_bytes(spec, spec.reduce_dtype))
    others = [r.live for r in resident[1:] if r.live.bucket.arena is grads.bucket.arena]
    fixed = {other.issue: offsets[other.issue] for other in others}
    return _first_fit([grads], {grads.issue: others}, fixed, None)[grads.issue] + grads.nbytes


class _SharedSlots:
    """The shared slots of a trace, which are to be placed in arenas.

    Args:
        ranges: the live range of each slot.
        arena_split: an offset (bytes) that no slot may cross.

    Attributes:
        gather_of: the issue of the gather whose slot a reduction of its bucket can use, keyed by the reduction's issue.
    """

    def __init__(self, ranges: Sequence[Lifetime], arena_split: int | None) -> None:
        self.ranges = {live.issue: live for live in ranges}
        self.gather_of = {r.issue: g.issue for r, g in grads_over_params(ranges).items()}
        self.arena_split = arena_split

    def offsets(self, resident: Sequence[_Resident] = (), limits: _ArenaLimits | None = None) -> dict[int, int] | None:
        """Return an offset for each issue, with gradients in the place of their parameters if that needs less memory.

        Return ``None`` if limits are given and exceeded.
        """
        ranges = self.ranges | {r.live.issue: r.live for r in resident}
        fixed = {r.live.issue: r.offset for r in resident if r.offset is not None}
        if limits is not None and _gathered_bytes(ranges.values()) > limits.gathered_bytes:
            return None
        offsets = _allocate(ranges.values(), fixed, self.arena_split)
        joined = dict(ranges)  # gradients and parameters in one range, by the issue of the gather
        over: dict[int, int] = {}
        for reduction, gather in self.gather_of.items():
            grads, params = ranges[reduction], ranges[gather]
            if gather not in fixed or grads.nbytes <= params.nbytes:
                over[reduction] = gather
                joined[gather] = replace(params, last=grads.last, nbytes=max(params.nbytes, grads.nbytes))
                del joined[reduction]
        together = _allocate(joined.values(), fixed, self.arena_split)
        if _end(joined.values(), together) < _end(ranges.values(), offsets):
            offsets = together | {reduction: together[gather] for reduction, gather in over.items()}
        return None if limits is not None and _end(ranges.values(), offsets) > limits.arena_bytes else offsets


def _gathered_bytes(ranges: Iterable[Lifetime]) -> int:
    """Return the most bytes of gathered buckets that are live at once."""
    return peak_bytes((live.first, live.last, live.nbytes) for live in ranges if live.is_gather)


def _end(ranges: Iterable[Lifetime], offsets: Mapping[int, int]) -> int:
    """Return the bytes of arena that the ranges need at these offsets."""
    return max((offsets[live.issue] + live.nbytes for live in ranges), default=0)


def _allocate(ranges: Collection[Lifetime], fixed: Mapping[int, int], arena_split: int | None) -> dict[int, int]:
    """Return an offset for each range, by its issue; those in ``fixed`` keep theirs, and none crosses ``arena_split``."""
    active: list[Lifetime] = []
    neighbours: dict[int, list[Lifetime]] = {live.issue: [] for live in ranges}
    for live in sorted(ranges, key=lambda r: r.first):
        active = [other for other in active if other.last >= live.first]
        for other in active:
            if other.bucket.arena is live.bucket.arena:
                neighbours[other.issue].append(live)
                neighbours[live.issue].append(other)
        active.append(live)
    free = [live for live in ranges if live.issue not in fixed]
    found = (_first_fit(sorted(free, key=order), neighbours, fixed, arena_split) for order in _ORDERS)
    return min(found, key=lambda offsets: _end(ranges, offsets))


_ORDERS: tuple[Callable[[Lifetime], tuple[int, ...]], ...] = (
    lambda r: (-r.nbytes, r.first),
    lambda r: (-r.nbytes, r.first - r.last, r.first),
    lambda r: (r.first, -r.nbytes),
    lambda r: ((r.first - r.last) * r.nbytes, r.first),
    lambda r: (-r.last, r.first),
)


def _first_fit(
    ranges: Sequence[Lifetime],
    neighbours: Mapping[int, Sequence[Lifetime]],
    fixed: Mapping[int, int],
    arena_split: int | None,
) -> dict[int, int]:
    """Assign each range, in this order, the lowest offset that is free during its whole live range."""
    offsets = dict(fixed)
    for live in ranges:
        occupied = (n for n in neighbours[live.issue] if n.issue in offsets)
        taken = sorted((offsets[n.issue], offsets[n.issue] + n.nbytes) for n in occupied)
        if arena_split is not None:
            taken = sorted([*taken, (arena_split, arena_split)])
        offset = 0
        for begin, end in taken:
            if begin - offset >= live.nbytes:
                break
            offset = max(offset, end)
        offsets[live.issue] = offset
    return offsets
