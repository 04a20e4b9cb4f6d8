"""Merged traces: a rank's own trace in the merged order, with the collectives that only other ranks need."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest import mock

import thunder_fsdp_sched as fs
from thunder_fsdp_sched import StepMemory, VerificationError
from thunder_fsdp_sched.extras.no_sync.ops import add_grads, add_reduced, reduce_unreduced
from thunder_fsdp_sched.extras.ranks_differ.build import MachineInAnyOrder, build
from thunder_fsdp_sched.extras.ranks_differ.follow_order import empty_trace, follow_order, steps_of
from thunder_fsdp_sched.extras.ranks_differ.merging import Key, merge
from thunder_fsdp_sched.extras.ranks_differ.symbols import key_of, serve_left, wait_served_grads
from thunder_fsdp_sched.ir.inspection import with_bound_symbols
from thunder_fsdp_sched.runtime import accumulation
from thunder_fsdp_sched.testing import statements
from thunder_fsdp_sched.transform import Compilation

import pytest
import thunder
import torch
from coded import coded
from internals import (
    Bucket,
    assign_slots,
    effects,
    is_declared,
    ops,
    outs_of,
    read_schedule,
    verify,
)
from models import ChosenBlocks
from ranks import on_ranks
from thunder.core.trace import TraceCtx
from torch.distributed.device_mesh import init_device_mesh

WAYS = ("013", "2", "310")
"""Which blocks each of three ranks runs, in which order."""


@dataclass
class Start:
    """A stand-in for the start of a merged trace."""

    name: str
    keys: frozenset[Key] = frozenset()
    left: list[str] = field(default_factory=list)
    no_sync: bool = False
    waiting: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return self.name

    def serves(self, kind: str, bucket: Bucket, occurrence: int) -> bool:
        return (kind, key_of(bucket), occurrence) in self.keys

    def serve_left(self) -> None:
        self.left.append(self.name)


@dataclass
class Compiled:
    """A scheduled trace, before ranks compare it, and the context of its compilation."""

    trace: TraceCtx
    context: Any
    half: str
    merged: Any = None

    def build(self, order: Sequence[Key], buckets: Any, start: Start, sources: Any = MappingProxyType({})) -> TraceCtx:
        arguments = {"order": order, "start": start, "buckets": buckets, "sources": sources}
        return build(self.trace, **arguments, context=self.context, half=self.half)

    @classmethod
    def nothing(cls, like: Compiled) -> Compiled:
        """Return that of a rank without a batch."""
        trace = empty_trace("nothing", backward=like.half == "backward")
        return cls(trace, dataclasses.replace(like.context, forward=None), like.half)


@contextmanager
def recorded() -> Iterator[list[Compiled]]:
    """Record the scheduled traces that are compiled in the context."""
    found: list[Compiled] = []
    agree = Compilation._agree

    def record(self: Compilation, trace: TraceCtx, schedule: Any, half: str) -> None:
        found.append(Compiled(trace, dataclasses.replace(self.context), half))
        agree(self, trace, schedule, half)

    with mock.patch.object(Compilation, "_agree", record):
        yield found


def buckets_of(transform: Any) -> dict[Any, Bucket]:
    return {key_of(b): b for base in transform.sharded.buckets for b in (base, *base.aliases.values())}


def compile_ways(ways: Sequence[str], context: Callable[[], Any] = nullcontext, **options: Any) -> tuple[Any, Any]:
    """Return the transform, and for each way its scheduled forward and backward."""
    model = thunder.jit(ChosenBlocks(6, 8, 4), transforms=[transform := fs.fsdp(**options)])
    found = []
    for way in ways:
        with recorded() as traces, context():
            model(torch.ones(2, 6), way)
        found.append(traces)
    return transform, found


def with_mesh(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with two replicas in place of two shards, if they ask for that."""
    if options.get("ranks") != "replicas":
        return options
    return {**options, "ranks": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))}


def compute(trace: TraceCtx) -> list[tuple[str, tuple[str, ...]]]:
    """Return what a trace computes, without communication: operators and the names of their results."""
    return [(b.sym.name, outs_of(b)) for b in statements(trace) if not is_declared(b.sym) or effects(b).fills]


def issued(trace: TraceCtx) -> list[tuple[str, Any]]:
    """Return the kinds and buckets of what a trace issues, in order."""
    issues = [e.issues for e in map(effects, trace.bound_symbols) if e.issues is not None]
    kinds = ["all_reduce" if "all_reduce" in i.kind else "gather" if "gather" in i.kind else "reduce" for i in issues]
    return [(kind, key_of(issue.bucket)) for kind, issue in zip(kinds, issues, strict=True)]


@pytest.mark.parametrize(
    ("options", "context"),
    [
        ({"sharding_strategy": "zero2", "prefetch": 1}, nullcontext),
        *(
            pytest.param({"sharding_strategy": "zero3", "prefetch": p}, nullcontext, marks=pytest.mark.long)
            for p in (0, 2)
        ),
        ({"sharding_strategy": fs.Sharding("zero3", release=True)}, nullcontext),
        pytest.param({"max_memory": "1 GB"}, nullcontext, marks=pytest.mark.long),
        pytest.param(
            {"sharding_strategy": "zero3"}, lambda: torch.autocast("cpu", torch.bfloat16), marks=pytest.mark.long
        ),
        ({"sharding_strategy": "zero3", "ranks": "replicas"}, nullcontext),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("fake_ranks")
def test_a_merged_trace_is_the_own_one_in_the_merged_order(options: dict[str, Any], context: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    transform, ways = compile_ways(WAYS, context, **with_mesh(options))
    buckets, steps = buckets_of(transform), [[], [], [], []]
    for half in range(2):
        order = merge([steps_of(way[half].trace) for way in ways])
        assert len(order) == len(set(order)) and {key[1] for key in order} <= buckets.keys()
        sources = dict.fromkeys(order, "rank 0 reads it at model.py:17")
        for way, step in zip(ways, steps, strict=False):
            own = way[half]
            merged = own.build(order, buckets, Start(f"{own.half}_0"), sources)
            assert issued(merged) == [key[:2] for key in order]
            assert compute(merged)[:-1] == compute(own.trace)[:-1]  # `forward` returns the same in another form
            mine = {step.key for step in steps_of(own.trace)}
            schedule = read_schedule(merged)
            served = [op for op in schedule if "_serve" in op.kind and op.issues]
            assert len(served) == len(order) - len(mine)
            assert all(op.reason.startswith("for others: rank 0 reads it at model.py:17; ") for op in served)
            of_own = {b.header for b in own.trace.bound_symbols}
            assert {op.reason for op in schedule if "_serve" not in op.kind} <= of_own
            waits = sum("_wait_" in op.kind for op in schedule)
            assert waits == sum(op.issues and "all_reduce" not in op.kind for op in schedule)
            assert merged.python_callable() is not None
            step.append(merged)
        nothing = Compiled.nothing(ways[0][half]).build(order, buckets, Start("start"))
        assert issued(nothing) == [key[:2] for key in order]
        assert nothing.python_callable() is not None
        steps[-1].append(nothing)
    memory = [StepMemory.of(step, transform.sharded.buckets) for step in steps]
    assert len({m.bytes_of("gradients")[-1] for m in memory}) == 1  # all ranks get the same gradients in the end


@pytest.mark.usefixtures("fake_ranks")
def test_a_wrong_merged_trace_is_refused() -> None:
    transform, ways = compile_ways(WAYS, sharding_strategy="zero3", prefetch=1)
    buckets, (forward, _) = buckets_of(transform), ways[2]
    order = merge([steps_of(way[0].trace) for way in ways])
    merged = follow_order(forward.trace, order=order, start=Start("forward_0"), buckets=buckets, sources={})
    right = assign_slots(merged)
    with pytest.raises(
        VerificationError,
        check=coded("proof.invalid-bound-symbol", "'blocks.3', gathered after bucket 'blocks.0'"),
    ):
        verify(right)
    verify(right, machine=MachineInAnyOrder)

    bsyms = right.bound_symbols
    mine, served = (next(b for b in bsyms if b.sym.name == name) for name in ("fsdp_all_gather", "fsdp_serve_gather"))
    in_slot_of_own = served.from_bsym(args=(served.args[0], mine.args[1], *served.args[2:]))
    for wrong, expected in (
        (
            [in_slot_of_own if b is served else b for b in bsyms],
            coded("proof.invalid-bound-symbol", "before the wait for bucket 'first'"),
        ),
        (
            [b for b in bsyms if effects(b).waits is None or effects(b).waits.future != served.output.name],
            coded("proof.invalid-bound-symbol", "fsdp_serve_gather is never waited for"),
        ),
    ):
        with pytest.raises(VerificationError, check=expected):
            verify(with_bound_symbols(right, wrong), machine=MachineInAnyOrder)


@pytest.mark.long  # `test_scenarios` has the limit on real ranks
@pytest.mark.usefixtures("fake_ranks")
def test_slots_of_a_merged_trace_keep_the_limit() -> None:
    transform, ways = compile_ways(WAYS, sharding_strategy=fs.Sharding("zero3", max_unsharded_bytes=2048))
    order = merge([steps_of(way[0].trace) for way in ways])
    with pytest.raises(ValueError, check=coded("plan.slots-too-large-where-ranks-differ", "2,048")):
        ways[0][0].build(order, buckets_of(transform), Start("forward_0"))


HALVES = ("forward", "backward")


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ({"sharding_strategy": "zero2"}, ("013", "2")),
        ({"prefetch": 2, "accumulate": "sharded"}, ("310", None)),
        pytest.param(
            {"sharding_strategy": fs.Sharding("zero3", release=True), "ranks": "replicas"},
            ("013", "2"),
            marks=pytest.mark.long,
        ),
    ],
)
@on_ranks()
def test_numbers_of_merged_traces(rank: int, options: dict[str, Any], ways: Sequence[str | None]) -> None:
    """A window of two micro-batches: all ranks get the mean of all gradients, and ``None`` for the same parameters."""
    torch.manual_seed(0)
    reference = ChosenBlocks(6, 8, 4).double()
    transform, given = fs.fsdp(**with_mesh(options), debug=fs.Debug(audit=False)), defaultdict(set)
    model = thunder.jit(copy.deepcopy(reference), transforms=[transform])
    cache = thunder.compile_stats(model).interpreter_cache
    xs = [torch.randn(2, 6, generator=torch.Generator().manual_seed(number)).double() for number in range(2)]
    for no_sync, of_ranks in (True, ways), (False, (ways[0], "2")):
        found = {}
        for way in filter(None, of_ranks):
            with recorded() as found[way], model.no_sync() if no_sync else nullcontext():
                transform.sharded.compile(model, (xs[0], way), {})
        buckets, starts = buckets_of(transform), []
        own = found.get(of_ranks[rank]) or [*map(Compiled.nothing, found[ways[0]])]
        for number, half in enumerate(HALVES):
            order = merge([steps_of(traces[number].trace) for traces in found.values()])
            starts.append(Start(f"{half}_0", frozenset(order)))
            own[number].merged = own[number].build(order, buckets, starts[-1]).python_callable()
        for bsym in (b for traces in found.values() for b in traces[1].trace.bound_symbols):
            if bsym.sym.name in ("fsdp_accumulate_grads", "fsdp_reduce_scatter"):
                bucket, *grads = bsym.args
                grads = grads[-len(bucket.params) :]
                given[bucket].update(index for index, grad in enumerate(grads) if grad is not None)
        for bucket in transform.sharded.buckets:
            bucket.accumulation.from_others = partial(frozenset, given[bucket])
        forward, backward = (half.merged for half in own)
        if of_ranks[rank] is None:
            forward()
            backward()
        else:
            at = list(found).index(of_ranks[rank]) - len(found)
            cache[at] = cache[at]._replace(computation_fn=forward, backward_fn=backward)
            with model.no_sync() if no_sync else nullcontext():
                model(xs[rank], of_ranks[rank]).backward()
        for x, way in zip(xs, of_ranks, strict=True):
            if way is not None:
                (reference(x, way) / 2).backward()
        assert starts[1].left == ([] if no_sync else ["backward_0"])
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (expected.grad is None), name
        if param.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


@pytest.mark.usefixtures("fake_ranks")
def test_gradients_of_a_backward_that_failed_are_not_added_later() -> None:
    transform, _ = compile_ways(WAYS[:1], accumulate="sharded")
    bucket, other = transform.sharded.buckets[:2]
    for run in (
        lambda: wait_served_grads(bucket, None, Start("backward_0"), False),
        lambda: serve_left(Start("backward_0"), bucket),
        lambda: reduce_unreduced(bucket),
    ):
        bucket.accumulation.deferred = {0: bucket.params[0].detach().clone()}
        run()
        ops.backward_done(False, bucket, other)
        assert bucket.params[0].grad is None
    bucket.accumulation.deferred = {0: bucket.params[0].detach().clone()}
    bucket.accumulation.sharded = torch.ones(bucket.shard.numel())
    ops.backward_done(False, bucket, other)
    assert bucket.params[0].grad is not None
    assert bucket.accumulation.sharded is not None  # the window has not ended


@pytest.mark.usefixtures("fake_ranks")
def test_a_backward_may_add_own_gradients_whole_and_those_of_others_sharded() -> None:
    transform, _ = compile_ways(WAYS[:1])
    bucket = transform.sharded.buckets[0]
    sums = bucket.accumulation
    with mock.patch.object(accumulation, "backward_number", lambda: number):
        for number in range(2):
            add_grads(bucket, {0: torch.ones(bucket.spec.params[0].shape)})
            sums.check_complete()  # as the reduction that is served does
            add_reduced(bucket, torch.ones(bucket.shard.numel()), {1})
            assert sums.params == {0, 1}
            assert sums.unsharded.sum() == bucket.spec.params[0].numel * (number + 1)
            sums.is_running = False
        sums.begin()
        number += 1
        with pytest.raises(RuntimeError, check=coded("gradient.sum-of-partial-backward")):
            sums.begin()
