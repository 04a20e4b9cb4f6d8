"""A new kind of communication is one declaration and one function: everything else reads its effects."""

from __future__ import annotations

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched import StepMemory, VerificationError
from thunder_fsdp_sched.ir.schedule import read_schedule
from thunder_fsdp_sched.planning.cost import AnalyticCost, ring_seconds
from thunder_fsdp_sched.planning.simulate import simulate
from thunder_fsdp_sched.proof import verify
from thunder_fsdp_sched.transforms.assign_slots import assign_slots
from thunder_fsdp_sched.transforms.sort_communication import sort_communication

import pytest
from new_collective import broadcast, wait_for_broadcast
from synthetic_traces import make_buckets, tensor
from thunder.core import prims
from thunder.core.trace import TraceCtx, tracectx


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


def test_a_broadcast_that_overwrites_what_is_still_read_is_refused() -> None:
    trace = assign_slots(sort_communication(_unsorted(3), prefetch=1))
    bsyms = trace.bound_symbols
    slot = next(b.args[1] for b in bsyms if b.sym is broadcast)
    other = [i for i, b in enumerate(bsyms) if b.sym is broadcast][1]
    bsyms[other] = bsyms[other].from_bsym(args=(bsyms[other].args[0], slot, bsyms[other].args[2]))
    with pytest.raises(VerificationError):
        verify(trace)
