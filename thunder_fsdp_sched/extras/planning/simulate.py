"""Simulate traces: streams, a timeline, and the communication that compute does not hide.

[Note: Streams]
The host issues bound symbols one after the other. Compute runs in order on the compute stream. A collective runs on the
stream of its process group, after the previous collective there. It starts only when all work that was issued to the
compute stream earlier has finished, because NCCL waits for the stream that is current at the issue. A wait blocks the
compute stream, not the host, until its collective has finished. On a CPU the host is the compute stream. While
collectives run, compute can be slower (``ClusterSpec.contention``), because collectives occupy processors of the GPU or
the host. Collectives themselves are not slowed down.

gloo runs two collectives of a group at once, which then share the link. Simulated, they run one after the other, so the
first of them ends earlier, and the last at about the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from thunder.core.trace import TraceCtx

from ...ir.analysis import BEFORE_TRACE
from ...ir.effects import Issue, Wait
from ...ir.inspection import is_statement
from ...ir.slots import spans_of
from ..step_memory.costs import Row
from ..step_memory.rows import StepRows
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
    return simulate_rows(StepRows(*traces), cost, in_window=in_window)


def simulate_rows(step: StepRows, cost: AnalyticCost, *, in_window: bool = False) -> Timeline:
    """Simulate the rows of a step; see :func:`simulate`."""
    streams = _Streams(cost, in_window)
    for row in step.rows:
        streams.run(row, row.position - step.rows[step.begins[row.trace]].position)
    return streams.timeline(step)


class _Streams:
    """The state of all streams while traces run. Times are in seconds since the step began."""

    def __init__(self, cost: AnalyticCost, in_window: bool) -> None:
        self.cost, self.in_window = cost, in_window
        self.intervals: list[Interval] = []
        self.host = self.compute = 0.0
        self.compute_seconds = self.contention_seconds = 0.0
        self.communication_seconds: dict[str, float] = defaultdict(float)
        self.free: dict[str, float] = {}
        """The time at which the stream of each process group finishes the collectives issued so far."""
        self.flights: dict[str, Interval | None] = {}
        """The collectives, keyed by their futures; ``None`` for a resident bucket, for which nothing waits."""
        self.running: list[Interval] = []
        """The collectives that may slow down the next compute."""
        self.times: list[tuple[float, float]] = []
        """For each bound symbol, the start and the end of its use of slots."""

    def run(self, row: Row, position: int) -> None:
        """Run a row, which has this schedule position in its trace."""
        began = used = self.compute
        if is_statement(row.bsym):
            seconds, issue, wait = self.cost.seconds(row), row.effects.issues, row.effects.waits
            at = row.bsym.sym.name, row.trace, position
            if issue is not None and (issue.resident or (self.in_window and issue.is_in_window)):
                self.flights[issue.future] = None
            else:
                flight = None if wait is None else self._wait(wait, at)
                used = self.compute  # the slot is free before the next collective itself is issued
                if wait is None or flight is not None:
                    self._work(seconds, at, flight.bucket if flight is not None and issue is None else "")
                if issue is None:
                    used = self.compute
                else:
                    arrival = self._issue(issue, at)
                    if wait is None:
                        began = arrival if issue.gathers else began  # the slot is empty before
                        used = max(began, self.compute)
        self.times.append((began, used))

    def timeline(self, step: StepRows) -> Timeline:
        self.intervals.sort(key=lambda i: (i.trace, i.position, i.kind != "wait"))
        end = max([self.host, *(i.end for i in self.intervals)])
        uses = tuple(_slot_uses(step, self.times))
        communication = dict(self.communication_seconds)
        return Timeline(tuple(self.intervals), uses, end, self.compute_seconds, self.contention_seconds, communication)

    def _work(self, seconds: Seconds, at: _At, bucket: str) -> None:
        label, *where = at
        self.host += seconds.host
        work = seconds.host + seconds.device if self.cost.synchronous else seconds.device
        if work:
            start = self.compute if self.cost.synchronous else max(self.host, self.compute)
            self.compute = self._end_of(start, work)
            self.compute_seconds += work
            self.contention_seconds += self.compute - start - work
            self.intervals.append(Interval(COMPUTE, COMPUTE, label, bucket, start, self.compute, *where))
        if self.cost.synchronous:
            self.host = self.compute

    def _issue(self, issue: Issue, at: _At) -> float:
        """Run a collective when its group is free, and return the time of its issue."""
        assert issue.group is not None and issue.bucket is not None
        group, seconds = issue.group.description, self.cost.collective_seconds(issue)
        arrival = max(self.host, self.compute)
        start = max(arrival, self.free.get(group, 0.0))
        flight = Interval(group, issue.kind, issue.kind, issue.bucket.spec.name, start, start + seconds, *at[1:])
        self.free[group] = flight.end
        self.communication_seconds[group] += seconds
        self.flights[issue.future] = flight
        self.running.append(flight)
        self.intervals.append(flight)
        return arrival

    def _wait(self, wait: Wait, at: _At) -> Interval | None:
        """Wait for a collective, and return it; ``None`` if the bucket is resident."""
        start, flight = max(self.compute, self.host), self.flights[wait.future]
        if flight is not None:
            if flight.end > start:
                self.intervals.append(Interval(COMPUTE, "wait", at[0], flight.bucket, start, flight.end, *at[1:]))
            self.compute = max(self.compute, flight.end)
        return flight

    def _end_of(self, now: float, work: float) -> float:
        """Return the end of compute that starts ``now`` and takes ``work`` seconds at full speed, given contention."""
        self.running = [i for i in self.running if i.end > now]
        for change in sorted({time for i in self.running for time in i.span if time > now}):
            load = sum(self.cost.contention for i in self.running if i.start <= now < i.end)
            speed = max(1.0 - load, 0.05)
            if now + work / speed <= change:
                return now + work / speed
            work, now = work - (change - now) * speed, change
        return now + work


_At = tuple[str, int, int]
"""The name of a bound symbol, the index of its trace, and its schedule position there."""


def _slot_uses(step: StepRows, times: Sequence[tuple[float, float]]) -> Iterator[SlotUse]:
    """Yield the uses of slots, in issue order.

    Args:
        times: for each row, the start and the end of the bound symbol's use of slots.
    """
    lives = list(step.slots.values())
    for live, (first, last, _) in zip(lives, spans_of(lives), strict=True):
        start = 0.0 if first == BEFORE_TRACE else times[first][0]
        end = start if last <= first else max(times[last][1], start)
        issue = step.effects[live.issue].issues
        assert issue is not None
        yield SlotUse(str(live.slot or ""), live.bucket.spec.name, issue.kind, issue.nbytes, start, end)
