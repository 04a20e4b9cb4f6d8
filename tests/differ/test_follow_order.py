"""Merged traces: a rank's own trace in the merged order, with the collectives that only other ranks need, and its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest import mock

from thunder_fsdp_sched import CompiledTraces, Sharding, VerificationError, fsdp, transform
from thunder_fsdp_sched.extras.no_sync import reduce_sums, reduce_unreduced
from thunder_fsdp_sched.extras.planning.dry_run import fake_rank
from thunder_fsdp_sched.extras.ranks_differ.build import MachineInAnyOrder, build
from thunder_fsdp_sched.extras.ranks_differ.follow_order import follow_order
from thunder_fsdp_sched.extras.ranks_differ.merging import Key, merge
from thunder_fsdp_sched.extras.ranks_differ.start import with_merged
from thunder_fsdp_sched.extras.ranks_differ.symbols import key_of, serve_left, wait_served_grads
from thunder_fsdp_sched.ir.inspection import with_bound_symbols
from thunder_fsdp_sched.testing import statements
from thunder_fsdp_sched.transform import Compilation

import pytest
import thunder
import torch
from coded import coded
from internals import Bucket, assign_slots, effects, is_declared, ops, outs_of, read_schedule, verify
from memory_count import Count, compare, count_step
from merged_programs import steps_of
from models import ChosenBlocks
from profiles import with_long
from thunder.core.trace import TraceCtx
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

WAYS = ("013", "2", "310")
"""Which blocks each of three ranks runs, in which order."""


@dataclass
class Start:
    """A stand-in for the start of a merged trace."""

    name: str
    keys: frozenset[Key] = frozenset()
    no_sync: bool = False
    waiting: list[Any] = field(default_factory=list)
    buckets: Sequence[Any] = ()  # of which windows have left gradients

    def __repr__(self) -> str:
        return self.name

    def serves(self, kind: str, bucket: Bucket, occurrence: int) -> bool:
        return (kind, key_of(bucket), occurrence) in self.keys

    def serve_left(self) -> None:
        for bucket in self.buckets:
            reduce_sums(bucket, scatters=bucket.accumulation.unsharded is not None)


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


def compile_ways(ways: Sequence[str], **options: Any) -> tuple[Any, Any]:
    """Return the transform, and for each way its scheduled forward and backward."""
    model = thunder.jit(ChosenBlocks(6, 8, 4), transforms=[transform := fsdp(**options)])
    found = []
    for way in ways:
        with recorded() as traces:
            model(torch.ones(2, 6), way)
        found.append(traces)
    return transform, found


def compute(trace: TraceCtx) -> list[tuple[str, tuple[str, ...]]]:
    """Return what a trace computes, without communication: operators and the names of their results."""
    return [(b.sym.name, outs_of(b)) for b in statements(trace) if not is_declared(b.sym) or effects(b).fills]


@pytest.mark.usefixtures("fake_ranks")
def test_a_merged_trace_computes_what_the_own_one_does_and_says_for_whom_it_serves() -> None:
    transform, ways = compile_ways(WAYS, sharding_strategy="zero2")
    for half in range(2):
        order = merge([steps_of(way[half].trace) for way in ways])
        sources = dict.fromkeys(order, "rank 0 reads it at model.py:17")
        for way in ways:
            own = way[half]
            merged = own.build(order, buckets_of(transform), Start(f"{own.half}_0"), sources)
            assert compute(merged)[:-1] == compute(own.trace)[:-1]  # `forward` returns the same in another form
            schedule, mine = read_schedule(merged), {step.key for step in steps_of(own.trace)}
            served = [op for op in schedule if "_serve" in op.kind and op.issues]
            assert len(served) == len(order) - len(mine)
            assert all(op.reason.startswith("for others: rank 0 reads it at model.py:17; ") for op in served)
            of_own = {b.header for b in own.trace.bound_symbols}
            assert {op.reason for op in schedule if "_serve" not in op.kind} <= of_own


@pytest.mark.usefixtures("fake_ranks")
def test_a_wrong_merged_trace_is_refused() -> None:
    transform, ways = compile_ways(WAYS, sharding_strategy="zero3", prefetch=1)
    buckets, (forward, _) = buckets_of(transform), ways[2]
    order = merge([steps_of(way[0].trace) for way in ways])
    merged = follow_order(forward.trace, order=order, start=Start("forward_0"), buckets=buckets, sources={})
    right = assign_slots(merged)
    refusal = coded("proof.invalid-bound-symbol", "'blocks.3', gathered after bucket 'blocks.0'")
    with pytest.raises(VerificationError, check=refusal):
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


LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

OPTIONS: dict[str, dict[str, Any]] = {
    "zero2, released": {"sharding_strategy": Sharding("zero2", release=True), "mp_policy": LOW},
    "sharded, zero3": {"accumulate": "sharded", "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
}


class Blocks(ChosenBlocks):
    """Blocks of different sizes, of which each rank runs some."""

    def __init__(self) -> None:
        super().__init__(6, 8, 0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, n), nn.Linear(n, 8, bias=False)) for n in (16, 8, 12, 20)
        )


@dataclass
class Way:
    """The compiled traces of a way, and the inputs of their computation."""

    compiled: CompiledTraces
    halves: list[Compiled]
    flat: Sequence[Any]


class Counted:
    """A model on a rank of fake ranks, its merged traces, and counts of them."""

    def __init__(self, **options: Any) -> None:
        self.ours = fsdp(**options)
        self.model = thunder.jit(Blocks().double(), transforms=[self.ours])

    def compile(self, way: str, *, no_sync: bool = False) -> Way:
        inputs = self.ours.cast_inputs((torch.ones(3, 6, dtype=torch.float64), way), {})
        with recorded() as halves, self.model.no_sync() if no_sync else nullcontext():
            _, flat = self.ours.sharded.compile(self.model, *inputs)
        return Way(self.ours.compiled[-1], halves, flat)

    def merge(self, own: Way, known: Sequence[Way], active: Sequence[Way], left: Sequence[Any] = ()) -> CompiledTraces:
        """Return the traces of ``own`` merged with ``known`` programs, of which other ranks run ``active``."""
        for number, half in enumerate(own.halves):
            order = merge([steps_of(way.halves[number].trace) for way in known])
            keys = {step.key for way in active for step in steps_of(way.halves[number].trace)}
            merged = half.build(order, buckets_of(self.ours), Start(half.half, frozenset(keys), buckets=left))
            own.compiled.attached.setdefault("merged", {})[half.half] = merged
        return with_merged(own.compiled)

    def count(self, own: Way, earlier: Way | None = None) -> Count:
        """Count a step, after one that allocates what lasts.

        Args:
            earlier: the micro-batch before it, under ``no_sync``.
        """
        for _ in range(2):
            self.model.zero_grad()
            for way in [own] if earlier is None else [earlier, own]:
                for bucket in self.ours.sharded.buckets:
                    bucket.private_slot.arena.contents.clear()
                    bucket.accumulation.from_others = partial(frozenset, range(len(bucket.params)))
                tracker = count_step(self.ours, with_merged(way.compiled), way.flat)
        window = [earlier.compiled] if earlier is not None else False
        memory = own.compiled.predict_memory(merged=True, accumulated=window, others=self.ours.compiled)
        assert any("fsdp_serve_" in line for line in memory.statements)
        return compare(memory, with_merged(own.compiled), tracker)


@pytest.mark.parametrize("option", with_long(OPTIONS, "sharded, zero3"))
def test_every_position_of_merged_traces_has_the_bytes_that_a_run_allocates(option: str) -> None:
    torch.manual_seed(0)
    with fake_rank(1, 2), mock.patch.object(transform, "RECENT", 8):
        counted = Counted(**OPTIONS[option])

        def check(count: Count) -> None:
            assert count.predicted >= count.counted and not count.wrong, count

        one, others, fewer = (counted.compile(way) for way in ("1", "023", "0"))
        waiting, other_waiting = (counted.compile(way, no_sync=True) for way in ("13", "023"))
        every = [one, others]
        for own in (others, one):
            counted.merge(own, every, every)
            count = counted.count(own)  # the memory of buckets that are kept is there only after others have run, too
        check(count)
        counted.merge(waiting, [waiting, other_waiting], [waiting, other_waiting])
        check(counted.count(one, waiting))
        # No program reduces block 3, of which the micro-batch has left gradients, nor what it has reduced for others.
        names = ("blocks.2", "blocks.3") if "sharded" in option else ("blocks.3",)
        left = [bucket for bucket in counted.ours.sharded.buckets if bucket.spec.name in names]
        counted.merge(one, [one, fewer], [one, fewer], left)
        check(counted.count(one, waiting))
        # No rank needs the blocks 2 and 3, so less is allocated.
        counted.merge(one, every, [one, fewer])
        count = counted.count(one)
        assert count.predicted >= count.counted and count.wrong, count
        assert all(found <= predicted for predicted, found, _ in count.wrong), count
