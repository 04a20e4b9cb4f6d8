"""Steps that torch's profiler has recorded, read from its files.

[Note: Recorded communication]
On a GPU, kernels of NCCL and NVSHMEM are communication. Of the other kernels, the stream with the longest total time is
the compute stream. On other streams, copies, and kernels that were launched in a range of this package or of FSDP2, are
communication. Everything else is compute.

On a CPU, the threads of gloo record when each collective runs. Communication is exposed while a collective runs and the
host waits in one of this package's ranges. The messages of a round of agreement count as running while the host waits for
them. Nothing records when other code waits, such as FSDP2. Its collectives are exposed while they run and no operator does,
other than those that communicate; that includes the host's time between operators.

Every moment of exposed communication counts once. It belongs to the collective that the host waits for; if that is not
recorded, to the one that started first of those that run.
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
"""Values of ``Interval.trace`` in a recorded step; the last is for what runs before forward or after backward."""

_KINDS = (
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier", "gather", "scatter", "reduce",
)  # fmt: skip
_OURS = "fsdp_"
_RANGE = re.compile(r"(fsdp_|FSDP::)(\w+)(?: ?\((.*)\))?")
_WAIT = "fsdp_wait_"
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
        timeline: what ran. Its collectives have the names of buckets, and in ``trace`` the phase (:data:`FORWARD`,
            :data:`BACKWARD`, :data:`OUTSIDE`). Its waits are the exposed communication, in disjoint intervals.
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
        The steps in order, and of each step the ranks in order.

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
    start: float
    end: float
    name: str
    category: str
    thread: Any
    args: dict[str, Any]

    @property
    def span(self) -> Span:
        return self.start, self.end


class _RecordedIssue(NamedTuple):
    """Something that the host issued: when, in which phase, for which bucket, and the kind of range that says so."""

    time: float
    kind: str
    bucket: str
    phase: int
    by: str


class _RecordedInterval(NamedTuple):
    """Something that ran on a device or in a thread of gloo, or the host's wait for it."""

    start: float
    end: float
    lane: str
    issue: _RecordedIssue


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
        communication: what [Note: Recorded communication] calls so.
        compute: the rest of what ran on a GPU; ``None`` on a CPU, where it is all that is not exposed.
        issues: the collectives that the host issued, each after the kind of collective that gloo runs for it.
        launches: launches of what ran on a device, by the number that both events have.
        waits: this package's waits for collectives.
        operators: when operators ran, other than those that communicate or contain one that does.
        backward: when events of backward ended.
    """

    def __init__(self, events: Sequence[_Event]) -> None:
        self.steps = [(*e.span, e.name) for e in events if e.name.startswith("ProfilerStep")]
        self.backward = [e.end for e in events if _BACKWARD.search(e.name)]
        self.issues: list[tuple[str, _RecordedIssue]] = []
        self.launches: dict[Any, _RecordedIssue] = {}
        self.waits: list[_RecordedInterval] = []
        threads: dict[Any, list[_Event]] = defaultdict(list)
        for event in events:
            if event.category in _BY_HOST and not event.name.startswith(("gloo:", "ProfilerStep")):
                threads[event.thread].append(event)
        self.operators = union(span for of_thread in threads.values() for span in self._sweep(of_thread))
        self.issues.sort(key=lambda of: of[1].time)
        self.waits.sort()
        on_device = [e for e in events if e.category in _ON_DEVICE]
        self.communication: list[_RecordedInterval] = []
        self.compute: list[_RecordedInterval] | None = [] if on_device else None
        if self.compute is None:
            self.communication += [
                wait._replace(lane="agreement") for wait in self.waits if wait.issue.kind == "agreement"
            ]
            rounds = [e.span for e in events if e.name in ("fsdp_agreement", "fsdp_wait_agreement")]
            gloo = [e for e in events if e.name.startswith("gloo:")]
            self._match([e for e in gloo if not any(start <= e.start < end for start, end in rounds)])
            self.communication.sort()
        else:
            self._sort_out(on_device, self.compute)

    def _sweep(self, events: Sequence[_Event]) -> list[Span]:
        """Note what one thread issued and waited for, and return when its operators ran."""
        enclosing: list[_Event] = []
        contain: set[int] = set()
        for event in events:
            enclosing = [*(e for e in enclosing if e.end > event.start), event]
            if event.category.startswith("cuda_"):
                self.launches[event.args.get("correlation")] = _issue(enclosing)
                continue
            if event.name.startswith(_WAIT):
                self.waits.append(_RecordedInterval(*event.span, "", _issue(enclosing)))
            elif event.name.startswith("c10d::") or event.name == "fsdp_agreement":
                self.issues.append((_kind_of(event.name), _issue(enclosing)))
            elif not event.name.startswith("_c10d_functional::"):
                continue
            contain.update(map(id, enclosing))
        return [e.span for e in events if e.category == "cpu_op" and id(e) not in contain]

    def _match(self, events: Sequence[_Event]) -> None:
        """Find what issued the collectives of gloo, whose threads take those of a group in the order of their issue."""
        pending, threads = list(self.issues), sorted({event.thread for event in events})
        has_ours = any(issue.by == _OURS for _, issue in pending)
        for event in events:
            kind = _kind_of(event.name)
            issue = _RecordedIssue(event.start, kind, "", FORWARD, _OURS if has_ours else "")
            for of in pending:
                if of[0] in (kind, "reduce_scatter" if kind == "all_reduce" else kind) and of[1].time <= event.start:
                    pending.remove(of)
                    issue = of[1]
                    break
            self.communication.append(
                _RecordedInterval(*event.span, f"gloo thread {threads.index(event.thread) + 1}", issue)
            )

    def _sort_out(self, events: Sequence[_Event], compute: list[_RecordedInterval]) -> None:
        """Tell communication from compute on a GPU."""
        busy: dict[Any, float] = defaultdict(float)
        for event in events:
            if event.category == "kernel" and not _KERNEL.search(event.name):
                busy[event.args.get("stream")] += event.end - event.start
        compute_stream = max(busy, key=busy.__getitem__, default=None)
        for event in events:
            stream = event.args.get("stream")
            issue = self.launches.get(event.args.get("correlation")) or _RecordedIssue(event.start, "", "", FORWARD, "")
            moves = event.category != "kernel" or issue.by
            communicates = _KERNEL.search(event.name) or (stream != compute_stream and moves)
            issue = issue if issue.by else issue._replace(kind=_kind_of(event.name))
            (self.communication if communicates else compute).append(
                _RecordedInterval(*event.span, f"stream {stream}", issue)
            )

    def _ran(self, launched: Span) -> Span:
        """Return when the device began and ended what the host launched in this time; on a CPU the time itself."""
        runs = [*self.communication, *self.compute] if self.compute is not None else []
        of_these = [run for run in runs if launched[0] <= run.issue.time < launched[1]]
        return (min(r.start for r in of_these), max(r.end for r in of_these)) if of_these else launched

    def _exposed(self, window: Span) -> list[Span]:
        """Return when communication ran and compute did not."""
        running = _spans(self.communication, window)
        if self.compute is not None:
            return _both(gaps(_spans(self.compute, window), *window), running)
        others = _spans([run for run in self.communication if run.issue.by != _OURS], window)
        idle = gaps(_both(self.operators, [window]), *window)
        return union([*_both(_spans(self.waits, window), running), *_both(idle, others)])

    def step(self, path: Path, rank: int, start: float, end: float, name: str) -> RecordedStep:
        """Return the step that the host ran in this time."""
        window = since, until = self._ran((start, end))
        exposed = self._exposed(window)
        collectives = _clipped(self.communication, window)
        waits = _clipped(self.waits, window)
        unknown = _both(exposed, gaps(_spans(waits, window), *window))
        blamed = [*overlaps(exposed, waits), *overlaps(unknown, _first_come(collectives))]
        computing = gaps(exposed, *window) if self.compute is None else _spans(self.compute, window)

        def interval(start: float, end: float, stream: str, kind: str, issue: _RecordedIssue) -> Interval:
            return Interval(stream, kind, issue.kind, issue.bucket, start - since, end - since, issue.phase, 0)

        work = _RecordedIssue(since, COMPUTE, "", FORWARD, "")
        intervals = [interval(begin, stop, COMPUTE, COMPUTE, work) for begin, stop in computing]
        intervals += [interval(begin, stop, COMPUTE, "wait", run.issue) for begin, stop, run in sorted(blamed)]
        intervals += [interval(r.start, r.end, r.lane, f"fsdp_{r.issue.kind}", r.issue) for r in collectives]
        lanes = sorted({run.lane for run in collectives})
        busy = {lane: length(_spans([r for r in collectives if r.lane == lane], window)) for lane in lanes}
        timeline = Timeline(tuple(intervals), (), until - since, length(computing), 0.0, busy)
        named = [issue.time for _, issue in self.issues if issue.by and start <= issue.time < end]
        ends = [time for time in self.backward if start < time <= end]
        passes = self._ran((min(named, default=start), max(ends, default=end)))
        return RecordedStep(str(path), rank, name, (passes[0] - since, passes[1] - since), timeline)


def _issue(enclosing: Sequence[_Event]) -> _RecordedIssue:
    """Identify the collective that the last event issues from the profiler ranges around it."""
    event = enclosing[-1]
    phase = BACKWARD if any(_BACKWARD.search(e.name) for e in enclosing) else FORWARD
    if any(e.name.startswith("Optimizer.") for e in enclosing):
        phase = OUTSIDE
    for outer in reversed(enclosing):
        if match := _RANGE.fullmatch(outer.name):
            by, kind, bucket = match.groups()
            bucket = bucket or ("" if by == _OURS else "(root)")
            return _RecordedIssue(event.start, _kind_of(kind.removeprefix("wait_")), bucket, phase, by)
    annotations = [e.name for e in enclosing if e.category == "user_annotation"]
    return _RecordedIssue(event.start, _kind_of(event.name), annotations[-1] if annotations else "", phase, "")


def _kind_of(name: str) -> str:
    """Return the kind of collective that a name contains, or else the name."""
    plain = name.replace("_", "").lower()
    return next((kind for kind in _KINDS if kind.replace("_", "") in plain), name)


def _clipped(runs: Iterable[_RecordedInterval], window: Span) -> list[_RecordedInterval]:
    """Return the runs in a window, cut to it."""
    since, until = window
    cut = (run._replace(start=max(run.start, since), end=min(run.end, until)) for run in runs)
    return [run for run in cut if run.end > run.start]


def _spans(runs: Iterable[_RecordedInterval], window: Span) -> list[Span]:
    """Return when any of the runs ran in a window."""
    return union((run.start, run.end) for run in _clipped(runs, window))


def _both(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the time that both have; each ascending and disjoint."""
    return [(start, end) for start, end, _ in overlaps(spans, others)]


def _first_come(runs: Iterable[_RecordedInterval]) -> list[_RecordedInterval]:
    """Return the runs, ascending, without the time in which an earlier one runs, so that they are disjoint."""
    covered, disjoint = float("-inf"), []
    for run in runs:
        if run.end > covered:
            disjoint.append(run._replace(start=max(run.start, covered)))
            covered = run.end
    return disjoint
