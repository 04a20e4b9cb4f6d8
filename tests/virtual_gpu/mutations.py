"""Logs changed as if a single wait, barrier, event or ``record_stream`` was missing in the code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .clocks import Fault, check
from .log import Entry, Log
from .order import Mutation


def faults_without(logs: Sequence[Log], mutation: Mutation) -> list[Fault]:
    """Return the faults in the logs after ``mutation`` has been applied."""
    missing = dict(mutation.entries)
    return check([_without(log, mutation, missing[log.rank]) if log.rank in missing else log for log in logs])


def site_of(entry: Entry) -> str:
    """Return the package's functions that led to an entry, innermost first: ``works.py:wait < works.py:issue_then``."""
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
