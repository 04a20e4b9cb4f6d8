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
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from thunder.core.trace import TraceCtx

from ..ir.analysis import BEFORE_TRACE, Analysis, Lifetime, peak_bytes
from ..ir.effects import effects
from ..ir.inspection import has_backward, with_bound_symbols
from ..ir.slots import grads_over_kept_params, grads_over_params, peak_live_bytes, retained_by_forward
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, Slot

_RESIDENCY_GROWTH = 1 / 32
"""How much larger backward's arena may grow to keep forward's buckets resident, as a share of its bytes. The edge
pieces of a block have a little more padding than the block itself."""


def assign_slots(
    trace: TraceCtx,
    *,
    kept: Collection[Bucket] = (),
    arena_of: Callable[[Bucket], Arena] = lambda bucket: bucket.arena,
    forward: TraceCtx | None = None,
    max_bytes: int | None = None,
    separate: bool = False,
    extends: bool = False,
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
        kept: buckets that stay unsharded (ZeRO-2). They are gathered into private slots, where their gradients replace
            them if that is safe. The others, and all other gradients, share an arena.
        arena_of: returns a bucket's arena. Pass another arena to try out a plan without changing the real one.
        forward: for a backward trace, its forward trace after ``mark_retained_by_forward``. See
            [Note: Buckets left by forward] in ``reuse_from_forward``.
        max_bytes: limit (bytes) up to which the arena may grow to keep forward's buckets resident.
        separate: whether each bucket gets memory of its own instead of a range of an arena, for ``release="bucket"``.
        extends: whether slots of backward beyond the memory that forward needs get memory that only backward allocates.
            See [Note: Memory that only backward needs] in ``release_slots``.
    """
    ranges = Analysis(trace).slots
    private = {issue for issue, live in ranges.items() if live.is_gather and live.bucket.base in kept}
    if kept and forward is not None:
        private |= grads_over_kept_params(forward, trace)
    shared = [live for issue, live in ranges.items() if issue not in private]
    border = _bytes_of_forward(forward, arena_of) if extends and forward is not None else None
    plan = _Plan(shared, {r.issue: g.issue for r, g in grads_over_params(shared).items()}, border=border)
    offsets = {} if separate else _offsets(trace, plan, forward, max_bytes)
    bsyms = list(trace.bound_symbols)
    for issue, live in ranges.items():
        if issue in private:
            slot = live.bucket.ensure_private_slot()
        elif separate:
            slot = _separate_slot(live, over_params=issue in plan.gather_of)
        else:
            slot = _slot_at(arena_of(live.bucket), offsets[issue], live.nbytes, border)
        for user in (*live.writes, issue):
            _, _, *others = bsyms[user].args
            bsyms[user] = bsyms[user].from_bsym(args=(live.bucket, slot, *others))
    return with_bound_symbols(trace, bsyms, "fsdp: assign slots")


def _offsets(trace: TraceCtx, plan: _Plan, forward: TraceCtx | None, max_bytes: int | None) -> dict[int, int]:
    """Return the offset of each shared slot by its issue, with as many buckets resident longer as fit."""
    offsets = plan.offsets()
    arena_bytes, gathered_bytes = _end(plan.ranges, offsets), plan.gathered_bytes
    gathers = [live for live in plan.ranges if live.is_gather]
    candidates: list[_Candidate] = []
    if has_backward(trace):
        candidates = [_Candidate(replace(live, last=len(trace.bound_symbols))) for live in reversed(gathers)]
    elif forward is not None:
        retained = retained_by_forward(forward)
        needed = max([arena_bytes, *(slot.end for slot in retained.values())])
        arena_bytes = needed + int(needed * _RESIDENCY_GROWTH)
        arena_bytes = arena_bytes if max_bytes is None else max(needed, min(arena_bytes, max_bytes))
        gathered_bytes = max(gathered_bytes, peak_live_bytes(forward))
        first = {live.bucket.primary: live for live in reversed(gathers)}
        candidates = [
            _Candidate(replace(live, first=BEFORE_TRACE), retained[primary].offset)
            for primary, live in reversed(first.items())
            if primary in retained
        ]
    return _keep_resident(plan, candidates, _Limits(arena_bytes, gathered_bytes)) or offsets


def _bytes_of_forward(forward: TraceCtx, arena_of: Callable[[Bucket], Arena]) -> int:
    """Return the bytes of arena that the shared slots of a forward trace occupy."""
    used = ((e.bucket, e.uses) for e in map(effects, forward.bound_symbols))
    return max((slot.end for bucket, slot in used if bucket and slot and slot.arena is arena_of(bucket)), default=0)


def _slot_at(arena: Arena, offset: int, nbytes: int, border: int | None) -> Slot:
    """Return the slot at an offset of an arena, or of its extension, which begins at ``border``."""
    if border is None or offset < border:
        return arena.slot(offset, nbytes)
    return arena.extension.slot(offset - border, nbytes)


def _separate_slot(live: Lifetime, *, over_params: bool) -> Slot:
    spec = live.bucket.spec
    dtype = spec.param_dtype if live.is_gather else spec.reduce_dtype
    return live.bucket.separate_slot("slot_of" if live.is_gather or over_params else "grads_of", dtype)


class _Candidate(NamedTuple):
    """A bucket that may be resident longer than it is read: up to the end of forward, or from the start of backward.

    ``offset`` is the one (bytes) that it must have to be resident from forward.
    """

    longer: Lifetime
    offset: int | None = None


class _Limits(NamedTuple):
    """Limits (bytes) on the arena, and on the gathered buckets that are live at once."""

    arena_bytes: int
    gathered_bytes: int


def _keep_resident(plan: _Plan, candidates: Sequence[_Candidate], limits: _Limits) -> dict[int, int] | None:
    """Return offsets with as many candidates as fit, in order; ``None`` if not even the first does.

    Where one more does not fit, it may replace the previous one if it is larger.
    """
    best: dict[int, int] | None = None
    number, too_many = 0, len(candidates) + 1  # so many candidates fit, so many do not
    while too_many - number > 1:
        middle = (number + too_many + 1) // 2
        offsets = plan.extended(candidates[:middle]).offsets_within(limits)
        if offsets is None:
            too_many = middle
        else:
            number, best = middle, offsets
    chosen = list(candidates[:number])
    for candidate in candidates[number:]:
        more = [*chosen, candidate]
        offsets = plan.extended(more).offsets_within(limits)
        if offsets is None and chosen and chosen[-1].longer.nbytes < candidate.longer.nbytes:
            more = [*chosen[:-1], candidate]
            offsets = plan.extended(more).offsets_within(limits)
        if offsets is None:
            break
        chosen, best = more, offsets
    return best


@dataclass(frozen=True)
class _Plan:
    """The shared slots of a trace, to be laid into arenas. An issue is the position of a bound symbol.

    Attributes:
        ranges: when each of them is in use.
        gather_of: the issue of each reduction that can use the slot of a gather of its bucket, with that of the gather.
        fixed: offsets (bytes) that some slots must have, by their issues.
        border: an offset (bytes) that no slot may cross.
    """

    ranges: Sequence[Lifetime]
    gather_of: Mapping[int, int]
    fixed: Mapping[int, int] = field(default_factory=dict)
    border: int | None = None

    def extended(self, candidates: Sequence[_Candidate]) -> _Plan:
        """Return the plan with the candidates' ranges and offsets."""
        longer = {c.longer.issue: c.longer for c in candidates}
        return replace(
            self,
            ranges=[longer.get(live.issue, live) for live in self.ranges],
            fixed={c.longer.issue: c.offset for c in candidates if c.offset is not None},
        )

    @property
    def gathered_bytes(self) -> int:
        """The most bytes of gathered buckets that are live at once."""
        return peak_bytes((live.first, live.last, live.nbytes) for live in self.ranges if live.is_gather)

    def offsets_within(self, limits: _Limits) -> dict[int, int] | None:
        """Return :meth:`offsets`, or ``None`` if they exceed the limits."""
        if self.gathered_bytes > limits.gathered_bytes:
            return None
        offsets = self.offsets()
        return offsets if _end(self.ranges, offsets) <= limits.arena_bytes else None

    def offsets(self) -> dict[int, int]:
        """Return an offset for each issue, with gradients in the place of their parameters if that needs less memory."""
        apart = _allocate(self.ranges, self.fixed, self.border)
        by_issue = {live.issue: live for live in self.ranges}
        joined: dict[int, Lifetime] = {}  # a range for both, by the issue of the gather
        over: dict[int, int] = {}
        for reduction, gather in self.gather_of.items():
            grads, params = by_issue[reduction], by_issue[gather]
            if gather not in self.fixed or grads.nbytes <= params.nbytes:
                over[reduction] = gather
                joined[gather] = replace(params, last=grads.last, nbytes=max(params.nbytes, grads.nbytes))
        alone = [live for live in self.ranges if live.issue not in over and live.issue not in joined]
        ranges = [*alone, *joined.values()]
        together = _allocate(ranges, self.fixed, self.border)
        if _end(ranges, together) >= _end(self.ranges, apart):
            return apart
        return together | {reduction: together[gather] for reduction, gather in over.items()}


def _allocate(ranges: Sequence[Lifetime], fixed: Mapping[int, int], border: int | None) -> dict[int, int]:
    """Return an offset for each range, by its issue; those in ``fixed`` keep theirs, and none crosses ``border``."""
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
    found = (_first_fit(sorted(free, key=order), neighbours, fixed, border) for order in _ORDERS)
    return min(found, key=lambda offsets: _end(ranges, offsets))


def _end(ranges: Iterable[Lifetime], offsets: Mapping[int, int]) -> int:
    """Return the bytes of arena that the ranges need at these offsets."""
    return max((offsets[live.issue] + live.nbytes for live in ranges), default=0)


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
    border: int | None,
) -> dict[int, int]:
    """Assign each range, in this order, the lowest offset that is free during its whole live range."""
    offsets = dict(fixed)
    for live in ranges:
        occupied = (n for n in neighbours[live.issue] if n.issue in offsets)
        taken = sorted((offsets[n.issue], offsets[n.issue] + n.nbytes) for n in occupied)
        if border is not None:
            taken = sorted([*taken, (border, border)])
        offset = 0
        for begin, end in taken:
            if begin - offset >= live.nbytes:
                break
            offset = max(offset, end)
        offsets[live.issue] = offset
    return offsets
