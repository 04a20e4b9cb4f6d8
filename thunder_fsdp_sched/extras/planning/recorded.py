"""Steps that torch's profiler has recorded, read from its files.

[Note: Recorded communication]
Kernels of NCCL and NVSHMEM are communication. Of the other kernels, the stream with the longest total time is the compute
stream. On other streams, copies, and kernels that were launched in a range of this package or of FSDP2, are communication.
Everything else is compute. Communication is exposed while it runs and nothing computes. Every moment of it counts once: it
belongs to the collective that started first of those that run.

Files of a run on CPUs with gloo have no kernels. ``benchmarks/overlap.py`` reads those of this package.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import coded_error
from .timeline import COMPUTE, Interval, Timeline, gaps, length, overlaps, union

Span = tuple[float, float]

FORWARD, BACKWARD, OUTSIDE = 0, 1, 2
"""Values of ``Interval.trace`` in a recorded step; the last is for all other work, such as the optimizer's."""

_KINDS = (
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier", "gather", "scatter", "reduce",
)  # fmt: skip
_RANGE = re.compile(r"(fsdp_|FSDP::)(\w+)(?: ?\((.*)\))?")
_BACKWARD = re.compile("autograd::engine|[Bb]ackward")
_KERNEL = re.compile("nccl|nvshmem", re.IGNORECASE)
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_BY_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_WHOLE_FILE = "whole file"


@dataclass(frozen=True)
class RecordedStep:
    """One step of one rank.

    Attributes:
        path: the file that it was read from.
        rank: the rank, or the file's position among several if the profiler did not know the rank.
        name: ``"ProfilerStep#2"``, or ``"whole file"`` for a file without such ranges.
        passes: start of forward and end of backward, in seconds since the step began.
        timeline: the activities. Its collectives have the names of buckets, and in ``trace`` the phase
            (:data:`FORWARD`, :data:`BACKWARD`, :data:`OUTSIDE`). Its waits are the exposed communication, in disjoint
            intervals.
    """

    path: str
    rank: int
    name: str
    passes: Span
    timeline: Timeline

    @property
    def compute_seconds(self) -> float:
        """The compute of forward and backward."""
        spans = union(i.span for i in self.timeline.intervals if i.kind == COMPUTE)
        return sum(end - start for start, end, _ in overlaps(spans, [self.passes]))


def read_recorded(paths: Sequence[str | Path]) -> list[RecordedStep]:
    """Read files of ``profile.export_chrome_trace``, one of each rank, of the same steps.

    Returns:
        The steps in order, and for each step the ranks in order.

    Raises:
        ValueError: a file is not one of torch's profiler, holds no step or no communication, or files are of the same
            rank or of different steps; the message names the files.
    """
    files: dict[int, list[RecordedStep]] = {}
    for position, path in enumerate(paths):
        steps = _read(Path(path), position)
        first = steps[0]
        if first.rank in files:
            raise coded_error(
                ValueError,
                "plan.profile-files-of-one-rank",
                other=files[first.rank][0].path,
                path=path,
                rank=first.rank,
            )
        for other in files.values():
            if [step.name for step in other] != [step.name for step in steps]:
                held = [f"{of[0].path} holds {', '.join(step.name for step in of)}" for of in (other, steps)]
                raise coded_error(ValueError, "plan.profile-files-of-different-steps", steps="; ".join(held))
        files[first.rank] = steps
    if not files:
        raise coded_error(ValueError, "plan.profile-without-files")
    ranks = [files[rank] for rank in sorted(files)]
    return [step for of_step in zip(*ranks, strict=True) for step in of_step]


class _Event(NamedTuple):
    """An event of a file: a call in a thread of the host, or an activity of a device."""

    start: float
    end: float
    name: str
    category: str
    thread: Any
    args: dict[str, Any]

    @property
    def span(self) -> Span:
        return self.start, self.end


class _Launch(NamedTuple):
    """A launch by the host: its time, its phase, and the collective and the bucket that a range around it names."""

    time: float
    phase: int = FORWARD
    kind: str = ""
    bucket: str = ""


class _DeviceRun(NamedTuple):
    """An activity of a device."""

    start: float
    end: float
    stream: str
    launch: _Launch


def _read(path: Path, position: int) -> list[RecordedStep]:
    try:
        data = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
        rank = int(data.get("distributedInfo", {}).get("rank", position))
        events = [e for e in map(_event, data["traceEvents"]) if e is not None]
    except OSError as error:
        raise coded_error(ValueError, "plan.profile-not-readable", path=path, error=error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise coded_error(ValueError, "plan.profile-not-of-torch-profiler", path=path, error=error) from error
    if not events:
        raise coded_error(ValueError, "plan.profile-without-step", path=path)
    recording = _Recording(sorted(events, key=lambda e: (e.start, -e.end)))
    if not recording.communication:
        raise coded_error(ValueError, "plan.profile-without-communication", path=path)
    steps = recording.steps or [(min(e.start for e in events), max(e.end for e in events), _WHOLE_FILE)]
    return [recording.step(path, rank, *step) for step in steps]


def _event(entry: dict[str, Any]) -> _Event | None:
    category, name = entry.get("cat"), entry.get("name", "")
    if entry.get("ph") != "X" or category not in (*_ON_DEVICE, *_BY_HOST):
        return None
    start, end = (round(1e3 * time) * 1e-9 for time in (entry["ts"], entry["ts"] + entry["dur"]))  # whole nanoseconds
    return _Event(start, end, name, category, (entry.get("pid"), entry.get("tid")), entry.get("args", {}))


class _Recording:
    """One file, with everything in the order of its start.

    Attributes:
        steps: start, end and name of each step.
        backward: the ends of events of backward.
        launches: the launches of the activities of devices, by the number that both events have.
        communication: the activities that are communication by [Note: Recorded communication].
        compute: all others.
    """

    def __init__(self, events: Sequence[_Event]) -> None:
        self.steps = [(*e.span, e.name) for e in events if e.name.startswith("ProfilerStep")]
        self.backward = [e.end for e in events if _BACKWARD.search(e.name)]
        self.launches: dict[Any, _Launch] = {}
        enclosing: dict[Any, list[_Event]] = defaultdict(list)
        busy: dict[Any, float] = defaultdict(float)
        for event in events:
            if event.category in _BY_HOST:
                around = [e for e in enclosing[event.thread] if e.end > event.start]
                enclosing[event.thread] = [*around, event]
                if event.category.startswith("cuda_"):
                    self.launches[event.args.get("correlation")] = _launch(event.start, around)
            elif event.category == "kernel" and not _KERNEL.search(event.name):
                busy[event.args.get("stream")] += event.end - event.start
        compute_stream = max(busy, key=busy.__getitem__, default=None)
        self.communication: list[_DeviceRun] = []
        self.compute: list[_DeviceRun] = []
        for event in events:
            if event.category in _ON_DEVICE:
                stream = event.args.get("stream")
                launch = self.launches.get(event.args.get("correlation"), _Launch(event.start))
                moves = event.category != "kernel" or launch.kind
                communicates = _KERNEL.search(event.name) or (stream != compute_stream and moves)
                launch = launch if launch.kind else launch._replace(kind=_kind_of(event.name))
                runs = self.communication if communicates else self.compute
                runs.append(_DeviceRun(*event.span, f"stream {stream}", launch))

    def _ran(self, launched: Span) -> Span:
        """Return the span in which the device ran the launches of ``launched``; without any, ``launched`` itself."""
        runs = [r for r in (*self.communication, *self.compute) if launched[0] <= r.launch.time < launched[1]]
        return (min(r.start for r in runs), max(r.end for r in runs)) if runs else launched

    def step(self, path: Path, rank: int, start: float, end: float, name: str) -> RecordedStep:
        """Return the step that the host ran in this time."""
        window = since, until = self._ran((start, end))
        collectives, computing = (
            _clipped(self.communication, window),
            union(run[:2] for run in _clipped(self.compute, window)),
        )
        exposed = overlaps(gaps(computing, *window), _first_come(collectives))

        def interval(start: float, end: float, stream: str, kind: str, launch: _Launch) -> Interval:
            return Interval(stream, kind, launch.kind, launch.bucket, start - since, end - since, launch.phase, 0)

        work = _Launch(since, kind=COMPUTE)
        intervals = [interval(begin, stop, COMPUTE, COMPUTE, work) for begin, stop in computing]
        intervals += [interval(begin, stop, COMPUTE, "wait", run.launch) for begin, stop, run in exposed]
        intervals += [interval(r.start, r.end, r.stream, f"fsdp_{r.launch.kind}", r.launch) for r in collectives]
        streams = sorted({run.stream for run in collectives})
        busy = {stream: length(union(r[:2] for r in collectives if r.stream == stream)) for stream in streams}
        timeline = Timeline(tuple(intervals), (), until - since, length(computing), 0.0, busy)
        named = [launch.time for launch in self.launches.values() if launch.kind and start <= launch.time < end]
        ends = [time for time in self.backward if start < time <= end]
        passes = self._ran((min(named, default=start), max(ends, default=end)))
        return RecordedStep(str(path), rank, name, (passes[0] - since, passes[1] - since), timeline)


def _launch(time: float, enclosing: Sequence[_Event]) -> _Launch:
    """Return the launch at a time, described by the profiler ranges that enclose it."""
    phase = BACKWARD if any(_BACKWARD.search(e.name) for e in enclosing) else FORWARD
    if any(e.name.startswith("Optimizer.") for e in enclosing):
        phase = OUTSIDE
    for outer in reversed(enclosing):
        if match := _RANGE.fullmatch(outer.name):
            by, kind, bucket = match.groups()
            bucket = bucket or ("" if by == "fsdp_" else "(root)")
            return _Launch(time, phase, _kind_of(kind.removeprefix("wait_")), bucket)
    return _Launch(time, phase)


def _kind_of(name: str) -> str:
    """Return the kind of collective that a name contains, or else the name."""
    plain = name.replace("_", "").lower()
    return next((kind for kind in _KINDS if kind.replace("_", "") in plain), name)


def _clipped(runs: Iterable[_DeviceRun], window: Span) -> list[_DeviceRun]:
    """Return the runs in a window, cut to it."""
    since, until = window
    cut = (run._replace(start=max(run.start, since), end=min(run.end, until)) for run in runs)
    return [run for run in cut if run.end > run.start]


def _first_come(runs: Iterable[_DeviceRun]) -> list[_DeviceRun]:
    """Return the runs, ascending, without the time in which an earlier one runs, so that they are disjoint."""
    covered, disjoint = float("-inf"), []
    for run in runs:
        if run.end > covered:
            disjoint.append(run._replace(start=max(run.start, covered)))
            covered = run.end
    return disjoint
