"""Plot a schedule (streams, exposed communication, buckets in slots) and the kinds of memory of a step."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import coded_error
from ...ir.schedule import GATHERS
from ..planning.timeline import COMPUTE, Interval, SlotUse, Timeline, union
from ..step_memory.step_memory import KINDS, StepMemory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"compute": "#b8c4d0", "gather": "#4c9f70", "reduction": "#e0a030", "exposed": "#d0312d", "gap": "#8a63c0"}
_COLORS_OF_MEMORY = dict(
    zip(
        KINDS,
        ("#5b6c7d", "#8a63c0", "#4c9f70", "#9ccfb3", "#b8c4d0", "#e0a030", "#d0312d", "#f0c987", "#7fb2d9"),
        strict=True,
    )
)
_LANE = 0.8  # height of a bar; lanes are 1 apart
_LABEL_SHARE = 0.011  # share of the picture's width for one character


def _figure(height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise coded_error(ImportError, "environment.pictures-need-matplotlib") from error
    return Figure(figsize=(14, height), layout="constrained")


def plot_timelines(timelines: Sequence[tuple[str, Timeline]], path: str | Path | None = None) -> Figure:
    """Draw simulated steps below each other, on one time axis.

    For each: a compute lane, a lane for each process group, and below a bar for each unsharded bucket while a slot holds
    it, in as many rows as slots are in use at once. On the compute lane, exposed communication is red, and gaps in
    which the device waits for the host to launch are violet; those shorter than 0.05 % of the picture are not drawn. A
    dotted line is the start of backward.

    Args:
        timelines: title and timeline of each step, ``[("before", ...), ("after", ...)]`` for a comparison.
        path: the file to write; its extension chooses the format (.png, .svg, .pdf).

    Raises:
        ImportError: matplotlib is not installed (the extra ``plot``).
    """
    timelines = [(title, replace(t, slots=_packed(t.slots))) for title, t in timelines]
    heights = [len(_lanes(t)) for _, t in timelines]
    figure = _figure(1.6 + sum(0.42 * h + 0.9 for h in heights))
    rows = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, height_ratios=[h + 2 for h in heights])
    end = max(t.step_seconds for _, t in timelines)
    scale, unit = (1e3, "ms") if end < 1 else (1.0, "s")
    for (title, timeline), [axes] in zip(timelines, rows, strict=True):
        _draw(axes, timeline, end * scale, scale)
        axes.set_title(textwrap.fill(f"{title}: {_summary(timeline)}", 140), loc="left", fontsize=10)
    rows[-1][0].set_xlabel(f"time in {unit}")
    rows[-1][0].set_xlim(0, end * scale * 1.005)
    names = {
        "compute": "compute",
        "gather": "all-gather; slot holding parameters",
        "reduction": "other collective; slot holding gradients",
        "exposed": "exposed: compute waits for communication",
        "gap": "launch gap: the device waits for the host",
    }
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=_COLORS[k], label=name) for k, name in names.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def _summary(timeline: Timeline) -> str:
    text = f"{timeline.breakdown}; communication {sum(timeline.communication_seconds.values()) * 1e3:,.1f} ms"
    return f"{text}, peak {timeline.peak_unsharded_bytes / 1e6:,.1f} MB unsharded" if timeline.slots else text


def _packed(uses: Iterable[SlotUse]) -> tuple[SlotUse, ...]:
    """Return the uses of slots, with the first free row in place of the slot, so that no row is nearly empty."""
    ends: list[float] = []
    packed = []
    for use in sorted(uses, key=lambda use: use.start):
        row = next((number for number, end in enumerate(ends) if end <= use.start), len(ends))
        ends[row : row + 1] = [use.end]
        packed.append(use._replace(slot=f"unsharded {row + 1}" if use.slot else ""))
    return tuple(packed)


def _lanes(timeline: Timeline) -> list[str]:
    """Return the names of compute, of process groups and copies, and of slots; without slots, one empty name."""
    return [COMPUTE, *timeline.communication_seconds, *dict.fromkeys(use.slot for use in timeline.slots)]


def _labels(bucket: str) -> list[str]:
    """Return the name of a bucket, and shorter ones that still name its block: ``blocks.0.up``, ``0.up``, ``0``."""
    parts = bucket.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return [bucket] if number is None else [bucket, ".".join(parts[number:]), parts[number]]


def _draw(axes: Axes, timeline: Timeline, end: float, scale: float) -> None:
    groups, lanes = list(timeline.communication_seconds), _lanes(timeline)
    y = {name: -float(number) for number, name in enumerate(lanes)}

    def bars(spans: Iterable[tuple[float, float]], color: str) -> None:
        ranges = [(start * scale, (stop - start) * scale) for start, stop in spans]
        axes.broken_barh(ranges, (y[COMPUTE] - _LANE / 2, _LANE), facecolors=_COLORS[color], linewidth=0)

    def bar(lane: str, use: Interval | SlotUse, label: str, alpha: float = 1.0) -> None:
        color, width = _COLORS["gather" if use.kind in GATHERS else "reduction"], (use.end - use.start) * scale
        how: dict[str, Any] = {"color": color, "alpha": alpha, "edgecolor": "white", "linewidth": 0.5}
        axes.barh(y[lane], width, left=use.start * scale, height=_LANE, **how)
        fitting = (text for text in _labels(label) if len(text) * _LABEL_SHARE * end <= width)
        if text := next(fitting, ""):  # a label that does not fit would cover its neighbours
            center = use.start * scale + width / 2
            axes.text(center, y[lane], text, ha="center", va="center", fontsize=7, clip_on=True)

    bars(
        union((i.span for i in timeline.intervals if i.kind == COMPUTE), end / scale / 2000), "compute"
    )  # thousands of kernels
    bars([(start, stop) for start, stop in timeline.launch_gaps if (stop - start) * scale >= end / 2000], "gap")
    bars([(i.start, i.end) for i in timeline.intervals if i.kind == "wait"], "exposed")
    for interval in timeline.collectives:
        bar(interval.stream, interval, interval.bucket)
    for use in timeline.slots:
        bar(use.slot, use, use.bucket if use.slot else "", alpha=0.55)  # without slots, buckets overlap in one lane
    if backward := [i.start for i in timeline.intervals if i.trace]:
        axes.axvline(min(backward) * scale, color="black", linewidth=0.8, linestyle=":", label="backward")
        axes.text(min(backward) * scale, 0.6, " backward", ha="left", va="top", fontsize=7)
    names = [f"group {lane}" if lane in groups and " " not in lane else lane or "no slots yet" for lane in lanes]
    axes.set_yticks([y[name] for name in lanes], names, fontsize=8)
    axes.set_ylim(-len(lanes) + 0.5, 0.6)
    axes.axhline(-len(groups) - 0.5, color="black", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def save_perfetto(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as a trace file in Chrome's JSON format, which Perfetto opens; times in microseconds."""
    tracks = {name: n for n, name in enumerate(_lanes(timeline))}
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


def plot_memory(memory: StepMemory, path: str | Path | None = None, *, timeline: Timeline | None = None) -> Figure:
    """Draw the bytes of each kind of memory as stacked areas, with marks at the peak and at the start of backward.

    Args:
        path: the file to write; its extension chooses the format (.png, .svg, .pdf).
        timeline: the simulated step, forward and backward, for an axis of time; by default the axis counts positions.

    Raises:
        ImportError: matplotlib is not installed (the extra ``plot``).
    """
    length, peak = len(memory.totals), memory.peak
    scale, unit = (1e9, "GB") if peak.nbytes >= 1e9 else (1e6, "MB")
    begins = list(range(length + 1)) if timeline is None else _milliseconds(memory, timeline)
    areas = {kind: [nbytes / scale for nbytes in memory.bytes_of(kind)] for kind in KINDS}
    areas = {kind: values for kind, values in areas.items() if any(values)}
    figure = _figure(5.5)
    axes = figure.subplots()
    axes.stackplot(
        begins,
        *([*values, values[-1]] for values in areas.values()),
        labels=[f"{kind}, {peak.by_kind[kind] / scale:,.2f} {unit} at the peak" for kind in areas],
        colors=[_COLORS_OF_MEMORY[kind] for kind in areas],
        step="post",
        linewidth=0,
    )
    at = begins[peak.position]
    axes.plot([at], [peak.nbytes / scale], "v", color="black", markersize=7)
    if memory.backward < length:
        axes.axvline(begins[memory.backward], color="black", linewidth=0.6, linestyle="--")
        axes.text(begins[memory.backward], 0, " backward", fontsize=8, va="bottom")
    source = next((t.source for t in memory.tensors if t.start == peak.position and t.source), "")
    where = ", ".join(filter(None, [_short(peak.statement), source.rpartition("/")[2]]))
    axes.set_title(
        f"peak {peak.nbytes / scale:,.2f} {unit} in {peak.phase} at position {peak.position}: {where}",
        loc="left",
        fontsize=10,
    )
    axes.set_xlabel("position in forward and backward" if timeline is None else "time in ms")
    axes.set_ylabel(unit)
    axes.set_xlim(begins[0], begins[-1])
    axes.set_ylim(0, 1.06 * peak.nbytes / scale)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def save_memory(memory: StepMemory, path: str | Path) -> None:
    """Write the memory of a step as JSON: the bytes of each kind at each position, and all tensors."""
    content = {
        "backward": memory.backward,
        "bytes": {kind: memory.bytes_of(kind) for kind in KINDS},
        "statements": list(memory.statements),
        "tensors": [tensor._asdict() for tensor in memory.tensors],
    }
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def _milliseconds(memory: StepMemory, timeline: Timeline) -> Sequence[float]:
    """Return the start of each position, and the end of the step."""
    begins = [0.0] * len(memory.totals)
    for interval in timeline.intervals:
        index = interval.position + memory.backward * interval.trace
        if interval.stream == COMPUTE and index < len(begins):
            begins[index] = max(begins[index], 1e3 * interval.start)
    return [*accumulate(begins, max), 1e3 * timeline.step_seconds]  # a position without time begins with the one before


def _short(statement: str) -> str:
    """Return a statement without its comment, and cut to the width of a title."""
    line = statement.partition("  #")[0]
    return line if len(line) <= 80 else line[:77] + "..."
