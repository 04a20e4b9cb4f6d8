"""A simulated step as a value: a timeline, exposed communication, and the memory of slots.

[Note: Exposed communication]
Communication is exposed while a collective runs and compute does not, by union of intervals: two collectives at once
count once. Copies of offloaded activations to host memory and back count as communication. So a step is compute +
contention + exposed communication + idle. Idle is time in which the device has nothing to do because the host has not
issued it yet.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

COMPUTE = "compute"
"""Name of the compute stream; the other streams have the names of process groups or the two below."""

TO_HOST, TO_DEVICE = "to host memory", "to the device"
"""Names of the streams that copy offloaded activations."""


class Interval(NamedTuple):
    """An activity of a stream from ``start`` to ``end`` (seconds since the start of the step).

    Attributes:
        stream: :data:`COMPUTE`, the process group's name, :data:`TO_HOST` or :data:`TO_DEVICE`.
        kind: ``"compute"``, ``"wait"`` (the compute stream waits for a collective), or the collective's symbol.
        label: name of the symbol.
        bucket: the bucket of a collective or its wait, the stream of a copy or its wait, else ``""``.
        trace: the index of its trace among the simulated ones.
        position: index of the bound symbol in its trace, ``del`` statements not counted.
    """

    stream: str
    kind: str
    label: str
    bucket: str
    start: float
    end: float
    trace: int
    position: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


class SlotUse(NamedTuple):
    """A slot that holds an unsharded bucket from ``start`` to ``end`` (seconds since the start of the step).

    Attributes:
        kind: the symbol of the collective that tells gathered parameters from gradients to be reduced.
    """

    slot: str
    bucket: str
    kind: str
    nbytes: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step. Times in seconds.

    Attributes:
        intervals: the activities of all streams, in issue order.
        slots: the uses of slots by buckets, in issue order.
        step_seconds: from the first issue to the end of the last stream.
        compute_seconds: work of the compute stream at full speed.
        contention_seconds: the time by which collectives slow compute down.
        communication_seconds: work of all collectives of each process group if each ran alone, keyed by the group's
            name, and of all copies in each direction.
    """

    intervals: tuple[Interval, ...]
    slots: tuple[SlotUse, ...]
    step_seconds: float
    compute_seconds: float
    contention_seconds: float
    communication_seconds: dict[str, float]

    @cached_property
    def collectives(self) -> tuple[Interval, ...]:
        """The intervals of all collectives, in issue order."""
        return tuple(i for i in self.intervals if i.stream != COMPUTE)

    @cached_property
    def exposed_by_bucket(self) -> dict[str, float]:
        """Return the time in which the bucket's collectives run and compute does not. Concurrent collectives both count."""
        exposed: dict[str, float] = {}
        outside = _outside(((c.start, c.end) for c in self.collectives), self._busy)
        for interval, seconds in zip(self.collectives, outside, strict=True):
            exposed[interval.bucket] = exposed.get(interval.bucket, 0.0) + seconds
        return exposed

    @cached_property
    def exposed_seconds(self) -> float:
        """The time in which a collective runs and compute does not."""
        return sum(_outside(_union((c.start, c.end) for c in self.collectives), self._busy))

    @cached_property
    def launch_gaps(self) -> tuple[tuple[float, float], ...]:
        """The intervals ``(start, end)`` in which nothing runs because the device waits for the host, ascending."""
        busy = _union((i.start, i.end) for i in self.intervals if i.kind != "wait")
        edges = [0.0, *(edge for interval in busy for edge in interval), self.step_seconds]
        return tuple((start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start)

    @cached_property
    def idle_seconds(self) -> float:
        """The time in which nothing runs because the device waits for the host."""
        return sum(end - start for start, end in self.launch_gaps)

    @property
    def breakdown(self) -> str:
        """The parts of the step as text: ``"14.77 ms = 12.10 compute + 0.42 exposed communication + 2.25 launch gaps"``."""
        parts = {
            "compute": self.compute_seconds,
            "slowed down by communication": self.contention_seconds,
            "exposed communication": self.exposed_seconds,
            "launch gaps": self.idle_seconds,
        }
        terms = [f"{1e3 * part:,.2f} {name}" for name, part in parts.items() if name == "compute" or part >= 5e-6]
        return f"{1e3 * self.step_seconds:,.2f} ms = {' + '.join(terms)}"

    @cached_property
    def lower_bound(self) -> float:
        """A lower bound for any order of these operations: the work of the busiest stream, with compute at full speed."""
        return max([self.compute_seconds, *self.communication_seconds.values()])

    @property
    def serial_seconds(self) -> float:
        """The time of compute and all communication one after the other."""
        return self.compute_seconds + sum(self.communication_seconds.values())

    @property
    def over_max(self) -> float:
        """The step relative to the longer of compute and communication; 1 if the shorter is fully hidden (``/max``)."""
        return self.step_seconds / self.lower_bound if self.lower_bound else 1.0

    @property
    def over_sum(self) -> float:
        """The step relative to the sum of compute and communication; 1 if nothing overlaps (``/sum``)."""
        return self.step_seconds / self.serial_seconds if self.serial_seconds else 1.0

    @property
    def overlap(self) -> float:
        """The share of communication that compute hides, between 0 and 1; 1 if there is none."""
        total = sum(end - start for start, end in _union((c.start, c.end) for c in self.collectives))
        return 1 - self.exposed_seconds / total if total else 1.0

    @cached_property
    def memory(self) -> tuple[tuple[float, int], ...]:
        """Return the bytes of unsharded buckets over time as a step function: ``(time, bytes from then on)``, ascending."""
        changes: dict[float, int] = {}
        for use in self.slots:
            changes[use.start] = changes.get(use.start, 0) + use.nbytes
            changes[use.end] = changes.get(use.end, 0) - use.nbytes
        steps, nbytes = [], 0
        for time in sorted(changes):
            nbytes += changes[time]
            steps.append((time, nbytes))
        return tuple(steps)

    @property
    def peak_unsharded_bytes(self) -> int:
        """The peak bytes of unsharded parameters and gradients in slots."""
        return max((nbytes for _, nbytes in self.memory), default=0)

    @cached_property
    def _busy(self) -> list[tuple[float, float]]:
        return _union((i.start, i.end) for i in self.intervals if i.kind == COMPUTE)

    def __str__(self) -> str:
        communication = ", ".join(f"{s:.4g} s in {group}" for group, s in self.communication_seconds.items()) or "none"
        return (
            f"step {self.step_seconds:.4g} s: compute {self.compute_seconds:.4g} s, communication {communication}, "
            f"exposed {self.exposed_seconds:.4g} s, contention {self.contention_seconds:.4g} s, "
            f"idle {self.idle_seconds:.4g} s; {self.over_max:.2f} of max, {self.over_sum:.2f} of sum; "
            f"peak {self.peak_unsharded_bytes:,} unsharded bytes"
        )


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as disjoint intervals, ascending."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def _outside(intervals: Iterable[tuple[float, float]], union: Sequence[tuple[float, float]]) -> list[float]:
    """Return how much of each interval is outside of ``others``, which are disjoint and ascending."""
    starts = [start for start, _ in union]
    ends = [end for _, end in union]
    before = [0.0, *accumulate(end - start for start, end in union)]
    outside = []
    for start, end in intervals:
        first, last = bisect_right(ends, start), bisect_left(starts, end)  # the overlapping ones
        covered = before[last] - before[first]
        if first < last:
            covered -= max(start - starts[first], 0.0) + max(ends[last - 1] - end, 0.0)
        outside.append(max(end - start - covered, 0.0))
    return outside
