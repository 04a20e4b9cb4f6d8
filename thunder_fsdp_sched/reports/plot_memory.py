"""Plot the memory of a step: the kinds of memory stacked over its positions or its time, with the peak marked and named."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ..ir.step_memory import KINDS, StepMemory
from ..planning.timeline import COMPUTE, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = dict(
    zip(
        KINDS,
        ("#5b6c7d", "#8a63c0", "#4c9f70", "#9ccfb3", "#b8c4d0", "#e0a030", "#d0312d", "#f0c987", "#7fb2d9"),
        strict=True,
    )
)


def plot_memory(memory: StepMemory, path: str | Path | None = None, *, timeline: Timeline | None = None) -> Figure:
    """Draw the bytes of each kind of memory as stacked areas, with a mark at the peak and where backward begins.

    Args:
        path: the file to write; its extension chooses the format (.png, .svg, .pdf).
        timeline: the simulated step, forward and backward, for an axis of time; by default the axis counts positions.

    Raises:
        ImportError: matplotlib is not installed (the extra ``plot``).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'thunder_fsdp_sched[plot]'") from error
    length, peak = len(memory.totals), memory.peak
    scale, unit = (1e9, "GB") if peak.nbytes >= 1e9 else (1e6, "MB")
    begins = list(range(length + 1)) if timeline is None else _milliseconds(memory, timeline)
    areas = {kind: [nbytes / scale for nbytes in memory.bytes_of(kind)] for kind in KINDS}
    areas = {kind: values for kind, values in areas.items() if any(values)}
    figure = Figure(figsize=(14, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(
        begins,
        *([*values, values[-1]] for values in areas.values()),
        labels=[f"{kind}, {peak.by_kind[kind] / scale:,.2f} {unit} at the peak" for kind in areas],
        colors=[_COLORS[kind] for kind in areas],
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


def _milliseconds(memory: StepMemory, timeline: Timeline) -> Sequence[float]:
    """Return when each position begins, and the end of the step."""
    begins = [0.0] * len(memory.totals)
    for interval in timeline.intervals:
        index = interval.position + memory.backward * interval.trace
        if interval.stream == COMPUTE and index < len(begins):
            begins[index] = max(begins[index], 1e3 * interval.start)
    return [*accumulate(begins, max), 1e3 * timeline.step_seconds]  # what takes no time begins with what precedes it


def _short(statement: str) -> str:
    """Return a statement without its comment, and cut to the width of a title."""
    line = statement.partition("  #")[0]
    return line if len(line) <= 80 else line[:77] + "..."
