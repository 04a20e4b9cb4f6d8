"""A new kind of communication is one declaration and one function: everything else reads its effects.

The tests declare a broadcast of a bucket, which the package does not have.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import StepMemory, VerificationError
from thunder_fsdp_sched.extras.planning.cost import ring_seconds
from thunder_fsdp_sched.extras.step_memory.symbol_costs import COSTS_OF
from thunder_fsdp_sched.ir.effects import DECLARED
from thunder_fsdp_sched.ir.registry import register
from thunder_fsdp_sched.planning import AnalyticCost, simulate
from thunder_fsdp_sched.transports import Traffic

import pytest
from coded import coded
from internals import (
    assign_slots,
    effects,
    fsdp_all_gather,
    fsdp_wait_params,
    read_schedule,
    sort_communication,
    verify,
)
from synthetic_traces import make_buckets, tensor
from thunder.core import prims
from thunder.core.proxies import FutureTensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx


def _broadcast(bsym: BoundSymbol) -> Any:
    """Declare a broadcast: it uses slots as a gather does, but sends the whole bucket at once."""
    gather = effects(fsdp_all_gather.bind(*bsym.args, output=bsym.output))
    traffic = Traffic((bsym.args[0].spec.unsharded_bytes,), 1)
    issue = gather.issues._replace(kind=bsym.sym.name, transport="broadcast", traffic=traffic)
    return dataclasses.replace(gather, issues=issue)


def _wait_for_broadcast(bsym: BoundSymbol) -> Any:
    wait = effects(fsdp_wait_params.bind(*bsym.args, output=(bsym.output,)))
    return dataclasses.replace(wait, waits=wait.waits._replace(kinds=("broadcast_bucket",)))


broadcast = register("broadcast_bucket", print, _broadcast, lambda bucket, slot, shard: FutureTensorProxy(like=shard))
wait_for_broadcast = register("wait_for_broadcast", print, _wait_for_broadcast, lambda bucket, future: tensor())


def _unsorted(blocks: int) -> TraceCtx:
    """Return a trace in which each bucket is broadcast right before it is read."""
    trace = TraceCtx()
    with tracectx(trace):
        x = tensor()
        trace.args = (x,)
        for bucket in make_buckets([1] * blocks):
            shard = tensor()
            trace.args = (*trace.args, shard)
            x = prims.matmul(x, wait_for_broadcast(bucket, broadcast(bucket, None, shard)))
        prims.python_return((x,))
    return trace


def test_a_new_collective_is_sorted_laid_out_proved_counted_priced_and_printed() -> None:
    trace = assign_slots(sort_communication(_unsorted(3), prefetch=1))
    issue, wait = broadcast.name, wait_for_broadcast.name
    names = [b.sym.name for b in trace.bound_symbols if b.sym in (broadcast, wait_for_broadcast)]
    assert names == [issue, issue, wait, issue, wait, wait]  # one ahead
    first, second, third = (b.args[1] for b in trace.bound_symbols if b.sym is broadcast)
    assert first is third and not first.overlaps(second)  # the third one takes the place of the first
    verify(trace)
    buckets = [b.args[0] for b in trace.bound_symbols if b.sym is broadcast]
    memory = StepMemory.of([trace], buckets)
    assert memory.fixed["unsharded buckets"] == buckets[0].arena.nbytes == first.nbytes + second.nbytes
    schedule = read_schedule(trace)
    assert [(op.kind, op.nbytes, op.transport) for op in schedule.of(issue)] == [(issue, 1024, "broadcast")] * 3
    assert schedule.ops[2].first_consumer is not None and schedule.ops[2].slot == str(first)
    cost = AnalyticCost("h100-sxm")
    timeline = simulate(trace, None, cost)
    assert [i.kind for i in timeline.collectives] == [issue] * 3
    expected = 3 * ring_seconds(cost.spec, 1024, buckets[0].ranks.group.global_ranks)
    assert sum(timeline.communication_seconds.values()) == pytest.approx(expected)


def test_a_new_symbol_is_proved_by_its_declaration() -> None:
    def changed(change: Callable[[list[BoundSymbol]], Any]) -> TraceCtx:
        trace = assign_slots(sort_communication(_unsorted(3), prefetch=1))
        change(trace.bound_symbols)
        return trace

    def overwrite(bsyms: list[BoundSymbol]) -> None:
        _, second, third = (i for i, b in enumerate(bsyms) if b.sym is broadcast)
        bucket, _, shard = bsyms[third].args
        bsyms[third] = bsyms[third].from_bsym(args=(bucket, bsyms[second].args[1], shard))

    def lose(bsyms: list[BoundSymbol]) -> None:
        bsyms[:] = [next(b for b in bsyms if b.sym is broadcast), bsyms[-1].from_bsym(args=((),))]

    refusal = coded("proof.invalid-bound-symbol", "writes slot_", "before the wait for bucket")
    with pytest.raises(VerificationError, check=refusal):
        verify(changed(overwrite))
    refusal = coded("proof.invalid-bound-symbol", "broadcast_bucket is never waited for")
    with pytest.raises(VerificationError, check=refusal):
        verify(changed(lose))


ONLY_CALLS = """agree agreed agreed_or_merged audit_agreed release params_unchanged guard_backward detached with_value
    zero_gradient after run check_memory check_module check_inputs check_number assign_attributes"""
"""The symbols that cost no more than the call of a function."""


def test_every_symbol_that_does_more_than_a_call_has_costs() -> None:
    for module in (
        "transforms.keep_fusions_apart",
        "extras.no_sync",
        "extras.ranks_differ.start",
        "extras.secondary_shards",
    ):
        importlib.import_module(f"thunder_fsdp_sched.{module}")
    declared = {symbol.name for symbol in DECLARED if symbol.name.startswith("fsdp_")}
    assert COSTS_OF.keys() <= declared
    assert declared - COSTS_OF.keys() <= {f"fsdp_{name}" for name in ONLY_CALLS.split()}
