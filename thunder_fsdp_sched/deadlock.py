"""Whether the collectives of all ranks together come to an end.

[Note: What is proved]
Each rank runs a program: it issues collectives on process groups and waits for them. A collective takes place when every
member of its group has come to it. Two things are demanded of all programs together. The members of a group issue the same
collectives on it in the same order. And they come to an end even if each rank runs all of its collectives one after the
other in the order of issue, whatever their groups: NCCL does not promise that kernels of two communicators find room on a
GPU at once. A system in which a rank only ever does what comes next, and what can happen stays possible until it happens,
ends in the same state in whatever order the steps are taken, so one run through it decides. Running collectives of
different groups side by side makes more steps possible and none impossible: what ends serially ends in any case.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Step", "find_fault"]


class Step(NamedTuple):
    """What a rank does next: issues a collective, or waits for one.

    Attributes:
        line: the collective, as a reader knows it; alike on all ranks.
        group: name of its process group, the same on all members.
        ranks: the members, by global rank.
        waits: whether it waits for a collective that was issued before.
        number: which collective of this program it is.
    """

    line: str
    group: str
    ranks: tuple[int, ...]
    waits: bool
    number: int


def find_fault(programs: Mapping[int, Sequence[Step]]) -> str:
    """What keeps these programs, by global rank, from ending; empty if nothing does.

    The time is linear in the number of steps.
    """
    return _different_order(programs) or _stuck(programs)


def _different_order(programs: Mapping[int, Sequence[Step]]) -> str:
    issued: dict[str, dict[int, list[str]]] = {}
    members: dict[str, tuple[int, ...]] = {}
    for rank, program in programs.items():
        for step in program:
            if not step.waits:
                issued.setdefault(step.group, {}).setdefault(rank, []).append(step.line)
                known = members.setdefault(step.group, step.ranks)
                if known != step.ranks:
                    return f"process group {step.group!r} is {known} for one rank and {step.ranks} for rank {rank}"
                if rank not in step.ranks:
                    return (
                        f"rank {rank} issues {step.line} on process group {step.group!r} of {step.ranks}, not its own"
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


def _stuck(programs: Mapping[int, Sequence[Step]]) -> str:
    position = dict.fromkeys(programs, 0)
    queue: dict[int, deque[int]] = {rank: deque() for rank in programs}  # issued and not done, by number
    done: dict[int, set[int]] = {rank: set() for rank in programs}
    at_head: Counter[str] = Counter()  # members of each group whose next collective is the group's next
    step_of = {rank: {s.number: s for s in program if not s.waits} for rank, program in programs.items()}
    runnable = deque(programs)
    while runnable:
        rank = runnable.popleft()
        program = programs[rank]
        while position[rank] < len(program):
            step = program[position[rank]]
            if step.waits:
                if step.number not in done[rank]:
                    break
            else:
                queue[rank].append(step.number)
                if len(queue[rank]) == 1:
                    at_head[step.group] += 1
            position[rank] += 1
            if not step.waits and at_head[step.group] == len(step.ranks):
                runnable.extend(_take_place(step, queue, done, at_head, step_of))
    stuck = [rank for rank in programs if position[rank] < len(programs[rank]) or queue[rank]]
    if not stuck:
        return ""
    lines = ["the collectives would never end:"]
    for rank in stuck:
        program = programs[rank]
        at = program[position[rank]].line if position[rank] < len(program) else "its end"
        head = step_of[rank][queue[rank][0]] if queue[rank] else None
        behind = f", in {head.line} with ranks {head.ranks}" if head is not None else ""
        lines.append(f"    rank {rank} is held up at {at}{behind}")
    return "\n".join(lines)


def _take_place(
    step: Step,
    queue: Mapping[int, deque[int]],
    done: Mapping[int, set[int]],
    at_head: Counter[str],
    step_of: Mapping[int, Mapping[int, Step]],
) -> list[int]:
    """Ends the collective at the head of all members' queues, and those that this makes possible; ranks that may go on."""
    possible, moved = [step], []
    while possible:
        current = possible.pop()
        at_head[current.group] -= len(current.ranks)
        for member in current.ranks:
            done[member].add(queue[member].popleft())
            moved.append(member)
            if queue[member]:
                following = step_of[member][queue[member][0]]
                at_head[following.group] += 1
                if at_head[following.group] == len(following.ranks):
                    possible.append(following)
    return moved
