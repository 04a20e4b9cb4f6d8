"""The log of one rank: what its host has requested of its devices, in order."""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import thunder_fsdp_sched

_HERE = str(Path(__file__).parent)
_TESTS = str(Path(__file__).parents[1])
_PACKAGE = str(Path(thunder_fsdp_sched.__file__).parent)


Region = tuple[tuple[int, int], ...]
"""Sorted, disjoint ranges of bytes of a storage."""


class Stream(NamedTuple):
    """A stream of a rank's device; 0 is the default stream."""

    device: int
    number: int

    def __str__(self) -> str:
        return f"cuda:{self.device} stream {self.number}"


HOST = Stream(-1, -1)
"""The host thread as a stream. Its reads and writes have finished when the call returns."""

Where = tuple[tuple[str, int, str], ...]
"""File, line and function of some callers, innermost first."""


class Access(NamedTuple):
    """Bytes of a storage that an operation reads or writes."""

    storage: int
    region: Region
    write: bool


@dataclass
class Entry:
    """One request of the host.

    Attributes:
        kind: ``kernel``, ``copy``, ``collective``, ``barrier``, ``put``, ``take`` (signals), ``split``; ``record``,
            ``wait_event``; ``sync`` of a stream, ``sync_event``, ``sync_device``; ``alloc``, ``free``,
            ``record_stream``; ``host`` for work of the host itself.
        stream: the stream on which it runs, or ``HOST`` for work of the host itself.
        blocks: whether the host waits until the stream has finished it.
        event: the number of the event (``record``, ``wait_event``, ``sync_event``).
        storage: the number of the storage (``alloc``, ``free``, ``record_stream``).
        group, signature: for requests that other ranks must match. ``signature`` must be equal on all of them.
        peer: the rank to which a signal goes, or from which it comes.
    """

    kind: str
    name: str
    stream: Stream
    accesses: tuple[Access, ...] = ()
    where: Where = ()
    blocks: bool = False
    event: int = 0
    storage: int = 0
    group: str = ""
    signature: tuple[Any, ...] = ()
    peer: int = -1
    launches: int = 1
    phase: str = ""

    def __str__(self) -> str:
        at = " <- ".join(_show(frame) for frame in self.where)
        return f"{self.kind} {self.name} on {'the host' if self.stream == HOST else self.stream} at {at or 'unknown'}"


def _show(frame: tuple[str, int, str]) -> str:
    file, line, function = frame
    if file.startswith("thunder."):
        return f"{function}: {linecache.getline(file, line).strip()[:120]}"
    return f"{file.rpartition('/')[2]}:{line} {function}"


@dataclass
class Log:
    """One rank's log.

    Attributes:
        names: descriptions of storages, for messages.
        remote: for storages in the memory of another rank, the group, the number of the rendezvous in it, and the rank.
        shared: this rank's storages that other ranks access, by group and number of the rendezvous.
        members: the global ranks of each group.
        phase: the label of the entries that are added now.
    """

    rank: int
    entries: list[Entry] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    remote: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    shared: dict[tuple[str, int], int] = field(default_factory=dict)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    phase: str = ""

    def add(self, kind: str, name: str, stream: Stream, accesses: Iterable[Access] = (), **more: Any) -> Entry:
        """Append an entry, with the callers that messages of faults show."""
        entry = Entry(kind, name, stream, tuple(accesses), callers(), phase=self.phase, **more)
        self.entries.append(entry)
        return entry


_MOST_FRAMES = 3


def callers() -> Where:
    """Return the innermost callers in the package, and then the line of the trace or the caller in a test."""
    found: list[tuple[str, int, str]] = []
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith("thunder.") or (_TESTS in file and _HERE not in file):
            found.append((file, frame.f_lineno, frame.f_code.co_name))
            break
        if _PACKAGE in file and len(found) < _MOST_FRAMES:
            found.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


Step = Sequence[tuple[int, int, Entry]]
"""An entry, or matching entries of several ranks: for each the rank, its position in the log, and the entry."""


def line_up(logs: Iterable[Log]) -> tuple[list[Step], dict[int, Entry]]:
    """Arrange the entries of all ranks in one possible order, and return by rank those that wait for others forever."""
    by_rank = {log.rank: log for log in logs}
    at = dict.fromkeys(by_rank, 0)
    signals: Counter[tuple[object, ...]] = Counter()
    steps: list[Step] = []

    def entry_of(rank: int) -> Entry | None:
        entries = by_rank[rank].entries
        return entries[at[rank]] if at[rank] < len(entries) else None

    def signal_of(rank: int, entry: Entry) -> tuple[object, ...]:
        ends = (rank, entry.peer) if entry.kind == "put" else (entry.peer, rank)
        return entry.group, *ends, entry.signature

    def ready(rank: int) -> Sequence[int]:
        """Return the ranks that execute the next entry of a rank together, none if it has to wait."""
        entry = entry_of(rank)
        if entry is None or (entry.kind == "take" and not signals[signal_of(rank, entry)]):
            return ()
        if entry.kind not in ("collective", "barrier", "split"):
            return (rank,)
        members = [r for r in by_rank[rank].members.get(entry.group, (rank,)) if r in by_rank]
        others = [entry_of(member) for member in members]
        return members if all(o and (o.kind, o.group) == (entry.kind, entry.group) for o in others) else ()

    done = -1
    while len(steps) > done:
        done = len(steps)
        for rank in by_rank:
            while ranks := ready(rank):
                step = [(r, at[r], entry) for r in ranks if (entry := entry_of(r)) is not None]
                for r, _, entry in step:
                    at[r] += 1
                    if entry.kind in ("put", "take"):
                        signals[signal_of(r, entry)] += 1 if entry.kind == "put" else -1
                steps.append(step)
    return steps, {rank: entry for rank in by_rank if (entry := entry_of(rank)) is not None}


def owner_of(logs: Mapping[int, Log], rank: int, storage: int) -> tuple[int, int]:
    """Return the rank and number of a storage, which may belong to another rank."""
    remote = logs[rank].remote.get(storage)
    if remote is not None:
        group, number, peer = remote
        owner = logs[rank].members[group][peer]
        if owner in logs:
            return owner, logs[owner].shared[group, number]
    return rank, storage


_MOST_RANGES = 1 << 16


@lru_cache(maxsize=1 << 16)
def region_of(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Region:
    """Return the bytes that a strided tensor covers.

    Args:
        offset: the offset of its first element in the storage, in elements.
    """
    if 0 in sizes:
        return ()
    dims = sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1 and stride)
    run = 1  # elements that follow each other without a gap
    while dims and dims[0][0] <= run:
        stride, size = dims.pop(0)
        run = stride * (size - 1) + run
    starts = [offset]
    for stride, size in reversed(dims):
        if len(starts) * size > _MOST_RANGES:  # too many ranges: use their bounds
            last = sum(st * (si - 1) for si, st in zip(sizes, strides, strict=True))
            return ((offset * itemsize, (offset + last + 1) * itemsize),)
        starts = [start + i * stride for start in starts for i in range(size)]
    return _merge(sorted((start * itemsize, (start + run) * itemsize) for start in starts))


def _merge(ranges: list[tuple[int, int]]) -> Region:
    merged = [ranges[0]]
    for begin, end in ranges[1:]:
        if begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return tuple(merged)


def overlap(a: Region, b: Region) -> bool:
    """Return whether two regions have a byte in common."""
    if not a or not b or a[-1][1] <= b[0][0] or b[-1][1] <= a[0][0]:
        return False
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i][0] < b[j][1] and b[j][0] < a[i][1]:
            return True
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return False


def covers(outer: Region, inner: Region) -> bool:
    """Return whether ``outer`` contains every byte of ``inner``."""
    j = 0
    for begin, end in inner:
        while j < len(outer) and outer[j][1] < end:
            j += 1
        if j == len(outer) or outer[j][0] > begin:
            return False
    return True
