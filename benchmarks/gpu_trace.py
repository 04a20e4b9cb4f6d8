"""Analyze a GPU step in the trace that ``torch.profiler`` exports, with pure functions that need no GPU.

[Note: Compute and communication]
NCCL's kernels are communication on any stream. Of the remaining kernels, the stream with the longest total time is the
compute stream. Everything on other streams is communication: copy engines of symmetric memory, gloo's copies between
GPU and host, copies of a transport. Everything else is compute, including copies on the compute stream.

[Note: Which collective an activity belongs to]
While a profiler runs, the package labels its collectives: ``fsdp_all_gather(bucket)`` and so on, as in a trace. The
profiler records the label as an annotation of the thread, and for each GPU activity the number of the call that
launched it (``correlation``). So an activity has the innermost label around that call. A label is entered once for each
collective, so its start distinguishes two collectives of one bucket.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from thunder_fsdp_sched.planning.timeline import _outside, _union

__all__ = [
    "Activity",
    "Collective",
    "collectives",
    "contention",
    "counts",
    "exposed",
    "first_difference",
    "idle",
    "read",
    "seconds_in",
    "split",
]

_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_COLLECTIVES = re.compile(r"(fsdp_all_gather|fsdp_reduce_scatter|fsdp_all_reduce)\((.*)\)")
_NCCL = re.compile(r"nccl", re.IGNORECASE)
_COPIES = re.compile(
    r"memcpy|CatArrayBatchedCopy|copy_kernel|direct_copy|split_with_sizes_copy|chunk_cat", re.IGNORECASE
)


@dataclass(frozen=True)
class Activity:
    """Something that the GPU did, from ``start`` to ``end`` (seconds).

    Attributes:
        category: ``"kernel"``, ``"gpu_memcpy"`` or ``"gpu_memset"``.
        shape: the grid and block of a kernel; kernels with the same name and shape do the same work.
        label: see [Note: Which collective an activity belongs to]; ``""`` if there is none.
        issued: when the host entered that label (seconds).
    """

    name: str
    category: str
    stream: int
    start: float
    end: float
    shape: str = ""
    label: str = ""
    issued: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Collective(NamedTuple):
    """A collective as the GPU ran it, from the start of its first activity to the end of its last (seconds)."""

    kind: str
    bucket: str
    start: float
    end: float

    def __str__(self) -> str:
        return f"{self.kind}({self.bucket})"


def read(trace: Mapping[str, Any], device: int | None = None) -> list[Activity]:
    """Return the activities of the GPU in a trace that ``profile.export_chrome_trace`` wrote, in order.

    Args:
        device: the index of the GPU; ``None`` for all GPUs.
    """
    found = []
    label_of = _Labels(trace["traceEvents"])
    for event in trace["traceEvents"]:
        arguments = event.get("args", {})
        if event.get("ph") != "X" or event.get("cat") not in _CATEGORIES:
            continue
        if device is not None and arguments.get("device") != device:
            continue
        start = float(event["ts"]) * 1e-6
        shape = f"{arguments.get('grid', '')}{arguments.get('block', '')}"
        stream = int(arguments.get("stream", -1))
        end = start + float(event["dur"]) * 1e-6
        label = label_of(arguments.get("correlation"))
        found.append(Activity(event["name"], event["cat"], stream, start, end, shape, *label))
    return sorted(found, key=lambda a: (a.start, a.end))


class _Labels:
    """The labels of launches, by their ``correlation``."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._launches: dict[Any, tuple[Any, float]] = {}
        self._labels: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for event in events:
            if event.get("ph") != "X":
                continue
            thread, start = (event.get("pid"), event.get("tid")), float(event["ts"])
            if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
                self._launches[event["args"]["correlation"]] = thread, start
            elif event.get("cat") == "user_annotation" and event["name"].startswith("fsdp_"):
                self._labels[thread].append((start, start + float(event["dur"]), event["name"]))

    def __call__(self, correlation: Any) -> tuple[str, float]:
        """Return the innermost label and when it was entered (seconds); ``("", 0.0)`` outside of any."""
        if correlation not in self._launches:
            return "", 0.0
        thread, launched = self._launches[correlation]
        around = [(start, name) for start, end, name in self._labels[thread] if start <= launched <= end]
        start, name = max(around, default=(0.0, ""))
        return name, start * 1e-6


def split(activities: Sequence[Activity]) -> tuple[list[Activity], list[Activity]]:
    """Return compute and communication separately; see [Note: Compute and communication]."""
    busy: dict[int, float] = defaultdict(float)
    for activity in activities:
        if activity.category == "kernel" and not _NCCL.search(activity.name):
            busy[activity.stream] += activity.seconds
    stream = max(busy, key=lambda s: busy[s], default=None)
    compute = [a for a in activities if a.stream == stream and not _NCCL.search(a.name)]
    return compute, [a for a in activities if a.stream != stream or _NCCL.search(a.name)]


def collectives(communication: Iterable[Activity]) -> list[Collective]:
    """Return the labelled collectives, in the order of their first activities."""
    found: dict[tuple[str, float], list[Activity]] = defaultdict(list)
    for activity in communication:
        if _COLLECTIVES.fullmatch(activity.label):
            found[activity.label, activity.issued].append(activity)
    made = []
    for (label, _), activities in found.items():
        match = _COLLECTIVES.fullmatch(label)
        assert match is not None
        start, end = min(a.start for a in activities), max(a.end for a in activities)
        made.append(Collective(match[1], match[2], start, end))
    return sorted(made, key=lambda c: (c.start, c.end))


def first_difference(predicted: Sequence[str], measured: Sequence[str]) -> str:
    """Describe the first difference between two orders of collectives; return ``""`` if there is none."""
    for number, (expected, found) in enumerate(zip(predicted, measured, strict=False)):
        if expected != found:
            return f"number {number + 1}: predicted {expected}, ran {found}"
    if len(predicted) != len(measured):
        longer, what = (predicted, "did not run") if len(predicted) > len(measured) else (measured, "was not predicted")
        return f"{longer[min(len(predicted), len(measured))]} {what}"
    return ""


def seconds_in(activities: Iterable[Activity]) -> float:
    """Return the seconds in which at least one of them runs."""
    return sum(end - start for start, end in _spans(activities))


def exposed(compute: Iterable[Activity], communication: Iterable[Activity]) -> float:
    """Return the seconds in which something communicates and nothing computes."""
    return sum(_outside(_spans(communication), _spans(compute)))


def idle(activities: Sequence[Activity]) -> float:
    """Return the seconds between the first and the last activity in which the GPU does nothing."""
    spans = _spans(activities)
    return spans[-1][1] - spans[0][0] - sum(end - start for start, end in spans) if spans else 0.0


def contention(compute: Sequence[Activity], communication: Iterable[Activity]) -> float | None:
    """Return the factor by which kernels are slower during communication; ``None`` if no kernel ran both with and without.

    Kernels that run entirely during communication are compared with the median of kernels of the same name and shape that
    run entirely without it, weighted by their time.
    """
    kernels = [a for a in compute if a.category == "kernel" and a.seconds > 0]
    alone: dict[tuple[str, str], list[float]] = defaultdict(list)
    beside: dict[tuple[str, str], list[float]] = defaultdict(list)
    outside = _outside([(a.start, a.end) for a in kernels], _spans(communication))
    for kernel, free in zip(kernels, outside, strict=True):
        share = free / kernel.seconds
        if share > 0.999:
            alone[kernel.name, kernel.shape].append(kernel.seconds)
        elif share < 0.001:
            beside[kernel.name, kernel.shape].append(kernel.seconds)
    both = beside.keys() & alone.keys()
    expected = sum(statistics.median(alone[key]) * len(beside[key]) for key in both)
    return sum(sum(beside[key]) for key in both) / expected if expected else None


def counts(compute: Sequence[Activity], communication: Sequence[Activity]) -> dict[str, int]:
    """Count kernels of compute and of communication, and copies and concatenations of both, by kernel or copy engine."""
    both = [*compute, *communication]
    return {
        "kernels": sum(a.category == "kernel" for a in compute),
        "communication_kernels": sum(a.category == "kernel" for a in communication),
        "copies": sum(a.category == "gpu_memcpy" or bool(_COPIES.search(a.name)) for a in both),
    }


def _spans(activities: Iterable[Activity]) -> list[tuple[float, float]]:
    return _union((a.start, a.end) for a in activities)
