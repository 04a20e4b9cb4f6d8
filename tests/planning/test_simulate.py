"""The simulator: timelines that can be worked out by hand, and properties that hold for any schedule.

Traces are built directly from symbols, and a cost model of constants says how long each symbol takes. Nothing is measured,
and nothing communicates.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from thunder_fsdp_sched.planning import Timeline, simulate
from thunder_fsdp_sched.ranks.messages import Action

import pytest
from executor import GLOO, NCCL, Program, seconds_of
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import (
    BucketRanks,
    ProcessGroupRef,
    assign_slots,
    effects,
    fsdp_all_gather,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
    sort_communication,
)
from synthetic_traces import make_buckets, tensor
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, from_trace, tracectx

NBYTES = 1024  # of an unsharded bucket


@dataclass
class ConstantCost:
    """A cost model of constants: seconds of each computing symbol by name, and of each collective by kind."""

    compute: dict[str, float] = field(default_factory=lambda: {"neg": 1.0})
    host: float = 0.0
    gather: float = 1.0
    reduction: float = 1.0
    contention: float = 0.0
    synchronous: bool = True

    def seconds(self, row: Any) -> Any:
        host = self.host * (row.bsym.sym is not prims.python_return)
        return SimpleNamespace(host=host, device=self.compute.get(row.bsym.sym.name, 0.0))

    def collective_seconds(self, issue: Any) -> float:
        return self.gather if issue.gathers else self.reduction


class TraceBuilder:
    """Builds a trace symbol by symbol. With ``after``, a backward trace whose names follow those of that builder."""

    def __init__(self, *, zero3: bool = True, after: "TraceBuilder | None" = None) -> None:
        self.trace = from_trace(after.trace) if after else TraceCtx()  # no name is used in both traces
        self.buckets = make_buckets([1] * 6, zero3=zero3)
        self.futures: dict[int, object] = {}
        self.params: dict[int, TensorProxy] = {}
        with tracectx(self.trace):
            self.value = tensor()
            self.trace.args = (self.value,)

    def do(self, *steps: str) -> "TraceBuilder":
        """Run steps, each a method with its number: ``"gather 0"``, ``"compute"``."""
        for step in steps:
            name, *numbers = step.split()
            getattr(self, name)(*map(int, numbers))
        return self

    def write(self, function: Callable, *args: object) -> object:
        with tracectx(self.trace):
            return function(*args)

    def gather(self, number: int) -> None:
        with tracectx(self.trace):
            self.futures[number] = fsdp_all_gather(self.buckets[number], None, tensor())

    def wait(self, number: int) -> None:
        (self.params[number],) = self.write(fsdp_wait_params, self.buckets[number], self.futures[number])

    def compute(self, number: int | None = None, symbol: Callable = prims.neg) -> None:
        """Apply ``symbol`` to the running value, or multiply it by a bucket's parameter."""
        if number is None:
            self.value = self.write(symbol, self.value)
        else:
            self.value = self.write(prims.matmul, self.value, self.params[number])

    def reduce(self, number: int) -> None:
        self.futures[number] = self.write(fsdp_reduce_scatter, self.buckets[number], None, self.value)

    def wait_grads(self, number: int) -> None:
        self.write(fsdp_wait_grads, self.buckets[number], self.futures[number])

    def finish_trace(self) -> TraceCtx:
        self.write(prims.python_return, {"output": self.value, "flat_args": []}, ())
        return self.trace


def spans(timeline: Timeline, stream: str, kind: str | None = None) -> list[tuple[float, float]]:
    return [(i.start, i.end) for i in timeline.intervals if i.stream == stream and kind in (None, i.kind)]


def run(*steps: str, **cost: object) -> Timeline:
    """Simulate a trace of steps with constant costs."""
    return simulate(TraceBuilder().do(*steps).finish_trace(), None, ConstantCost(**cost))


PREFETCHED = ("gather 0", "gather 1", "wait 0", "compute 0", "wait 1", "compute 1")
"""The gather of b1 is issued before compute with b0."""


def test_compute_hides_a_prefetched_gather_but_not_the_first():
    """A step is as long as the executor says, and the sum of its parts; see the properties below."""
    timeline = run(*PREFETCHED, compute={"matmul": 3.0}, gather=2.0)
    assert spans(timeline, "compute", "wait") == [(0.0, 2.0)]
    assert (timeline.exposed_seconds, timeline.over_max, timeline.over_sum) == (2.0, 8 / 6, 0.8)


def test_collectives_queue_within_a_group_but_not_across_groups():
    def trace_in(group: str) -> TraceCtx:
        builder = TraceBuilder()
        builder.buckets[1].ranks = BucketRanks(ProcessGroupRef(group, 0, range(2)))
        return builder.do("reduce 0", "gather 1", "wait 1", "compute 1", "wait_grads 0").finish_trace()

    cost = ConstantCost({"matmul": 1.0}, gather=2.0, reduction=4.0)
    together = simulate(trace_in("none"), None, cost)
    assert spans(together, "none") == [(0.0, 4.0), (4.0, 6.0)]
    assert together.step_seconds == 7.0
    separate = simulate(trace_in("other"), None, cost)
    assert spans(separate, "none") == [(0.0, 4.0)]
    assert spans(separate, "other") == [(0.0, 2.0)]
    assert separate.step_seconds == 4.0
    assert separate.exposed_seconds == 3.0, (
        "exposed time is the union of [0, 4] and [0, 2] without the compute in [2, 3]"
    )
    assert separate.lower_bound == 4.0


def test_running_collectives_slow_compute_down():
    steps = ("gather 0", "compute", "compute", "wait 0", "compute 0")
    timeline = run(*steps, compute={"neg": 1.5}, gather=2.0, contention=0.25)
    # In the first 2 s compute does 1.5 s of work; afterwards it runs at full speed.
    assert spans(timeline, "compute", "compute") == [(0.0, 2.0), (2.0, 3.5)]
    assert (timeline.compute_seconds, timeline.contention_seconds, timeline.exposed_seconds) == (3.0, 0.5, 0.0)
    middle = run("gather 0", "compute", "wait 0", compute={"neg": 4.0}, gather=2.0, contention=0.5)
    assert spans(middle, "compute", "compute") == [(0.0, 5.0)] and middle.contention_seconds == 1.0


def test_the_device_idles_while_it_waits_for_a_slower_host():
    timeline = run("compute", "compute", "compute", compute={"neg": 1.0}, host=2.0, synchronous=False)
    assert spans(timeline, "compute") == [(2.0, 3.0), (4.0, 5.0), (6.0, 7.0)]
    assert (timeline.step_seconds, timeline.idle_seconds) == (7.0, 4.0)


def test_a_slot_is_held_from_the_issue_to_the_last_read_through_views():
    builder = TraceBuilder().do("gather 0", "wait 0")
    builder.params[0] = builder.write(prims.transpose, builder.params[0], (1, 0))
    builder.do("compute 0", "gather 1", "compute 0", "compute", "wait 1", "compute 1")
    timeline = simulate(builder.finish_trace(), None, ConstantCost({"matmul": 2.0, "neg": 2.0}, gather=1.0))
    # b0 is held until the second matmul that reads it ends, b1 from its issue after the first matmul until the end.
    assert [(u.bucket, u.start, u.end) for u in timeline.slots] == [("b0", 0.0, 5.0), ("b1", 3.0, 9.0)]
    assert timeline.memory == ((0.0, NBYTES), (3.0, 2 * NBYTES), (5.0, NBYTES), (9.0, 0))
    assert timeline.peak_unsharded_bytes == 2 * NBYTES


def test_a_sequence_of_traces_runs_in_order():
    traces = [TraceBuilder().do(*PREFETCHED).finish_trace() for _ in range(3)]
    cost = ConstantCost({"matmul": 3.0}, gather=2.0)
    timeline = simulate(traces, None, cost)
    assert timeline.step_seconds == 24.0
    assert simulate(traces[:2], traces[2], cost) == timeline
    positions = [i.position for i in timeline.intervals if i.trace == 2 and i.kind == "compute"]
    assert positions == [3, 5], "positions must be those of the matmuls in their own trace"


#
# Properties of any schedule
#


@st.composite
def steps(draw):
    """Draw a forward and a backward trace, sorted by the passes, that use buckets in order and reduce some of them."""
    count = draw(st.integers(1, 6))
    prefetch = draw(st.integers(0, 3))
    zero3 = draw(st.booleans())
    traces = []
    builder = None
    for backward in (False, True):
        builder = TraceBuilder(zero3=zero3, after=builder)
        for number in range(count):
            builder.do(*["compute"] * draw(st.integers(0, 2)))
            builder.do(f"gather {number}", f"wait {number}", f"compute {number}")
        if backward:
            for number in draw(st.lists(st.integers(0, count - 1), unique=True)):
                builder.do("compute", f"reduce {number}", f"wait_grads {number}")
        traces.append(assign_slots(sort_communication(builder.finish_trace(), prefetch=prefetch)))
    return traces


times = st.sampled_from([0.0, 0.25, 1.0, 3.0])
costs = st.builds(
    ConstantCost,
    compute=st.fixed_dictionaries({"neg": times, "matmul": times, "fsdp_reduce_scatter": times}),
    host=st.sampled_from([0.0, 0.5]),
    gather=times,
    reduction=times,
    contention=st.sampled_from([0.0, 0.25]),
    synchronous=st.booleans(),
)


@settings(deadline=None)
@given(steps(), costs, st.sampled_from([0.0, 0.5, 0.9]))
def test_times_and_memory_of_any_step_are_consistent(traces, cost, factor):
    timeline = simulate(*traces, cost)
    parts = timeline.compute_seconds + timeline.contention_seconds + timeline.exposed_seconds + timeline.idle_seconds
    assert timeline.step_seconds == pytest.approx(parts)
    assert sum(end - start for start, end in timeline.launch_gaps) == pytest.approx(timeline.idle_seconds)
    total, terms = timeline.breakdown.replace(",", "").split(" ms = ")
    shown = sum(float(term.split()[0]) for term in terms.split(" + "))
    assert float(total) == pytest.approx(shown, abs=0.03)
    assert timeline.step_seconds >= timeline.lower_bound - 1e-9
    for stream in ("compute", *timeline.communication_seconds):
        in_order = spans(timeline, stream)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(in_order)), "intervals of a stream overlap"
    assert all(nbytes >= 0 for _, nbytes in timeline.memory)
    assert not timeline.memory or timeline.memory[-1][1] == 0
    for use in timeline.slots:
        assert 0.0 <= use.start <= use.end <= timeline.step_seconds + 1e-9

    # Without contention a step takes at most the serial time.
    calm = simulate(*traces, dataclasses.replace(cost, host=0.0, contention=0.0))
    assert calm.step_seconds <= calm.serial_seconds + 1e-9
    assert calm.step_seconds == pytest.approx(calm.compute_seconds + calm.exposed_seconds)

    # A faster link never makes a step slower.
    slower = dataclasses.replace(cost, contention=0.0)
    faster = dataclasses.replace(slower, gather=factor * cost.gather, reduction=factor * cost.reduction)
    assert simulate(*traces, faster).step_seconds <= simulate(*traces, slower).step_seconds + 1e-9


def program_of(traces: Sequence[TraceCtx], cost: ConstantCost) -> Program:
    """Return what a rank computes, issues and waits for."""
    found: list[Action | float] = []
    issued: dict[tuple[int, str], Action] = {}
    for number, trace in enumerate(traces):
        for bsym in trace.bound_symbols:
            e = effects(bsym)
            if e.waits is not None:
                found.append(issued[number, e.waits.future]._replace(waits=True))
            found.append(cost.seconds(SimpleNamespace(bsym=bsym)).device)
            if e.issues is not None:
                kind = "gather" if e.issues.gathers else "reduction"
                found.append(
                    issued.setdefault((number, e.issues.future), Action(kind, "none", (0, 1), False, len(issued)))
                )
    return found


@settings(deadline=None, max_examples=50)
@given(steps(), costs)
def test_a_step_takes_as_long_as_the_executor_says(traces, cost):
    """The executor knows nothing of links, contention or slots, and runs both ranks."""
    cost = dataclasses.replace(cost, host=0.0, contention=0.0)
    program = program_of(traces, cost)
    expected = seconds_of(
        {0: program, 1: program}, lambda action: getattr(cost, action.line), GLOO if cost.synchronous else NCCL
    )
    assert simulate(*traces, cost).step_seconds == pytest.approx(expected[0]) == pytest.approx(expected[1])
