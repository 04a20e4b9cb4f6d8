"""Random histories of simulated ranks that differ: real rounds, registries and merged traces, executed in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.extras.ranks_differ import programs
from thunder_fsdp_sched.extras.ranks_differ.programs import differences_of, program_of
from thunder_fsdp_sched.extras.ranks_differ.start import DifferingStart
from thunder_fsdp_sched.testing import statements
from thunder_fsdp_sched.transforms.insert_agreement import describe

import pytest
from executor import GLOO, NCCL, Program, execute, issued
from internals import effects, read_statements
from merged_programs import Small, make_blocks, program_of_merged, step_of, steps_of
from simulated_ranks import World

BLOCKS = "abcd"


class DifferingRank:
    """A rank that keeps the traces that it has compiled."""

    def __init__(self, world: World) -> None:
        self.control, self.world, self.buckets = world.control(), world, make_blocks(BLOCKS, world.size)
        module = SimpleNamespace(training=True)
        self.sharded: Any = SimpleNamespace(control=self.control, module=module, buckets=list(self.buckets.values()))
        self.compiled: dict[tuple[str, int], list[tuple[Small, DifferingStart]]] = {}

    def step(self, way: str, prefetch: int) -> list[Program]:
        """Run forward and backward of some blocks, and return the program of each half with the rounds before it."""
        if (way, prefetch) not in self.compiled:
            halves = zip(("forward", "backward"), step_of(self.buckets, way, prefetch), strict=True)
            self.compiled[way, prefetch] = [(small, self._start(half, small)) for half, small in halves]
        return [self._run(small, start) for small, start in self.compiled[way, prefetch]]

    def _start(self, half: str, small: Small) -> DifferingStart:
        def make(start: DifferingStart) -> tuple[Callable[..., Any], None]:
            merged = small.follow(start.registry.order, self.buckets, start)
            return lambda: merged, None

        program, groups = program_of(read_statements(small.trace))
        start = DifferingStart(self.sharded, half, (half, False, True), f"{half} of a trace", program, groups, make)
        describe(start, list(map(effects, statements(small.trace))))
        return start

    def _run(self, small: Small, start: DifferingStart) -> Program:
        start.post()
        run = start.settled_or_merged()
        trace, active = (small.trace, start.program.issues) if run is None else (run(), start._outcome.active)
        program = program_of_merged(trace, active, self.world.size)
        self.control.issue_counts.issued += 2 * len(issued(program))
        return program


@pytest.mark.parametrize("number", [12, pytest.param(1000, marks=pytest.mark.long)])
def test_ranks_issue_the_same_whatever_they_run(number: int) -> None:
    merges = forgotten = 0
    for seed in range(number):
        rng = random.Random(seed)
        world = World(rng.choice([2, 2, 3, 4]), seed=seed)
        ranks = world.run(lambda rank: DifferingRank(world))  # noqa: B023
        ways = ["".join(rng.sample(BLOCKS, rng.randint(0, 4))) for _ in range(3)]
        with mock.patch.object(programs, "MOST_PROGRAMS", rng.choice([2, 256])):
            for _ in range(6):
                chosen = [(rng.choice(ways), rng.randint(0, 2)) for _ in ranks]
                halves = world.run(lambda rank: ranks[rank].step(*chosen[rank]))  # noqa: B023
                for half in range(2):
                    of_ranks = {rank: found[half] for rank, found in enumerate(halves)}
                    assert execute(of_ranks, rng.choice([GLOO, NCCL]), seed=seed) == "", (seed, chosen)
                    own = [steps_of(ranks[r].compiled[way][half][0].trace) for r, way in enumerate(chosen)]
                    needed = {step.key for steps in own for step in steps}
                    assert len(issued(of_ranks[0])) == len(needed), (seed, chosen)
                known = [
                    {kind: (r.version, r.order, [*r.programs], [*r.outcomes]) for kind, r in registries.items()}
                    for registries in (differences_of(rank.control).registries for rank in ranks)
                ]
                assert all(theirs == known[0] for theirs in known), (seed, chosen)
                assert {rank.control.issue_counts.surplus_issues for rank in ranks} == {0}, (seed, chosen)
                merges += len(set(chosen)) > 1
            forgotten += any(
                len(registry.programs) < len({way for way, _ in ranks[0].compiled})
                for registry in differences_of(ranks[0].control).registries.values()
            )
    assert merges > number and forgotten
