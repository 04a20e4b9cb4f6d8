"""Simulate traces: streams, a timeline, and the communication that compute does not hide.

[Note: Streams]
The host issues bound symbols one after the other. Compute runs in order on the compute stream. A collective runs on the
stream of its process group, after the previous collective there. It starts only when all work that was issued to the
compute stream earlier has finished, because NCCL waits for the stream that is current at the issue. A wait blocks the
compute stream, not the host, until its collective has finished. On a CPU the host is the compute stream. While
collectives run, compute can be slower (``AnalyticCost.contention``), because collectives occupy processors of the GPU or
the host. Collectives themselves are not slowed down.

[Note: Several collectives at once]
NCCL runs the collectives of one group one after the other (``AnalyticCost.concurrent`` is 1). gloo has two threads per
group, so two collectives share the link. Two reductions get half of it each: both finish late, the first no earlier
than if it had been issued last. An all-gather sends its data in one piece, whereas a reduction sends segment after
segment, each only when the previous one has arrived. So of these two, the all-gather gets the larger share of the link
(``gather_share``), and the reduction less than the rest (``reduction_share``). Of two all-gathers, the first gets the
whole link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ...ir.analysis import BEFORE_TRACE, Analysis
from ...ir.effects import Effects, Issue, Wait, effects
from ...ir.inspection import is_statement
from ...runtime.bucket import Bucket
from ...runtime.memory import Slot
from .cost import AnalyticCost, Seconds
from .timeline import COMPUTE, Interval, SlotUse, Timeline


def simulate(
    forward: TraceCtx | Sequence[TraceCtx],
    backward: TraceCtx | None,
    cost: AnalyticCost,
    *,
    in_window: bool = False,
) -> Timeline:
    """Simulate execution traces that run one after the other, usually forward and backward.

    The cost is about linear in the number of bound symbols.

    Args:
        forward: an execution trace, sorted or not, or several.
        backward: the backward trace, if any.
        cost: the cost model of bound symbols and collectives.
        in_window: whether an earlier micro-batch of an accumulation window has gathered the buckets that this one may
            reuse. A window of ``n`` micro-batches takes the time of the first, of ``n - 2`` more in the window, and of the
            one in the window that reduces gradients.
    """
    traces = [forward] if isinstance(forward, TraceCtx) else list(forward)
    if backward is not None:
        traces.append(backward)
    simulator = _Simulator(cost, in_window)
    for number, trace in enumerate(traces):
        simulator.run(number, trace)
    return simulator.timeline(Analysis(*traces))


@dataclass(eq=False)
class _SimulatedTransfer:
    """A collective or a copy in flight; ``remaining`` is its remaining work in seconds, if it were alone on the link."""

    interval: Interval
    gathers: bool
    arrival: float
    remaining: float
    start: float = -1.0
    end: float = -1.0


class _Link:
    """The link of a process group. It runs collectives in issue order, several at once if the backend does.

    Its simulated time lags that of the streams that issue to it, and advances only while no new collective can arrive.
    """

    def __init__(self, cost: AnalyticCost, intervals: list[Interval]) -> None:
        self.cost, self.concurrent = cost, cost.concurrent
        self.intervals = intervals
        self.now = 0.0
        self.dedicated_seconds = 0.0
        self.waiting: deque[_SimulatedTransfer] = deque()
        self.active: list[_SimulatedTransfer] = []
        self.load = 0.0
        """The share of compute speed that is lost to the active collectives."""
        self.next_change = float("inf")
        """The time at which the next one starts or finishes."""

    def issue(self, flight: _SimulatedTransfer) -> None:
        self.dedicated_seconds += flight.remaining
        self.advance(flight.arrival)
        self.waiting.append(flight)
        self._admit()

    def advance(self, until: float) -> None:
        while self.next_change <= until:
            self._move(self.next_change)
            for flight in [f for f in self.active if f.remaining <= 1e-12]:
                self._end(flight)
            self._admit()
        if until > self.now:
            self._move(until)

    def finish(self, flight: _SimulatedTransfer) -> float:
        """Advance the link to the end of ``flight``, and return that time."""
        while flight.end < 0:
            self.advance(self.next_change)
        return flight.end

    def _move(self, until: float) -> None:
        for flight, share in zip(self.active, self._shares(), strict=True):
            flight.remaining -= (until - self.now) * share
        self.now = until

    def _end(self, flight: _SimulatedTransfer) -> None:
        flight.end = self.now
        self.active.remove(flight)
        self.intervals.append(flight.interval._replace(start=flight.start, end=flight.end))

    def _admit(self) -> None:
        while self.waiting and len(self.active) < self.concurrent and self.waiting[0].arrival <= self.now:
            flight = self.waiting.popleft()
            flight.start = self.now
            self.active.append(flight)
        shares = self._shares()
        ends = [self.now + max(f.remaining, 0.0) / share for f, share in zip(self.active, shares, strict=True) if share]
        if self.waiting and len(self.active) < self.concurrent:
            ends.append(self.waiting[0].arrival)
        self.next_change = min(ends, default=float("inf"))
        self.load = sum(
            self.cost.contention(f.interval.kind) * share for f, share in zip(self.active, shares, strict=True)
        )

    def _shares(self) -> list[float]:
        """Return the share of the link of each active collective: see [Note: Several collectives at once]."""
        if len(self.active) == 1:
            return [1.0]
        gathers = [flight.gathers for flight in self.active]
        reductions = max(gathers.count(False), 1)
        if True not in gathers:
            return [1 / reductions for _ in gathers]
        for_gathers = [0.0] * len(gathers)
        for_gathers[gathers.index(True)] = 1.0 if all(gathers) else self.cost.gather_share
        for_reduction = self.cost.reduction_share / reductions
        return [share if gather else for_reduction for gather, share in zip(gathers, for_gathers, strict=True)]


class _Simulator:
    """The state of all streams while traces run."""

    def __init__(self, cost: AnalyticCost, in_window: bool) -> None:
        self.cost = cost
        self.in_window = in_window
        self.intervals: list[Interval] = []
        self.host = 0.0
        self.compute = 0.0
        self.links: dict[str, _Link] = {}
        self.flights: dict[str, tuple[_Link, _SimulatedTransfer]] = {}
        self.times: list[tuple[float, float]] = []
        """For each bound symbol, when it begins to use slots and when it has used them."""
        self.resident: set[str] = set()  # gathers whose buckets are resident, so there is nothing to wait for
        self.compute_seconds = 0.0
        self.contention_seconds = 0.0

    def run(self, number: int, trace: TraceCtx) -> None:
        self.flights.clear()
        self.resident.clear()
        position = 0
        for bsym, seconds in zip(trace.bound_symbols, self.cost.seconds(trace), strict=True):
            began = used = self.compute
            if not is_statement(bsym):
                self.times.append((began, used))
                continue
            e = effects(bsym)
            issue, wait = e.issues, e.waits
            if issue is not None and wait is not None:
                self._wait(bsym, wait, Seconds(0.0, 0.0), number, position)
                used = self.compute  # the slot is free before the next collective itself is issued
                self._work(bsym, seconds, number, position)
                self._issue(e, issue, number, position)
            elif issue is not None and (issue.resident or (self.in_window and issue.window is not None)):
                self.resident.add(issue.future)
            elif issue is not None:
                self._work(bsym, seconds, number, position)
                flight = self._issue(e, issue, number, position)
                if issue.gathers:  # parameters occupy the slot only while they are received
                    began = flight.arrival
                used = max(began, self.compute)
            else:
                if wait is None:
                    self._work(bsym, seconds, number, position)
                elif wait.future not in self.resident:
                    self._wait(bsym, wait, seconds, number, position)
                used = self.compute
            self.times.append((began, used))
            position += 1

    def timeline(self, analysis: Analysis) -> Timeline:
        for link in self.links.values():
            while link.active or link.waiting:
                link.advance(link.next_change)
        self.intervals.sort(key=lambda i: (i.trace, i.position, i.kind != "wait"))
        end = max([self.host, *(i.end for i in self.intervals)])
        communication = {name: link.dedicated_seconds for name, link in self.links.items()}
        uses = _slot_uses(analysis, self.times)
        return Timeline(tuple(self.intervals), uses, end, self.compute_seconds, self.contention_seconds, communication)

    def _work(self, bsym: BoundSymbol, seconds: Seconds, trace: int, position: int, bucket: str = "") -> None:
        self.host += seconds.host
        work = seconds.host + seconds.device if self.cost.synchronous else seconds.device
        if work:
            start = self.compute if self.cost.synchronous else max(self.host, self.compute)
            self.compute = self._end_of(start, work)
            self.compute_seconds += work
            self.contention_seconds += self.compute - start - work
            self.intervals.append(
                Interval(COMPUTE, COMPUTE, bsym.sym.name, bucket, start, self.compute, trace, position)
            )
        if self.cost.synchronous:
            self.host = self.compute

    def _issue(self, e: Effects, issue: Issue, trace: int, position: int) -> _SimulatedTransfer:
        assert issue.group is not None and issue.bucket is not None
        name, seconds = issue.group.description, self.cost.collective_seconds(issue)
        if name not in self.links:
            self.links[name] = _Link(self.cost, self.intervals)
        label = issue.bucket.spec.name
        arrival = max(self.host, self.compute)
        interval = Interval(name, issue.kind, issue.kind, label, arrival, arrival, trace, position)
        flight = _SimulatedTransfer(interval, issue.gathers, arrival, seconds)
        self.links[name].issue(flight)
        self.flights[issue.future] = self.links[name], flight
        return flight

    def _wait(self, bsym: BoundSymbol, wait: Wait, seconds: Seconds, trace: int, position: int) -> None:
        link, flight = self.flights[wait.future]
        start = max(self.compute, self.host)
        link.advance(start)
        end = link.finish(flight)
        if end > start:
            of = flight.interval.bucket
            self.intervals.append(Interval(COMPUTE, "wait", bsym.sym.name, of, start, end, trace, position))
        self.compute = max(self.compute, end)
        self._work(bsym, seconds, trace, position, flight.interval.bucket)

    def _end_of(self, start: float, work: float) -> float:
        """Return when compute of ``work`` seconds at full speed ends if it starts at ``start``, given contention."""
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


def _slot_uses(analysis: Analysis, times: Sequence[tuple[float, float]]) -> tuple[SlotUse, ...]:
    """Return when each slot is in use, in issue order.

    Args:
        analysis: that of the traces.
        times: for each position, when the bound symbol begins to use slots and when it has used them.
    """
    uses: list[SlotUse] = []
    gathered: dict[tuple[Slot, Bucket], int] = {}
    for live in analysis.slots.values():
        start = 0.0 if live.first == BEFORE_TRACE else times[live.first][0]
        end = start if live.last == live.first else times[live.last][1]
        if live.slot is not None:
            if live.is_gather:
                gathered[live.slot, live.bucket.primary] = len(uses)
            elif (live.slot, live.bucket) in gathered:  # gradients in the place of their parameters
                number = gathered[live.slot, live.bucket]
                params = uses[number]
                uses[number] = params._replace(end=max(min(params.end, start), params.start))
        issue = analysis.effects[live.issue].issues
        assert issue is not None
        uses.append(SlotUse(str(live.slot or ""), live.bucket.spec.name, issue.kind, issue.nbytes, start, end))
    return tuple(uses)
