"""Schedules in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ...ir.schedule import StepSchedule
from ..json_files import read_json, write_json

_FORMAT = 2
"""The version of the files of schedules."""


class _ScheduleFile(NamedTuple):
    """The content of a file of schedules."""

    steps: tuple[StepSchedule, ...]


def save_schedules(schedules: Iterable[StepSchedule], path: str | Path) -> None:
    """Write schedules, oldest first, as JSON that ``fsdp(schedule=path)`` replays."""
    write_json(path, _FORMAT, {"steps": [dataclasses.asdict(s) for s in schedules]})


def load_schedules(path: str | Path) -> list[StepSchedule]:
    """Read a file written by :func:`save_schedules`.

    Raises:
        ValueError: the file was not written by :func:`save_schedules`, or is damaged; the message names the first fault.
    """
    return list(read_json(path, "schedule", "schedule", _FORMAT, _ScheduleFile).steps)
