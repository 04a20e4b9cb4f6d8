"""Runs traces on paper: streams, a timeline, and what of the communication compute does not hide.

[Note: Streams]
The host issues bound symbols one after the other. Compute runs in order on the compute stream. A collective runs on the
stream of its process group, behind the one issued there before it, and starts no earlier than everything that was issued
to the compute stream before it has ended (NCCL waits for the stream that is current at the issue). A wait holds back the
compute stream, not the host, until its collective has ended. On a CPU the host is the compute stream. While collectives
run, compute can be slower (``CostModel.contention``): they take processors, of a GPU or of the host; collectives themselves
are not slowed.

[Note: Several collectives at once]
NCCL runs the collectives of one group one after the other (``CostModel.concurrent`` is 1). gloo has two threads for each
group, so two collectives are on the wire at once. Of two reductions each then gets half of it: both end late, the first no
earlier than if it had been issued last. An all-gather sends its piece whole, a reduction one segment after the
other and each only when the last one has come around: so of the two the all-gather gets the larger share
(``gather_share``) and the reduction less than the rest (``reduction_share``). Of two all-gathers the first gets all.

[Note: What is exposed]
Exposed is the time in which a collective runs and compute does not, by union of intervals: two collectives at once count
once. So a step is compute + contention + exposed communication + idle, the last being time in which the device has nothing
to do because the host has not issued it yet.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from .buffers import Bucket, Slot, describe_group
from .cost import CostModel, Seconds
from .symbols import ISSUES, WAITS, fsdp_all_gather, fsdp_wait_params
from .traces import aliased_inputs, args_of, outs_of

__all__ = ["COMPUTE", "Interval", "SlotUse", "Timeline", "simulate"]

COMPUTE = "compute"
"""Name of the compute stream; the other streams have the names of process groups."""


class Interval(NamedTuple):
    """Something that a stream does from ``start`` to ``end`` (seconds since the start of the step).

    Attributes:
        stream: :data:`COMPUTE`, or the process group's name.
        kind: ``"compute"``, ``"wait"`` (the compute stream waits for a collective), or the collective's symbol.
        label: name of the symbol.
        bucket: of a collective, or a wait, ``""`` else.
        trace: which of the simulated traces.
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
        kind: symbol of the collective: parameters that were gathered, or gradients to be reduced.
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
        intervals: of all streams, in the order of issue.
        slots: which slot holds which bucket when, in the order of issue.
        step_seconds: from the first issue to the end of the last stream.
        compute_seconds: of the compute stream, at full speed.
        contention_seconds: by which collectives slow compute down.
        communication_seconds: of all collectives of each process group, by its name, if each ran alone.
    """

    intervals: tuple[Interval, ...]
    slots: tuple[SlotUse, ...]
    step_seconds: float
    compute_seconds: float
    contention_seconds: float
    communication_seconds: dict[str, float]

    @cached_property
    def collectives(self) -> tuple[Interval, ...]:
        """The intervals of all collectives, in the order of issue."""
        return tuple(i for i in self.intervals if i.stream != COMPUTE)

    @cached_property
    def exposed_by_bucket(self) -> dict[str, float]:
        """Time in which the bucket's collectives run and compute does not. Two at once on two groups count for both."""
        exposed: dict[str, float] = {}
        outside = _outside(((c.start, c.end) for c in self.collectives), self._busy)
        for interval, seconds in zip(self.collectives, outside, strict=True):
            exposed[interval.bucket] = exposed.get(interval.bucket, 0.0) + seconds
        return exposed

    @cached_property
    def exposed_seconds(self) -> float:
        """Time in which some collective runs and compute does not."""
        return sum(_outside(_union((c.start, c.end) for c in self.collectives), self._busy))

    @cached_property
    def idle_seconds(self) -> float:
        """Time in which nothing runs: the device waits for the host."""
        busy = (i for i in self.intervals if i.kind != "wait")
        return self.step_seconds - sum(end - start for start, end in _union((i.start, i.end) for i in busy))

    @cached_property
    def lower_bound(self) -> float:
        """No order of these operations is faster: the longest stream's work, compute at full speed."""
        return max([self.compute_seconds, *self.communication_seconds.values()])

    @property
    def serial_seconds(self) -> float:
        """Compute and all communication one after the other."""
        return self.compute_seconds + sum(self.communication_seconds.values())

    @property
    def over_max(self) -> float:
        """The step over the longer of compute and communication, 1 if the shorter is hidden altogether (``/max``)."""
        return self.step_seconds / self.lower_bound if self.lower_bound else 1.0

    @property
    def over_sum(self) -> float:
        """The step over the sum of compute and communication, 1 if nothing overlaps (``/sum``)."""
        return self.step_seconds / self.serial_seconds if self.serial_seconds else 1.0

    @property
    def overlap(self) -> float:
        """Share of the communication that compute hides, between 0 and 1; 1 if there is none."""
        total = sum(end - start for start, end in _union((c.start, c.end) for c in self.collectives))
        return 1 - self.exposed_seconds / total if total else 1.0

    @cached_property
    def memory(self) -> tuple[tuple[float, int], ...]:
        """Bytes of unsharded buckets over time, a step function: ``(time, bytes from then on)``, times ascending."""
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
        """Most bytes of unsharded parameters and gradients in slots at one time."""
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


def simulate(forward: TraceCtx | Sequence[TraceCtx], backward: TraceCtx | None, cost: CostModel) -> Timeline:
    """Simulates execution traces that run one after the other, usually the forward and the backward one.

    The time that this takes is about linear in the number of bound symbols.

    Args:
        forward: an execution trace, sorted or not, or several.
        backward: the one that runs behind it, if any.
        cost: what bound symbols and collectives cost.
    """
    traces = [forward] if isinstance(forward, TraceCtx) else list(forward)
    if backward is not None:
        traces.append(backward)
    step = _Step(cost)
    uses = _SlotUses()
    for number, trace in enumerate(traces):
        step.run(number, trace, uses)
    return step.timeline(uses)


@dataclass(eq=False)
class _Flight:
    """A collective between its issue and its end; ``left`` are seconds of work, alone on the link."""

    kind: str
    bucket: Bucket
    arrival: float
    left: float
    trace: int
    position: int
    start: float = -1.0
    end: float = -1.0


class _Link:
    """A process group: serves the collectives that are issued to it in their order, some at once if the backend does.

    It runs behind the streams that issue to it and is brought forward as far as nothing new can arrive.
    """

    def __init__(self, group: str, cost: CostModel, intervals: list[Interval]) -> None:
        self.group = group
        self.cost = cost
        self.intervals = intervals
        self.now = 0.0
        self.alone = 0.0
        self.waiting: deque[_Flight] = deque()
        self.active: list[_Flight] = []
        self.load = 0.0
        """Share of compute speed that the active collectives take."""
        self.next_change = float("inf")
        """When a collective starts or ends next."""

    def issue(self, flight: _Flight) -> None:
        self.alone += flight.left
        self.advance(flight.arrival)
        self.waiting.append(flight)
        self._admit()

    def advance(self, until: float) -> None:
        while self.next_change <= until:
            self._move(self.next_change)
            for flight in [f for f in self.active if f.left <= 1e-12]:
                self._end(flight)
            self._admit()
        if until > self.now:
            self._move(until)

    def finish(self, flight: _Flight) -> float:
        """Brings the link forward to the end of ``flight`` and returns that."""
        while flight.end < 0:
            self.advance(self.next_change)
        return flight.end

    def _move(self, until: float) -> None:
        for flight, share in zip(self.active, self._shares(), strict=True):
            flight.left -= (until - self.now) * share
        self.now = until

    def _end(self, flight: _Flight) -> None:
        flight.end = self.now
        self.active.remove(flight)
        self.intervals.append(
            Interval(
                self.group,
                flight.kind,
                flight.kind,
                flight.bucket.spec.name,
                flight.start,
                flight.end,
                flight.trace,
                flight.position,
            )
        )

    def _admit(self) -> None:
        while self.waiting and len(self.active) < self.cost.concurrent and self.waiting[0].arrival <= self.now:
            flight = self.waiting.popleft()
            flight.start = self.now
            self.active.append(flight)
        shares = self._shares()
        ends = [self.now + max(f.left, 0.0) / share for f, share in zip(self.active, shares, strict=True) if share]
        if self.waiting and len(self.active) < self.cost.concurrent:
            ends.append(self.waiting[0].arrival)
        self.next_change = min(ends, default=float("inf"))
        self.load = sum(self.cost.contention(f.kind) * share for f, share in zip(self.active, shares, strict=True))

    def _shares(self) -> list[float]:
        """Which part of the link each active collective has: see [Note: Several collectives at once]."""
        if len(self.active) == 1:
            return [1.0]
        gathers = [f.kind == fsdp_all_gather.name for f in self.active]
        reductions = gathers.count(False)
        if reductions == len(gathers):
            return [1 / max(reductions, 1)] * reductions
        for_gather, for_reductions = (self.cost.gather_share, self.cost.reduction_share) if reductions else (1.0, 0.0)
        first = gathers.index(True)
        return [
            (for_gather if number == first else 0.0) if gather else for_reductions / reductions
            for number, gather in enumerate(gathers)
        ]


class _Step:
    """The state of all streams while traces run."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.intervals: list[Interval] = []
        self.host = 0.0
        self.compute = 0.0
        self.links: dict[str, _Link] = {}
        self.flights: dict[str, tuple[_Link, _Flight]] = {}
        self.full_speed = 0.0
        self.lost = 0.0

    def run(self, number: int, trace: TraceCtx, uses: _SlotUses) -> None:
        self.flights.clear()
        position = 0
        for bsym, seconds in zip(trace.bound_symbols, self.cost.seconds(trace), strict=True):
            if bsym.sym.id is PrimIDs.DEL:
                continue
            name = bsym.sym.name
            if name in ISSUES:
                began = self.compute
                self._work(bsym, seconds, number, position)
                uses.issue(bsym, self._communicate(bsym, number, position), began)
            elif name in WAITS:
                self._wait(bsym, seconds, number, position)
                uses.wait(bsym, self.compute)
            else:
                self._work(bsym, seconds, number, position)
                uses.other(bsym, self.compute)
            position += 1

    def timeline(self, uses: _SlotUses) -> Timeline:
        for link in self.links.values():
            while link.active or link.waiting:
                link.advance(link.next_change)
        self.intervals.sort(key=lambda i: (i.trace, i.position, i.kind != "wait"))
        end = max([self.host, *(i.end for i in self.intervals)])
        communication = {group: link.alone for group, link in self.links.items()}
        return Timeline(tuple(self.intervals), uses.done(), end, self.full_speed, self.lost, communication)

    def _work(self, bsym: BoundSymbol, seconds: Seconds, trace: int, position: int, bucket: str = "") -> None:
        self.host += seconds.host
        work = seconds.host + seconds.device if self.cost.synchronous else seconds.device
        if work:
            start = self.compute if self.cost.synchronous else max(self.host, self.compute)
            self.compute = self._end_of(start, work)
            self.full_speed += work
            self.lost += self.compute - start - work
            self.intervals.append(
                Interval(COMPUTE, COMPUTE, bsym.sym.name, bucket, start, self.compute, trace, position)
            )
        if self.cost.synchronous:
            self.host = self.compute

    def _communicate(self, bsym: BoundSymbol, trace: int, position: int) -> _Flight:
        bucket, kind = bsym.args[0], bsym.sym.name
        group = describe_group(bucket.group)
        link = self.links.get(group)
        if link is None:
            link = self.links[group] = _Link(group, self.cost, self.intervals)
        seconds = self.cost.collective_seconds(kind, bucket)
        flight = _Flight(kind, bucket, max(self.host, self.compute), seconds, trace, position)
        link.issue(flight)
        self.flights[bsym.output.name] = link, flight
        return flight

    def _wait(self, bsym: BoundSymbol, seconds: Seconds, trace: int, position: int) -> None:
        link, flight = self.flights[bsym.args[1].name]
        start = max(self.compute, self.host)
        link.advance(start)
        end = link.finish(flight)
        if end > start:
            name = flight.bucket.spec.name
            self.intervals.append(Interval(COMPUTE, "wait", bsym.sym.name, name, start, end, trace, position))
        self.compute = max(self.compute, end)
        self._work(bsym, seconds, trace, position, flight.bucket.spec.name)

    def _end_of(self, start: float, work: float) -> float:
        """When ``work`` seconds at full speed end that begin at ``start``, beside the collectives that run then."""
        now = start
        for link in self.links.values():
            link.advance(now)
        while True:
            speed = max(1.0 - sum(link.load for link in self.links.values()), 0.05)
            until = min((link.next_change for link in self.links.values()), default=float("inf"))
            if now + work / speed <= until:
                return now + work / speed
            work -= (until - now) * speed
            now = until
            for link in self.links.values():
                link.advance(now)


class _SlotUses:
    """Follows the values that lie in slots, through views and from one trace into the next."""

    def __init__(self) -> None:
        self.uses: list[list[Any]] = []
        self.of_value: dict[str, tuple[int, ...]] = {}  # by the name of a future, a gathered parameter or a view of it

    def issue(self, bsym: BoundSymbol, flight: _Flight, began: float) -> None:
        bucket, slot = bsym.args[0], bsym.args[1]
        # Gradients are copied into the slot before they travel, parameters come in while they do.
        start = flight.arrival if bsym.sym is fsdp_all_gather else began
        name = slot.name if isinstance(slot, Slot) else ""
        self.of_value[bsym.output.name] = (len(self.uses),)
        self.uses.append([name, bucket.spec.name, bsym.sym.name, bucket.spec.unsharded_bytes, start, start])

    def wait(self, bsym: BoundSymbol, now: float) -> None:
        numbers = self.of_value[bsym.args[1].name]
        self.uses[numbers[0]][-1] = now
        if bsym.sym is fsdp_wait_params:
            self.of_value.update(dict.fromkeys(outs_of(bsym), numbers))

    def other(self, bsym: BoundSymbol, now: float) -> None:
        touched = [arg for arg in args_of(bsym) if arg in self.of_value]
        if not touched:
            return
        for arg in touched:
            for number in self.of_value[arg]:
                self.uses[number][-1] = now
        for out, inputs in aliased_inputs(bsym).items():
            numbers = {number for name in inputs for number in self.of_value.get(name, ())}
            if numbers:
                self.of_value[out] = tuple(numbers)

    def done(self) -> tuple[SlotUse, ...]:
        return tuple(SlotUse(*use) for use in self.uses)


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as disjoint intervals, ascending."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def _outside(intervals: Iterable[tuple[float, float]], union: Sequence[tuple[float, float]]) -> list[float]:
    """How much of each interval lies outside of the union of others, which is disjoint and ascending."""
    starts = [start for start, _ in union]
    ends = [end for _, end in union]
    before = [0.0, *accumulate(end - start for start, end in union)]
    outside = []
    for start, end in intervals:
        first, last = bisect_right(ends, start), bisect_left(starts, end)  # those that overlap
        covered = before[last] - before[first]
        if first < last:
            covered -= max(start - starts[first], 0.0) + max(ends[last - 1] - end, 0.0)
        outside.append(max(end - start - covered, 0.0))
    return outside
