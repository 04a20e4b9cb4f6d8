"""Runs traces on paper: streams, a timeline, and what of the communication compute does not hide.

[Note: Streams]
The host issues bound symbols one after the other. Compute runs in order on the compute stream. A collective runs on the
stream of its process group, behind the one issued there before it, and starts no earlier than everything that was issued
to the compute stream before it has ended (NCCL waits for the stream that is current at the issue). A wait holds back the
compute stream, not the host, until its collective has ended. On a CPU the host is the compute stream. While collectives
run, compute can be slower (``CostModel.contention``): they take processors, of a GPU or of the host; collectives themselves
are not slowed.

[Note: What is exposed]
Exposed is the time in which a collective runs and compute does not, by union of intervals: two collectives at once count
once. So a step is compute + contention + exposed communication + idle, the last being time in which the device has nothing
to do because the host has not issued it yet.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
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
    """

    intervals: tuple[Interval, ...]
    slots: tuple[SlotUse, ...]
    step_seconds: float
    compute_seconds: float
    contention_seconds: float

    @cached_property
    def collectives(self) -> tuple[Interval, ...]:
        """The intervals of all collectives, in the order of issue."""
        return tuple(i for i in self.intervals if i.stream != COMPUTE)

    @cached_property
    def communication_seconds(self) -> dict[str, float]:
        """Time in which each process group communicates, by its name."""
        seconds: dict[str, float] = {}
        for interval in self.collectives:
            seconds[interval.stream] = seconds.get(interval.stream, 0.0) + interval.seconds
        return seconds

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


class _Flight(NamedTuple):
    bucket: Bucket
    end: float


class _Step:
    """The state of all streams while traces run."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.intervals: list[Interval] = []
        self.host = 0.0
        self.compute = 0.0
        self.streams: dict[str, float] = {}  # when each group's last collective ends
        self.flights: dict[str, _Flight] = {}
        self.changes: list[tuple[float, float]] = []  # heap of (time, change of the contention)
        self.load = 0.0
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
                uses.issue(bsym, *self._communicate(bsym, number, position), began)
            elif name in WAITS:
                self._wait(bsym, seconds, number, position)
                uses.wait(bsym, self.compute)
            else:
                self._work(bsym, seconds, number, position)
                uses.other(bsym, self.compute)
            position += 1

    def timeline(self, uses: _SlotUses) -> Timeline:
        end = max([self.host, self.compute, *self.streams.values()])
        return Timeline(tuple(self.intervals), uses.done(), end, self.full_speed, self.lost)

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

    def _communicate(self, bsym: BoundSymbol, trace: int, position: int) -> tuple[float, float]:
        bucket, kind = bsym.args[0], bsym.sym.name
        group = describe_group(bucket.group)
        start = max(self.host, self.compute, self.streams.get(group, 0.0))
        end = start + self.cost.collective_seconds(kind, bucket)
        self.streams[group] = end
        self.flights[bsym.output.name] = _Flight(bucket, end)
        share = self.cost.contention(kind)
        if share and end > start:
            heapq.heappush(self.changes, (start, share))
            heapq.heappush(self.changes, (end, -share))
        self.intervals.append(Interval(group, kind, kind, bucket.spec.name, start, end, trace, position))
        return start, end

    def _wait(self, bsym: BoundSymbol, seconds: Seconds, trace: int, position: int) -> None:
        flight = self.flights[bsym.args[1].name]
        name = flight.bucket.spec.name
        start = max(self.compute, self.host)
        if flight.end > start:
            self.intervals.append(Interval(COMPUTE, "wait", bsym.sym.name, name, start, flight.end, trace, position))
            self.compute = flight.end
        self._work(bsym, seconds, trace, position, name)

    def _end_of(self, start: float, work: float) -> float:
        """When ``work`` seconds at full speed end that begin at ``start``, beside the collectives that run then."""
        now = start
        while True:
            while self.changes and self.changes[0][0] <= now:
                self.load = max(self.load + heapq.heappop(self.changes)[1], 0.0)
            if not self.changes and self.load < 1e-12:
                return now + work
            speed = max(1.0 - self.load, 0.05)
            until = self.changes[0][0] if self.changes else float("inf")
            if now + work / speed <= until:
                return now + work / speed
            work -= (until - now) * speed
            now = until


class _SlotUses:
    """Follows the values that lie in slots, through views and from one trace into the next."""

    def __init__(self) -> None:
        self.uses: list[list[Any]] = []
        self.of_value: dict[str, tuple[int, ...]] = {}  # by the name of a future, a gathered parameter or a view of it

    def issue(self, bsym: BoundSymbol, start: float, end: float, began: float) -> None:
        bucket, slot = bsym.args[0], bsym.args[1]
        if bsym.sym is not fsdp_all_gather:
            start = began  # gradients are copied into the slot first
        name = slot.name if isinstance(slot, Slot) else ""
        self.of_value[bsym.output.name] = (len(self.uses),)
        self.uses.append([name, bucket.spec.name, bsym.sym.name, bucket.spec.unsharded_bytes, start, end])

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
