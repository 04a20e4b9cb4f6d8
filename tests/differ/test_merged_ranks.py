"""The merged traces of all ranks together: their collectives finish, whichever of the known programs each rank runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import product

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.extras.ranks_differ.follow_order import steps_of
from thunder_fsdp_sched.extras.ranks_differ.merging import GATHER, REDUCE, Key, Step, merge
from thunder_fsdp_sched.extras.ranks_differ.symbols import key_of
from thunder_fsdp_sched.ranks.messages import Action

import pytest
from internals import effects, find_fault, statements
from test_follow_order import WAYS, Compiled, Start, buckets_of, compile_ways
from thunder.core.trace import TraceCtx

RANKS = 3


def steps_of_merged(trace: TraceCtx) -> Iterator[Step]:
    """Yield the issues and waits of a merged trace, served ones included."""
    key_of_future: dict[str, Key] = {}
    earlier: Counter[tuple[str, object]] = Counter()
    for e in map(effects, statements(trace)):
        if e.waits is not None and e.bucket is not None:
            yield Step(key_of_future[e.waits.future], True)
        if e.issues is not None and e.bucket is not None:
            kind, bucket = GATHER if "gather" in e.issues.kind else REDUCE, key_of(e.bucket)
            key = key_of_future[e.issues.future] = kind, bucket, earlier[kind, bucket]
            earlier[kind, bucket] += 1
            yield Step(key, False)


def actions(steps: Collection[Step], active: Collection[Key]) -> list[Action]:
    """Return what a rank does in a run in which some rank needs the collectives ``active``."""
    number = {key: n for n, key in enumerate(step.key for step in steps if not step.waits)}
    everyone = tuple(range(RANKS))
    return [Action(str(key), "all", everyone, waits, number[key]) for key, waits in steps if key in active]


@pytest.mark.usefixtures("fake_ranks")
def test_any_combination_of_merged_traces_finishes() -> None:
    transform, ways = compile_ways(WAYS, sharding_strategy="zero3", prefetch=2)
    buckets = buckets_of(transform)
    for half in range(2):
        traces = [way[half] for way in ways] + [Compiled.nothing(ways[0][half])]
        own = [steps_of(compiled.trace) for compiled in traces]
        order = merge(own)
        merged = [[*steps_of_merged(compiled.build(order, buckets, Start("start")))] for compiled in traces]
        different = 0
        for chosen in product(range(len(traces)), repeat=RANKS):
            active = {step.key for n in chosen for step in own[n]}
            assert find_fault({rank: actions(merged[n], active) for rank, n in enumerate(chosen)}) == ""
            different += find_fault({rank: actions(own[n], active) for rank, n in enumerate(chosen)}) != ""
        assert different > len(traces) ** RANKS / 2  # their own traces would not finish
