"""Tables and pictures of traces and timelines, and what torch's profiler recorded. Pictures need the extra ``plot``."""

from .extras.reports.exposed import ExposedCommunication, calibrate, exposed_communication
from .extras.reports.plot import plot_memory, plot_timelines, save_memory, save_perfetto
from .extras.reports.report import (
    communication_lines,
    dry_run_table,
    make_console,
    step_before_and_after,
    window_table,
)
from .extras.reports.texts import plan_table

__all__ = [
    "ExposedCommunication",
    "calibrate",
    "communication_lines",
    "dry_run_table",
    "exposed_communication",
    "make_console",
    "plan_table",
    "plot_memory",
    "plot_timelines",
    "save_memory",
    "save_perfetto",
    "step_before_and_after",
    "window_table",
]
