"""Agreement on buckets that one rank has lost and gradients that it has left: real rounds of simulated ranks, whose programs
then run in all orders.

Each rank compiles small traces with real buckets: the ranks compare them, a real pass inserts the agreement, and a real
start announces it. Collectives are recorded, also those with which ranks gather again what one of them has lost.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from thunder_fsdp_sched import ScheduleDisagreement
from thunder_fsdp_sched.ranks.compare_programs import Computation, check_program
from thunder_fsdp_sched.runtime import trace_start
from thunder_fsdp_sched.runtime.bucket import WINDOW_OPEN
from thunder_fsdp_sched.transforms.check_params_unchanged import fsdp_params_unchanged
from thunder_fsdp_sched.transforms.insert_agreement import insert_agreement

import pytest
from coded import coded
from executor import GLOO, NCCL, Backend, Program, execute, explore, issued
from internals import (
    AGREEMENT,
    Arena,
    Bucket,
    BucketRanks,
    ProcessGroupRef,
    effects,
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
    "a gradient that backward has not": (
        {0},
        True,
        ", with gradients that only no_sync has left for a.p0 of bucket a",
    ),
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
