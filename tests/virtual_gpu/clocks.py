"""Walks the logs of all ranks in parallel with vector clocks and reports accesses that are not ordered.

A clock says for every stream, and for every rank's host, how much of its work is known to have finished. An access happens
after another if its clock has reached the other. Work on a stream happens after everything that its host did before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .log import HOST, Access, Entry, Log, Region, Step, Stream, covers, line_up, overlap, owner_of

Thread = tuple[int, Stream]
"""A stream of a rank, or its host."""

Clock = dict[Thread, int]


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


@dataclass
class _Past:
    """An earlier access."""

    thread: Thread
    epoch: int
    region: Region
    write: bool
    entry: Entry

    def before(self, clock: Clock) -> bool:
        return clock.get(self.thread, 0) >= self.epoch


@dataclass
class _Storage:
    past: list[_Past] = field(default_factory=list)
    stream: Stream | None = None  # the stream of the allocation
    recorded: set[Stream] = field(default_factory=set)


def check(logs: Sequence[Log]) -> list[Fault]:
    """Return the faults in the logs, once for each pair of code locations."""
    return _Walk(logs).run()


class _Walk:
    def __init__(self, logs: Sequence[Log]) -> None:
        self.logs = {log.rank: log for log in logs}
        self.clocks: defaultdict[Thread, Clock] = defaultdict(dict)
        self.events: dict[tuple[int, int], Clock] = {}
        self.storages: defaultdict[tuple[int, int], _Storage] = defaultdict(_Storage)
        self.freed: defaultdict[Thread, list[tuple[str, _Past]]] = defaultdict(list)
        self.signals: defaultdict[tuple[object, ...], list[Clock]] = defaultdict(list)
        self.faults: dict[object, Fault] = {}

    def run(self) -> list[Fault]:
        steps, stuck = line_up(self.logs.values())
        for step in steps:
            if len(step) > 1:
                self._meet(step)
            for rank, _, entry in step:
                self._do(rank, entry)
        for rank, entry in stuck.items():
            others = "; ".join(
                f"rank {r} is at {stuck[r]}" if r in stuck else f"rank {r} has finished" for r in self.logs if r != rank
            )
            self._report("deadlock", rank, ("deadlock", rank), f"{entry} waits forever: {others}")
        return list(self.faults.values())

    def _meet(self, step: Step) -> None:
        """Order the accesses of a collective after everything that its streams did on any of its ranks."""
        first, _, expected = step[0]
        together: Clock = {}
        for rank, _, entry in step:
            if entry.signature != expected.signature:
                text = f"{entry} {entry.signature}, but rank {first}: {expected} {expected.signature}"
                self._report("mismatch", rank, ("mismatch", str(expected), str(entry)), text)
            _join(together, self.clocks[rank, entry.stream])
            _join(together, self.clocks[rank, HOST])
        for rank, _, entry in step:
            _join(self.clocks[rank, entry.stream], together)

    def _do(self, rank: int, entry: Entry) -> None:
        thread = rank, entry.stream
        host = rank, HOST
        clock = self.clocks[thread]
        if entry.stream != HOST:
            _join(clock, self.clocks[host])
        kind = entry.kind
        if kind == "record":
            self.events[rank, entry.event] = dict(clock)
        elif kind == "wait_event":
            _join(clock, self.events.get((rank, entry.event), {}))
        elif kind == "sync_event":
            _join(self.clocks[host], self.events.get((rank, entry.event), {}))
        elif kind == "sync_device":
            for (r, stream), other in list(self.clocks.items()):
                if r == rank and stream.device == entry.stream.device:
                    _join(self.clocks[host], other)
        elif kind == "alloc":
            self._allocate(rank, entry, clock)
        elif kind == "free":
            self._free(rank, entry, clock)
        elif kind == "record_stream":
            self.storages[owner_of(self.logs, rank, entry.storage)].recorded.add(entry.stream)
        elif kind == "take":
            _join(clock, self.signals[entry.group, entry.peer, rank, entry.signature].pop(0))
            self._tick(thread)
        elif kind == "put":
            self._tick(thread)
            self.signals[entry.group, rank, entry.peer, entry.signature].append(dict(clock))
        else:
            self._tick(thread)
            for access in entry.accesses:
                self._access(rank, thread, access, entry)
        if entry.blocks:
            _join(self.clocks[host], clock)

    def _tick(self, thread: Thread) -> int:
        clock = self.clocks[thread]
        clock[thread] = clock.get(thread, 0) + 1
        return clock[thread]

    def _allocate(self, rank: int, entry: Entry, clock: Clock) -> None:
        thread = rank, entry.stream
        waiting = self.freed.pop(thread, [])
        for name, past in waiting:
            if not past.before(clock):
                self._pair("reuse", rank, past, entry, f"{name} was freed and may be allocated again")
        storage = self.storages[rank, entry.storage] = _Storage(stream=entry.stream)
        if entry.stream != HOST:
            # This stream may still be using the memory for an earlier tensor.
            region = ((0, 1 << 62),)
            storage.past.append(_Past(thread, self._tick(thread), region, True, entry))

    def _free(self, rank: int, entry: Entry, clock: Clock) -> None:
        storage = self.storages.pop((rank, entry.storage), None)
        if storage is None or storage.stream is None or storage.stream == HOST:
            return
        name = self.logs[rank].names.get(entry.storage, "memory")
        for past in storage.past:
            recorded = any(past.before(self.clocks[rank, stream]) for stream in storage.recorded)
            if past.thread != (rank, storage.stream) and not recorded and not past.before(clock):
                self.freed[rank, storage.stream].append((name, past))

    def _access(self, rank: int, thread: Thread, access: Access, entry: Entry) -> None:
        clock = self.clocks[thread]
        storage = self.storages[owner_of(self.logs, rank, access.storage)]
        kept = []
        for past in storage.past:
            ordered = past.before(clock)
            if not ordered and (past.write or access.write) and overlap(past.region, access.region):
                name = self.logs[rank].names.get(access.storage, "memory")
                kind = "host race" if HOST in (past.thread[1], thread[1]) else "race"
                self._pair(kind, rank, past, entry, f"{name} is {'written' if access.write else 'read'}")
            superseded = ordered and (access.write or not past.write) and covers(access.region, past.region)
            if not superseded:
                kept.append(past)
        kept.append(_Past(thread, clock.get(thread, 0), access.region, access.write, entry))
        storage.past = kept

    def _pair(self, kind: str, rank: int, past: _Past, entry: Entry, text: str) -> None:
        verb = "writes" if past.write else "reads"
        if past.entry.kind == "alloc":
            verb = "may still use, as the memory of an earlier tensor,"
        key = (kind, past.entry.where, past.entry.name, entry.where, entry.name)
        other = f"rank {past.thread[0]}'s " if past.thread[0] != rank else ""
        self._report(kind, rank, key, f"{text} by {entry}, unordered with {other}{past.entry}, which {verb} it")

    def _report(self, kind: str, rank: int, key: object, text: str) -> None:
        self.faults.setdefault(key, Fault(kind, rank, text))


def _join(clock: Clock, other: Clock) -> None:
    for thread, epoch in other.items():
        if clock.get(thread, 0) < epoch:
            clock[thread] = epoch
