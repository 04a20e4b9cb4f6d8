"""Chooses memory and prefetch together: which buckets stay unsharded, and how far ahead the others are gathered.

[Note: The search]
Keeping one more bucket unsharded between forward and backward never costs time and always costs its bytes; gathering one
step further ahead hides at least as much and holds one more bucket. So for each distance the most buckets that fit are
kept, those that backward reads first (they are gathered last in forward, so the memory is held shortest), and the pair
with the least simulated step time wins; of equal ones that with fewer bytes. Each candidate goes through the passes that
the real trace goes through, so its bytes are those that will be allocated, and its time is that of the real order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from thunder.core.trace import TraceCtx

from .buffers import Arena, Bucket, slot_bytes
from .cost import CostModel
from .operands import bucket_of
from .simulate import simulate
from .symbols import fsdp_all_gather, fsdp_reduce_scatter
from .traces import split_joint
from .transforms import (
    mark_left_by_forward,
    plan_slots,
    regather_for_backward,
    reuse_from_forward,
    sort_communication,
    write_grads_in_place,
)
from .transforms.plan_slots import filling_bytes, slot_bytes_of
from .transforms.sort_communication import bytes_in_flight

__all__ = ["Candidate", "Choice", "choose", "room_for_gathers", "room_for_slots"]

_FARTHEST = 8
"""Steps of prefetch that are tried at most; what is not hidden by then does not fit into the step."""

_PATIENCE = 2
"""Distances without an improvement after which the search ends."""

_SAME = 1e-3
"""Step times that differ by a smaller share than this count as equal: a model is not more exact."""


@dataclass(frozen=True)
class Candidate:
    """One way to use memory.

    Attributes:
        prefetch: steps that gathers are issued ahead of their waits.
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
) -> Choice:
    """Searches for the least simulated step time within the budget.

    Args:
        joint: the joint trace with bucketed communication, before anything is gathered again for backward.
        cost: what the simulator charges.
        prefetch: steps, if they are given; ``None`` tries several.
        kept: buckets that stay unsharded in any case.
        may_keep: whether more of them may.
        max_unsharded_bytes: the budget for all slots together; ``None`` for no limit.

    Raises:
        ValueError: nothing fits, naming the bytes of the most frugal candidate.
    """
    search = _Search(joint, cost, frozenset(kept), max_unsharded_bytes)
    distances = [prefetch] if prefetch is not None else range(min(_FARTHEST, search.gathers) + 1)
    considered: list[Candidate] = []
    for distance in distances:
        candidate = search.best_at(distance, may_keep)
        if candidate is None:
            break  # no room for this distance, and still less for a larger one
        considered.append(candidate)
        if len(considered) > _PATIENCE:
            before = min(c.step_seconds for c in considered[:-_PATIENCE])
            if min(c.step_seconds for c in considered[-_PATIENCE:]) > before * (1 - _SAME):
                break
    if not considered:
        least = search.try_out(distances[0], search.kept)[1]
        raise ValueError(
            f"max_unsharded_bytes: {max_unsharded_bytes:,} bytes are too few: with prefetch={distances[0]} and nothing kept "
            f"for backward the slots need {least:,} bytes. Allow more, or make smaller buckets "
            f"(bucketing_strategy)"
        )
    fastest = min(c.step_seconds for c in considered)
    good = [c for c in considered if c.step_seconds <= fastest * (1 + _SAME)]
    return Choice(min(good, key=lambda c: (c.unsharded_bytes, c.prefetch)), tuple(considered))


def room_for_gathers(trace: TraceCtx, *, budget: int | None, kept: Collection[Bucket]) -> int | None:
    """Bytes that gathered buckets may take in one trace: the budget less kept buckets and unsharded gradients.

    These are as many reductions as may be in flight, and the slots that gradients are being written to beside them.
    """
    room = room_for_slots(trace, budget=budget, kept=kept)
    if room is None:
        return None
    in_flight = sum(bytes_in_flight(b for b in trace.bound_symbols if b.sym is fsdp_reduce_scatter).values())
    return max(room - in_flight - filling_bytes(trace), 0)


def room_for_slots(trace: TraceCtx, *, budget: int | None, kept: Collection[Bucket]) -> int | None:
    """Bytes that shared slots may take: the budget less kept buckets."""
    return None if budget is None else budget - _private_bytes(trace, kept)


def _private_bytes(trace: TraceCtx, kept: Collection[Bucket]) -> int:
    """Bytes of the slots in which kept buckets stay; of those that this trace does not gather, as planned."""
    gathered = [b for b in trace.bound_symbols if b.sym is fsdp_all_gather and bucket_of(b).whole in kept]
    elsewhere = set(kept) - {bucket_of(b).whole for b in gathered}
    return sum(map(slot_bytes_of, gathered)) + sum(slot_bytes(b.spec, b.spec.param_dtype) for b in elsewhere)


class _Search:
    def __init__(self, joint: TraceCtx, cost: CostModel, kept: frozenset[Bucket], budget: int | None) -> None:
        self.joint = joint
        self.cost = cost
        self.kept = kept
        self.budget = budget
        self.gathers = sum(b.sym is fsdp_all_gather for b in joint.bound_symbols)
        self.most = len(self.first_in_backward)  # most further buckets that fitted at the last distance

    def best_at(self, prefetch: int, may_keep: bool) -> Candidate | None:
        """The fastest candidate at one distance, which is the one that keeps most; ``None`` if nothing fits."""
        if self.budget is None or not may_keep:
            low, high = 0, 1
        else:
            low, high = 0, self.most + 1
        if not self._fits(prefetch, low):
            return None
        # `low` further buckets fit, `high` do not. More never fit at a larger distance than at the last one.
        if high - low > 1 and self._fits(prefetch, high - 1):
            low = high - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(prefetch, middle) else (low, middle)
        self.most = low
        kept = self.kept | frozenset(self.first_in_backward[:low])
        halves, nbytes = self.try_out(prefetch, kept)
        seconds = simulate(halves, None, self.cost).step_seconds
        return Candidate(prefetch, tuple(sorted(b.spec.name for b in kept)), nbytes, seconds)

    def _fits(self, prefetch: int, number: int) -> bool:
        if self.budget is None:
            return True
        kept = self.kept | frozenset(self.first_in_backward[:number])
        return self.try_out(prefetch, kept)[1] <= self.budget

    def try_out(self, prefetch: int, kept: frozenset[Bucket]) -> tuple[Sequence[TraceCtx], int]:
        """Runs the passes for one candidate, on memory that nobody uses: the sorted halves, and the bytes of all slots."""
        scratch: dict[Arena, Arena] = {}

        def arena_of(bucket: Bucket) -> Arena:
            return scratch.setdefault(bucket.arena, Arena(bucket.arena.device))

        joint = regather_for_backward(self.joint, kept=kept)
        halves: list[TraceCtx] = []
        for half in map(write_grads_in_place, split_joint(joint)):
            forward = halves[0] if halves else None
            room = room_for_gathers(half, budget=self.budget, kept=kept)
            half = sort_communication(half, prefetch=prefetch, max_unsharded_bytes=room)
            most = room_for_slots(half, budget=self.budget, kept=kept)
            half = plan_slots(half, kept=kept, arena_of=arena_of, forward=forward, max_bytes=most)
            halves.append(mark_left_by_forward(half) if forward is None else reuse_from_forward(half, forward=forward))
        private = _private_bytes(halves[0], kept)
        return halves, private + sum(arena.nbytes for arena in scratch.values())

    @cached_property
    def first_in_backward(self) -> list[Bucket]:
        """The buckets that backward gathers again, in the order in which it needs them."""
        halves = split_joint(regather_for_backward(self.joint, kept=self.kept))
        if len(halves) == 1:
            return []
        ordered = sort_communication(halves[1], prefetch=0)
        return list(dict.fromkeys(bucket_of(b).whole for b in ordered.bound_symbols if b.sym is fsdp_all_gather))
