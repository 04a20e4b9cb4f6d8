"""Deadlock detection: prove that the collectives of all ranks finish.

[Note: The deadlock proof]
Each rank runs a program: it issues collectives on process groups and waits for them. A collective runs when every
member of its group has reached it. The programs of all ranks together must satisfy two conditions:

1. The members of a group issue the same collectives on it in the same order.
2. All programs finish even if each rank runs its collectives one after the other in issue order, across all groups.
NCCL
   does not guarantee that kernels of two communicators fit on a GPU at the same time.

One simulated run decides the second condition. Each rank can only take its next step, and a step that is possible stays
possible until it is taken, so every order of steps ends in the same state. Running collectives of different groups
concurrently only makes more steps possible, so programs that finish serially always finish.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Action", "find_fault"]


class Action(NamedTuple):
    """One action of a program: issuing a collective, or waiting for one.

    Attributes:
        line: a readable description of the collective, the same on all ranks.
        group: name of its process group, the same on all members.
        ranks: the members, by global rank.
        waits: whether the action is the wait for a collective that was issued earlier.
        number: the number of the collective in this program.
    """

    line: str
    group: str
    ranks: tuple[int, ...]
    waits: bool
    number: int


def find_fault(programs: Mapping[int, Sequence[Action]]) -> str:
    """Return what prevents these programs, keyed by global rank, from finishing; empty if nothing does.

    The time is linear in the number of actions.
    """
    return _different_order(programs) or _find_stuck(programs)


def _different_order(programs: Mapping[int, Sequence[Action]]) -> str:
    issued: dict[str, dict[int, list[str]]] = {}
    members: dict[str, tuple[int, ...]] = {}
    for rank, program in programs.items():
        for action in program:
            if not action.waits:
                issued.setdefault(action.group, {}).setdefault(rank, []).append(action.line)
                known = members.setdefault(action.group, action.ranks)
                if known != action.ranks:
                    return f"process group {action.group!r} is {known} for one rank and {action.ranks} for rank {rank}"
                if rank not in action.ranks:
                    return (
                        f"rank {rank} issues {action.line} on process group {action.group!r} of {action.ranks}, not "
                        f"its own"
                    )
    for group, ranks in members.items():
        missing = [rank for rank in ranks if rank not in programs]
        if missing:
            return f"ranks {missing} of process group {group!r} take no part"
        first, *others = ranks
        lines = issued[group].get(first, [])
        for rank in others:
            theirs = issued[group].get(rank, [])
            for number in range(max(len(lines), len(theirs))):
                one, other = (lst[number] if number < len(lst) else "(nothing)" for lst in (lines, theirs))
                if one != other:
                    where = f"line {number + 1}" + (f" of process group {group!r}" if len(members) > 1 else "")
                    return f"{where}:\n    rank {first}: {one}\n    rank {rank}: {other}"
    return ""


def _find_stuck(programs: Mapping[int, Sequence[Action]]) -> str:
    position = dict.fromkeys(programs, 0)
    queue: dict[int, deque[int]] = {rank: deque() for rank in programs}  # collectives issued but not run, by number
    done: dict[int, set[int]] = {rank: set() for rank in programs}
    at_head: Counter[str] = Counter()  # number of members of each group whose next collective is that of the group
    issue_of = {rank: {s.number: s for s in program if not s.waits} for rank, program in programs.items()}
    runnable = deque(programs)
    while runnable:
        rank = runnable.popleft()
        program = programs[rank]
        while position[rank] < len(program):
            action = program[position[rank]]
            if action.waits:
                if action.number not in done[rank]:
                    break
            else:
                queue[rank].append(action.number)
                if len(queue[rank]) == 1:
                    at_head[action.group] += 1
            position[rank] += 1
            if not action.waits and at_head[action.group] == len(action.ranks):
                runnable.extend(_complete(action, queue, done, at_head, issue_of))
    stuck = [rank for rank in programs if position[rank] < len(programs[rank]) or queue[rank]]
    if not stuck:
        return ""
    lines = ["the collectives would never end:"]
    for rank in stuck:
        program = programs[rank]
        at = program[position[rank]].line if position[rank] < len(program) else "its end"
        head = issue_of[rank][queue[rank][0]] if queue[rank] else None
        held_by = f", in {head.line} with ranks {head.ranks}" if head is not None else ""
        lines.append(f"    rank {rank} is held up at {at}{held_by}")
    return "\n".join(lines)


def _complete(
    action: Action,
    queue: Mapping[int, deque[int]],
    done: Mapping[int, set[int]],
    at_head: Counter[str],
    issue_of: Mapping[int, Mapping[int, Action]],
) -> list[int]:
    """Run the collective at the head of all members' queues, and all that follow; return the ranks to continue."""
    possible, moved = [action], []
    while possible:
        current = possible.pop()
        at_head[current.group] -= len(current.ranks)
        for member in current.ranks:
            done[member].add(queue[member].popleft())
            moved.append(member)
            if queue[member]:
                following = issue_of[member][queue[member][0]]
                at_head[following.group] += 1
                if at_head[following.group] == len(following.ranks):
                    possible.append(following)
    return moved
