"""The time of a step in which ranks run different blocks, on a virtual clock.

A rank computes, issues and waits in the order of its merged traces. A collective starts when all ranks have issued it and
the previous one has finished. Times are in units of a block's forward.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.extras.ranks_differ.merging import (
    GATHER,
    REDUCE,
    SERVED_IN_FLIGHT,
    Key,
    Own,
    Placed,
    Step,
    merge,
    place,
)

import pytest

PIECES = 4
"""Operations in a block's forward or backward, between which collectives can be issued."""
SECONDS = {GATHER: 0.25, REDUCE: 0.3}


class Trace(NamedTuple):
    own: list[Own]
    seconds: list[float]  # of each operation

    @property
    def program(self) -> list[Step]:
        """Issues precede waits at a position, like those of placed collectives."""
        events = [(o.planned, 0, Step(o.key, False)) for o in self.own]
        events += [(o.waited, 1, Step(o.key, True)) for o in self.own]
        return [step for *_, step in sorted(events, key=lambda event: event[:2])]


def step_of(blocks: Sequence[str], prefetch: int, block_seconds: float = 1.0) -> list[Trace]:
    """Return forward and backward of ZeRO-3, scheduled as :func:`sort_communication` does with this prefetch."""
    traces = []
    for order, is_backward in (blocks, False), (blocks[::-1], True):
        own = []
        for n, block in enumerate(order):
            bucket = (block, "", ())
            own.append(Own((GATHER, bucket, 0), max(n - prefetch, 0) * PIECES, n * PIECES, n * PIECES))
            if is_backward:
                ready = (n + 1) * PIECES
                own.append(Own((REDUCE, bucket, 0), ready, min(ready + PIECES, len(order) * PIECES), ready))
        own.sort(key=lambda o: (o.planned, o.key[0] != GATHER))
        seconds = [block_seconds * (1 + is_backward) / PIECES] * (len(order) * PIECES)
        traces.append(Trace(own, seconds))
    return traces


Collective = tuple[int, Key]
"""The number of its trace, and its key there."""


class Event(NamedTuple):
    """Compute of some seconds, or the issue of a collective or the wait for it."""

    seconds: float = 0.0
    issues: Collective | None = None
    waits: Collective | None = None


def simulate(programs: Sequence[Sequence[Event]]) -> float:
    """Return the time at which the slowest rank has finished."""
    remaining = [deque(program) for program in programs]
    clock = [0.0] * len(programs)
    queues: list[deque[tuple[Collective, float]]] = [deque() for _ in programs]  # issued and not run, with the time
    ends: dict[Collective, float] = {}
    link = 0.0
    blocked = False
    while not blocked:
        blocked = True
        for rank, program in enumerate(remaining):
            while program and (program[0].waits is None or program[0].waits in ends):
                event = program.popleft()
                clock[rank] += event.seconds
                if event.issues is not None:
                    queues[rank].append((event.issues, clock[rank]))
                if event.waits is not None:
                    clock[rank] = max(clock[rank], ends[event.waits])
                blocked = False
        while all(queues):
            heads = [queue.popleft() for queue in queues]
            (collective,) = {collective for collective, _ in heads}
            link = max(link, *(time for _, time in heads)) + SECONDS[collective[1][0]]
            ends[collective] = link
            blocked = False
    assert not any(remaining)
    return max(clock)


def events_of(number: int, placed: Sequence[Placed], seconds: Sequence[float], active: Collection[Key]) -> list[Event]:
    """Return the events of a merged trace. A served collective is waited for when the next one needs its slot."""
    at: list[list[Event]] = [[] for _ in range(len(seconds) + 1)]
    slots = itertools.cycle(range(SERVED_IN_FLIGHT))
    in_slot: dict[int, Key] = {}
    for p in placed:
        slot = next(slots) if p.served else None
        if p.key not in active:
            continue
        if slot is not None:
            if slot in in_slot:
                at[p.issue].append(Event(waits=(number, in_slot[slot])))
            in_slot[slot] = p.key
        at[p.issue].append(Event(issues=(number, p.key)))
    for p in placed:
        if not p.served:
            at[p.wait].append(Event(waits=(number, p.key)))
    at[-1] += [Event(waits=(number, key)) for key in in_slot.values()]
    return [event for events, work in zip(at, [*seconds, 0.0], strict=True) for event in (*events, Event(work))]


def together(
    ranks: Sequence[Sequence[Trace]],
    known: Sequence[Sequence[Trace]] = (),
    merge_programs: Callable[[Sequence[Sequence[Step]]], Sequence[Key]] = merge,
) -> float:
    """Return the time of a step in which ranks serve each other, and know the programs of other steps, too."""
    orders = [merge_programs([trace.program for trace in of_kind]) for of_kind in zip(*ranks, *known, strict=True)]
    active = [{o.key for trace in of_kind for o in trace.own} for of_kind in zip(*ranks, strict=True)]
    programs = []
    for traces in ranks:
        events = []
        for number, (trace, order) in enumerate(zip(traces, orders, strict=True)):
            placed = place(order, trace.own, set(order), len(trace.seconds))
            events += events_of(number, placed, trace.seconds, active[number])
        programs.append(events)
    return simulate(programs)


def slowdown(ranks: Sequence[Sequence[Trace]], known: Sequence[Sequence[Trace]] = ()) -> float:
    """Return the time of a step in which ranks serve each other, relative to the slowest if all ranks did the same as it."""
    return together(ranks, known) / max(together([traces] * len(ranks)) for traces in ranks)


def tower(name: str, size: int = 6) -> list[str]:
    return [f"{name}{n}" for n in range(size)]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(("size", "seconds"), [(6, 1.0), (4, 1.0), (6, 0.7), (6, 1.3)])
def test_two_towers_progress_side_by_side(size: int, seconds: float, prefetch: int) -> None:
    ranks = [step_of(tower("a"), prefetch), step_of(tower("b", size), prefetch, seconds)]
    assert 1 <= slowdown(ranks) <= 1.1


@pytest.mark.parametrize("size", [4, 8])
def test_towers_that_no_rank_runs_cost_nothing(size: int) -> None:
    towers = [step_of(tower(name), 1) for name in "abcdefgh"[:size]]
    for first, second in itertools.combinations(range(size), 2):
        others = [traces for number, traces in enumerate(towers) if number not in (first, second)]
        assert slowdown([towers[first], towers[second]], others) <= 1.1


def test_one_tower_after_the_other_would_take_longer() -> None:
    """The bound of the test above means something: it is the order that keeps it."""

    def in_sequence(programs: Sequence[Sequence[Step]]) -> list[Key]:
        return [step.key for program in programs for step in program if not step.waits]

    ranks = [step_of(tower(name), 1) for name in "ab"]
    assert together(ranks, merge_programs=in_sequence) > 1.5 * together(ranks)


def test_ranks_with_opposite_orders_alternate() -> None:
    ranks = [step_of(tower("a"), 1), step_of(tower("a")[::-1], 1)]
    assert slowdown(ranks) <= 1.35


@pytest.mark.parametrize("prefetches", [(1, 11), (0, 10)])
def test_gathers_far_ahead_of_reductions_overtake_few(prefetches: tuple[int, int]) -> None:
    """Without the rule that the collective is next that overtakes the fewest, the step takes 29 % and 24 % longer."""
    assert slowdown([step_of(tower("a", 12), prefetch) for prefetch in prefetches]) <= 1.2


def test_random_blocks_on_each_rank() -> None:
    """LayerDrop: each of four ranks runs another random half of eight blocks. They agree on the order, but not on when."""
    rng = random.Random(0)
    slowdowns = [slowdown([step_of(sorted(rng.sample(tower("a", 8), 4)), 1) for _ in range(4)]) for _ in range(20)]
    assert sum(slowdowns) / len(slowdowns) <= 1.3
