"""Compare the programs that the ranks have compiled; loaded if there are several ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .control import hash64
from .joint_control import AgreedProgram, JointControl
from .messages import MAY_DIFFER, Action, first_different


@dataclass
class Computation:
    """The computation of one trace; see [Note: Equal computations] in ``ir.computation``."""

    inputs: Sequence[str] = ()  # descriptions of the inputs' shapes, dtypes and values
    lines: Sequence[str] = ()  # one for each bound symbol of compute, with all numbers
    comparable: Sequence[str] = ()  # the same lines without numbers that may stem from a size
    trace_lines: Sequence[str] = ()  # one for each bound symbol, for messages: collectives by their buckets

    @cached_property
    def hashes(self) -> tuple[int, int, int]:
        """Hashes of :attr:`comparable`, of :attr:`inputs` and of :attr:`lines`."""
        return hash64(*self.comparable), hash64(*self.inputs), hash64(*self.lines)


def check_program(
    control: JointControl, what: str, program: Sequence[Action], computation: Computation, *, guards: bool = False
) -> AgreedProgram:
    """Prove that the programs of all ranks together finish; see [Note: The deadlock proof] in ``deadlock``.

    Programs that the ranks have already agreed on are not compared again. So a rank whose batch has another shape
    can compile alone, with traces that match those in the caches of the others. A comparison is one round if all ranks
    have the same program in the same process groups; otherwise they also exchange descriptions of some 100 bytes.

    Args:
        control: the control of the model, which several ranks share.
        what: the name of the trace.
        program: the collectives that this rank issues and waits for.
        computation: the computation of the trace.
        guards: whether the trace may gather kept buckets again.

    Raises:
        ScheduleDisagreement: on every rank. It names the first line that differs and the ranks, or where they would
            block each other, or the ranks that do something else or did not arrive.
    """
    key = hash64(what, guards, *program)
    if key not in control.agreed:
        control.agreed[key] = _compare_programs(control, what, program, computation, guards)
    return control.agreed[key]


def _compare_programs(
    control: JointControl, what: str, program: Sequence[Action], computation: Computation, guards: bool
) -> AgreedProgram:
    groups = {action.group: action.ranks for action in program}
    numbers = {group: number for number, group in enumerate(groups)}
    lines = hash64(*((action.line, numbers[action.group], action.waits, action.number) for action in program))
    described = [(group, hash64(members), len(members)) for group, members in groups.items()]
    own = lines, described, computation.hashes, guards
    what_they_do = f"compiling the {what}"
    if control.all_have(what_they_do, hash64(own), MAY_DIFFER):
        everyones = dict.fromkeys(control.group.global_ranks, own)
    else:
        everyones = control.gather_settled(what_they_do, own)
    alike = all(theirs[0] == lines for theirs in everyones.values())
    groups_match = do_groups_match({rank: groups for rank, (_, groups, _, _) in everyones.items()})
    if not (alike and groups_match):
        programs = control.gather_settled(f"the collectives of {what}", list(program))
        from .deadlock import find_fault  # here, because ranks that run the same need no proof

        if fault := find_fault(programs):
            raise control.disagreement(f"{what}, {fault}\n{MAY_DIFFER}")
    hashes = {rank: (theirs, *computed) for rank, (theirs, _, computed, _) in everyones.items()}
    without_sizes = {rank: (theirs, comparable) for rank, (theirs, comparable, _, _) in hashes.items()}
    exact = {rank: ((theirs, inputs), all_) for rank, (theirs, _, inputs, all_) in hashes.items()}
    for parts, own_lines in ((without_sizes, computation.comparable), (exact, computation.lines)):
        if (different := first_different(parts)) is not None:
            raise control.disagreement(
                f"{what}: the collectives agree but the computations differ, "
                f"{control.difference(*different, own_lines)}\n{MAY_DIFFER}"
            )
    communicates = any(groups or may_gather for _, groups, _, may_gather in everyones.values())
    number = hash64(what, *(theirs[0] for theirs in everyones.values()))
    return AgreedProgram(number, communicates, alike, alike and groups_match)


def do_groups_match(groups_of: Mapping[int, Sequence[tuple[str, int, int]]]) -> bool:
    """Return whether the members of each rank's n-th process group have the same n-th group.

    Args:
        groups_of: the name of each group of a rank, a hash of its members, and their number.
    """
    holders = Counter(group for groups in groups_of.values() for group in enumerate(groups))
    return all(ranks == size for (_, (_, _, size)), ranks in holders.items())
