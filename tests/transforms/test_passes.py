"""The passes on traces, most of which hypothesis builds directly from symbols. Nothing here moves data.

``tests/test_training.py`` runs compiled traces on real ranks.
"""

from thunder_fsdp_sched import StepMemory, VerificationError, testing
from thunder_fsdp_sched.transforms.unsharded_budget import filling_bytes

import pytest
from coded import coded
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import (
    Analysis,
    Bucket,
    args_of,
    assign_slots,
    fsdp_all_gather,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
    outs_of,
    read_schedule,
    sort_communication,
    verify,
    write_grads_in_place,
)
from synthetic_traces import SHAPE, FakeProcessGroup, chain, make_buckets, tensor
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors import torchex


@st.composite
def traces(draw):
    """Draw an execution trace like those that reach post-optimization.

    Each gather is at its first use and each reduction at its last gradient or later. Compute reads parameters in any order,
    directly or through views. Some gradients can be written in place.
    """
    buckets = make_buckets(draw(st.lists(st.integers(1, 3), min_size=1, max_size=6)))
    uses = draw(st.lists(st.tuples(st.integers(0, len(buckets) - 1), st.integers(0, 2)), min_size=1, max_size=14))
    reduced = draw(st.lists(st.integers(0, len(buckets) - 1), unique=True, max_size=len(buckets)))
    trace = TraceCtx()
    with tracectx(trace):
        shards = {b: [tensor() for _ in b.spec.params] for b in buckets}
        x = tensor()
        condition = tensor(dtype=dtypes.bool8)
        trace.args = (x, condition, *(s for b in buckets for s in shards[b]))
        for arg in trace.args:
            prims.unpack_trivial(arg, name=arg.name)
        params: dict[Bucket, tuple] = {}
        last: dict[Bucket, TensorProxy] = {}
        values = [x]
        for number, param in uses:
            bucket = buckets[number]
            both = [bucket, buckets[number - 1]] if draw(st.integers(0, 3)) == 0 else [bucket]
            for read in both:
                if read not in params:
                    params[read] = fsdp_wait_params(read, fsdp_all_gather(read, None, *shards[read]))
            weight = params[bucket][param % len(bucket.spec.params)]
            if draw(st.booleans()):
                weight = prims.transpose(weight, (1, 0))
            if len(both) == 2:  # reads two buckets, as a fusion may
                weight = prims.where(condition, weight, params[both[1]][0])
            values.append(prims.matmul(values[draw(st.integers(max(0, len(values) - 2), len(values) - 1))], weight))
            last[bucket] = values[-1]

        def make_grads(bucket: Bucket) -> list[TensorProxy]:
            value = last.get(bucket, x)
            in_place = draw(st.lists(st.booleans(), min_size=3, max_size=3))
            return [
                torchex.matmul(value, value) if i else prims.neg(value)
                for _, i in zip(bucket.spec.params, in_place, strict=False)
            ]

        grads_before_reductions = {
            bucket: make_grads(bucket) for bucket in (buckets[r] for r in reduced) if draw(st.booleans())
        }
        for bucket in (buckets[r] for r in reduced):
            grads = grads_before_reductions.get(bucket) or make_grads(bucket)
            values += fsdp_wait_grads(bucket, fsdp_reduce_scatter(bucket, None, *grads))[:1]
            if draw(st.booleans()):
                values.append(prims.add(x, x))
        prims.python_return(tuple(values[1:]))
    return trace


def compute(trace: TraceCtx) -> list:
    communication = (fsdp_all_gather, fsdp_wait_params, fsdp_reduce_scatter, fsdp_wait_grads)
    return [(b.sym.name, args_of(b), outs_of(b)) for b in trace.bound_symbols if b.sym not in communication]


@settings(deadline=None)
@given(traces(), st.integers(0, 4))
def test_a_sorted_trace_keeps_compute_and_shares_no_slot_in_use(trace, prefetch):
    trace = write_grads_in_place(trace)
    once = sort_communication(trace, prefetch=prefetch)
    twice = sort_communication(once, prefetch=prefetch)
    assert [str(b) for b in once.bound_symbols] == [str(b) for b in twice.bound_symbols]
    sorted_trace = verify(assign_slots(once))
    assert compute(sorted_trace) == compute(trace), "compute must not be reordered or lost"
    testing.assert_waits_right_before_first_consumer(sorted_trace)
    testing.assert_gathers_in_consumer_order(sorted_trace)
    testing.assert_prefetch_distance(sorted_trace, prefetch)
    testing.assert_reductions_right_after_last_gradient(sorted_trace)

    ranges = Analysis(sorted_trace.bound_symbols).slots
    slots = {position: sorted_trace.bound_symbols[position].args[1] for position in ranges}
    for a, one in ranges.items():
        for b, other in ranges.items():
            if a != b and one.first <= other.first <= one.last:
                in_place = one.is_gather and not other.is_gather and one.bucket is other.bucket
                assert (in_place and slots[a] is slots[b]) or not slots[a].overlaps(slots[b]), (one, other)
    memory = StepMemory.of([sorted_trace], {slot.bucket for slot in ranges.values()})
    used = memory.fixed["unsharded buckets"]
    assert used <= 1.5 * (used - min(memory.wasted))


@settings(deadline=None)
@given(traces(), st.integers(0, 4), st.integers(1, 3))
def test_no_more_gathers_are_in_flight_than_allowed(trace, prefetch, most):
    free = assign_slots(sort_communication(trace, prefetch=prefetch))
    limited = assign_slots(sort_communication(trace, prefetch=prefetch, max_gathers_in_flight=most))
    verify(limited, max_gathers_in_flight=most)
    assert compute(limited) == compute(trace)
    testing.assert_buckets_in_flight_at_most(limited, most)
    testing.assert_waits_right_before_first_consumer(limited)
    testing.assert_gathers_in_consumer_order(limited)
    assert read_schedule(limited).gathers_in_flight == min(most, read_schedule(free).gathers_in_flight)
    if read_schedule(free).gathers_in_flight <= most:
        assert [str(b) for b in limited.bound_symbols] == [str(b) for b in free.bound_symbols]
    else:
        with pytest.raises(
            VerificationError, check=coded("proof.invalid-bound-symbol", f"max_gathers_in_flight={most}")
        ):
            verify(free, max_gathers_in_flight=most)


@pytest.mark.parametrize(
    ("sizes", "in_flight"), [([3, 3, 3, 3], [1, 2, 2, 2]), ([3, 1, 1, 3, 3], [1, 2, 3, 3, 2]), ([1, 1, 1], [1, 2, 2])]
)
def test_reductions_in_flight_are_counted_in_bytes(sizes, in_flight):
    """At most as many bytes as the two largest reductions have, so small reductions do not delay others."""
    trace = TraceCtx()
    with tracectx(trace):
        grads = []
        for bucket in make_buckets(sizes):
            value = prims.full(SHAPE, 1.0, device=devices.cpu, dtype=dtypes.float32)
            own = [prims.neg(value) for _ in bucket.spec.params]
            grads += fsdp_wait_grads(bucket, fsdp_reduce_scatter(bucket, None, *own))
        prims.python_return(tuple(grads))
    in_flight_now, counts = 0, []
    for bsym in sort_communication(trace, prefetch=1).bound_symbols:
        in_flight_now += (bsym.sym is fsdp_reduce_scatter) - (bsym.sym is fsdp_wait_grads)
        if bsym.sym is fsdp_reduce_scatter:
            counts.append(in_flight_now)
    assert counts == in_flight


@settings(max_examples=settings().max_examples // 2, deadline=None)
@given(traces(), st.integers(0, 3), st.integers(0, 2))
def test_slots_being_filled_with_gradients_stay_within_filling_bytes(trace, prefetch, most):
    unsorted = write_grads_in_place(trace)
    sorted_trace = assign_slots(sort_communication(unsorted, prefetch=prefetch, reductions_in_flight=most))
    verify(sorted_trace)
    assert filling_bytes(sorted_trace) == filling_bytes(unsorted)
    reductions = {
        p: r
        for p, r in Analysis(sorted_trace.bound_symbols).slots.items()
        if sorted_trace.bound_symbols[p].sym is fsdp_reduce_scatter
    }
    in_flight = sorted((r.nbytes for r in reductions.values()), reverse=True)[: max(most, 1)]
    for position in range(len(sorted_trace.bound_symbols)):
        held = sum(r.nbytes for r in reductions.values() if r.first <= position <= r.last)
        assert held <= filling_bytes(unsorted) + sum(in_flight)


@pytest.mark.parametrize(
    ("sizes", "prefetch", "points"),
    [
        ([8, 8, 8, 8], 0, [0, 1, 2, 3]),
        ([8, 8, 8, 8], 1, [0, 0, 1, 2]),
        ([8, 8, 8, 8], 2, [0, 0, 0, 1]),
        ([9, 1, 90, 90, 90, 1, 9], 0, [0, 1, 2, 3, 4, 5, 6]),
        ([8, 1, 90, 90, 90, 1, 8], 1, [0, 0, 0, 2, 3, 4, 4]),  # a small step does not hold back the block after it
        ([8, 1, 90, 90, 90, 1, 8], 2, [0, 0, 0, 0, 2, 3, 3]),
        ([90, 90, 1, 90, 90], 1, [0, 0, 1, 1, 3]),
        ([1] * 7 + [90] * 8, 1, [0, 0, 1, 2, 2, 2, 2, 2, 7, 8, 9, 10, 11, 12, 13]),
        ([3, 5, 4, 12, 12, 4, 5, 3], 1, [0, 0, 0, 0, 3, 4, 4, 6]),  # several smaller steps together hide a large one
        ([1, 3, 1, 3, 1, 3], 1, [0, 0, 1, 2, 3, 4]),  # the limit is the bytes of two large steps: 3 + 1, not 3 + 1 + 3
    ],
)
def test_small_prefetch_steps_count_for_less_before_large_ones(sizes, prefetch, points):
    waits, found = 0, []  # before which wait each gather is issued
    for bsym in sort_communication(chain(len(sizes), sizes=sizes), prefetch=prefetch).bound_symbols:
        found += [waits] * (bsym.sym is fsdp_all_gather)
        waits += bsym.sym is fsdp_wait_params
    assert found == points


@pytest.mark.parametrize("symbol", ["neg", "matmul"])  # the latter reads a parameter itself
def test_no_collective_is_moved_across_foreign_communication(symbol):
    trace = chain(4)
    foreign = next(i for i, b in enumerate(trace.bound_symbols) if b.sym.name == symbol)
    bsym = trace.bound_symbols[foreign]
    trace.bound_symbols[foreign] = bsym.from_bsym(args=(*bsym.args, FakeProcessGroup()))
    sorted_trace = verify(assign_slots(sort_communication(trace, prefetch=3)))
    names = [b.sym.name for b in sorted_trace.bound_symbols]
    barrier = next(i for i, b in enumerate(sorted_trace.bound_symbols) if b.sym.name == symbol)
    assert names[:barrier].count("fsdp_all_gather") == 1
    late = [op.reason for op in read_schedule(sorted_trace).of("fsdp_all_gather")[1:]]
    assert late[0] == f"producer: not across {bsym.output.name} = {symbol}, which communicates too"


def test_a_gather_delayed_by_a_byte_budget_names_the_bucket_freed_before_it():
    trace = chain(4)
    bucket = next(b for b in trace.bound_symbols if b.sym is fsdp_all_gather).args[0]
    sorted_trace = verify(
        assign_slots(sort_communication(trace, prefetch=2, max_unsharded_bytes=2 * bucket.spec.unsharded_bytes))
    )
    reasons = {op.bucket: op.reason for op in read_schedule(sorted_trace).of("fsdp_all_gather")}
    assert reasons["b1"] == "prefetch: 2 ahead of its wait, before the wait for b0"
    assert reasons["b2"] == "byte budget: fits only after the last read of b0"
    assert reasons["b3"] == "byte budget: fits only after the last read of b1"
    testing.assert_gathered_buckets_at_most(sorted_trace, 2)
