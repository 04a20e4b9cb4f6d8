"""The proof that no collective deadlocks, compared with executions in all orders of events."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched import ScheduleDisagreement
from thunder_fsdp_sched.ranks.compare_programs import Computation, check_program
from thunder_fsdp_sched.ranks.messages import Action

import pytest
from executor import GLOO, NCCL, ROUNDS, Backend, execute, explore, seconds_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from internals import find_fault
from simulated_ranks import World

Programs = Mapping[int, Sequence[Action]]


def program(*actions: str) -> list[Action]:
    """Return a rank's program: ``"A:01"`` issues on group A of ranks 0 and 1, ``"wait 0"`` waits for the first issue."""
    issued: list[Action] = []
    out = []
    for action in actions:
        if action.startswith("wait"):
            out.append(issued[int(action[5:])]._replace(waits=True))
        else:
            group, ranks = action.split(":")
            issued.append(Action(f"op on {group}", group, tuple(map(int, ranks)), False, len(issued)))
            out.append(issued[-1])
    return out


AB = ("A:01", "wait 0", "B:01", "wait 1")
BA = ("B:01", "wait 0", "A:01", "wait 1")
FAULTS: dict[str, tuple[list[tuple[str, ...]], tuple[str, ...]]] = {
    "none": ([("A:012", "B:012", "wait 1", "wait 0")] * 3, ()),
    # Groups of two along a ring. Each rank issues in the order of the groups' letters.
    "none in a ring": (
        [
            ("A:01", "C:02", "wait 0", "wait 1"),
            ("A:01", "wait 0", "B:12", "wait 1"),
            ("B:12", "C:02", "wait 0", "wait 1"),
        ],
        (),
    ),
    "groups that wait for each other": (
        [AB, BA],
        (
            "deadlocks",
            "rank 0 is held up at op on A, in op on A with ranks (0, 1)",
            "rank 1 is held up at op on B, in op on B with ranks (0, 1)",
        ),
    ),
    # No rank waits before it has issued both, so these finish if collectives of two groups run concurrently. NCCL does
    # not guarantee that.
    "groups that have to run concurrently": ([("A:01", "B:01"), ("B:01", "A:01")], ("deadlocks",)),
    "a missing rank": ([("A:01",)], ("line 1:\n    rank 0: op on A\n    rank 1: (nothing)",)),
    "a missing collective": ([("A:01", "A:01"), ("A:01",)], ("line 2:\n    rank 0: op on A\n    rank 1: (nothing)",)),
    "another order on one of two groups": (
        [("A:01", "B:01"), ("A:01",)],
        ("line 1 of process group 'B':\n    rank 0: op on B\n    rank 1: (nothing)",),
    ),
    "no member": ([("A:01",)] * 2 + [("A:01", "A:01")], ("line 2:",)),
    "other members": ([("A:01",), ("A:012",), ()], ("deadlocks",)),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_described(case):
    programs, expected = FAULTS[case]
    fault = find_fault({rank: program(*actions) for rank, actions in enumerate(programs)})
    assert bool(fault) == bool(expected)
    assert all(text in fault for text in expected), fault


GROUPS = {"A": (0, 1), "B": (1, 2), "C": (0, 2), "D": (0, 1, 2), "E": (0, 1)}


@st.composite
def small_programs(draw: st.DrawFn) -> Programs:
    """Draw programs of three ranks, with any waits.

    Ranks of a group issue equally many collectives on it, in any order; now and then of two kinds.
    """
    times = {group: draw(st.integers(0, 2)) for group in GROUPS}
    kinds = draw(st.sampled_from(["x", "x", "xy"]))
    programs = {}
    for rank in range(3):
        own = [group for group, members in GROUPS.items() if rank in members for _ in range(times[group])]
        order = draw(st.permutations(own))
        actions: list[Action] = []
        waiting: list[Action] = []
        for number, group in enumerate(order):
            line = f"{draw(st.sampled_from(kinds))} on {group}"
            waiting.append(Action(line, group, GROUPS[group], False, number))
            actions.append(waiting[-1])
            for earlier in [earlier for earlier in waiting if draw(st.booleans())]:
                waiting.remove(earlier)
                actions.append(earlier._replace(waits=True))
        programs[rank] = actions
    return programs


def check_proof(programs: Programs) -> bool:
    """Compare the proof with all orders of events, and return whether it finds a fault."""
    fault = find_fault(programs)
    assert bool(explore(programs, NCCL)) == bool(fault), (programs, fault)
    if not fault:
        assert not explore(programs, GLOO)
    return bool(fault)


@settings(deadline=None)
@given(small_programs())
@example({0: program("A:01", "C:02"), 1: program("B:12", "A:01"), 2: program("C:02", "B:12")})
def test_faults_are_found_exactly_where_some_order_of_events_has_one(programs: Programs) -> None:
    check_proof(programs)


def all_programs(groups: Sequence[str], most: int) -> Iterator[list[Action]]:
    """Yield all programs of at most so many collectives on these groups, each waited for at any time or never."""

    def continued(actions: list[Action], waiting: list[Action]) -> Iterator[list[Action]]:
        yield actions
        for action in waiting:
            yield from continued([*actions, action._replace(waits=True)], [a for a in waiting if a is not action])
        if (number := sum(not action.waits for action in actions)) < most:
            for group in groups:
                action = Action(f"op on {group}", group, GROUPS[group], False, number)
                yield from continued([*actions, action], [*waiting, action])

    return continued([], [])


def test_ranks_that_compile_any_small_programs_raise_exactly_where_some_order_of_events_has_a_fault() -> None:
    """Programs that are alike up to the names of groups are not proved: their n-th groups match, or they do not."""
    of_rank = list(all_programs("AE", 2))
    pairs = random.Random(0).sample([*itertools.product(of_rank, repeat=2)], 400) + [(p, p) for p in of_rank]
    world = World(2)

    def compare(rank: int) -> list[bool]:
        control, agreed = world.control(), []
        for number, pair in enumerate(pairs):
            try:
                check_program(control, f"trace {number}", pair[rank], Computation())
                agreed.append(True)
            except ScheduleDisagreement:
                agreed.append(False)
        return agreed

    expected = [explore(dict(enumerate(pair)), NCCL) == "" for pair in pairs]
    assert world.run(compare) == [expected] * 2


#
# The executor itself
#


AT_ONCE, MISMATCH = [("A:01", "B:01"), ("B:01", "A:01")], [("A:01",), ("A:012",), ()]


@pytest.mark.parametrize(
    ("programs", "backend", "fault"),
    [
        ([AB, BA], GLOO, "0 is at its wait for op on A, and has issued op on A with ranks (0, 1)\n    rank 1 is at"),
        (AT_ONCE, GLOO, ""),
        (AT_ONCE, NCCL, "1 is at its end, and has issued op on B with ranks (0, 1), op on A with"),
        ([("A:01",), ()], GLOO, "0 is at its end, and has issued op on A with ranks (0, 1)"),
        (MISMATCH, GLOO, "1 is at its end, and has issued op on A with ranks (0, 1, 2)"),
    ],
)
def test_faults_of_executions(programs: Sequence[Sequence[str]], backend: Backend, fault: str) -> None:
    of_ranks = {rank: program(*actions) for rank, actions in enumerate(programs)}
    for found in (explore(of_ranks, backend), *(execute(of_ranks, backend, seed=seed) for seed in range(3))):
        assert fault in found and bool(found) == bool(fault), found


def test_a_host_meets_in_rounds_while_its_device_waits() -> None:
    """With NCCL a round may precede what ends the wait; with gloo the host would never come to it."""
    meet = [Action("a round", ROUNDS, (0, 1), False, 9), Action("a round", ROUNDS, (0, 1), True, 9)]
    first = program("A:01", "wait 0")
    programs = {0: [*first, *meet], 1: [*meet, *first]}
    assert explore(programs, NCCL) == ""
    assert explore(programs, GLOO).startswith("stuck:")


def test_the_clock_follows_the_streams() -> None:
    """A link of two seconds for each collective, and compute of one second in between."""
    first, second = program("A:01", "A:01", "wait 0", "wait 1")[:2]
    overlapped = [first, 1.0, second, 1.0, first._replace(waits=True), 1.0, second._replace(waits=True)]
    for backend in (GLOO, NCCL):
        assert seconds_of({0: overlapped, 1: [0.5, *overlapped]}, lambda action: 2.0, backend) == {0: 4.5, 1: 4.5}
    other = second._replace(group="B")
    at_once = {rank: [first, other, first._replace(waits=True), other._replace(waits=True)] for rank in range(2)}
    assert seconds_of(at_once, lambda action: 2.0, GLOO) == {0: 2.0, 1: 2.0}
    assert seconds_of(at_once, lambda action: 2.0, NCCL) == {0: 4.0, 1: 4.0}
