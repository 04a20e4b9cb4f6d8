"""The order in which the checkpoints in a folder were saved.

[Note: The order of saves]
Times of files are those of the last copy, so the order stands in the checkpoints: the list of contents ends with a stamp. It
is the time of the save in nanoseconds or, if a checkpoint in the same folder has that stamp or a later one, the latest stamp
plus one. So neither a copy of the folder nor a clock that goes back changes the order.

Checkpoints of ``dcp.save`` and of earlier versions of this package have no stamp. They count as older than those with one.
Among them, a series (names that differ in digits alone) is ordered by these numbers, and series by the times of their files.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from .folder import METADATA

_STAMP = re.compile(rb"\nthunder_fsdp_sched saved (\d{1,30})\nthunder_fsdp_sched crc32 [0-9a-f]{8}\n\Z")

_NUMBER = re.compile("[0-9]+")

_END = 128
"""Bytes at the end of a list of contents that contain the stamp."""


def stamped(data: bytes, folder: Path) -> bytes:
    """Append the stamp of a checkpoint that is about to be completed in ``folder`` to its list of contents."""
    others = (stamp_of(file.parent) for file in folder.resolve().parent.glob(f"*/{METADATA}"))
    return data + b"\nthunder_fsdp_sched saved %d" % max(time.time_ns(), *((stamp or 0) + 1 for stamp in others), 0)


def stamp_of(folder: Path) -> int | None:
    """Return the stamp of a checkpoint; ``None`` if it has none, or its list of contents is damaged or gone."""
    with contextlib.suppress(OSError), (folder / METADATA).open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _END, 0))
        if found := _STAMP.search(file.read()):
            return int(found[1])
    return None


def newest_first(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder`` by the order of their saves, links to one after the folder itself."""
    found: list[Path] = []
    times: dict[str, int] = {}
    for file in folder.glob(f"*/{METADATA}"):
        with contextlib.suppress(FileNotFoundError):  # the first rank removes old ones meanwhile
            series = series_of(file.parent)
            times[series] = max(time_of(file.parent), times.get(series, 0))
            found.append(file.parent)

    def order(path: Path) -> tuple[bool, int, str, list[int], bool, str]:
        stamp, series = stamp_of(path), series_of(path)
        numbers = [int(number) for number in _NUMBER.findall(path.resolve().name)]
        when = times[series] if stamp is None else stamp
        return stamp is not None, when, series, numbers, not path.is_symlink(), path.name

    return sorted(found, key=order, reverse=True)


def series_of(path: Path) -> str:
    """Return what the names of the checkpoints of a series have in common: ``step-#`` for ``step-100``."""
    return _NUMBER.sub("#", path.resolve().name)


def time_of(folder: Path) -> int:
    """Return when the list of contents of a checkpoint was written or copied, in nanoseconds."""
    return (folder / METADATA).stat().st_mtime_ns
