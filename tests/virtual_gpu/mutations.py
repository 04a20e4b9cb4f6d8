"""Logs changed as if a single wait, barrier, event or ``record_stream`` was missing in the code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from .clocks import Fault, check
from .log import Entry, Log, line_up


class Mutation(NamedTuple):
    """A wait, barrier, event or ``record_stream`` that is removed.

    Attributes:
        kind: ``wait``, ``barrier``, ``event`` (its record), ``host wait`` or ``record_stream``.
        entry: one of the removed entries.
        positions: by rank, the position of the removed entry in its log.
    """

    kind: str
    entry: Entry
    positions: dict[int, int]


def mutations_of(logs: Sequence[Log]) -> Iterator[Mutation]:
    """Yield all that the package's code in a step may miss."""
    steps, _ = line_up(logs)
    for step in steps:
        _, _, entry = step[0]
        kind = _kind_of(entry)
        if kind is not None and is_ours(entry):
            yield Mutation(kind, entry, {rank: position for rank, position, _ in step})


def _kind_of(entry: Entry) -> str | None:
    """Return the kind of mutation that removes an entry; ``None`` if it cannot be removed by itself."""
    if entry.kind in ("wait_event", "barrier"):
        return entry.kind.removesuffix("_event")
    if entry.kind == "record":
        return "event"
    if entry.kind in ("sync_event", "sync", "sync_device") or (entry.kind == "copy" and entry.blocks):
        return "host wait"
    return "record_stream" if entry.kind == "record_stream" else None


def faults_without(logs: Sequence[Log], mutation: Mutation) -> list[Fault]:
    """Return the faults in the logs after ``mutation`` has been applied."""
    missing = mutation.positions
    return check([_without(log, missing[log.rank]) if log.rank in missing else log for log in logs])


def site_of(entry: Entry) -> str:
    """Return the package's functions that led to an entry, innermost first: ``works.py:wait < works.py:issue_then``."""
    frames = [f"{file.rpartition('/')[2]}:{function}" for file, _, function in entry.where if not _is_outside(file)]
    return " < ".join(frames[:2])


def is_ours(entry: Entry) -> bool:
    """Return whether the package's code in a step led to an entry."""
    return bool(entry.phase and site_of(entry))


def _is_outside(file: str) -> bool:
    return file.startswith("thunder.") or "/tests/" in file


def _without(log: Log, position: int) -> Log:
    entries = list(log.entries)
    if entries[position].kind == "copy":  # the copy stays, and the host continues
        entries[position] = replace(entries[position], blocks=False)
    else:
        del entries[position]
    return replace(log, entries=entries)
