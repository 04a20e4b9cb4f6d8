"""Agreement on buckets that one rank has lost and gradients that it has left: real rounds of simulated ranks, whose programs
then run in all orders.

Each rank compiles small traces with real buckets: the ranks compare them, a real pass inserts the agreement, and a real
start announces it. Collectives are recorded, also those with which ranks gather again what one of them has lost. The proof
that no collective deadlocks is compared with executions of other programs in all orders.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched import ScheduleDisagreement
from thunder_fsdp_sched.ranks.compare_programs import Computation, check_program
from thunder_fsdp_sched.ranks.messages import Action
from thunder_fsdp_sched.runtime import trace_start
from thunder_fsdp_sched.runtime.bucket import WINDOW_OPEN
from thunder_fsdp_sched.transforms.check_params_unchanged import fsdp_params_unchanged
from thunder_fsdp_sched.transforms.insert_agreement import insert_agreement

import pytest
from coded import coded
from executor import GLOO, NCCL, ROUNDS, Backend, Program, execute, explore, issued, seconds_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from internals import (
    AGREEMENT,
    Arena,
    Bucket,
    BucketRanks,
    ProcessGroupRef,
    effects,
    find_fault,
    fsdp_all_gather,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
    ops,
    read_program,
)
from simulated_ranks import World
from synthetic_traces import SHAPE, make_bucket, tensor
from thunder.core import prims
from thunder.core.trace import TraceCtx, tracectx
from torch import device

Layout = Mapping[str, Sequence[int]]
"""The ranks of each bucket, by its name."""

KINDS = ("kept", "left", "window")
"""How a bucket may be there when a trace starts: in its private slot, from forward, or from an earlier micro-batch."""


class SimulatedRank:
    """A rank with buckets of two parameters, and a trace that reads them and reduces a gradient of the second ones."""

    def __init__(self, world: World, layout: Layout, kind: str, backend: Backend) -> None:
        self.world, self.lost, rank = world, frozenset[str](), world.rank
        arena = Arena(device("cpu"))
        self.buckets = []
        for name, members in layout.items():
            if rank in members:
                group = ProcessGroupRef(f"group {members}", members.index(rank), members, name=f"group {members}")
                bucket = make_bucket(name, [SHAPE] * 2, world_size=len(members), arena=arena, ranks=BucketRanks(group))
                has = lambda *_, name=name, **__: name not in self.lost  # noqa: E731
                bucket.is_resident = has  # type: ignore[method-assign, assignment]
                self.buckets.append(bucket)
        trace, control = self._trace(kind), world.control()
        program, guards = read_program(trace), any(effects(b).ensures for b in trace.bound_symbols)
        agreed = check_program(control, "a trace", program, Computation(), guards=guards)
        self.start = trace_start.TraceStart(control, "backward_0", agreed, "trace", Computation(), 0)
        self.trace = insert_agreement(trace, start=self.start, before_issue=backend is GLOO)

    def _trace(self, kind: str) -> TraceCtx:
        trace = TraceCtx()
        with tracectx(trace):
            gradient, shards = tensor(), [tensor() for _ in self.buckets]
            trace.args = (gradient, *shards)
            for arg in trace.args:
                prims.unpack_trivial(arg, name=arg.name)
            for bucket, shard in zip(self.buckets, shards, strict=True):
                if kind == "kept":
                    trace.bound_symbols.append(fsdp_params_unchanged.bind(bucket, shard, shard, output=None))
                    continue
                marks: dict[str, Any] = {"window": WINDOW_OPEN} if kind == "window" else {"resident": True}
                param, _ = fsdp_wait_params(bucket, fsdp_all_gather(bucket, bucket.private_slot, shard, shard, **marks))
                gradient = prims.matmul(gradient, param)
            futures = []
            for bucket in reversed(self.buckets):
                gradient = prims.neg(gradient)
                futures.append((bucket, fsdp_reduce_scatter(bucket, None, None, gradient)))
            prims.python_return(tuple(grad for pair in futures for grad in fsdp_wait_grads(*pair)))
        return trace

    def run(self, lost: Collection[str] = ()) -> None:
        """Run the statements of agreement, and record the collectives, on a rank that has lost some buckets."""
        self.lost, flights = frozenset(lost), dict[str, int]()
        for bsym in self.trace.bound_symbols:
            e = effects(bsym)
            if bsym.sym.name in AGREEMENT:
                {"fsdp_agree": self.start.post, "fsdp_agreed": self.start.settle}.get(bsym.sym.name, int)()
            elif e.issues is not None and e.issues.bucket is not None:
                bucket, marks = e.issues.bucket, e.issues.marks
                if not marks or not ops.reuses(bucket, bucket.private_slot, in_window="window" in marks):
                    flights[e.issues.future] = self.issue(bucket, e.issues.kind)
            elif e.waits is not None and e.waits.future in flights:
                self.world.wait(flights[e.waits.future])

    def issue(self, bucket: Bucket, kind: str) -> int:
        group = bucket.ranks.group
        return self.world.issue(f"{kind} {bucket.spec.name}", group.name, tuple(group.global_ranks))

    def gather_again(self, bucket: Bucket) -> None:
        self.world.wait(self.issue(bucket, "gather again"))
        self.lost -= {bucket.spec.name}


class Job:
    """Simulated ranks that have compiled a trace, and run it as often as a test likes."""

    def __init__(self, size: int, layout: Layout, kind: str, backend: Backend, seed: int = 0) -> None:
        self.world = World(size, seed=seed)
        self.ranks = self.world.run(lambda rank: SimulatedRank(self.world, layout, kind, backend))
        self.world.taken()

    def run(self, lost: Mapping[int, Collection[str]]) -> dict[int, Any]:
        """Return the programs of a run in which ranks have lost these buckets."""

        def again(bucket: Bucket, *_: Any) -> None:
            self.ranks[self.world.rank].gather_again(bucket)

        with mock.patch.object(trace_start, "gather_again", again):
            self.world.run(lambda rank: self.ranks[rank].run(lost.get(rank, ())))
        return self.world.taken()


def gathered(program: Program) -> list[str]:
    return [a.line.rpartition(" ")[2] for a in issued(program) if "gather" in a.line]


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))


@pytest.mark.parametrize("backend", [GLOO, NCCL], ids=["gloo", "NCCL"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_gather_exactly_what_any_of_them_has_lost(kind: str, backend: Backend) -> None:
    names = ("a", "b")
    job = Job(2, dict.fromkeys(names, (0, 1)), kind, backend)
    reduced = [f"fsdp_reduce_scatter {name}" for name in reversed(names)]
    for lost in itertools.product(subsets(names), repeat=2):
        programs = job.run(dict(enumerate(lost)))
        assert explore(programs, backend) == "", lost
        for program in programs.values():
            assert gathered(program) == [name for name in names if name in {*lost[0], *lost[1]}]
            assert [action.line for action in issued(program)][-2:] == reduced


def test_ranks_that_have_lost_different_ones_of_many_buckets_gather_those_that_share_their_bits() -> None:
    names = [f"{number:02}" for number in range(70)]
    job = Job(2, dict.fromkeys(names, (0, 1)), "kept", GLOO)
    programs = job.run({0: ["03"], 1: ["34", "63"]})
    assert execute(programs) == ""
    for program in programs.values():
        assert gathered(program) == ["03", "04", "33", "34", "63", "64"]


@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_ranks_with_other_buckets_gather_all_of_theirs_if_one_is_lost(number: int) -> None:
    """Their numbers of buckets mean other buckets: a bit for each would gather one that its other ranks do not gather."""
    names, members = ("a", "b", "c"), [(0, 1), (1, 2), (0, 2), (0, 1, 2)]
    differ = 0
    for seed in range(number):
        rng = random.Random(seed)
        layout = {name: rng.choice(members) for name in names}
        of_rank = [[name for name, ranks in layout.items() if rank in ranks] for rank in range(3)]
        are_others = of_rank != [list(names)] * 3
        backend = rng.choice([GLOO, NCCL])
        job = Job(3, layout, "kept", backend, seed)
        for _ in range(4):
            lost = {rank: [name for name in own if rng.random() < 0.3] for rank, own in enumerate(of_rank)}
            programs = job.run(lost)
            assert execute(programs, backend, seed=seed) == "", (seed, lost)
            for rank, own in enumerate(of_rank):
                some = {name for losing in lost.values() for name in losing}
                others = own if some and are_others else [name for name in own if name in some]
                assert gathered(programs[rank]) == others, (seed, lost)
        differ += are_others
    assert differ > number / 2


#
# What windows have left
#

WINDOWS = {
    "nothing": (set(), True, ""),
    "a gradient that backward has, too": ({1}, True, ""),
    "a gradient that backward has not": ({0}, True, ", with gradients that only no_sync has left for a.p0 of bucket a"),
    "gradients that backward leaves": ({0}, False, r", which leaves gradients of no_sync in a"),
}
"""The parameters of which a micro-batch has left gradients, whether backward ends the window, and what it tells others."""


@pytest.mark.parametrize("backend", [GLOO, NCCL], ids=["gloo", "NCCL"])
def test_backwards_whose_windows_differ_raise_on_all_ranks(backend: Backend) -> None:
    """A rank would return a gradient that the other one drops, or add its gradients in another backward."""
    job = Job(2, {"a": (0, 1)}, "kept", backend)
    for windows in itertools.product(WINDOWS.values(), repeat=2):
        for rank, (params, ends_window, _) in enumerate(windows):
            [bucket] = job.ranks[rank].buckets
            bucket.accumulation.params = params
            bucket.ends_window = lambda params=params, ends_window=ends_window: bool(params) and ends_window
        texts = [text for _, _, text in windows]
        if texts[0] == texts[1]:
            job.run({})
            continue
        lines = [f"\n    rank {rank}: the trace of module 0 (Model){text}\n" for rank, text in enumerate(texts)]

        def run(rank: int, lines: Sequence[str] = lines) -> None:
            with pytest.raises(ScheduleDisagreement, check=coded("ranks.actions-differ", *lines)):
                job.ranks[rank].run()

        job.world.run(run)
        assert not any(issued(program) for program in job.world.taken().values())


#
# The proof that no collective deadlocks
#

Programs = Mapping[int, Sequence[Action]]


def program(*actions: str) -> list[Action]:
    """Return a rank's program: ``"A:01"`` issues on group A of ranks 0 and 1, ``"wait 0"`` waits for the first issue."""
    issued: list[Action] = []
    out = []
    for action in actions:
        if action.startswith("wait"):
            out.append(issued[int(action[5:])]._replace(waits=True))
        else:
            group, ranks = action.split(":")
            issued.append(Action(f"op on {group}", group, tuple(map(int, ranks)), False, len(issued)))
            out.append(issued[-1])
    return out


AB = ("A:01", "wait 0", "B:01", "wait 1")
BA = ("B:01", "wait 0", "A:01", "wait 1")
FAULTS: dict[str, tuple[list[tuple[str, ...]], tuple[str, ...]]] = {
    "none": ([("A:012", "B:012", "wait 1", "wait 0")] * 3, ()),
    # Groups of two along a ring. Each rank issues in the order of the groups' letters.
    "none in a ring": (
        [
            ("A:01", "C:02", "wait 0", "wait 1"),
            ("A:01", "wait 0", "B:12", "wait 1"),
            ("B:12", "C:02", "wait 0", "wait 1"),
        ],
        (),
    ),
    "groups that wait for each other": (
        [AB, BA],
        (
            "deadlocks",
            "rank 0 is held up at op on A, in op on A with ranks (0, 1)",
            "rank 1 is held up at op on B, in op on B with ranks (0, 1)",
        ),
    ),
    # No rank waits before it has issued both, so these finish if collectives of two groups run concurrently. NCCL does
    # not guarantee that.
    "groups that have to run concurrently": ([("A:01", "B:01"), ("B:01", "A:01")], ("deadlocks",)),
    "a missing rank": ([("A:01",)], ("line 1:\n    rank 0: op on A\n    rank 1: (nothing)",)),
    "a missing collective": ([("A:01", "A:01"), ("A:01",)], ("line 2:\n    rank 0: op on A\n    rank 1: (nothing)",)),
    "another order on one of two groups": (
        [("A:01", "B:01"), ("A:01",)],
        ("line 1 of process group 'B':\n    rank 0: op on B\n    rank 1: (nothing)",),
    ),
    "no member": ([("A:01",)] * 2 + [("A:01", "A:01")], ("line 2:",)),
    "other members": ([("A:01",), ("A:012",), ()], ("deadlocks",)),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_described(case):
    programs, expected = FAULTS[case]
    fault = find_fault({rank: program(*actions) for rank, actions in enumerate(programs)})
    assert bool(fault) == bool(expected)
    assert all(text in fault for text in expected), fault


GROUPS = {"A": (0, 1), "B": (1, 2), "C": (0, 2), "D": (0, 1, 2), "E": (0, 1)}


@st.composite
def small_programs(draw: st.DrawFn) -> Programs:
    """Draw programs of three ranks, with any waits.

    Ranks of a group issue equally many collectives on it, in any order; now and then of two kinds.
    """
    times = {group: draw(st.integers(0, 2)) for group in GROUPS}
    kinds = draw(st.sampled_from(["x", "x", "xy"]))
    programs = {}
    for rank in range(3):
        own = [group for group, members in GROUPS.items() if rank in members for _ in range(times[group])]
        order = draw(st.permutations(own))
        actions: list[Action] = []
        waiting: list[Action] = []
        for number, group in enumerate(order):
            line = f"{draw(st.sampled_from(kinds))} on {group}"
            waiting.append(Action(line, group, GROUPS[group], False, number))
            actions.append(waiting[-1])
            for earlier in [earlier for earlier in waiting if draw(st.booleans())]:
                waiting.remove(earlier)
                actions.append(earlier._replace(waits=True))
        programs[rank] = actions
    return programs


def check_proof(programs: Programs) -> bool:
    """Compare the proof with all orders of events, and return whether it finds a fault."""
    fault = find_fault(programs)
    assert bool(explore(programs, NCCL)) == bool(fault), (programs, fault)
    if not fault:
        assert not explore(programs, GLOO)
    return bool(fault)


@settings(deadline=None)
@given(small_programs())
@example({0: program("A:01", "C:02"), 1: program("B:12", "A:01"), 2: program("C:02", "B:12")})
def test_faults_are_found_exactly_where_some_order_of_events_has_one(programs: Programs) -> None:
    check_proof(programs)


def all_programs(groups: Sequence[str], most: int) -> Iterator[list[Action]]:
    """Yield all programs of at most so many collectives on these groups, each waited for at any time or never."""

    def continued(actions: list[Action], waiting: list[Action]) -> Iterator[list[Action]]:
        yield actions
        for action in waiting:
            yield from continued([*actions, action._replace(waits=True)], [a for a in waiting if a is not action])
        if (number := sum(not action.waits for action in actions)) < most:
            for group in groups:
                action = Action(f"op on {group}", group, GROUPS[group], False, number)
                yield from continued([*actions, action], [*waiting, action])

    return continued([], [])


def test_ranks_that_compile_any_small_programs_raise_exactly_where_some_order_of_events_has_a_fault() -> None:
    """Programs that are alike up to the names of groups are not proved: their n-th groups match, or they do not."""
    of_rank = list(all_programs("AE", 2))
    pairs = random.Random(0).sample([*itertools.product(of_rank, repeat=2)], 400) + [(p, p) for p in of_rank]
    world = World(2)

    def compare(rank: int) -> list[bool]:
        control, agreed = world.control(), []
        for number, pair in enumerate(pairs):
            try:
                check_program(control, f"trace {number}", pair[rank], Computation())
                agreed.append(True)
            except ScheduleDisagreement:
                agreed.append(False)
        return agreed

    expected = [explore(dict(enumerate(pair)), NCCL) == "" for pair in pairs]
    assert world.run(compare) == [expected] * 2


#
# The executor itself
#


AT_ONCE, MISMATCH = [("A:01", "B:01"), ("B:01", "A:01")], [("A:01",), ("A:012",), ()]


@pytest.mark.parametrize(
    ("programs", "backend", "fault"),
    [
        ([AB, BA], GLOO, "0 is at its wait for op on A, and has issued op on A with ranks (0, 1)\n    rank 1 is at"),
        (AT_ONCE, GLOO, ""),
        (AT_ONCE, NCCL, "1 is at its end, and has issued op on B with ranks (0, 1), op on A with"),
        ([("A:01",), ()], GLOO, "0 is at its end, and has issued op on A with ranks (0, 1)"),
        (MISMATCH, GLOO, "1 is at its end, and has issued op on A with ranks (0, 1, 2)"),
    ],
)
def test_faults_of_executions(programs: Sequence[Sequence[str]], backend: Backend, fault: str) -> None:
    of_ranks = {rank: program(*actions) for rank, actions in enumerate(programs)}
    for found in (explore(of_ranks, backend), *(execute(of_ranks, backend, seed=seed) for seed in range(3))):
        assert fault in found and bool(found) == bool(fault), found


def test_a_host_meets_in_rounds_while_its_device_waits() -> None:
    """With NCCL a round may precede what ends the wait; with gloo the host would never come to it."""
    meet = [Action("a round", ROUNDS, (0, 1), False, 9), Action("a round", ROUNDS, (0, 1), True, 9)]
    first = program("A:01", "wait 0")
    programs = {0: [*first, *meet], 1: [*meet, *first]}
    assert explore(programs, NCCL) == ""
    assert explore(programs, GLOO).startswith("stuck:")


def test_the_clock_follows_the_streams() -> None:
    """A link of two seconds for each collective, and compute of one second in between."""
    first, second = program("A:01", "A:01", "wait 0", "wait 1")[:2]
    overlapped = [first, 1.0, second, 1.0, first._replace(waits=True), 1.0, second._replace(waits=True)]
    for backend in (GLOO, NCCL):
        assert seconds_of({0: overlapped, 1: [0.5, *overlapped]}, lambda action: 2.0, backend) == {0: 4.5, 1: 4.5}
    other = second._replace(group="B")
    at_once = {rank: [first, other, first._replace(waits=True), other._replace(waits=True)] for rank in range(2)}
    assert seconds_of(at_once, lambda action: 2.0, GLOO) == {0: 2.0, 1: 2.0}
    assert seconds_of(at_once, lambda action: 2.0, NCCL) == {0: 4.0, 1: 4.0}
