"""Changes of a log as if a wait, a barrier or a reference was missing in the code, to see whether the fault is flagged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from .clocks import Fault, check
from .log import HOST, Entry, Log, Stream

__all__ = ["missing_references", "missing_waits", "without_waits"]

Site = str
"""Where in the package something is done: the innermost functions, innermost first."""


def missing_waits(logs: Sequence[Log]) -> dict[Site, list[Fault]]:
    """Return the faults that there would be without the waits and barriers of one site, for each site of a step.

    Without the record of an event its wait does nothing, so that counts as the same.
    """
    sites = sorted({site for log in logs for entry in log.entries if (site := _wait_site(entry)) is not None})
    return {site: without_waits(logs, [site]) for site in sites}


def without_waits(logs: Sequence[Log], sites: Collection[Site]) -> list[Fault]:
    """Return the faults that there would be without the waits and barriers of all these sites."""
    return check([replace(log, entries=[e for e in log.entries if _wait_site(e) not in sites]) for log in logs])


def missing_references(logs: Sequence[Log]) -> dict[Site, list[Fault]]:
    """Return the faults if memory was freed as soon as the host has issued what uses it last, by where it is allocated.

    That is about memory that another stream uses last; what its own stream uses last may be freed then.
    """
    lent = {log.rank: _lent(log) for log in logs}
    sites = sorted({site for found in lent.values() for site in found.values()})
    return {
        site: check([_freed_early(log, {s for s, at in lent[log.rank].items() if at == site}) for log in logs])
        for site in sites
    }


def site_of(entry: Entry) -> Site:
    """Return the functions of the package that led to an entry, without lines: ``staged.py:issue < base.py:behind``."""
    frames = [f"{file.rpartition('/')[2]}:{function}" for file, _, function in entry.where if not _is_outside(file)]
    return " < ".join(frames[:2])


def _is_outside(file: str) -> bool:
    return file.startswith("thunder.") or "/tests/" in file


def _wait_site(entry: Entry) -> Site | None:
    """The site of a wait or a barrier in a step; ``None`` of anything else."""
    if entry.kind not in ("wait_event", "barrier") or not entry.phase or not (site := site_of(entry)):
        return None
    what = {"nccl start": "NCCL starts after", "nccl wait": "waits for NCCL"}.get(entry.name, entry.name)
    return f"{what}: {site}"


def _lent(log: Log) -> dict[int, Site]:
    """Storages that are freed in a step and that another stream uses last, with the site of their allocation."""
    owner: dict[int, tuple[Stream, Site]] = {}
    last: dict[int, Stream] = {}
    freed: set[int] = set()
    for entry in log.entries:
        if entry.kind == "alloc":
            owner[entry.storage] = entry.stream, site_of(entry)
        elif entry.kind == "free" and entry.phase:
            freed.add(entry.storage)
        for access in entry.accesses:
            last[access.storage] = entry.stream
    return {
        s: site
        for s, (stream, site) in owner.items()
        if s in freed and site and last.get(s, HOST) not in (stream, HOST)
    }


def _freed_early(log: Log, storages: Collection[int]) -> Log:
    last: dict[int, int] = {}
    frees: dict[int, Entry] = {}
    for position, entry in enumerate(log.entries):
        if entry.kind == "free" and entry.storage in storages:
            frees[entry.storage] = entry
        for access in entry.accesses:
            if access.storage in storages:
                last[access.storage] = position
    after: defaultdict[int, list[Entry]] = defaultdict(list)
    for storage, position in last.items():
        after[position].append(frees[storage])
    entries: list[Entry] = []
    for position, entry in enumerate(log.entries):
        if entry.kind != "free" or entry.storage not in storages:
            entries.append(entry)
        entries += after.get(position, ())
    return replace(log, entries=entries)
