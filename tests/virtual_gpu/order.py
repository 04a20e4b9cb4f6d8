"""The happens-before order as sets of accesses, with and without each single wait, barrier or event.

This is a second, independent check besides ``clocks``. Each access has a bit, and the clock of a stream or a host is the set
of all accesses that are known to have finished. It can therefore decide for every single wait whether it is needed: whether
without it, two accesses to the same bytes, or a use of memory and its next allocation, are not ordered.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .log import HOST, Entry, Log, Region, Stream, line_up, overlap, owner_of

Thread = tuple[int, Stream]
Bits = int
"""A set of accesses."""

_EVERYWHERE: Region = ((0, 1 << 62),)


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
    freed: defaultdict[Thread, Bits] = field(default_factory=lambda: defaultdict(int))

    def copy(self) -> _State:
        return _State(
            self.clocks.copy(),
            self.events.copy(),
            defaultdict(list, {key: list(sent) for key, sent in self.signals.items()}),
            defaultdict(set, {key: set(streams) for key, streams in self.recorded.items()}),
            self.freed.copy(),
        )


class Order:
    """The order of all accesses in the logs of some ranks, which must not deadlock."""

    def __init__(self, logs: Sequence[Log]) -> None:
        self._logs = {log.rank: log for log in logs}
        steps, stuck = line_up(logs)
        assert not stuck, "a deadlock"
        numbers = itertools.count()
        self._steps = [
            _Step(
                tuple(
                    (rank, index, entry, 1 << next(numbers) if entry.accesses or entry.kind == "alloc" else 0)
                    for rank, index, entry in step
                )
            )
            for step in steps
        ]
        self._find_conflicts()
        state = _State()
        self._unordered = [self._do(state, step) for step in self._steps]

    @property
    def is_clean(self) -> bool:
        """True if all accesses to the same bytes are ordered."""
        return not any(self._unordered)

    def verdicts(self, matters: Callable[[Entry], bool]) -> Iterator[Verdict]:
        """Yield the verdict on each wait, barrier, event and ``record_stream`` that ``matters`` accepts."""
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
        return any(self._do(state, self._steps[number]) & ~self._unordered[number] for number in following)

    def _find_conflicts(self) -> None:
        past: defaultdict[tuple[int, int], list[tuple[Bits, Region, bool]]] = defaultdict(list)
        lenders: dict[tuple[int, int], Stream] = {}
        for step in self._steps:
            for rank, _, entry, bits in step.parts:
                if entry.kind == "alloc":
                    lenders[rank, entry.storage] = entry.stream
                    if entry.stream != HOST:  # the stream may still use it as the memory of an earlier tensor
                        past[rank, entry.storage].append((bits, _EVERYWHERE, True))
                elif entry.kind == "free":
                    step.lender = lenders.get((rank, entry.storage))
                    for accessed, _, _ in past.pop((rank, entry.storage), ()):
                        step.used |= accessed
                conflicts = 0
                for access in entry.accesses:
                    before = past[owner_of(self._logs, rank, access.storage)]
                    for accessed, region, write in before:
                        if (write or access.write) and accessed != bits and overlap(region, access.region):
                            conflicts |= accessed
                for access in entry.accesses:
                    past[owner_of(self._logs, rank, access.storage)].append((bits, access.region, access.write))
                step.conflicts[rank] = conflicts

    def _do(self, state: _State, step: _Step, *, blocks: bool = True) -> Bits:
        """Execute a step. Return the accesses that its accesses fail to follow."""
        clocks = state.clocks
        if len(step.parts) > 1:
            together = 0
            for rank, _, entry, _ in step.parts:
                together |= clocks[rank, entry.stream] | clocks[rank, HOST]
            for rank, _, entry, _ in step.parts:
                clocks[rank, entry.stream] |= together
        unordered = 0
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
                    state.freed[rank, step.lender] |= left
            elif kind == "record_stream":
                state.recorded[rank, entry.storage].add(entry.stream)
            elif kind == "alloc":
                if entry.stream != HOST:
                    unordered |= state.freed.pop(thread, 0) & ~clocks[thread]
                    clocks[thread] |= bits
            else:
                if kind == "take":
                    clocks[thread] |= state.signals[entry.group, entry.peer, rank, entry.signature].pop(0)
                if bits:
                    unordered |= step.conflicts[rank] & ~clocks[thread]
                    clocks[thread] |= bits
                if kind == "put":
                    state.signals[entry.group, rank, entry.peer, entry.signature].append(clocks[thread])
            if entry.blocks and blocks:
                clocks[host] |= clocks[thread]
        return unordered


def _kind_of(entry: Entry) -> str | None:
    """Return the kind of mutation that removes ``entry``; ``None`` if it cannot be removed by itself."""
    if entry.kind in ("wait_event", "barrier"):
        return entry.kind.removesuffix("_event")
    if entry.kind == "record":
        return "event"
    if entry.kind in ("sync_event", "sync", "sync_device") or (entry.kind == "copy" and entry.blocks):
        return "host wait"
    return "record_stream" if entry.kind == "record_stream" else None
