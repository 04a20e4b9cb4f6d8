"""Merged traces: a rank's own trace in the merged order, with the collectives that only other ranks need."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from unittest import mock

import thunder_fsdp_sched as fs
from thunder_fsdp_sched import VerificationError
from thunder_fsdp_sched.extras.no_sync import reduce_unreduced
from thunder_fsdp_sched.extras.ranks_differ.build import MachineInAnyOrder, build
from thunder_fsdp_sched.extras.ranks_differ.follow_order import follow_order
from thunder_fsdp_sched.extras.ranks_differ.merging import Key, merge
from thunder_fsdp_sched.extras.ranks_differ.symbols import key_of, serve_left, wait_served_grads
from thunder_fsdp_sched.ir.inspection import with_bound_symbols
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
from merged_programs import steps_of
from models import ChosenBlocks
from thunder.core.trace import TraceCtx

WAYS = ("013", "2", "310")
"""Which blocks each of three ranks runs, in which order."""


@dataclass
class Start:
    """A stand-in for the start of a merged trace."""

    name: str
    keys: frozenset[Key] = frozenset()
    no_sync: bool = False
    waiting: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return self.name

    def serves(self, kind: str, bucket: Bucket, occurrence: int) -> bool:
        return (kind, key_of(bucket), occurrence) in self.keys

    def serve_left(self) -> None:
        pass


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
    model = thunder.jit(ChosenBlocks(6, 8, 4), transforms=[transform := fs.fsdp(**options)])
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
