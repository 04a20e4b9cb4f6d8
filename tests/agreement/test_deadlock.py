"""The check that no collective deadlocks, compared with an exhaustive search over all orders of events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.ranks.messages import Action

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from internals import find_fault

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
    "no member": ([("A:01",)] * 2 + [("A:01", "A:01")], ("line 2:",)),
    "other members": ([("A:01",), ("A:012",), ()], ("deadlocks",)),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_described(case):
    programs, expected = FAULTS[case]
    fault = find_fault({rank: program(*actions) for rank, actions in enumerate(programs)})
    assert bool(fault) == bool(expected)
    assert all(text in fault for text in expected), fault


#
# All orders of events
#

State = tuple[tuple[int, ...], tuple[frozenset[int], ...]]


def deadlocks(programs: Programs, *, serial: bool) -> bool:
    """Return whether some order of events leads to a state that is unfinished but in which nothing can happen.

    An event is one rank's next action, or the completion of a collective. With ``serial``, a collective completes only when
    it is the oldest unfinished one on all its ranks, otherwise when it is the oldest of its group on all of them.
    """
    ranks = sorted(programs)
    start: State = (tuple(0 for _ in ranks), tuple(frozenset() for _ in ranks))
    seen, stack = {start}, [start]
    while stack:
        state = stack.pop()
        following = list(_events(programs, ranks, state, serial))
        finished = all(
            position == len(programs[rank]) and len(done) == sum(not s.waits for s in programs[rank])
            for rank, position, done in zip(ranks, *state, strict=True)
        )
        if not following and not finished:
            return True
        for new in following:
            if new not in seen:
                seen.add(new)
                stack.append(new)
    return False


def _events(programs: Programs, ranks: list[int], state: State, serial: bool) -> Iterator[State]:
    positions, done = state
    for i, rank in enumerate(ranks):
        if positions[i] < len(programs[rank]):
            action = programs[rank][positions[i]]
            if not action.waits or action.number in done[i]:
                yield (*positions[:i], positions[i] + 1, *positions[i + 1 :]), done
    heads: dict[str, dict[int, int]] = {}
    members: dict[str, tuple[int, ...]] = {}
    for i, rank in enumerate(ranks):
        running = [s for s in programs[rank][: positions[i]] if not s.waits and s.number not in done[i]]
        oldest: dict[str, Action] = {}
        for action in running[:1] if serial else running:
            oldest.setdefault(action.group, action)
        for group, action in oldest.items():
            heads.setdefault(group, {})[i] = action.number
            members[group] = action.ranks
    for group, numbers in heads.items():
        if len(numbers) == len(members[group]):
            yield positions, tuple(d | {numbers[i]} if i in numbers else d for i, d in enumerate(done))


GROUPS = {"A": (0, 1), "B": (1, 2), "C": (0, 2), "D": (0, 1, 2)}


@st.composite
def small_programs(draw: st.DrawFn) -> Programs:
    """Draw programs of three ranks. Ranks of a group issue equally many collectives on it, in any order, with any waits."""
    times = {group: draw(st.integers(0, 2)) for group in GROUPS}
    programs = {}
    for rank in range(3):
        own = [group for group, members in GROUPS.items() if rank in members for _ in range(times[group])]
        order = draw(st.permutations(own))
        actions: list[Action] = []
        waited = []
        for number, group in enumerate(order):
            actions.append(Action(f"op on {group}", group, GROUPS[group], False, number))
            for earlier in range(number + 1):
                if earlier not in waited and draw(st.booleans()):
                    actions.append(
                        Action(f"op on {order[earlier]}", order[earlier], GROUPS[order[earlier]], True, earlier)
                    )
                    waited.append(earlier)
        programs[rank] = actions
    return programs


@settings(deadline=None)
@given(small_programs())
@example({0: program("A:01", "C:02"), 1: program("B:12", "A:01"), 2: program("C:02", "B:12")})
def test_faults_are_found_exactly_where_the_search_finds_deadlocks(programs):
    stuck = bool(find_fault(programs))
    assert stuck == deadlocks(programs, serial=True)
    if not stuck:
        assert not deadlocks(programs, serial=False)
