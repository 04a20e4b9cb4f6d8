"""The figures of a step on a GPU: seconds of compute and communication, recorded by the profiler or simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thunder_fsdp_sched.extras.planning.recorded import read_recorded
from thunder_fsdp_sched.extras.planning.simulate import simulate

# Figures of a step besides its seconds.
PARTS = ("compute", "communication", "exposed", "idle")


def measured(path: Path) -> dict[str, float]:
    """Return the figures of a step, from a file that ``profile.export_chrome_trace`` wrote."""
    [step] = read_recorded([path])
    t = step.timeline
    return _figures(t.step_seconds, t.compute_seconds, t.communicating_seconds, t.exposed_seconds, t.idle_seconds)


def simulated(compiled: Any, cost: Any) -> dict[str, float]:
    """Simulate a step of a compiled pair of traces and return its figures."""
    t = simulate(compiled.forward, compiled.backward, cost)
    communication = sum(t.communication_seconds.values())
    return _figures(t.step_seconds, t.compute_seconds, communication, t.exposed_seconds, t.idle_seconds)


def _figures(*seconds: float) -> dict[str, float]:
    return dict(zip(("seconds", *PARTS), seconds, strict=True))
