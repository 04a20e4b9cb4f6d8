"""Plot a schedule: the activities of each stream, exposed communication, and the buckets in each slot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ir.symbols import GATHERS
from ..planning.timeline import COMPUTE, Interval, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"compute": "#b8c4d0", "gather": "#4c9f70", "reduction": "#e0a030", "exposed": "#d0312d", "gap": "#8a63c0"}
_LANE = 0.8  # height of a bar; lanes are 1 apart
_LABEL_SHARE = 0.011  # share of the picture's width for one character


def plot_timelines(timelines: Sequence[tuple[str, Timeline]], path: str | Path | None = None) -> Figure:
    """Draw simulated steps below each other, on one time axis.

    For each: a compute lane, a lane for each process group, and the slots below, one bar for each unsharded bucket that
    a slot holds. On the compute lane, exposed communication is red, and gaps in which the device waits for the host to
    launch are violet; shorter ones than half a thousandth of the picture are not drawn.

    Args:
        timelines: title and timeline of each step, ``[("before", ...), ("after", ...)]`` for a comparison.
        path: the file to write; its extension chooses the format (.png, .svg, .pdf).

    Raises:
        ImportError: matplotlib is not installed (the extra ``plot``).
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'thunder_fsdp_sched[plot]'") from error
    heights = [_lanes(t) for _, t in timelines]
    figure = Figure(figsize=(14, 1.6 + sum(0.42 * h + 0.9 for h in heights)), layout="constrained")
    rows = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, height_ratios=[h + 2 for h in heights])
    end = max(t.step_seconds for _, t in timelines)
    scale, unit = (1e3, "ms") if end < 1 else (1.0, "s")
    for (title, timeline), [axes] in zip(timelines, rows, strict=True):
        _draw(axes, timeline, end * scale, scale)
        axes.set_title(f"{title}: {_summary(timeline)}", loc="left", fontsize=10)
    rows[-1][0].set_xlabel(f"time in {unit}")
    rows[-1][0].set_xlim(0, end * scale * 1.005)
    names = {
        "compute": "compute",
        "gather": "all-gather; slot holding parameters",
        "reduction": "reduction; slot holding gradients",
        "exposed": "exposed: compute waits for communication",
        "gap": "launch gap: the device waits for the host",
    }
    patches = [Patch(facecolor=_COLORS[k], label=name) for k, name in names.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def _summary(timeline: Timeline) -> str:
    return (
        f"{timeline.breakdown}; communication {sum(timeline.communication_seconds.values()) * 1e3:,.1f} ms, peak "
        f"{timeline.peak_unsharded_bytes / 1e6:,.1f} MB unsharded"
    )


def _slots(timeline: Timeline) -> list[str]:
    return list(dict.fromkeys(use.slot for use in timeline.slots))


def _lanes(timeline: Timeline) -> int:
    return 1 + len(timeline.communication_seconds) + len(_slots(timeline))


def _draw(axes: Axes, timeline: Timeline, end: float, scale: float) -> None:
    groups, slots = list(timeline.communication_seconds), _slots(timeline)
    lanes = ["compute", *groups, *slots]
    y = {name: -float(number) for number, name in enumerate(lanes)}
    compute = _merged((i for i in timeline.intervals if i.kind == COMPUTE), gap=end / scale / 2000)
    _bars(axes, y["compute"], compute, _COLORS["compute"], scale)
    gaps = [(start, stop) for start, stop in timeline.launch_gaps if (stop - start) * scale >= end / 2000]
    _bars(axes, y["compute"], gaps, _COLORS["gap"], scale)
    waits = [(i.start, i.end) for i in timeline.intervals if i.kind == "wait"]
    _bars(axes, y["compute"], waits, _COLORS["exposed"], scale)
    for interval in timeline.collectives:
        color = _COLORS["gather" if interval.kind in GATHERS else "reduction"]
        _bar(axes, y[interval.stream], interval.start, interval.end, color, interval.bucket, end, scale)
    for use in timeline.slots:
        color = _COLORS["gather" if use.kind in GATHERS else "reduction"]
        label = use.bucket if use.slot else ""  # without slots, buckets overlap in one lane
        _bar(axes, y[use.slot], use.start, use.end, color, label, end, scale, alpha=0.55)
    axes.set_yticks([y[name] for name in lanes], [_lane_name(n, groups) for n in lanes], fontsize=8)
    axes.set_ylim(-len(lanes) + 0.5, 0.6)
    axes.axhline(-len(groups) - 0.5, color="black", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _lane_name(lane: str, groups: Sequence[str]) -> str:
    return f"group {lane}" if lane in groups else lane or "no slots yet"


def _bars(axes: Axes, y: float, spans: Iterable[tuple[float, float]], color: str, scale: float) -> None:
    ranges = [(start * scale, (end - start) * scale) for start, end in spans]
    axes.broken_barh(ranges, (y - _LANE / 2, _LANE), facecolors=color, linewidth=0)


def _bar(
    axes: Axes,
    y: float,
    start: float,
    end: float,
    color: str,
    label: str,
    full: float,
    scale: float,
    alpha: float = 1.0,
) -> None:
    width = (end - start) * scale
    axes.barh(y, width, left=start * scale, height=_LANE, color=color, alpha=alpha, edgecolor="white", linewidth=0.5)
    short = label if len(label) * _LABEL_SHARE * full <= width else label.rpartition(".")[2]
    if len(short) * _LABEL_SHARE * full <= width:  # a label that does not fit would cover its neighbours
        axes.text(start * scale + width / 2, y, short, ha="center", va="center", fontsize=7, clip_on=True)


def _merged(intervals: Iterable[Interval], gap: float) -> list[tuple[float, float]]:
    """Merge intervals with at most ``gap`` seconds between them, so that thousands of kernels become one bar."""
    runs: list[tuple[float, float]] = []
    for interval in intervals:
        if runs and interval.start - runs[-1][1] <= gap:
            runs[-1] = (runs[-1][0], interval.end)
        else:
            runs.append((interval.start, interval.end))
    return runs


def save_perfetto(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as a trace file in Chrome's JSON format, which Perfetto opens; times in microseconds."""
    tracks = {name: n for n, name in enumerate([COMPUTE, *timeline.communication_seconds, *_slots(timeline)])}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}} for name, tid in tracks.items()
    ]
    for i in timeline.intervals:
        name = f"{i.label} {i.bucket}".strip()
        arguments = {"position": i.position, "trace": i.trace}
        events.append(_event(tracks[i.stream], name, i.kind, i.start, i.end, arguments))
    for use in timeline.slots:
        arguments = {"bytes": use.nbytes}
        events.append(_event(tracks[use.slot], use.bucket, use.kind, use.start, use.end, arguments))
    for time, nbytes in timeline.memory:
        events.append({"ph": "C", "pid": 0, "name": "unsharded bytes", "ts": time * 1e6, "args": {"bytes": nbytes}})
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _event(tid: int, name: str, category: str, start: float, end: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "pid": 0, "tid": tid, "name": name, "cat": category, "ts": start * 1e6, "dur": (end - start) * 1e6,
        "args": arguments,
    }  # fmt: skip
