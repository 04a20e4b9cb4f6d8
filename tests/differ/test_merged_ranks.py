"""The merged traces of all ranks together: their collectives finish, whichever of the known programs each rank runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, permutations, product

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.extras.ranks_differ.follow_order import steps_of
from thunder_fsdp_sched.extras.ranks_differ.merging import Key, Step, merge
from thunder_fsdp_sched.ranks.messages import Action

import pytest
from executor import GLOO, NCCL, execute, explore
from internals import find_fault
from merged_programs import Small, make_blocks, program_of_merged, step_of
from test_follow_order import WAYS, Compiled, Start, buckets_of, compile_ways

RANKS = 3


def own_program(steps: Sequence[Step], size: int = RANKS) -> list[Action]:
    """Return what one of ``size`` ranks does by itself."""
    number = {key: n for n, key in enumerate(step.key for step in steps if not step.waits)}
    return [Action(str(key), "all", tuple(range(size)), waits, number[key]) for key, waits in steps]


@pytest.mark.usefixtures("fake_ranks")
def test_any_combination_of_merged_traces_finishes() -> None:
    transform, ways = compile_ways(WAYS, sharding_strategy="zero3", prefetch=2)
    buckets = buckets_of(transform)
    for half in range(2):
        traces = [way[half] for way in ways] + [Compiled.nothing(ways[0][half])]
        own = [steps_of(compiled.trace) for compiled in traces]
        order = merge(own)
        merged = [compiled.build(order, buckets, Start("start")) for compiled in traces]
        different = 0
        for seed, chosen in enumerate(product(range(len(traces)), repeat=RANKS)):
            active = {step.key for n in chosen for step in own[n]}
            programs = {rank: program_of_merged(merged[n], active, RANKS) for rank, n in enumerate(chosen)}
            assert execute(programs, (GLOO, NCCL)[seed % 2], seed=seed) == ""
            different += find_fault({rank: own_program(own[n]) for rank, n in enumerate(chosen)}) != ""
        assert different > len(traces) ** RANKS / 2  # their own traces would not finish


#
# All pairs of small traces
#

BLOCKS = "abc"
BUCKETS = make_blocks(BLOCKS)


def small_steps(most: int) -> list[list[Small]]:
    """Return the steps of all sequences of at most so many blocks, also of none, with any prefetch that matters."""
    ways = [way for size in range(most + 1) for way in permutations(BLOCKS, size)]
    return [step_of(BUCKETS, way, prefetch) for way in ways for prefetch in range(max(len(way), 1))]


@pytest.mark.parametrize("most", [2, pytest.param(3, marks=pytest.mark.long)])
def test_all_pairs_of_small_traces(most: int) -> None:
    """Ranks that know both programs, and now and then another one, run them in all orders of events."""
    rng, different = random.Random(0), 0
    for traces in zip(*small_steps(most), strict=True):
        for first, second in combinations(traces, 2):
            known = rng.sample(traces, rng.randint(0, 1))
            order: list[Key] = merge([trace.steps for trace in (first, second, *known)])
            active = {step.key for trace in (first, second) for step in trace.steps}
            merged = (trace.merged(order, active, BUCKETS, has_compute=False) for trace in (first, second))
            programs = dict(enumerate(merged))
            for backend in (GLOO, NCCL):
                assert explore(programs, backend) == "", (first.steps, second.steps, known)
            different += find_fault({r: own_program(t.steps, 2) for r, t in enumerate((first, second))}) != ""
    assert different > 10
