"""The passes on traces: hypothesis builds them straight from symbols (thousands of shapes in seconds), and a small GPT is
traced with a fake process group. Nothing here moves data; tests/test_training.py does."""

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched import testing
from thunder_fsdp_sched.buckets import BucketSpec, ParamSpec
from thunder_fsdp_sched.buffers import Arena, Bucket
from thunder_fsdp_sched.groups import Group
from thunder_fsdp_sched.layout import plan_layout
from thunder_fsdp_sched.symbols import (
    fsdp_all_gather,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
)
from thunder_fsdp_sched.traces import args_of, outs_of
from thunder_fsdp_sched.transforms import VerificationError, plan_slots, sort_communication, verify
from thunder_fsdp_sched.transforms.plan_slots import live_ranges, peak_live_bytes
from thunder_fsdp_sched.transports import AllGatherTransport

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx

SHAPE = (4, 4)


def make_buckets(sizes: list[int], *, zero3: bool = True) -> list[Bucket]:
    arena = Arena(torch.device("cpu"))
    buckets = []
    for number, size in enumerate(sizes):
        params = tuple(
            ParamSpec((f"b{number}.p{i}",), SHAPE, torch.float32, torch.device("cpu"), True) for i in range(size)
        )
        spec = BucketSpec(f"b{number}", params, plan_layout([SHAPE] * size, 2, 4), zero3)
        buckets.append(Bucket(spec, Group("none", 0, range(2)), AllGatherTransport(), arena, f"bucket_b{number}"))
    return buckets


def tensor() -> TensorProxy:
    return TensorProxy(shape=SHAPE, device=devices.cpu, dtype=dtypes.float32)


@st.composite
def traces(draw):
    """An execution trace like those that reach post-optimization: each gather at its first use, each reduction at its
    last gradient, in between a chain of compute that reads parameters (also through views) in any order."""
    buckets = make_buckets(draw(st.lists(st.integers(1, 3), min_size=1, max_size=6)))
    uses = draw(st.lists(st.tuples(st.integers(0, len(buckets) - 1), st.integers(0, 2)), min_size=1, max_size=14))
    reduced = draw(st.lists(st.integers(0, len(buckets) - 1), unique=True, max_size=len(buckets)))
    trace = TraceCtx()
    with tracectx(trace):
        shards = {b: [tensor() for _ in b.spec.params] for b in buckets}
        x = tensor()
        condition = TensorProxy(shape=SHAPE, device=devices.cpu, dtype=dtypes.bool8)
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
            if len(both) == 2:  # as a fusion does
                weight = prims.where(condition, weight, params[both[1]][0])
            values.append(prims.matmul(values[draw(st.integers(max(0, len(values) - 2), len(values) - 1))], weight))
            last[bucket] = values[-1]
        for bucket in (buckets[r] for r in reduced):
            grads = [prims.neg(last.get(bucket, x)) for _ in bucket.spec.params]
            values += fsdp_wait_grads(bucket, fsdp_reduce_scatter(bucket, None, *grads))[:1]
            if draw(st.booleans()):
                values.append(prims.add(x, x))
        prims.python_return(tuple(values[1:]))
    return trace


def compute(trace: TraceCtx) -> list:
    ours = (fsdp_all_gather, fsdp_wait_params, fsdp_reduce_scatter, fsdp_wait_grads)
    return [(b.sym.name, args_of(b), outs_of(b)) for b in trace.bound_symbols if b.sym not in ours]


@settings(max_examples=300, deadline=None)
@given(traces(), st.integers(0, 4))
def test_a_sorted_trace_keeps_every_promise(trace, prefetch):
    done = verify(plan_slots(sort_communication(trace, prefetch=prefetch)))
    assert compute(done) == compute(trace), "compute was reordered or lost"
    testing.assert_waits_right_before_first_consumer(done)
    testing.assert_gathers_in_consumer_order(done)
    testing.assert_prefetch_distance(done, prefetch)
    testing.assert_reductions_right_after_last_gradient(done)


@settings(max_examples=100, deadline=None)
@given(traces(), st.integers(0, 4))
def test_sorting_twice_changes_nothing(trace, prefetch):
    once = sort_communication(trace, prefetch=prefetch)
    twice = sort_communication(once, prefetch=prefetch)
    assert [str(b) for b in once.bound_symbols] == [str(b) for b in twice.bound_symbols]


@settings(max_examples=200, deadline=None)
@given(traces(), st.integers(0, 3))
def test_slots_never_overlap_while_both_are_live(trace, prefetch):
    done = plan_slots(sort_communication(trace, prefetch=prefetch))
    ranges = live_ranges(done)
    slots = {position: done.bound_symbols[position].args[1] for position in ranges}
    for a, one in ranges.items():
        for b, other in ranges.items():
            if a < b <= one.end:
                assert not slots[a].overlaps(slots[b]), (one, other)
    assert max((s.end for s in slots.values()), default=0) >= peak_live_bytes(done)


def chain(blocks: int, *, zero3: bool = True) -> TraceCtx:
    """Forward of ``blocks`` equal blocks, each gather at its first use."""
    buckets = make_buckets([1] * blocks, zero3=zero3)
    trace = TraceCtx()
    with tracectx(trace):
        x = tensor()
        shards = [tensor() for _ in buckets]
        trace.args = (x, *shards)
        for arg in trace.args:
            prims.unpack_trivial(arg, name=arg.name)
        for bucket, shard in zip(buckets, shards, strict=True):
            (weight,) = fsdp_wait_params(bucket, fsdp_all_gather(bucket, None, shard))
            x = prims.neg(prims.matmul(x, weight))
        prims.python_return({"output": x, "flat_args": list(trace.args)}, ())
    return trace


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_equal_blocks_need_one_slot_more_than_prefetch(prefetch):
    done = verify(plan_slots(sort_communication(chain(8), prefetch=prefetch)))
    assert len({b.args[1] for b in done.bound_symbols if b.sym is fsdp_all_gather}) == prefetch + 1
    testing.assert_gathered_buckets_at_most(done, prefetch + 1)
    bucket = next(b for b in done.bound_symbols if b.sym is fsdp_all_gather).args[0]
    testing.assert_unsharded_bytes_at_most(done, (prefetch + 1) * bucket.spec.unsharded_bytes)
    if prefetch:
        with pytest.raises(AssertionError, match="buckets are unsharded"):
            testing.assert_gathered_buckets_at_most(done, prefetch)


def test_zero2_buckets_keep_their_private_slots():
    trace = chain(4, zero3=False)
    kept = {b.args[0] for b in trace.bound_symbols if b.sym is fsdp_all_gather}
    done = verify(plan_slots(sort_communication(trace, prefetch=1), kept=kept))
    for bsym in done.bound_symbols:
        if bsym.sym is fsdp_all_gather:
            assert bsym.args[1] is bsym.args[0].private_slot


def test_no_collective_crosses_an_op_that_communicates_and_is_not_ours():
    trace = chain(4)
    foreign = next(i for i, b in enumerate(trace.bound_symbols) if b.sym.name == "neg")
    bsym = trace.bound_symbols[foreign]
    # What a claimed communication prim of Thunder's looks like: a leaf with the process group among its arguments.
    trace.bound_symbols[foreign] = bsym.from_bsym(args=(*bsym.args, _FakeProcessGroup()))
    done = verify(plan_slots(sort_communication(trace, prefetch=3)))
    names = [b.sym.name for b in done.bound_symbols]
    barrier = next(i for i, b in enumerate(done.bound_symbols) if b.sym.name == "neg")
    assert names[:barrier].count("fsdp_all_gather") == 1


class _FakeProcessGroup:
    def _get_backend(self) -> None: ...


#
# verify catches what it promises to catch: right traces, made wrong one by one
#


def right() -> TraceCtx:
    return plan_slots(sort_communication(chain(4), prefetch=1))


def positions(trace: TraceCtx, symbol) -> list[int]:
    return [i for i, b in enumerate(trace.bound_symbols) if b.sym is symbol]


def test_verify_catches_a_wait_below_its_consumer():
    trace = right()
    wait = positions(trace, fsdp_wait_params)[1]
    bsyms = trace.bound_symbols
    bsyms[wait], bsyms[wait + 1] = bsyms[wait + 1], bsyms[wait]
    with pytest.raises(VerificationError, match="which nothing before it defines"):
        verify(trace)


def test_verify_catches_a_missing_wait():
    trace = right()
    gather = trace.bound_symbols[positions(trace, fsdp_all_gather)[0]]
    with tracectx(trace):
        extra = gather.from_bsym(output=fsdp_all_gather.meta(*gather.args))
    trace.bound_symbols.insert(-1, extra)
    with pytest.raises(VerificationError, match="'b0' is never waited for"):
        verify(trace)


def test_verify_catches_a_second_wait():
    trace = right()
    wait = positions(trace, fsdp_wait_params)[0]
    trace.bound_symbols.insert(wait + 1, trace.bound_symbols[wait])
    with pytest.raises(VerificationError, match="waits a second time"):
        verify(trace)


def test_verify_catches_a_slot_that_is_written_while_it_is_read():
    trace = right()
    first, second = positions(trace, fsdp_all_gather)[:2]
    slot = trace.bound_symbols[first].args[1]
    bsym = trace.bound_symbols[second]
    trace.bound_symbols[second] = bsym.from_bsym(args=(bsym.args[0], slot, *bsym.args[2:]))
    with pytest.raises(VerificationError, match=r"writes slot_\d for bucket 'b1' while bucket 'b0'"):
        verify(trace)


def test_verify_catches_a_slot_that_is_read_through_a_view_after_it_was_reused():
    trace = right()
    first_wait = positions(trace, fsdp_wait_params)[0]
    (weight,) = trace.bound_symbols[first_wait].output
    with tracectx(trace):
        view, late = tensor(), tensor()
        trace.bound_symbols.insert(first_wait + 1, prims.transpose.bind(weight, (1, 0), output=view))
        trace.bound_symbols.insert(-1, prims.neg.bind(view, output=late))
    with pytest.raises(VerificationError, match="while bucket 'b0'"):
        verify(trace)


def test_verify_catches_gathers_in_another_order_than_their_consumers():
    trace = right()
    first, second = positions(trace, fsdp_all_gather)[1:3]
    bsyms = trace.bound_symbols
    moved = bsyms.pop(second)
    bsyms.insert(first, moved)
    with pytest.raises(VerificationError, match=r"first read later|while bucket"):
        verify(trace)


def test_verify_catches_a_parameter_that_is_returned_or_saved():
    trace = right()
    (weight,) = trace.bound_symbols[positions(trace, fsdp_wait_params)[-1]].output
    last = trace.bound_symbols[-1]
    returned = last.args[0]
    trace.bound_symbols[-1] = last.from_bsym(args=({**returned, "output": weight}, ()))
    with pytest.raises(VerificationError, match="returns"):
        verify(trace)
    trace.bound_symbols[-1] = last.from_bsym(args=(returned, ((weight,), ())))
    with pytest.raises(VerificationError, match=r"saves .* for backward"):
        verify(trace)


def test_verify_catches_a_collective_without_a_slot():
    with pytest.raises(VerificationError, match="has no slot"):
        verify(sort_communication(chain(2), prefetch=1))


def test_a_failing_assertion_shows_the_trace_around_the_fault():
    trace = right()
    with pytest.raises(AssertionError) as caught:
        testing.assert_prefetch_distance(trace, 2)
    assert "expected 2" in str(caught.value)
    assert "fsdp_all_gather(bucket_b2" in str(caught.value)


def test_unsorted_traces_fail_the_assertions():
    with pytest.raises(AssertionError, match="expected 1"):
        testing.assert_prefetch_distance(plan_slots(chain(4)), 1)
