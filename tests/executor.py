"""Execute the programs of all ranks without processes: in one order of events, in all orders, and on a virtual clock.

A program is a list of the package's own actions (issues and waits of collectives) and of compute, which is a number of
seconds. The programs come from the package: ``read_program`` of a trace, merged traces, or what ``simulated_ranks`` records
while the real code of several ranks runs. An event is the next statement of one rank, or the end of a collective, which runs
when it is the oldest one on all members of its group. This is deliberately not the algorithm of ``ranks.deadlock``, which
proves that one order of events is enough: it is the oracle of that proof.

Two backends differ in what a wait blocks:

* ``GLOO``: a wait blocks the host. Collectives of different groups run concurrently.
* ``NCCL``: the host goes on, and the wait blocks its compute stream and everything that is issued later. A rank runs
  one collective at a time, across all groups: NCCL does not guarantee more, hence using communicators in different
  orders is a deadlock.

Rounds of agreement are collectives between hosts with both backends, on the group ``ROUNDS``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.ranks.messages import Action

ROUNDS = "rounds of agreement"

Program = Sequence[Action | float]
Programs = Mapping[int, Program]
"""By global rank."""


class Backend(NamedTuple):
    """The way in which a backend runs collectives.

    Attributes:
        blocks_host: whether a wait blocks the host, otherwise its compute stream.
        is_serial: whether a rank runs its collectives one after the other across groups.
    """

    blocks_host: bool
    is_serial: bool


GLOO, NCCL = Backend(blocks_host=True, is_serial=False), Backend(blocks_host=False, is_serial=True)


def execute(programs: Programs, backend: Backend = GLOO, *, seed: int = 0) -> str:
    """Return the fault that ends an execution in a random order of events, empty if all programs finish."""
    return _finished(programs, backend, random.Random(seed)).fault()


def explore(programs: Programs, backend: Backend = GLOO) -> str:
    """Return the first fault in any order of events, empty if all programs finish in every order."""
    start = _Execution(programs, backend)
    seen, stack = {start.key()}, [start]
    while stack:
        state = stack.pop()
        following = list(state.following())
        if not following and (fault := state.fault()):
            return fault
        for new in following:
            if (key := new.key()) not in seen:
                seen.add(key)
                stack.append(new)
    return ""


def seconds_of(
    programs: Programs, of_collective: Callable[[Action], float] = lambda action: 0.0, backend: Backend = GLOO
) -> dict[int, float]:
    """Return the time at which each rank has finished its compute and waits. A host takes no time to issue.

    Args:
        of_collective: the seconds of a collective once it runs, with the link to itself.
    """
    done = _finished(programs, backend, random.Random(0), of_collective)
    assert not (fault := done.fault()), fault
    return {rank: max(state.host_time, state.time) for rank, state in done.ranks.items()}


def issued(program: Program) -> list[Action]:
    """Return the collectives that a program issues on devices, in order."""
    return [s for s in program if isinstance(s, Action) and not s.waits and s.group != ROUNDS]


class _Rank:
    """The progress of a rank.

    Attributes:
        host: the position of the host in the program; ``device``: that of the compute stream, which follows it.
        unfinished: the collectives that it has issued, in order.
        time: when the compute stream has done the statements before ``device``; ``host_time``: the same of the host.
        ends: when collectives have ended, by number.
    """

    def __init__(self) -> None:
        self.host = self.device = 0
        self.unfinished: tuple[Action, ...] = ()
        self.time = self.host_time = 0.0
        self.reached: dict[int, float] = {}  # when the host has reached the statements that the device has not
        self.issued_at: dict[int, float] = {}
        self.ends: dict[int, float] = {}

    def copy(self) -> _Rank:
        """Return a copy that shares what only the clock needs."""
        new = _Rank.__new__(_Rank)
        new.__dict__.update(self.__dict__)
        return new

    def holds(self, action: Action) -> bool:
        """Return whether a wait for this collective blocks."""
        return any(other.number == action.number for other in self.unfinished)

    def head(self, group: str, *, is_serial: bool) -> Action | None:
        """Return the collective of a group that this rank runs next, ``None`` if there is none or it is not its turn."""
        for action in self.unfinished:
            if action.group == group:
                return action
            if is_serial and ROUNDS not in (group, action.group):
                return None
        return None


class _Execution:
    """A state of an execution: changed in place by an event, or copied by :meth:`following`."""

    def __init__(
        self, programs: Programs, backend: Backend, of_collective: Callable[[Action], float] = lambda action: 0.0
    ) -> None:
        self.programs, self.backend, self.of_collective = programs, backend, of_collective
        self.ranks = {rank: _Rank() for rank in programs}
        self.free_at: dict[object, float] = {}
        actions = [s for program in programs.values() for s in program if isinstance(s, Action)]
        self.actors: list[tuple[Callable[[_Execution, int | str], bool], int | str]] = []
        self.actors += [(_Execution.advance_host, rank) for rank in programs]
        self.actors += [] if backend.blocks_host else [(_Execution.advance_device, rank) for rank in programs]
        self.actors += [(_Execution.run_collective, group) for group in dict.fromkeys(a.group for a in actions)]
        for rank in programs:
            self._run_ahead(rank)

    def key(self) -> object:
        """Return the part of this state on which later events depend."""
        return tuple((r.host, r.device, tuple([a.number for a in r.unfinished])) for r in self.ranks.values())

    def following(self) -> Iterator[_Execution]:
        """Yield the states after each event that is possible now."""
        for act, which in self.actors:
            new = _Execution.__new__(_Execution)
            new.__dict__.update(self.__dict__)
            new.ranks = {rank: state.copy() for rank, state in self.ranks.items()}
            if act(new, which):
                yield new

    def advance_host(self, rank: int) -> bool:
        state, program = self.ranks[rank], self.programs[rank]
        if state.host == len(program) or not self._do(state, program[state.host], is_host=True):
            return False
        self._run_ahead(rank)
        return True

    def _run_ahead(self, rank: int) -> None:
        """Let an unblocked host issue everything up to the next round, which no other rank notices."""
        state, program = self.ranks[rank], self.programs[rank]
        while not self.backend.blocks_host and state.host < len(program) and not _is_round(program[state.host]):
            state.reached[state.host] = state.host_time
            state.host += 1

    def advance_device(self, rank: int) -> bool:
        state = self.ranks[rank]
        if state.device == state.host:
            return False
        s = self.programs[rank][state.device]
        if _is_round(s):  # the host's
            state.device += 1
            return True
        state.time = max(state.time, state.reached[state.device])
        return self._do(state, s, is_host=False)

    def _do(self, state: _Rank, s: Action | float, *, is_host: bool) -> bool:
        now = state.host_time if is_host else state.time
        if not isinstance(s, Action):
            now += s
        elif not s.waits:
            state.unfinished += (s,)
            state.issued_at[s.number] = now
        elif state.holds(s):
            return False
        else:
            now = max(now, state.ends.get(s.number, 0.0))
        if is_host:
            state.host += 1
            state.host_time = now
            if self.backend.blocks_host:
                state.device, state.time = state.host, now
        else:
            state.device += 1
            state.time = now
        return True

    def run_collective(self, group: str) -> bool:
        heads = self._heads(group)
        some = next(iter(heads.values()), None)
        if some is None or any(rank not in heads for rank in some.ranks) or _differ(heads):
            return False
        streams: list[object] = [group, *(some.ranks if self.backend.is_serial and group != ROUNDS else ())]
        issued_at = [self.ranks[rank].issued_at[heads[rank].number] for rank in some.ranks]
        end = max(*issued_at, *(self.free_at.get(stream, 0.0) for stream in streams)) + self.of_collective(some)
        self.free_at.update(dict.fromkeys(streams, end))
        for rank in some.ranks:
            state = self.ranks[rank]
            state.unfinished = tuple(a for a in state.unfinished if a is not heads[rank])
            state.ends[heads[rank].number] = end
        return True

    def _heads(self, group: str) -> dict[int, Action]:
        heads = {rank: state.head(group, is_serial=self.backend.is_serial) for rank, state in self.ranks.items()}
        return {rank: head for rank, head in heads.items() if head is not None}

    #
    # Faults
    #

    def fault(self) -> str:
        """Return the reason why no further event is possible; empty if all programs have finished."""
        found = []
        for rank, state in self.ranks.items():
            program = self.programs[rank]
            at = program[state.device] if state.device < len(program) else None
            if at is not None or state.unfinished:
                where = f"its wait for {at.line}" if isinstance(at, Action) else "its end"
                runs = ", ".join(f"{action.line} with ranks {action.ranks}" for action in state.unfinished)
                found.append(f"\n    rank {rank} is at {where}, and has issued {runs}")
        return "stuck:" + "".join(found) if found else ""


def _finished(
    programs: Programs,
    backend: Backend,
    rng: random.Random,
    of_collective: Callable[[Action], float] = lambda action: 0.0,
) -> _Execution:
    """Return the state in which a random order of events ends."""
    state = _Execution(programs, backend, of_collective)
    possible = True
    while possible:
        possible = False
        for act, which in rng.sample(state.actors, len(state.actors)):
            while act(state, which):
                possible = True
                if rng.random() < 0.3:
                    break
    return state


def _is_round(statement: Action | float) -> bool:
    return isinstance(statement, Action) and statement.group == ROUNDS


def _differ(heads: Mapping[int, Action]) -> bool:
    return len({(action.line, action.ranks) for action in heads.values()}) > 1
