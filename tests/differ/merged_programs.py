"""The programs of merged traces, for the executor; and small traces to merge, scheduled by the real passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from thunder_fsdp_sched.extras.ranks_differ.follow_order import empty_trace, follow_order, steps_at
from thunder_fsdp_sched.extras.ranks_differ.merging import GATHER, REDUCE, Key, Step
from thunder_fsdp_sched.extras.ranks_differ.start import AccumulationOfAll
from thunder_fsdp_sched.extras.ranks_differ.symbols import ServingStart, key_of
from thunder_fsdp_sched.ir.statements import read_statements
from thunder_fsdp_sched.ranks.messages import Action
from thunder_fsdp_sched.testing import statements

import torch
from executor import Program
from internals import (
    Arena,
    Bucket,
    assign_slots,
    effects,
    fsdp_all_gather,
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
    sort_communication,
)
from synthetic_traces import SHAPE, make_bucket, tensor
from thunder.core import prims
from thunder.core.trace import TraceCtx, tracectx

PIECES = 4
"""Operators in a block's forward or backward, between which collectives can be issued."""


def steps_of(trace: TraceCtx) -> list[Step]:
    """Return the program of a scheduled trace: the issues and waits of its collectives, in order."""
    return [step for _, step in steps_at(read_statements(trace))]


@dataclass(frozen=True)
class Small:
    """A scheduled trace of some blocks, and the seconds of each operator."""

    trace: TraceCtx
    seconds: float

    @cached_property
    def steps(self) -> list[Step]:
        return steps_of(self.trace)

    def merged(
        self, order: Sequence[Key], active: Collection[Key], buckets: Mapping[str, Bucket], size: int
    ) -> Program:
        """Return the program of its merged trace in a run in which some rank needs the collectives ``active``."""
        return program_of_merged(self.follow(order, buckets, _Start()), active, size, self.seconds)

    def follow(self, order: Sequence[Key], buckets: Mapping[str, Bucket], start: ServingStart) -> TraceCtx:
        """Return its merged trace, with slots."""
        by_key = {key_of(bucket): bucket for bucket in buckets.values()}
        return assign_slots(follow_order(self.trace, order=order, start=start, buckets=by_key, sources={}))


class _Start:
    """The start of a merged trace, of which only the name is used before it runs."""

    no_sync = False

    def __repr__(self) -> str:
        return "start"


def make_blocks(names: Sequence[str], size: int = 2) -> dict[str, Bucket]:
    """Return a bucket for each block, in one arena."""
    common: Any = {"world_size": size, "arena": Arena(torch.device("cpu")), "accumulation": AccumulationOfAll}
    return {name: make_bucket(name, [SHAPE], **common) for name in names}


def step_of(buckets: Mapping[str, Bucket], blocks: Sequence[str], prefetch: int, seconds: float = 1.0) -> list[Small]:
    """Return forward and backward of ZeRO-3 on these blocks; ``seconds`` takes a block's forward, and half its backward."""
    if not blocks:
        return [Small(empty_trace("nothing", backward=is_backward), 0.0) for is_backward in (False, True)]
    forward = _trace([buckets[block] for block in blocks], is_backward=False, prefetch=prefetch)
    backward = _trace([buckets[block] for block in reversed(blocks)], is_backward=True, prefetch=prefetch)
    return [Small(forward, seconds / PIECES), Small(backward, 2 * seconds / PIECES)]


def _trace(buckets: Sequence[Bucket], *, is_backward: bool, prefetch: int) -> TraceCtx:
    trace = TraceCtx()
    with tracectx(trace):
        x, shards = tensor(), [tensor() for _ in buckets]
        trace.args = (x, *shards)
        for arg in trace.args:
            prims.unpack_trivial(arg, name=arg.name)
        reduced = []
        for bucket, shard in zip(buckets, shards, strict=True):
            (weight,) = fsdp_wait_params(bucket, fsdp_all_gather(bucket, None, shard))
            x = prims.matmul(x, weight)
            for _ in range(PIECES - 1):
                x = prims.neg(x)
            if is_backward:
                reduced += fsdp_wait_grads(bucket, fsdp_reduce_scatter(bucket, None, x))
        prims.python_return((x, *reduced))
    return sort_communication(trace, prefetch=prefetch)


def program_of_merged(trace: TraceCtx, active: Collection[Key], size: int, seconds: float = 0.0) -> Program:
    """Return what one of ``size`` ranks does in a run in which some rank needs the collectives ``active``.

    A wait for a served collective only frees its slot: a later issue that uses the memory waits, or the end of the trace.

    Args:
        trace: a merged trace, or an own one, in which all collectives are active.
        seconds: of each operator; without it, the program has no compute.
    """
    return list(_program_of_merged(trace, active, tuple(range(size)), seconds))


def _program_of_merged(
    trace: TraceCtx, active: Collection[Key], ranks: tuple[int, ...], seconds: float
) -> Iterator[Action | float]:
    flights: dict[str, Action] = {}
    slots: dict[str, Any] = {}
    served: list[str] = []  # futures of served collectives whose slots may be used again
    occurrences: Counter[object] = Counter()
    for bsym in statements(trace):
        e = effects(bsym)
        if e.bucket is None and seconds:
            yield seconds
        if e.waits is not None and e.waits.future in flights:
            if "_serve" in e.waits.kinds[0]:
                served.append(e.waits.future)
            else:
                yield flights[e.waits.future]._replace(waits=True)
        if e.issues is None or e.bucket is None:
            continue
        kind, bucket = GATHER if "gather" in e.issues.kind else REDUCE, key_of(e.bucket)
        key = kind, bucket, occurrences[kind, bucket]
        occurrences[kind, bucket] += 1
        if key not in active:
            continue
        if e.issues.region is not None and (slot := e.issues.region.slot) is not None:
            for earlier in [future for future in served if overlap(slots[future], slot)]:
                served.remove(earlier)
                yield flights[earlier]._replace(waits=True)
            slots[e.issues.future] = slot
        flights[e.issues.future] = Action(str(key), "all", ranks, False, len(flights))
        yield flights[e.issues.future]
    yield from (flights[future]._replace(waits=True) for future in served)


def overlap(one: Any, other: Any) -> bool:
    return one.arena is other.arena and one.offset < other.end and other.offset < one.end
