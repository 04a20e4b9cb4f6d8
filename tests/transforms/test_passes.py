"""The passes on traces, most of which hypothesis builds directly from symbols. Nothing here moves data.

``tests/test_training.py`` runs compiled traces on real ranks.
"""

import os
from typing import Any

from thunder_fsdp_sched import Debug, Sharding, StepMemory, VerificationError, fsdp, testing

import pytest
from coded import coded
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import (
    Analysis,
    args_of,
    assign_slots,
    fsdp_all_gather,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
    outs_of,
    pipeline,
    read_schedule,
    sort_communication,
    verify,
    write_grads_in_place,
)
from models import CASES, Stack, compile_model
from passes_table import rows_of
from pipeline_patches import replacing
from random_traces import traces
from scenario import Scenario, do, each
from synthetic_traces import SHAPE, FakeProcessGroup, chain, make_buckets
from thunder.core import devices, dtypes, prims
from thunder.core.trace import TraceCtx, tracectx

PLAIN_TRACES = traces(is_plain=True).map(lambda drawn: drawn[0])


def compute(trace: TraceCtx) -> list:
    communication = (fsdp_all_gather, fsdp_wait_params, fsdp_reduce_scatter, fsdp_wait_grads)
    return [(b.sym.name, args_of(b), outs_of(b)) for b in trace.bound_symbols if b.sym not in communication]


@settings(deadline=None)
@given(PLAIN_TRACES, st.integers(0, 4))
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
@given(PLAIN_TRACES, st.integers(0, 4), st.integers(1, 3))
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
        refusal = coded("proof.invalid-bound-symbol", f"max_gathers_in_flight={most}")
        with pytest.raises(VerificationError, check=refusal):
            verify(free, max_gathers_in_flight=most)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_gather_beyond_the_limit_is_issued_right_after_the_wait_that_makes_room(prefetch):
    limited = sort_communication(chain(3), prefetch=prefetch, max_gathers_in_flight=1)
    of_block = ["fsdp_wait_params", "fsdp_all_gather", "matmul", "neg"]
    names = [bsym.sym.name for bsym in limited.bound_symbols if bsym.sym.name in of_block]
    assert names == ["fsdp_all_gather", *of_block, *of_block, "fsdp_wait_params", "matmul", "neg"]


@pytest.mark.parametrize(
    ("sizes", "in_flight"),
    [
        ([3, 3, 3, 3], [1, 2, 2, 2]),
        ([3, 1, 1, 3, 3], [1, 2, 3, 3, 2]),
        ([1, 1, 1], [1, 2, 2]),
        ([8, 3, 3, 3, 3, 3, 3, 8], [1, 2, 2, 2, 2, 2, 2, 2]),  # head and embedding do not keep three blocks in flight
        ([8, 1, 1, 1, 3, 3, 3, 3, 3], [1, 2, 3, 4, 3, 2, 2, 2, 2]),  # nothing waits for a head before a block follows
        ([24, 3, 3, 3, 3, 3, 3, 3, 24], [1, 2, 3, 4, 5, 6, 2, 2, 2]),  # a head takes the time of several blocks
    ],
)
def test_reductions_in_flight_are_counted_in_bytes(sizes, in_flight):
    """The oldest is waited for once about its own bytes and two blocks are later, so small ones do not delay others."""
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


def filling_bytes(trace: TraceCtx) -> int:
    """Return the peak bytes of slots that hold gradients, each until its bucket has all of them."""
    live = Analysis(trace)
    filling = [r for r in live.slots.values() if r.writes]
    spans = [(r.first, live.defined(args_of(trace.bound_symbols[r.issue])), r.nbytes) for r in filling]
    return max((sum(n for first, last, n in spans if first <= at <= last) for at, _, _ in spans), default=0)


@settings(max_examples=settings().max_examples // 2, deadline=None)
@given(PLAIN_TRACES, st.integers(0, 3), st.integers(0, 2))
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


#
# Passes can be left out by name, unless numbers depend on them, and each can be checked
#


def _stack() -> Stack:
    return Stack(3, width=16).double()


def _without(*names: str, **options: Any) -> Scenario:
    sharding = Sharding(**options)
    return Scenario(
        lambda: CASES["checkpointed"]().double(),
        [do.train(1), do.micro_batch(0), do.micro_batch(1, no_sync=False), do.step()],
        {"sharding_strategy": sharding, "debug": Debug(skip_passes=names)},
        others=[{"sharding_strategy": sharding}],
    )


SCENARIOS = {"ZeRO-3": _without(*pipeline.OPTIONAL, secondary_ranks=2), "reuse": _without("reuse_from_forward")}


@each(SCENARIOS)
def test_a_step_without_passes_that_are_not_required_gives_the_same_bits(name: str) -> None:
    SCENARIOS[name].run()


def test_passes_that_are_left_out_leave_no_trace() -> None:
    whole, without = (compile_model(_stack, debug=Debug(skip_passes=names)) for names in ((), pipeline.OPTIONAL))
    assert "fsdp_matmul_into" in str(whole.backward) and "fsdp_matmul_into" not in str(without.backward)
    assert set(whole.pass_seconds) - set(without.pass_seconds) == set(whole.pass_seconds) & set(pipeline.OPTIONAL)
    assert set(pipeline.OPTIONAL) <= {row.pass_.__name__ for phase in pipeline.PHASES for row in rows_of(phase)}


@pytest.mark.parametrize("name", ["verify", "sort_comunication"])
def test_a_required_or_unknown_pass_cannot_be_left_out(name: str) -> None:
    with pytest.raises(ValueError, check=coded("option.pass-cannot-be-skipped", name)):
        fsdp(debug=Debug(skip_passes=(name,)))


def _faulty(trace: Any, context: Any) -> Any:
    """Return the trace with its third statement in the first place, which then reads what is not defined."""
    third = next(b for b in trace.bound_symbols if b.sym.name == "fsdp_wait_params")
    trace.bound_symbols = [third, *(b for b in trace.bound_symbols if b is not third)]
    return trace


def test_the_check_names_the_pass_after_which_a_trace_is_wrong() -> None:
    assert os.environ["THUNDER_FSDP_SCHED_CHECK_PASSES"] == "1" and Debug().check_passes
    with replacing("write_grads_in_place", _faulty):
        refusal = coded("proof.ill-formed-trace", "write_grads_in_place", "bound symbol 0", "which is not defined")
        with pytest.raises(VerificationError, check=refusal):
            compile_model(_stack)
        with pytest.raises(Exception, match=r"^(?!after write_grads_in_place)"):
            compile_model(_stack, debug=Debug(check_passes=False))
