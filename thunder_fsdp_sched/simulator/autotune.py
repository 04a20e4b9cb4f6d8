"""Choose memory and prefetch together: which buckets stay unsharded, and how far ahead the others are gathered.

[Note: The search]
Keeping one more bucket unsharded between forward and backward never costs time and always costs memory. Gathering one
step further ahead hides at least as much communication and holds one more bucket. So for each prefetch distance, as
many buckets as fit are kept: those that backward reads first, because forward gathers them last and so they occupy
memory for the shortest time. The pair with the shortest simulated step wins; among equals, the one with fewer bytes.
Each candidate runs through the same passes as the real trace, so its bytes are those that will be allocated and its
order is the real one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from thunder.core.trace import TraceCtx

from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, slot_bytes
from ..trace.inspection import split_joint
from ..trace.liveness import slot_bytes_of
from ..trace.operands import bucket_of
from ..trace.slots import filling_bytes
from ..trace.symbols import fsdp_all_gather, fsdp_reduce_scatter
from ..transforms import (
    assign_slots,
    mark_retained_by_forward,
    regather_for_backward,
    reuse_from_forward,
    sort_communication,
    write_grads_in_place,
)
from ..transforms.sort_communication import bytes_in_flight
from .cost import CostModel
from .simulate import simulate

__all__ = ["Candidate", "Choice", "choose", "gather_budget", "slot_budget"]

_MAX_PREFETCH = 8
"""The largest prefetch distance that is tried; communication still exposed then cannot be hidden in the step."""

_PATIENCE = 2
"""How many distances without an improvement end the search."""

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
    considered: list[Candidate] = []
    for distance in distances:
        candidate = search.best_at(distance, may_keep)
        if candidate is None:
            break  # this distance does not fit, and no larger one can
        considered.append(candidate)
        if len(considered) > _PATIENCE:
            before = min(c.step_seconds for c in considered[:-_PATIENCE])
            if min(c.step_seconds for c in considered[-_PATIENCE:]) > before * (1 - _SAME):
                break
    if not considered:
        least = search.evaluate(distances[0], search.kept)[1]
        raise ValueError(
            f"max_unsharded_bytes: {max_unsharded_bytes:,} bytes are too few: with prefetch={distances[0]} and nothing kept "
            f"for backward the slots need {least:,} bytes. Allow more, or make smaller buckets "
            f"(bucketing_strategy)"
        )
    fastest = min(c.step_seconds for c in considered)
    good = [c for c in considered if c.step_seconds <= fastest * (1 + _SAME)]
    return Choice(min(good, key=lambda c: (c.unsharded_bytes, c.prefetch)), tuple(considered))


def gather_budget(trace: TraceCtx, *, budget: int | None, kept: Collection[Bucket]) -> int | None:
    """Return the bytes left for gathered buckets in one trace: the budget minus kept buckets and unsharded gradients.

    Unsharded gradients are the reductions that may be in flight, and the slots that gradients are written to meanwhile.
    """
    room = slot_budget(trace, budget=budget, kept=kept)
    if room is None:
        return None
    in_flight = sum(bytes_in_flight(b for b in trace.bound_symbols if b.sym is fsdp_reduce_scatter).values())
    return max(room - in_flight - filling_bytes(trace), 0)


def slot_budget(trace: TraceCtx, *, budget: int | None, kept: Collection[Bucket]) -> int | None:
    """Return the bytes left for shared slots: the budget minus kept buckets."""
    return None if budget is None else budget - _private_bytes(trace, kept)


def _private_bytes(trace: TraceCtx, kept: Collection[Bucket]) -> int:
    """Return the bytes of the slots of kept buckets; for those that this trace does not gather, the planned bytes."""
    gathered = [b for b in trace.bound_symbols if b.sym is fsdp_all_gather and bucket_of(b).base in kept]
    elsewhere = set(kept) - {bucket_of(b).base for b in gathered}
    return sum(map(slot_bytes_of, gathered)) + sum(slot_bytes(b.spec, b.spec.param_dtype) for b in elsewhere)


class _Search:
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
        self.most = len(self.first_in_backward)  # how many further buckets fitted at the previous distance

    def best_at(self, prefetch: int, may_keep: bool) -> Candidate | None:
        """Return the fastest candidate at one distance, which keeps the most buckets; ``None`` if nothing fits."""
        if self.budget is None or not may_keep:
            low, high = 0, 1
        else:
            low, high = 0, self.most + 1
        if not self._fits(prefetch, low):
            return None
        # `low` further buckets fit, `high` do not. A larger distance never fits more of them than the previous one.
        if high - low > 1 and self._fits(prefetch, high - 1):
            low = high - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(prefetch, middle) else (low, middle)
        self.most = low
        kept = self.kept | frozenset(self.first_in_backward[:low])
        halves, nbytes = self.evaluate(prefetch, kept)
        seconds = simulate(halves, None, self.cost).step_seconds
        return Candidate(prefetch, tuple(sorted(b.spec.name for b in kept)), nbytes, seconds)

    def _fits(self, prefetch: int, number: int) -> bool:
        if self.budget is None:
            return True
        kept = self.kept | frozenset(self.first_in_backward[:number])
        return self.evaluate(prefetch, kept)[1] <= self.budget

    def evaluate(self, prefetch: int, kept: frozenset[Bucket]) -> tuple[Sequence[TraceCtx], int]:
        """Run the passes for one candidate in an unused arena, and return the sorted halves and the bytes of all slots."""
        scratch: dict[Arena, Arena] = {}

        def arena_of(bucket: Bucket) -> Arena:
            return scratch.setdefault(bucket.arena, Arena(bucket.arena.device))

        joint = regather_for_backward(self.joint, kept=kept)
        halves: list[TraceCtx] = []
        for half in map(write_grads_in_place, split_joint(joint)):
            forward = halves[0] if halves else None
            room = gather_budget(half, budget=self.budget, kept=kept)
            half = sort_communication(
                half,
                prefetch=prefetch,
                max_unsharded_bytes=room,
                max_gathers_in_flight=self.max_gathers_in_flight,
            )
            most = slot_budget(half, budget=self.budget, kept=kept)
            half = assign_slots(half, kept=kept, arena_of=arena_of, forward=forward, max_bytes=most)
            halves.append(
                mark_retained_by_forward(half) if forward is None else reuse_from_forward(half, forward=forward)
            )
        private = _private_bytes(halves[0], kept)
        return halves, private + sum(arena.nbytes for arena in scratch.values())

    @cached_property
    def first_in_backward(self) -> list[Bucket]:
        """Return the buckets that backward gathers again, in the order of their first consumers."""
        halves = split_joint(regather_for_backward(self.joint, kept=self.kept))
        if len(halves) == 1:
            return []
        ordered = sort_communication(halves[1], prefetch=0)
        return list(dict.fromkeys(bucket_of(b).base for b in ordered.bound_symbols if b.sym is fsdp_all_gather))
