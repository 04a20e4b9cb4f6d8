"""The figures of a step on a GPU: seconds of compute and communication, from a profiler's trace or simulated.

[Note: Compute and communication]
NCCL's kernels are communication on any stream. Of the remaining kernels, the stream with the longest total time is the
compute stream. Everything on other streams is communication: copy engines of symmetric memory, gloo's copies between
GPU and host, copies of a transport. Everything else is compute. Exposed is the time in which communication runs and no
kernel computes, by the union of intervals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import filterfalse
from typing import Any

from thunder_fsdp_sched.planning.simulate import simulate
from thunder_fsdp_sched.planning.timeline import length, union

# Figures of a step besides its seconds.
PARTS = ("compute", "communication", "exposed", "idle")


def measured(trace: Mapping[str, Any], device: int | None = None) -> dict[str, float]:
    """Return the figures of a step, from a trace that ``profile.export_chrome_trace`` wrote.

    See [Note: Compute and communication].

    Raises:
        RuntimeError: nothing ran there.
    """
    found = [event for event in trace["traceEvents"] if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found = [event for event in found if device in (None, event["args"].get("device", device))]
    if not found:
        raise RuntimeError("the profiler saw nothing run on the GPU (CUPTI missing, or not permitted?)")
    busy: Counter[int] = Counter()
    for event in found:
        busy[event["args"]["stream"]] += event["dur"] if event["cat"] == "kernel" and not _is_nccl(event) else 0
    [(stream, _)] = busy.most_common(1)

    def computes(event: Mapping[str, Any]) -> bool:
        return event["args"]["stream"] == stream and not _is_nccl(event)

    compute, communication = _seconds_in(filter(computes, found)), _seconds_in(filterfalse(computes, found))
    start, end = min(event["ts"] for event in found), max(event["ts"] + event["dur"] for event in found)
    seconds, busy_seconds = (end - start) * 1e-6, _seconds_in(found)
    return _figures(seconds, compute, communication, busy_seconds - compute, seconds - busy_seconds)


def _is_nccl(event: Mapping[str, Any]) -> bool:
    return "nccl" in event["name"].lower()


def _seconds_in(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds in which at least one of them runs."""
    return length(union((event["ts"], event["ts"] + event["dur"]) for event in events)) * 1e-6


def simulated(compiled: Any, cost: Any) -> dict[str, float]:
    """Simulate a step of a compiled pair of traces and return its figures."""
    t = simulate(compiled.forward, compiled.backward, cost)
    communication = sum(t.communication_seconds.values())
    return _figures(t.step_seconds, t.compute_seconds, communication, t.exposed_seconds, t.idle_seconds)


def _figures(*seconds: float) -> dict[str, float]:
    return dict(zip(("seconds", *PARTS), seconds, strict=True))
