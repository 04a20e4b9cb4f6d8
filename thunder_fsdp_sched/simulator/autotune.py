"""Choose together what stays unsharded, how far ahead the rest is gathered, and what backward computes again.

[Note: The search]
A kept bucket is not gathered again in backward, but it occupies memory that gathers further ahead could use, and it
changes which of them overlap. So more kept buckets, or a larger prefetch distance, can make a step slower. The search
tries distances with nothing kept first. At the fastest it tries as many kept buckets as fit, half as many, and ever
closer numbers around the fastest so far; then the neighbouring distances with that number. Kept are the buckets that
backward reads first, because forward gathers them last and so they occupy memory for the shortest time.

With ``max_memory``, a candidate whose step exceeds it computes values again in backward, or moves them to host memory:
those that cost the least time (``activation_plan``). Their effect on memory is estimated first. The passes then give the
real peak, and the estimate is corrected by the difference.

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
from typing import NamedTuple

from thunder.core.trace import TraceCtx, from_trace

from ..runtime.bucket import Bucket
from ..runtime.memory import Arena
from ..trace.inspection import split_joint
from ..trace.operands import bucket_of
from ..trace.step_memory import StepMemory
from ..trace.symbols import fsdp_all_gather
from ..transforms import (
    assign_slots,
    mark_retained_by_forward,
    offload_activations,
    offloadable,
    regather_for_backward,
    reuse_from_forward,
    sort_communication,
    sort_host_copies,
    sort_within_budget,
    write_grads_in_place,
)
from ..transforms.sort_within_budget import private_bytes, shared_budget
from .activation_plan import ActivationPlan, ActivationPlans
from .cost import CostModel, compute_seconds
from .simulate import simulate

__all__ = ["Candidate", "Choice", "Limits", "choose"]

_MAX_PREFETCH = 8
"""The largest prefetch distance that is tried; communication still exposed then cannot be hidden in the step."""

_PATIENCE = 2
"""How many distances without an improvement end the search."""

_WORTHWHILE = 5e-3
"""Relative improvement of the step time below which larger distances are not tried, because each takes compile time."""

_CORRECTIONS = 4
"""How often the estimate of memory is corrected by the real peak."""

_SAME = 1e-3
"""Relative difference below which step times count as equal, because the cost model is not more accurate."""


class Limits(NamedTuple):
    """Limits of a search; ``None`` where there is none.

    Attributes:
        unsharded_bytes: bytes of all slots together.
        gathers_in_flight: how many gathers may be in flight.
        memory: bytes of all memory of the step, without optimizer state.
    """

    unsharded_bytes: int | None = None
    gathers_in_flight: int | None = None
    memory: int | None = None

    @property
    def any_bytes(self) -> bool:
        """Whether bytes are limited."""
        return self.unsharded_bytes is not None or self.memory is not None


class MemoryLimitError(ValueError):
    """``max_memory`` is too little for a step.

    Attributes:
        least_bytes: what the step needs with all that lowers its peak.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class Candidate:
    """A setting of prefetch, kept buckets and recomputed values, with its simulated cost.

    Attributes:
        prefetch: how many prefetch steps gathers are issued ahead of their waits.
        kept: names of the buckets that stay unsharded from forward to backward.
        unsharded_bytes: bytes of all slots: kept buckets, gathered ones, and unsharded gradients.
        step_seconds: simulated time of forward and backward.
        recomputed: names of the values that backward computes again.
        offloaded: names of the values that wait in host memory between forward and backward.
        peak_bytes: peak of all memory of the step; ``None`` without ``max_memory``.
    """

    prefetch: int
    kept: tuple[str, ...]
    unsharded_bytes: int
    step_seconds: float
    recomputed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    peak_bytes: int | None = None

    def __str__(self) -> str:
        text = f"prefetch {self.prefetch}  {len(self.kept):3d} buckets kept  {self.unsharded_bytes:>15,} bytes"
        if self.peak_bytes is not None:
            text += f"  {len(self.recomputed):5d} values recomputed  {len(self.offloaded):4d} offloaded"
            text += f"  {self.peak_bytes:>17,} bytes in all"
        return f"{text}  {self.step_seconds * 1e3:10.3f} ms"


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen, and all that were considered."""

    chosen: Candidate
    considered: tuple[Candidate, ...]

    def __str__(self) -> str:
        return "\n".join(f"{'>' if c == self.chosen else ' '} {c}" for c in self.considered)


def choose(
    joint: TraceCtx,
    *,
    cost: CostModel,
    prefetch: int | None,
    kept: Collection[Bucket],
    may_keep: bool,
    limits: Limits,
    buckets: Sequence[Bucket] = (),
) -> Choice:
    """Search for the shortest simulated step within the limits.

    Args:
        joint: the joint trace with bucketed communication, before ``regather_for_backward``.
        cost: the cost model of the simulator.
        prefetch: a fixed prefetch distance; ``None`` tries several.
        kept: buckets that stay unsharded in any case.
        may_keep: whether more buckets may be kept.
        limits: those on memory and on gathers in flight.
        buckets: all buckets of the module, whose shards count as memory of the step.

    Raises:
        MemoryLimitError, ValueError: nothing fits; the message has the bytes of the smallest candidate.
    """
    search = _Search(joint, cost, frozenset(kept), limits, buckets)
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
        raise _error(search.smallest(distances[0]), distances[0], limits)
    if may_keep and limits.any_bytes:
        _keep_more(search, distances)
    default = search.candidates.get((1 if prefetch is None else prefetch, 0))
    longest = min(c.step_seconds for c in search.candidates.values()) * (1 + _SAME)
    if default is not None:
        longest = min(longest, default.step_seconds)
    good = [c for c in search.candidates.values() if c.step_seconds <= longest]
    considered = tuple(c for _, c in sorted(search.candidates.items()))
    return Choice(min(good, key=lambda c: (-len(c.kept), c.unsharded_bytes, c.prefetch)), considered)


def _error(least: _Plan, prefetch: int, limits: Limits) -> ValueError:
    """Return the error for limits that not even the smallest plan keeps."""
    if limits.unsharded_bytes is not None and least.unsharded_bytes > limits.unsharded_bytes:
        return ValueError(
            f"max_unsharded_bytes: {limits.unsharded_bytes:,} bytes are too few: with prefetch={prefetch} and nothing kept "
            f"for backward the slots need {least.unsharded_bytes:,} bytes. Allow more, or make smaller buckets "
            f"(bucketing_strategy)"
        )
    less = "prefetch='auto', " if prefetch else ""
    assert least.peak_bytes is not None
    return MemoryLimitError(
        f"max_memory: {limits.memory:,} bytes are too few: with prefetch={prefetch} and as much recomputed or offloaded "
        f"as helps the step needs {least.peak_bytes:,} bytes. Allow more, or use {less}smaller batches, more ranks, lower "
        f"precision (mp_policy) or smaller buckets (bucketing_strategy)",
        least.peak_bytes,
    )


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


class _Plan(NamedTuple):
    """The traces of one candidate.

    ``unsharded_bytes`` are those of all slots, ``recomputed`` and ``offloaded`` the names of values that backward computes
    again or that wait in host memory, ``peak_bytes`` the peak of all memory, if it is limited.
    """

    halves: Sequence[TraceCtx]
    unsharded_bytes: int
    recomputed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    peak_bytes: int | None = None


class _Search:
    """Candidates by prefetch distance and number of buckets kept besides those that are kept in any case, each run once."""

    def __init__(
        self, joint: TraceCtx, cost: CostModel, kept: frozenset[Bucket], limits: Limits, buckets: Sequence[Bucket]
    ) -> None:
        self.joint = joint
        self.cost = cost
        self.kept = kept
        self.limits = limits
        self.buckets = buckets
        self.gathers = sum(b.sym is fsdp_all_gather for b in joint.bound_symbols)
        self.candidates: dict[tuple[int, int], Candidate] = {}
        self._halves: dict[int, list[TraceCtx]] = {}
        self._planned: dict[tuple[int, int], _Plan] = {}

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
            plan = self._planned.pop(key)
            names = tuple(sorted(b.spec.name for b in self._kept(number)))
            seconds = simulate(plan.halves, None, self.cost).step_seconds
            self.candidates[key] = Candidate(prefetch, names, plan.unsharded_bytes, seconds, *plan[2:])
        return self.candidates.get(key)

    def fastest(self) -> tuple[int, int]:
        """Return the distance and the number of further buckets of the fastest candidate."""
        return min(self.candidates, key=lambda key: self.candidates[key].step_seconds)

    def smallest(self, prefetch: int) -> _Plan:
        """Return the plan that keeps no further bucket, and recomputes as much as helps if it does not fit."""
        return self._plan(prefetch, 0)

    def _fits(self, prefetch: int, number: int) -> bool:
        if (prefetch, number) in self.candidates:
            return True
        plan, most = self._plan(prefetch, number), self.limits.unsharded_bytes
        return (most is None or plan.unsharded_bytes <= most) and self._is_within_memory(plan)

    def _kept(self, number: int) -> frozenset[Bucket]:
        return self.kept | frozenset(self.first_in_backward[:number]) if number else self.kept

    def _plan(self, prefetch: int, number: int) -> _Plan:
        """Run the passes for one candidate in an unused arena. If its memory is too much, recompute what helps."""
        key = prefetch, number
        if key not in self._planned:
            plan = self._run_passes(prefetch, number)
            if not self._is_within_memory(plan):
                plan = self._with_less_memory(prefetch, number, plan)
            self._planned[key] = plan
        return self._planned[key]

    def _is_within_memory(self, plan: _Plan) -> bool:
        return self.limits.memory is None or plan.peak_bytes is None or plan.peak_bytes <= self.limits.memory

    def _with_less_memory(self, prefetch: int, number: int, plan: _Plan) -> _Plan:
        """Return the fastest plan found that recomputes and offloads to keep the limit; else the smallest found."""
        if len(plan.halves) == 1:
            return plan
        plans = [self._corrected(prefetch, number, plan, offload=False)]
        if self._offloadable:
            plans.append(self._corrected(prefetch, number, plan, offload=True))
        fitting = [p for p in plans if self._is_within_memory(p)]
        if len(fitting) > 1:
            return min(fitting, key=lambda p: simulate(p.halves, None, self.cost).step_seconds)
        return min(fitting or plans, key=lambda p: p.peak_bytes or 0)

    def _corrected(self, prefetch: int, number: int, plan: _Plan, *, offload: bool) -> _Plan:
        """Estimate what to recompute and to offload until the real peak is within the limit."""
        assert plan.peak_bytes is not None and self.limits.memory is not None
        limit = self.limits.memory - (plan.peak_bytes - self._activations.unchanged.peak)
        least, peak = plan, plan.peak_bytes
        for _ in range(_CORRECTIONS):
            choice = self._activations.within(limit, offload=offload)
            plan = self._run_passes(prefetch, number, choice)
            assert plan.peak_bytes is not None
            if plan.peak_bytes < peak:
                least, peak = plan, plan.peak_bytes
            if self._is_within_memory(plan):
                break
            limit = min(limit, choice.peak) - (plan.peak_bytes - self.limits.memory)
        return least

    @cached_property
    def _offloadable(self) -> frozenset[str]:
        """The values that may move to host memory. On a CPU that would free nothing."""
        if self.cost.synchronous:
            return frozenset()
        return frozenset(offloadable(self._unchanged))

    @cached_property
    def _activations(self) -> ActivationPlans:
        """The plans for activations if no further bucket is kept; further ones hardly change them."""
        return ActivationPlans(split_joint(self._unchanged), self.cost, self._offloadable)

    @cached_property
    def _unchanged(self) -> TraceCtx:
        """The joint trace with backward's gathers if no further bucket is kept and nothing is recomputed."""
        return self._regathered(0)

    def _regathered(self, number: int, recomputed: frozenset[str] = frozenset()) -> TraceCtx:
        joint = from_trace(self.joint)
        joint.bound_symbols = self.joint.bound_symbols
        joint.names = set(self.joint.names)  # those of a candidate that is not chosen stay free
        return regather_for_backward(joint, kept=self._kept(number), recomputed=recomputed)

    def _unsorted(self, number: int, activations: ActivationPlan | None) -> list[TraceCtx]:
        if activations is None:
            if number not in self._halves:
                halves = split_joint(self._regathered(number) if number else self._unchanged)
                self._halves[number] = [write_grads_in_place(half) for half in halves]
            return self._halves[number]
        joint = self._regathered(number, activations.recomputed)
        joint = offload_activations(joint, offloaded=activations.offloaded)
        sort = partial(
            sort_host_copies, seconds=partial(compute_seconds, self.cost), copy_seconds=self.cost.host_copy_seconds
        )
        return [sort(write_grads_in_place(half)) for half in split_joint(joint)]

    def _run_passes(self, prefetch: int, number: int, activations: ActivationPlan | None = None) -> _Plan:
        scratch: dict[Arena, Arena] = {}

        def arena_of(bucket: Bucket) -> Arena:
            return scratch.setdefault(bucket.arena, Arena(bucket.arena.device))

        kept, budget = self._kept(number), self.limits.unsharded_bytes
        halves: list[TraceCtx] = []
        for half in self._unsorted(number, activations):
            forward = halves[0] if halves else None
            left = shared_budget(half, budget=budget, kept=kept)
            sort = partial(sort_communication, prefetch=prefetch, max_gathers_in_flight=self.limits.gathers_in_flight)
            if budget is None:
                half = sort(half)
            else:
                half = sort_within_budget(half, sort=sort, max_unsharded_bytes=budget, kept=kept, forward=forward)
            half = assign_slots(half, kept=kept, arena_of=arena_of, forward=forward, max_bytes=left)
            halves.append(
                mark_retained_by_forward(half) if forward is None else reuse_from_forward(half, forward=forward)
            )
        nbytes = private_bytes(halves[0], kept) + sum(arena.nbytes for arena in scratch.values())
        if self.limits.memory is None:
            return _Plan(halves, nbytes)
        changes = (activations.recomputed, activations.offloaded) if activations else (frozenset(), frozenset())
        # Other sets of shapes and flags may have needed a larger arena, which is one for all.
        larger = sum(max(arena.nbytes - new.nbytes, 0) for arena, new in scratch.items())
        return _Plan(halves, nbytes, *changes, StepMemory.of(halves, self.buckets).peak.nbytes + larger)

    @cached_property
    def first_in_backward(self) -> list[Bucket]:
        """Return the buckets that backward gathers again, in the order of their first consumers."""
        halves = split_joint(self._unchanged)
        if len(halves) == 1:
            return []
        ordered = sort_communication(halves[1], prefetch=0)
        return list(dict.fromkeys(bucket_of(b).base for b in ordered.bound_symbols if b.sym is fsdp_all_gather))
