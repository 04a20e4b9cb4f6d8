"""Choose memory and prefetch together: which buckets stay unsharded, and how far ahead the others are gathered.

[Note: The search]
A kept bucket is not gathered again in backward, but it occupies memory that gathers further ahead could use, and it
changes which of them overlap. So more kept buckets, or a larger prefetch distance, can make a step slower. The search
tries distances with nothing kept first. At the fastest it tries as many kept buckets as fit, half as many, and ever
closer numbers around the fastest so far; then the neighbouring distances with that number. Kept are the buckets that
backward reads first, because forward gathers them last and so they occupy memory for the shortest time.

The candidate with the shortest simulated step wins; among equals, the one that keeps more buckets, because it sends
less, and then the one with fewer bytes. The default, ``prefetch=1`` with nothing kept, is always tried. If it fits the
budget, nothing slower is chosen.

Each candidate runs through the same passes as the real trace, so its bytes are those that will be allocated and its
order is the real one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from thunder.core.trace import TraceCtx

from ..runtime.bucket import Bucket
from ..runtime.memory import Arena
from ..trace.inspection import split_joint
from ..trace.operands import bucket_of
from ..trace.symbols import fsdp_all_gather
from ..transforms import (
    assign_slots,
    mark_retained_by_forward,
    regather_for_backward,
    reuse_from_forward,
    sort_communication,
    sort_within_budget,
    write_grads_in_place,
)
from ..transforms.sort_within_budget import private_bytes, shared_budget
from .cost import CostModel
from .simulate import simulate

__all__ = ["Candidate", "Choice", "choose"]

_MAX_PREFETCH = 8
"""The largest prefetch distance that is tried; communication still exposed then cannot be hidden in the step."""

_PATIENCE = 2
"""How many distances without an improvement end the search."""

_WORTHWHILE = 5e-3
"""Relative improvement of the step time below which larger distances are not tried, because each takes compile time."""

_SAME = 1e-3
"""Relative difference below which step times count as equal, because the cost model is not more accurate."""


@dataclass(frozen=True)
class Candidate:
    """A setting of prefetch and kept buckets, with its simulated cost.

    Attributes:
        prefetch: how many prefetch steps gathers are issued ahead of their waits.
        kept: names of the buckets that stay unsharded from forward to backward.
        unsharded_bytes: bytes of all slots: kept buckets, gathered ones, and unsharded gradients.
        step_seconds: simulated time of forward and backward.
    """

    prefetch: int
    kept: tuple[str, ...]
    unsharded_bytes: int
    step_seconds: float


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen, and all that were considered."""

    chosen: Candidate
    considered: tuple[Candidate, ...]

    def __str__(self) -> str:
        lines = []
        for c in self.considered:
            mark = ">" if c == self.chosen else " "
            lines.append(
                f"{mark} prefetch {c.prefetch}  {len(c.kept):3d} buckets kept  {c.unsharded_bytes:>15,} bytes  "
                f"{c.step_seconds * 1e3:10.3f} ms"
            )
        return "\n".join(lines)


def choose(
    joint: TraceCtx,
    *,
    cost: CostModel,
    prefetch: int | None,
    kept: Collection[Bucket],
    may_keep: bool,
    max_unsharded_bytes: int | None,
    max_gathers_in_flight: int | None = None,
) -> Choice:
    """Search for the shortest simulated step within the budget.

    Args:
        joint: the joint trace with bucketed communication, before ``regather_for_backward``.
        cost: the cost model of the simulator.
        prefetch: a fixed prefetch distance; ``None`` tries several.
        kept: buckets that stay unsharded in any case.
        may_keep: whether more buckets may be kept.
        max_unsharded_bytes: the budget for all slots together; ``None`` for no limit.
        max_gathers_in_flight: how many gathers may be in flight; ``None`` for no limit.

    Raises:
        ValueError: nothing fits; the message has the bytes of the smallest candidate.
    """
    search = _Search(joint, cost, frozenset(kept), max_unsharded_bytes, max_gathers_in_flight)
    distances = [prefetch] if prefetch is not None else range(min(_MAX_PREFETCH, search.gathers) + 1)
    times: list[float] = []
    for distance in distances:
        candidate = search.consider(distance, 0)
        if candidate is None and distance > 0:
            break  # this distance does not fit, and no larger one can
        times += [candidate.step_seconds] if candidate else []
        if len(times) > _PATIENCE and min(times[-_PATIENCE:]) > min(times[:-_PATIENCE]) * (1 - _WORTHWHILE):
            break
    if not search.candidates:
        raise ValueError(
            f"max_unsharded_bytes: {max_unsharded_bytes:,} bytes are too few: with prefetch={distances[0]} and nothing kept "
            f"for backward the slots need {search.least_bytes(distances[0]):,} bytes. Allow more, or make smaller buckets "
            f"(bucketing_strategy)"
        )
    if may_keep and max_unsharded_bytes is not None:
        _keep_more(search, distances)
    default = search.candidates.get((1 if prefetch is None else prefetch, 0))
    longest = min(c.step_seconds for c in search.candidates.values()) * (1 + _SAME)
    if default is not None:
        longest = min(longest, default.step_seconds)
    good = [c for c in search.candidates.values() if c.step_seconds <= longest]
    considered = tuple(c for _, c in sorted(search.candidates.items()))
    return Choice(min(good, key=lambda c: (-len(c.kept), c.unsharded_bytes, c.prefetch)), considered)


def _keep_more(search: _Search, distances: Collection[int]) -> None:
    """Consider candidates that keep further buckets: at the fastest distance so far, then at its neighbours."""
    distance, _ = search.fastest()
    most = search.most(distance)
    step = max(most // 2, 1)
    numbers = [step, most]
    while step:
        for number in numbers:
            if 0 <= number <= most:
                search.consider(distance, number)
        step //= 2
        numbers = [search.fastest()[1] + step * sign for sign in (-1, 1)]
    _, number = search.fastest()
    for other in (distance - 1, distance + 1):
        if other in distances:
            search.consider(other, number)


class _Search:
    """Candidates by prefetch distance and number of buckets kept besides those that are kept in any case, each run once."""

    def __init__(
        self,
        joint: TraceCtx,
        cost: CostModel,
        kept: frozenset[Bucket],
        budget: int | None,
        max_gathers_in_flight: int | None,
    ) -> None:
        self.joint = joint
        self.cost = cost
        self.kept = kept
        self.budget = budget
        self.max_gathers_in_flight = max_gathers_in_flight
        self.gathers = sum(b.sym is fsdp_all_gather for b in joint.bound_symbols)
        self.candidates: dict[tuple[int, int], Candidate] = {}
        self._halves: dict[int, list[TraceCtx]] = {}
        self._planned: dict[tuple[int, int], tuple[Sequence[TraceCtx], int]] = {}

    def most(self, prefetch: int) -> int:
        """Return the largest number of further buckets that fits at this distance; 0 if none does."""
        low, high = 0, len(self.first_in_backward)
        if high == 0 or self._fits(prefetch, high):
            return high
        while high - low > 1:  # `low` fits, `high` does not
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(prefetch, middle) else (low, middle)
        return low

    def consider(self, prefetch: int, number: int) -> Candidate | None:
        """Return the candidate that keeps ``number`` further buckets; ``None`` if it does not fit the budget."""
        key = prefetch, number
        if key not in self.candidates and self._fits(*key):
            halves, nbytes = self._plan(*key)
            del self._planned[key]
            names = tuple(sorted(b.spec.name for b in self._kept(number)))
            seconds = simulate(halves, None, self.cost).step_seconds
            self.candidates[key] = Candidate(prefetch, names, nbytes, seconds)
        return self.candidates.get(key)

    def fastest(self) -> tuple[int, int]:
        """Return the distance and the number of further buckets of the fastest candidate."""
        return min(self.candidates, key=lambda key: self.candidates[key].step_seconds)

    def least_bytes(self, prefetch: int) -> int:
        """Return the bytes of all slots if no further bucket is kept."""
        return self._plan(prefetch, 0)[1]

    def _fits(self, prefetch: int, number: int) -> bool:
        key = prefetch, number
        return key in self.candidates or self.budget is None or self._plan(*key)[1] <= self.budget

    def _kept(self, number: int) -> frozenset[Bucket]:
        return self.kept | frozenset(self.first_in_backward[:number])

    def _plan(self, prefetch: int, number: int) -> tuple[Sequence[TraceCtx], int]:
        """Run the passes for one candidate in an unused arena, and return the sorted halves and the bytes of all slots."""
        key = prefetch, number
        if key not in self._planned:
            self._planned[key] = self._run_passes(prefetch, self._kept(number), self._unsorted(number))
        return self._planned[key]

    def _unsorted(self, number: int) -> list[TraceCtx]:
        if number not in self._halves:
            joint = regather_for_backward(self.joint, kept=self._kept(number))
            self._halves[number] = [write_grads_in_place(half) for half in split_joint(joint)]
        return self._halves[number]

    def _run_passes(
        self, prefetch: int, kept: frozenset[Bucket], unsorted: Sequence[TraceCtx]
    ) -> tuple[Sequence[TraceCtx], int]:
        scratch: dict[Arena, Arena] = {}

        def arena_of(bucket: Bucket) -> Arena:
            return scratch.setdefault(bucket.arena, Arena(bucket.arena.device))

        halves: list[TraceCtx] = []
        for half in unsorted:
            forward = halves[0] if halves else None
            left = shared_budget(half, budget=self.budget, kept=kept)
            sort = partial(sort_communication, prefetch=prefetch, max_gathers_in_flight=self.max_gathers_in_flight)
            if self.budget is None:
                half = sort(half)
            else:
                half = sort_within_budget(half, sort=sort, max_unsharded_bytes=self.budget, kept=kept, forward=forward)
            half = assign_slots(half, kept=kept, arena_of=arena_of, forward=forward, max_bytes=left)
            halves.append(
                mark_retained_by_forward(half) if forward is None else reuse_from_forward(half, forward=forward)
            )
        return halves, private_bytes(halves[0], kept) + sum(arena.nbytes for arena in scratch.values())

    @cached_property
    def first_in_backward(self) -> list[Bucket]:
        """Return the buckets that backward gathers again, in the order of their first consumers."""
        halves = split_joint(regather_for_backward(self.joint, kept=self.kept))
        if len(halves) == 1:
            return []
        ordered = sort_communication(halves[1], prefetch=0)
        return list(dict.fromkeys(bucket_of(b).base for b in ordered.bound_symbols if b.sym is fsdp_all_gather))
