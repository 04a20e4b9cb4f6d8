"""The check of ``fsdp(schedule=...)``."""

from __future__ import annotations

from pathlib import Path

from ...ir.schedule import StepSchedule
from .schedule_files import load_schedules


def check_schedule(name: str, schedule: object) -> tuple[StepSchedule, ...]:
    """Return the schedules that a user has given, or those of a file.

    Raises:
        TypeError: it is neither; the message begins with ``name``.
        ValueError: there is no such file, or it has no schedules.
    """
    if isinstance(schedule, StepSchedule):
        return (schedule,)
    if not isinstance(schedule, (str, Path)):
        raise TypeError(
            f"{name}: expected a path to a saved schedule, a StepSchedule or None, got {schedule!r} of type "
            f"{type(schedule).__name__}"
        )
    if not Path(schedule).is_file():
        raise ValueError(f"{name}: there is no file {str(schedule)!r}; transform.save_schedules(path) writes one")
    return tuple(load_schedules(schedule))
