"""The happens-before order of accesses on all ranks: which are not ordered, and which waits are needed.

Each access has a bit, and the clock of a stream or a host is the set of all accesses that are known to have finished. Work
on a stream happens after everything that its host did before. For every single wait it can be decided whether it is needed:
whether without it, two accesses to the same bytes, or a use of memory and its next allocation, are not ordered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .log import HOST, Access, Entry, Log, Stream, covers, line_up, overlap, owner_of

Thread = tuple[int, Stream]
"""A stream of a rank, or its host."""

Bits = int
"""A set of accesses."""


@dataclass(frozen=True)
class Fault:
    """An error that could occur on a GPU.

    Attributes:
        kind: ``race``, ``reuse`` (memory is allocated again while a stream still uses it), ``host race`` (one of the
            accesses to pinned memory is the host's), ``mismatch`` or ``deadlock`` of collectives.
    """

    kind: str
    rank: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind} on rank {self.rank}: {self.text}"


class Mutation(NamedTuple):
    """A wait, barrier, event or ``record_stream`` that is removed.

    Attributes:
        kind: ``wait``, ``barrier``, ``event`` (its record), ``host wait`` or ``record_stream``.
        entries: rank and position in its log of each removed entry.
        entry: one of the entries.
    """

    kind: str
    entries: tuple[tuple[int, int], ...]
    entry: Entry


class Verdict(NamedTuple):
    """A mutation, and whether it is *flagged*: without it, some accesses to the same bytes are not ordered."""

    mutation: Mutation
    flagged: bool


class _Unordered(NamedTuple):
    """Accesses that ``entry`` should follow but does not. ``freed`` is the storage whose memory it may reuse, or 0."""

    rank: int
    entry: Entry
    freed: int
    past: Bits


@dataclass
class _Step:
    """An entry, or matching entries of several ranks, with the bits of their accesses."""

    parts: tuple[tuple[int, int, Entry, Bits], ...]
    conflicts: dict[int, Bits] = field(default_factory=dict)  # by rank: earlier accesses that must have finished
    used: Bits = 0  # for a free: the accesses to the memory
    lender: Stream | None = None  # for a free: the stream of the allocation


@dataclass
class _State:
    clocks: defaultdict[Thread, Bits] = field(default_factory=lambda: defaultdict(int))
    events: dict[tuple[int, int], Bits] = field(default_factory=dict)
    signals: defaultdict[tuple[object, ...], list[Bits]] = field(default_factory=lambda: defaultdict(list))
    recorded: defaultdict[tuple[int, int], set[Stream]] = field(default_factory=lambda: defaultdict(set))
    freed: defaultdict[Thread, list[tuple[int, Bits]]] = field(default_factory=lambda: defaultdict(list))

    def copy(self) -> _State:
        return _State(
            self.clocks.copy(),
            self.events.copy(),
            defaultdict(list, {key: list(sent) for key, sent in self.signals.items()}),
            defaultdict(set, {key: set(streams) for key, streams in self.recorded.items()}),
            defaultdict(list, {key: list(freed) for key, freed in self.freed.items()}),
        )


class Order:
    """The order of all accesses in the logs of some ranks.

    Attributes:
        faults: the faults in the logs, once for each pair of code locations.
    """

    def __init__(self, logs: Sequence[Log]) -> None:
        self._logs = {log.rank: log for log in logs}
        self._entries: list[tuple[int, Entry]] = []  # rank and entry of each bit
        steps, stuck = line_up(logs)
        self._steps = [_Step(tuple((rank, i, entry, self._bit_of(rank, entry)) for rank, i, entry in s)) for s in steps]
        self._find_conflicts()
        self._faults: dict[object, Fault] = {}
        state = _State()
        for step in self._steps:
            self._compare_signatures(step)
            for unordered in self._do(state, step):
                self._report_accesses(unordered)
        for rank, entry in stuck.items():
            others = (
                f"rank {r} {f'is at {stuck[r]}' if r in stuck else 'has finished'}" for r in self._logs if r != rank
            )
            self._report("deadlock", rank, f"{entry} waits forever: {'; '.join(others)}", rank)
        self.faults = list(self._faults.values())

    def verdicts(self, matters: Callable[[Entry], bool]) -> Iterator[Verdict]:
        """Yield the verdict on each wait, barrier, event and ``record_stream`` that ``matters`` accepts."""
        assert not self.faults, "logs must have no faults"
        state = _State()
        for position, step in enumerate(self._steps):
            entry = step.parts[0][2]
            kind = _kind_of(entry)
            if kind is not None and matters(entry):
                mutation = Mutation(kind, tuple((r, i) for r, i, _, _ in step.parts), entry)
                yield Verdict(mutation, self._is_needed(state.copy(), position, step))
            self._do(state, step)

    def _is_needed(self, state: _State, position: int, step: _Step) -> bool:
        """Return whether accesses to the same bytes, or of memory and of its next allocation, are unordered without it."""
        if step.parts[0][2].blocks and step.parts[0][2].kind == "copy":  # the copy itself stays
            self._do(state, step, blocks=False)
        following = range(position + 1, len(self._steps))
        return any(self._do(state, self._steps[number]) for number in following)

    def _bit_of(self, rank: int, entry: Entry) -> Bits:
        if not self._accesses(rank, entry):
            return 0
        self._entries.append((rank, entry))
        return 1 << (len(self._entries) - 1)

    def _accesses(self, rank: int, entry: Entry) -> list[tuple[tuple[int, int], Access]]:
        """Return the accesses of an entry with the rank and number of their storages."""
        if entry.kind != "alloc":
            return [(owner_of(self._logs, rank, access.storage), access) for access in entry.accesses]
        # The stream of the allocation may still use the memory for an earlier tensor.
        everywhere = Access(entry.storage, ((0, 1 << 62),), write=True)
        return [((rank, entry.storage), everywhere)] if entry.stream != HOST else []

    def _find_conflicts(self) -> None:
        past: defaultdict[tuple[int, int], list[tuple[Bits, Thread, Access]]] = defaultdict(list)
        lenders: dict[tuple[int, int], Stream] = {}
        for step in self._steps:
            for rank, _, entry, bits in step.parts:
                if entry.kind == "alloc":
                    lenders[rank, entry.storage] = entry.stream
                    past[rank, entry.storage].clear()  # another rank's log may come first
                elif entry.kind == "free":
                    step.lender = lenders.get((rank, entry.storage))
                    for accessed, *_ in past.pop((rank, entry.storage), ()):
                        step.used |= accessed
                conflicts = 0
                accesses = self._accesses(rank, entry)
                for owner, access in accesses:
                    for accessed, _, earlier in past[owner]:
                        if not accessed & conflicts and _conflict(earlier, access):
                            conflicts |= accessed
                thread = rank, entry.stream
                for owner, access in accesses:
                    kept = [p for p in past[owner] if p[1] != thread or not _supersedes(access, p[2])]
                    past[owner] = [*kept, (bits, thread, access)]
                step.conflicts[rank] = conflicts

    def _do(self, state: _State, step: _Step, *, blocks: bool = True) -> list[_Unordered]:
        """Execute a step. Return the accesses that its accesses fail to follow."""
        clocks = state.clocks
        if len(step.parts) > 1:
            together = 0
            for rank, _, entry, _ in step.parts:
                together |= clocks[rank, entry.stream] | clocks[rank, HOST]
            for rank, _, entry, _ in step.parts:
                clocks[rank, entry.stream] |= together
        unordered = []
        for rank, _, entry, bits in step.parts:
            thread, host, kind = (rank, entry.stream), (rank, HOST), entry.kind
            if thread != host:
                clocks[thread] |= clocks[host]
            if kind == "record":
                state.events[rank, entry.event] = clocks[thread]
            elif kind == "wait_event":
                clocks[thread] |= state.events.get((rank, entry.event), 0)
            elif kind == "sync_event":
                clocks[host] |= state.events.get((rank, entry.event), 0)
            elif kind == "sync_device":
                for (r, stream), clock in list(clocks.items()):
                    if r == rank and stream.device == entry.stream.device:
                        clocks[host] |= clock
            elif kind == "free":
                if step.lender is not None and step.lender != HOST:
                    left = step.used & ~clocks[rank, step.lender] & ~clocks[host]
                    for stream in state.recorded.pop((rank, entry.storage), ()):
                        left &= ~clocks[rank, stream]
                    if left:
                        state.freed[rank, step.lender].append((entry.storage, left))
            elif kind == "record_stream":
                state.recorded[rank, entry.storage].add(entry.stream)
            else:
                if kind == "alloc":
                    for freed, used in state.freed.pop(thread, ()):
                        if late := used & ~clocks[thread]:
                            unordered.append(_Unordered(rank, entry, freed, late))
                elif kind == "take":
                    clocks[thread] |= state.signals[entry.group, entry.peer, rank, entry.signature].pop(0)
                if bits:
                    if late := step.conflicts[rank] & ~clocks[thread]:
                        unordered.append(_Unordered(rank, entry, 0, late))
                    clocks[thread] |= bits
                if kind == "put":
                    state.signals[entry.group, rank, entry.peer, entry.signature].append(clocks[thread])
            if entry.blocks and blocks:
                clocks[host] |= clocks[thread]
        return unordered

    def _compare_signatures(self, step: _Step) -> None:
        first, _, expected, _ = step.parts[0]
        for rank, _, entry, _ in step.parts:
            if entry.signature != expected.signature:
                text = f"{entry} {entry.signature}, but rank {first}: {expected} {expected.signature}"
                self._report("mismatch", rank, text, str(expected), str(entry))

    def _report_accesses(self, unordered: _Unordered) -> None:
        rank, entry, freed, bits = unordered
        for past_rank, past in (of for number, of in enumerate(self._entries) if bits >> number & 1):
            if freed:
                kind, storage, text = "reuse", freed, "was freed and may be allocated again"
                writes = any(a.write for a in past.accesses if a.storage == freed)
            else:
                kind = "host race" if HOST in (past.stream, entry.stream) else "race"
                pairs = (
                    (earlier, access)
                    for owner, access in self._accesses(rank, entry)
                    for past_owner, earlier in self._accesses(past_rank, past)
                    if owner == past_owner and _conflict(earlier, access)
                )
                earlier, access = next(pairs)
                storage, writes, text = access.storage, earlier.write, f"is {'written' if access.write else 'read'}"
            verb = "writes" if writes else "reads"
            if past.kind == "alloc":
                verb = "may still use, as the memory of an earlier tensor,"
            name = self._logs[rank].names.get(storage, "memory")
            other = f"rank {past_rank}'s {past}" if past_rank != rank else str(past)
            text = f"{name} {text} by {entry}, unordered with {other}, which {verb} it"
            self._report(kind, rank, text, past.where, past.name, entry.where, entry.name)

    def _report(self, kind: str, rank: int, text: str, *key: object) -> None:
        self._faults.setdefault((kind, *key), Fault(kind, rank, text))


def _conflict(one: Access, other: Access) -> bool:
    """Return whether two accesses to the same storage have to be ordered."""
    return (one.write or other.write) and overlap(one.region, other.region)


def _supersedes(later: Access, earlier: Access) -> bool:
    """Return whether what follows ``later``, on the same stream, need not be compared with ``earlier``."""
    return (later.write or not earlier.write) and covers(later.region, earlier.region)


def _kind_of(entry: Entry) -> str | None:
    """Return the kind of mutation that removes ``entry``; ``None`` if it cannot be removed by itself."""
    if entry.kind in ("wait_event", "barrier"):
        return entry.kind.removesuffix("_event")
    if entry.kind == "record":
        return "event"
    if entry.kind in ("sync_event", "sync", "sync_device") or (entry.kind == "copy" and entry.blocks):
        return "host wait"
    return "record_stream" if entry.kind == "record_stream" else None


def faults_without(logs: Sequence[Log], mutation: Mutation) -> list[Fault]:
    """Return the faults in the logs after ``mutation`` has been applied."""
    missing = dict(mutation.entries)
    return Order([_without(log, mutation, missing[log.rank]) if log.rank in missing else log for log in logs]).faults


def site_of(entry: Entry) -> str:
    """Return the package's functions that led to an entry, innermost first: ``staged.py:issue < base.py:issue_then``."""
    frames = [f"{file.rpartition('/')[2]}:{function}" for file, _, function in entry.where if not _is_outside(file)]
    return " < ".join(frames[:2])


def is_ours(entry: Entry) -> bool:
    """Return whether the package's code in a step led to an entry."""
    return bool(entry.phase and site_of(entry))


def _is_outside(file: str) -> bool:
    return file.startswith("thunder.") or "/tests/" in file


def _without(log: Log, mutation: Mutation, number: int) -> Log:
    entries = list(log.entries)
    if entries[number].kind == "copy":  # the copy stays, and the host continues
        entries[number] = replace(entries[number], blocks=False)
    else:
        del entries[number]
    return replace(log, entries=entries)
