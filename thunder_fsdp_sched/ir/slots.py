"""Slots in a trace: how many bytes are in use at once, which collectives may share one, which buckets forward retains.

[Note: Gradients in the place of their parameters]
In backward each parameter of a bucket is read for the last time before its gradient is written or copied into the slot
of the reduction. Both have the same offset in the bucket, so the reduction can use the slot of the gather: the
gradients then need no memory of their own while other parameters of the bucket are still read. That saves a slot, and
no collective has to be waited for earlier. It is done where the trace shows that it is safe, only for parameters and
gradients of one dtype, and only if it makes the arena smaller.

A kept bucket (ZeRO-2) is gathered in forward into its private slot, and backward reads saved views of it. The same rule
applies to both traces together, so the gradients of kept buckets need no memory at all. From the first gradient on, the
slot no longer contains the parameters (``Arena.contents``). So another backward of the same forward, or one after an
exception, gathers them again into the slot, of which the saved tensors are views.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from thunder.core.trace import TraceCtx

from ..runtime.bucket import Bucket
from ..runtime.memory import Slot
from .analysis import Analysis, Lifetime, peak_bytes
from .effects import effects


def retained_by_forward(forward: TraceCtx) -> dict[Bucket, Slot]:
    """Return the buckets that are still resident in shared slots after a forward trace, with their slots."""
    found: dict[Bucket, Slot] = {}
    later: list[Slot] = []
    for issue in (e.slot_issue for e in map(effects, reversed(forward.bound_symbols))):
        if issue is not None and (region := issue.region) is not None and (slot := region.slot) is not None:
            if issue.gathers and not region.is_private and not any(map(slot.overlaps, later)):
                found.setdefault(region.bucket.primary, slot)
            later.append(slot)
    return found


def is_used_before(uses: Mapping[int, Lifetime], position: int) -> bool:
    """Return whether the slot of the gather at ``position`` is used before it, given the uses of slots by their issues."""
    slot = uses[position].slot
    before = (other.slot for at, other in uses.items() if at != position and other.first < position)
    return slot is not None and any(other is not None and slot.overlaps(other) for other in before)


def grads_over_params(ranges: Iterable[Lifetime]) -> dict[Lifetime, Lifetime]:
    """Return the reductions that can use the slot of a gather of their bucket, each with that gather.

    See [Note: Gradients in the place of their parameters].

    Args:
        ranges: the lifetimes of shared slots, in the order of their issues.
    """
    gathers: dict[Bucket, Lifetime] = {}
    found = {}
    for live in ranges:
        if live.is_gather:
            gathers[live.bucket.primary] = live
            continue
        gather = gathers.get(live.bucket)
        if gather is not None and gather.first < live.first <= gather.last and gather.may_be_replaced_by(live):
            found[live] = gathers.pop(live.bucket)
    return found


def peak_live_bytes(trace: TraceCtx) -> int:
    """Return the peak bytes of unsharded parameters and gradients in shared slots: a lower bound for any arena.

    Where gradients have the place of their parameters, both count once.
    """
    lives = Analysis(trace).slots.values()
    return peak_bytes(spans_of([live for live in lives if live.region is not None and not live.region.is_private]))


def spans_of(lives: Sequence[Lifetime]) -> Iterator[tuple[int, int, int]]:
    """Yield the first and last position of each slot, until gradients take the place of its parameters, and its bytes."""
    for live in lives:
        replaced = [
            other.first - 1
            for other in lives
            if live.first < other.first <= live.last and live.slot and other.slot and live.slot.overlaps(other.slot)
        ]
        yield live.first, min([live.last, *replaced]), live.nbytes


class ReductionLimits(NamedTuple):
    """Limits on the slots of reductions of a process group that are in flight.

    [Note: When a reduction has ended]
    The time of a reduction is about proportional to its bytes. The time of the compute between two reductions is about
    proportional to the bytes of the second, because larger gradients take longer to compute. So when the later reductions
    have about as many bytes as the oldest, and about as many as ``most`` typical ones, the oldest has probably ended: a wait
    does not delay compute, and makes its slot free. The typical size is the median, weighted by bytes, without the ``most``
    largest. It is the size of a block, even beside a large head and embedding. The following reduction counts as at most
    typical, because little compute may come before a large one.

    Attributes:
        most: how many equally large reductions may be in flight.
        largest_bytes: the bytes of so many of the largest; never more are in flight.
        typical_bytes: the bytes of a typical reduction.
    """

    most: int
    largest_bytes: int
    typical_bytes: int

    @classmethod
    def of(cls, sizes: Iterable[int], most: int) -> ReductionLimits:
        """Return the limits of a group whose reductions have these bytes."""
        ordered = sorted(sizes, reverse=True)
        blocks = sorted(ordered[most:] or ordered)
        sums = list(accumulate(blocks))
        return cls(most, sum(ordered[:most]), blocks[bisect_left(sums, sums[-1] / 2)])

    def are_exceeded(self, in_flight: Sequence[int], following: int) -> bool:
        """Return whether to wait for the oldest reduction in flight before the following one is issued.

        Args:
            in_flight: the bytes of each, the oldest first.
        """
        later = sum(in_flight[1:]) + min(following, self.typical_bytes)
        is_ended = later >= _ENDED * max(self.most * self.typical_bytes, in_flight[0])
        return is_ended or sum(in_flight) + following > self.largest_bytes


_ENDED = 0.7
"""Less than 1, because blocks are of about one size, not of exactly one."""
