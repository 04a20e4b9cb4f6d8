"""Random traces keep their values in slots, and their collectives keep the rules of the sorter.

The oracle of values is ``slot_executor``; that of the rules recomputes them from the sorted trace alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

from thunder_fsdp_sched.extras.replicas import fsdp_all_reduce
from thunder_fsdp_sched.transforms.assign_slots import _ArenaLimits, _Resident, _SharedSlots

import torch
from hypothesis import given
from hypothesis import strategies as st
from internals import (
    BEFORE_TRACE,
    Analysis,
    Arena,
    Bucket,
    ProcessGroupRef,
    args_of,
    assign_slots,
    effects,
    fsdp_all_gather,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
    outs_of,
    sort_communication,
    verify,
    write_grads_in_place,
)
from random_models import quiet
from random_traces import LIMITS, inputs_of, traces
from slot_executor import SlotExecutor
from synthetic_traces import SHAPE, chain, make_bucket, tensor
from thunder.core import prims
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors import torchex


@quiet(60)
@given(traces(), LIMITS, st.booleans())
def test_values_are_those_without_slots(
    drawn: tuple[TraceCtx, list[Bucket]], limits: dict[str, Any], kept: bool
) -> None:
    trace, buckets = drawn
    expected = SlotExecutor(inputs := inputs_of(trace)).run(trace)
    sorted_trace = sort_communication(write_grads_in_place(trace), **limits)
    found = assign_slots(sorted_trace, kept_buckets=buckets[:1] if kept else ())
    actual = SlotExecutor(inputs).run(found)
    assert actual.keys() == expected.keys()
    wrong = [name for name, value in expected.items() if not torch.equal(value, actual[name])]
    assert not wrong
    verify(found, max_gathers_in_flight=limits["max_gathers_in_flight"])


class Reduction(NamedTuple):
    """Where the statements of a reduction are in a sorted trace; ``across`` is where its all-reduce is, if it has one."""

    bucket: Bucket
    issue: int
    across: int | None
    wait: int

    @property
    def group(self) -> ProcessGroupRef:
        return self.bucket.ranks.reductions

    @property
    def released(self) -> int:
        """The position from which on it does not need its slot."""
        return self.wait if self.across is None else self.across


def _reductions(bsyms: list[BoundSymbol]) -> list[Reduction]:
    """Return all reductions in the order of their issues."""
    issues: dict[str, tuple[Bucket, int]] = {}
    across: dict[str, int] = {}
    found = []
    for position, bsym in enumerate(bsyms):
        if bsym.sym is fsdp_reduce_scatter:
            issues[bsym.output.name] = bsym.args[0], position
        elif bsym.sym is fsdp_all_reduce:
            issues[bsym.output.name], across[bsym.output.name] = issues.pop(bsym.args[1].name), position
        elif bsym.sym is fsdp_wait_grads:
            future = bsym.args[1].name
            found.append(Reduction(*issues[future], across.get(future), position))
    return sorted(found, key=lambda reduction: reduction.issue)


def _is_compute(bsym: BoundSymbol) -> bool:
    return effects(bsym).bucket is None


def _until_compute(bsyms: list[BoundSymbol], position: int) -> range:
    """Return the positions from the next one to that of the next operator, which is included."""
    end = position + 1
    while end < len(bsyms) - 1 and not _is_compute(bsyms[end]):
        end += 1
    return range(position + 1, end + 1)


@quiet(60)
@given(traces(), st.integers(0, 3), st.sampled_from([2, 2, 1]))
def test_reductions_wait_only_for_readers_and_for_memory_of_their_own_group(
    drawn: tuple[TraceCtx, list[Bucket]], prefetch: int, most: int
) -> None:
    bsyms = sort_communication(drawn[0], prefetch=prefetch, reductions_in_flight=most).bound_symbols
    reductions = _reductions(bsyms)
    slot_bytes = {r: r.bucket.spec.grad_bytes for r in reductions}
    of_group: dict[ProcessGroupRef, list[int]] = defaultdict(list)
    for reduction in reductions:
        of_group[reduction.group].append(slot_bytes[reduction])
    limit = {group: sum(sorted(sizes)[-most:]) for group, sizes in of_group.items()}
    blocks = {group: sorted(sizes)[:-most] or sizes for group, sizes in of_group.items()}
    # The smallest size such that blocks of at most this size have half of the bytes of all.
    typical = {
        group: min(size for size in sizes if 2 * sum(s for s in sizes if s <= size) >= sum(sizes))
        for group, sizes in blocks.items()
    }

    def needs_memory(reduction: Reduction, released: int) -> bool:
        """Return whether the next reduction of the group needs what this one releases there."""
        later = next((r for r in reductions if r.issue > released and r.group is reduction.group), None)
        if later is None or not all(not _is_compute(bsyms[i]) for i in range(released, later.issue)):
            return False
        held = [
            r for r in reductions if r.issue < later.issue and r.group is reduction.group and r.released >= released
        ]
        block = typical[reduction.group]
        after = sum(slot_bytes[r] for r in held if r.issue > reduction.issue) + min(slot_bytes[later], block)
        is_ended = after >= 0.7 * max(most * block, slot_bytes[reduction])
        return is_ended or sum(slot_bytes[r] for r in (*held, later)) > limit[reduction.group]

    for reduction in reductions:
        before = [r for r in reductions if r.issue < reduction.issue < r.released and r.group is reduction.group]
        assert sum(slot_bytes[r] for r in (*before, reduction)) <= limit[reduction.group]
        after = _until_compute(bsyms, reduction.wait)
        reader = bsyms[after[-1]]
        waited = [r for r in reductions if r.group is reduction.group and reduction.wait <= r.wait <= after[-1]]
        is_read = any(set(outs_of(bsyms[r.wait])) & set(args_of(reader)) for r in waited)
        assert (
            is_read
            or (reduction.across is None and needs_memory(reduction, reduction.wait))
            or any(needs_memory(r, r.released) for r in waited)
        )
        if reduction.across is None:
            continue
        # An all-reduce is issued once another reduce-scatter is, which takes a tenth of the time of its own or more.
        later = (r for r in reductions if r.issue > reduction.issue)
        hiding = [r for r in later if 10 * slot_bytes[r] >= slot_bytes[reduction]]
        at_once = [r for r in hiding if reduction.across in _until_compute(bsyms, r.issue)]
        assert all(r in at_once or r.issue > reduction.across for r in hiding)
        is_waited = reduction.wait in _until_compute(bsyms, reduction.across)
        assert at_once[:1] == hiding[:1] != [] or needs_memory(reduction, reduction.across) or is_waited


@quiet(60)
@given(traces(), st.integers(1, 3))
def test_a_gather_overtakes_a_reduction_only_where_it_would_queue_behind_it(
    drawn: tuple[TraceCtx, list[Bucket]], prefetch: int
) -> None:
    trace = drawn[0]
    bsyms = sort_communication(trace, prefetch=prefetch).bound_symbols
    live = Analysis(bsyms)
    waits = [position for position, b in enumerate(bsyms) if b.sym is fsdp_wait_params]
    for reduction in _reductions(bsyms):
        overtaking = []
        while bsyms[reduction.issue - 1 - len(overtaking)].sym is fsdp_all_gather:
            overtaking.append(bsyms[reduction.issue - 1 - len(overtaking)])
        if not overtaking:
            continue
        assert effects(overtaking[-1]).issues.group is reduction.group
        following = min((w for w in waits if w > reduction.issue), default=None)
        assert following is not None
        reader = _until_compute(bsyms, following)[-1]
        for wait in (w for w in waits if w < reduction.issue):
            assert not reduction.issue < live.last_use(outs_of(bsyms[wait])) < reader


def test_slots_of_two_arenas_do_not_displace_each_other() -> None:
    buckets = [make_bucket(f"b{i}", [SHAPE], arena=Arena(torch.device("cpu"))) for i in range(2)]
    trace = TraceCtx()
    with tracectx(trace):
        x, *shards = trace.args = tuple(tensor() for _ in range(3))
        for bucket, shard in zip(buckets, shards, strict=True):
            x = prims.matmul(x, fsdp_wait_params(bucket, fsdp_all_gather(bucket, None, shard))[0])
        prims.python_return((x,))
    found = assign_slots(sort_communication(trace, prefetch=1))  # both are gathered at the start
    assert [b.args[1].offset for b in found.bound_symbols if b.sym is fsdp_all_gather] == [0, 0]


def test_gradients_take_the_place_of_parameters_only_if_that_saves_memory() -> None:
    arena = Arena(torch.device("cpu"))
    used, *others = (make_bucket(f"b{i}", [SHAPE] * 2, arena=arena) for i in range(3))
    trace = TraceCtx()
    with tracectx(trace):
        x, *shards = trace.args = tuple(tensor() for _ in range(7))
        first, second = fsdp_wait_params(used, fsdp_all_gather(used, None, *shards[:2]))
        grads = [torchex.matmul(prims.matmul(x, first), x)]
        y = prims.matmul(x, second)
        grads.append(torchex.matmul(y, x))
        reduced = fsdp_wait_grads(used, fsdp_reduce_scatter(used, None, *grads))
        weights = [
            fsdp_wait_params(b, fsdp_all_gather(b, None, *shards[2 + 2 * i : 4 + 2 * i]))[0]
            for i, b in enumerate(others)
        ]
        prims.python_return((prims.matmul(*weights), *reduced))
    found = assign_slots(write_grads_in_place(trace))  # two buckets are gathered at once in any case
    params, gradients = (
        next(b.args[1] for b in found.bound_symbols if b.sym is s) for s in (fsdp_all_gather, fsdp_reduce_scatter)
    )
    assert not params.overlaps(gradients)


def test_buckets_stay_resident_only_within_both_limits() -> None:
    slots = Analysis(sort_communication(chain(2), prefetch=0)).slots.values()
    one, other = slots  # one after the other
    resident = [_Resident(replace(live, first=BEFORE_TRACE)) for live in slots]
    enough = _ArenaLimits(one.nbytes + other.nbytes, one.nbytes + other.nbytes)
    shared = _SharedSlots(list(slots), None)
    assert shared.offsets(resident, enough) is not None
    assert shared.offsets(resident, enough._replace(arena_bytes=enough.arena_bytes - 1)) is None
    assert shared.offsets(resident, enough._replace(gathered_bytes=enough.gathered_bytes - 1)) is None
