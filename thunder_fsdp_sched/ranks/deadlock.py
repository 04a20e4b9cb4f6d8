"""Deadlock detection: prove that the collectives of all ranks finish.

[Note: The deadlock proof]
Each rank runs a program: it issues collectives on process groups and waits for them. A collective runs when every
member of its group has reached it. The programs of all ranks together must satisfy two conditions:

1. The members of a group issue the same collectives on it in the same order.
2. All programs finish even if each rank runs its collectives one after the other in issue order, across all groups.
   NCCL does not guarantee that kernels of two communicators fit on a GPU at the same time.

One simulated run decides the second condition. Each rank can only take its next step, and a step that is possible stays
possible until it is taken, so every order of steps ends in the same state. Running collectives of different groups
concurrently only makes more steps possible, so programs that finish serially always finish.

Programs that are equal up to the names of groups need no simulation if their n-th groups match: all ranks reach the
n-th collective, one after the other, and ``verify`` has proved that every wait follows its issue.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from .messages import Action, first_difference


def find_fault(programs: Mapping[int, Sequence[Action]]) -> str:
    """Return why these programs, keyed by global rank, cannot all finish; empty if they can.

    The time is linear in the number of actions.
    """
    return _different_order(programs) or _find_stuck(programs)


def _different_order(programs: Mapping[int, Sequence[Action]]) -> str:
    issued: dict[str, dict[int, list[str]]] = {}  # keyed by group and rank
    for rank, program in programs.items():
        for action in program:
            if not action.waits:
                of_group = issued.setdefault(action.group, {member: [] for member in action.ranks})
                of_group.setdefault(rank, []).append(action.line)
    for group, lines in issued.items():
        where = f" of process group {group!r}" if len(issued) > 1 else ""
        first, *others = lines
        for rank in others:
            if difference := first_difference(first, lines[first], rank, lines[rank], where):
                return difference
    return ""


def _find_stuck(programs: Mapping[int, Sequence[Action]]) -> str:
    position = dict.fromkeys(programs, 0)
    queue: dict[int, deque[Action]] = {rank: deque() for rank in programs}  # collectives issued but not run
    done: dict[int, set[int]] = {rank: set() for rank in programs}
    at_head: Counter[str] = Counter()  # number of members of each group whose next collective is that of the group
    runnable = deque(programs)
    while runnable:
        rank = runnable.popleft()
        program = programs[rank]
        while position[rank] < len(program):
            action = program[position[rank]]
            if action.waits and action.number not in done[rank]:
                break
            if not action.waits:
                queue[rank].append(action)
                at_head[action.group] += len(queue[rank]) == 1
            position[rank] += 1
        if queue[rank] and at_head[(head := queue[rank][0]).group] == len(head.ranks):
            for member in head.ranks:
                done[member].add(queue[member].popleft().number)
                if queue[member]:
                    at_head[queue[member][0].group] += 1
            at_head[head.group] -= len(head.ranks)
            runnable.extend(head.ranks)
    stuck = [rank for rank in programs if position[rank] < len(programs[rank]) or queue[rank]]
    if not stuck:
        return ""
    lines = ["this order of collectives deadlocks:"]
    for rank in stuck:
        program = programs[rank]
        at = program[position[rank]].line if position[rank] < len(program) else "its end"
        held_by = f", in {queue[rank][0].line} with ranks {queue[rank][0].ranks}" if queue[rank] else ""
        lines.append(f"    rank {rank} is held up at {at}{held_by}")
    return "\n".join(lines)
