"""A simulated step as a value: a timeline, exposed communication, and the memory of slots.

[Note: Exposed communication]
Communication is exposed while a collective runs and compute does not, by union of intervals: two collectives at once
count once. So a step is compute + contention + exposed communication + idle. Idle is time in which the device has nothing
to do because the host has not issued it yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

COMPUTE = "compute"
"""Name of the compute stream; the other streams have the names of process groups."""

_Span = TypeVar("_Span", bound="tuple[Any, ...]")


class Interval(NamedTuple):
    """An activity of a stream from ``start`` to ``end`` (seconds since the start of the step).

    Attributes:
        stream: :data:`COMPUTE`, or the process group's name.
        kind: ``"compute"``, ``"wait"`` (the compute stream waits for a collective), or the collective's symbol.
        label: name of the symbol.
        bucket: the bucket of a collective or its wait, else ``""``.
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
    def span(self) -> tuple[float, float]:
        return self.start, self.end

    @property
    def seconds(self) -> float:
        return self.end - self.start


class SlotUse(NamedTuple):
    """A slot that holds an unsharded bucket from ``start`` to ``end`` (seconds since the start of the step).

    Attributes:
        kind: the symbol of the collective: a gather of parameters or a reduction of gradients.
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
    def communicating_seconds(self) -> float:
        """The time in which any collective runs."""
        return length(union(i.span for i in self.collectives))

    @cached_property
    def exposed_seconds(self) -> float:
        """The time in which a collective runs and compute does not."""
        not_computing = self._gaps(i for i in self.intervals if i.kind == COMPUTE)
        return sum(end - start for start, end, _ in overlaps(not_computing, union(i.span for i in self.collectives)))

    @cached_property
    def launch_gaps(self) -> tuple[tuple[float, float], ...]:
        """The intervals ``(start, end)`` in which nothing runs because the device waits for the host, ascending."""
        return self._gaps(i for i in self.intervals if i.kind != "wait")

    def _gaps(self, intervals: Iterable[Interval]) -> tuple[tuple[float, float], ...]:
        return tuple(gaps(union(i.span for i in intervals), 0.0, self.step_seconds))

    @cached_property
    def idle_seconds(self) -> float:
        """The time in which nothing runs because the device waits for the host."""
        return length(self.launch_gaps)

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

    @cached_property
    def memory(self) -> tuple[tuple[float, int], ...]:
        """Return the bytes of unsharded buckets over time as a step function: ``(time, bytes from then on)``, ascending."""
        changes: Counter[float] = Counter()
        for use in self.slots:
            changes[use.start] += use.nbytes
            changes[use.end] -= use.nbytes
        times = sorted(changes)
        return tuple(zip(times, accumulate(changes[time] for time in times), strict=True))

    @property
    def peak_unsharded_bytes(self) -> int:
        """The peak bytes of unsharded parameters and gradients in slots."""
        return max((nbytes for _, nbytes in self.memory), default=0)

    def __str__(self) -> str:
        shares = f"{self.over_max:.2f} of max, {self.over_sum:.2f} of sum"
        return f"{self.breakdown}; {shares}; peak {self.peak_unsharded_bytes:,} unsharded bytes"


def union(spans: Iterable[tuple[float, float]], gap: float = 0.0) -> list[tuple[float, float]]:
    """Return the union of spans ``(start, end)``, ascending; those at most ``gap`` seconds apart count as one."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def gaps(spans: Iterable[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    """Return the time between ``start`` and ``end`` outside of ascending, disjoint spans."""
    edges = [start, *(edge for span in spans for edge in span), end]
    return [(since, until) for since, until in zip(edges[::2], edges[1::2], strict=True) if until > since]


def overlaps(spans: Sequence[tuple[float, float]], others: Iterable[_Span]) -> Iterator[tuple[float, float, _Span]]:
    """Yield the start and the end of each time that a span shares with one of ``others``, and that other.

    Args:
        spans: ascending and disjoint.
        others: tuples that begin with start and end, ascending.
    """
    first = 0
    for other in others:
        while first < len(spans) and spans[first][1] <= other[0]:
            first += 1
        at = first
        while at < len(spans) and spans[at][0] < other[1]:
            yield max(spans[at][0], other[0]), min(spans[at][1], other[1]), other
            at += 1


def length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total length of disjoint spans."""
    return sum(end - start for start, end in spans)
