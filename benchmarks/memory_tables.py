"""The evaluation of ``memory.py``: comparisons at equal peak, tables, promises, and the picture."""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, field
from typing import Any

from netns import describe_link
from systems import ratio

__all__ = ["Point", "Results", "equal_peaks", "finish", "summarized"]

BAR = 0.92
"""Limit on the step time of ours, divided by that of the best other system, at equal peak."""

BLOCK_WISE = ("every block", "every second block")


@dataclass
class Results:
    """The figures of a run.

    Attributes:
        figures: figures of each system that ran.
        refused: the messages of budgets that nothing fits.
        seconds: seconds of the slowest rank, for each system and round.
        losses: the losses of each system on this rank.
    """

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """A comparison at equal peak.

    Attributes:
        ours: the name of ours with that budget.
        budget: the budget, in bytes.
        best: the fastest other system whose peak is at most the budget, or that of ours if that is larger; ``None`` if
            there is none.
        ratio: the step time of ours divided by that of ``best``, as the median over rounds.
        block_wise: the systems with checkpoints of whole blocks, and without, whose peak is at most that.
    """

    ours: str
    budget: int
    best: str | None
    ratio: float | None
    block_wise: tuple[str, ...]


def equal_peaks(results: Results) -> list[Point]:
    """Return a comparison for each budget of ours that fits."""
    others = [name for name in results.figures if not name.startswith("ours")]
    points = []
    for name, figures in results.figures.items():
        if "budget" not in figures:
            continue
        limit = max(figures["budget"], figures["peak"])  # the others may have as much as was counted for ours
        fitting = [other for other in others if results.figures[other]["peak"] <= limit]
        best = min(fitting, key=lambda other: statistics.median(results.seconds[other]), default=None)
        of_best = None if best is None else ratio(results.seconds[name], results.seconds[best])
        block_wise = tuple(n for n in fitting if "compiled" not in n and "selective" not in n)
        points.append(Point(name, figures["budget"], best, of_best, block_wise))
    return points


def summarized(results: Results) -> dict[str, dict[str, Any]]:
    """Return the figures of each system with its step time."""
    return {
        name: {**figures, "seconds": statistics.median(steps), "least": min(steps), "most": max(steps)}
        for (name, figures), steps in ((item, results.seconds[item[0]]) for item in results.figures.items())
    }


def promises(results: Results, points: list[Point]) -> list[tuple[bool, str]]:
    """Return what this benchmark is to show: whether each promise holds, and its text with the figure."""
    made = []
    for point in points:
        peak = results.figures[point.ours]["peak"]
        made.append((peak <= point.budget, f"{point.ours}: counted {_mb(peak)} of a budget of {_mb(point.budget)}"))
    for point in points:
        if point.ratio is not None:
            made.append((point.ratio <= BAR, f"{point.ours}: {point.ratio:.2f} of {point.best}, {BAR}"))
    alone = [point.ours for point in points if not point.block_wise]
    made.append((bool(alone), f"budgets that no checkpoints of blocks meet: {', '.join(alone) or 'none'}"))
    made += [(False, f"{name}: {why}") for name, why in results.refused.items()]
    return made


def finish(arguments: argparse.Namespace, results: Results) -> None:
    """Print the tables and promises, and save the figures and the picture."""
    from thunder_fsdp_sched.demo.show import make_console

    figures, points = summarized(results), equal_peaks(results)
    console = make_console()
    console.width = 160
    link = describe_link(arguments)
    compute = "real compute" if arguments.real else f"{arguments.compute} s of emulated compute"
    console.print(
        f"{arguments.ranks} gloo ranks, {link}; GPT with {arguments.blocks} blocks, width {arguments.width}, "
        f"{arguments.batch} x {arguments.length} bytes a rank; {compute}; {arguments.rounds} rounds",
        highlight=False,
    )
    console.print(steps_table(figures), highlight=False)
    console.print(parts_table(figures), highlight=False)
    if points:
        console.print(points_table(figures, points), highlight=False)
        for kept, promise in promises(results, points):
            console.print(("kept    " if kept else "MISSED  ") + promise, highlight=False)
    else:
        console.print("fsdp has no option max_memory here, so there are no budgets.", highlight=False)
    losses = list(results.losses.values())
    spread = max(abs(a - b) for of_one in losses for a, b in zip(of_one, losses[0], strict=True))
    console.print(f"Losses of all systems on this rank differ by {spread:.1g} at most.", highlight=False)
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
        stem = "memory_real" if arguments.real else "memory"
        saved = {
            "setup": {key: value for key, value in vars(arguments).items() if key != "save"},
            "figures": figures,
            "equal_peaks": [vars(point) for point in points],
            "refused": results.refused,
            "seconds": results.seconds,
        }
        (arguments.save / f"{stem}.json").write_text(json.dumps(saved, indent=1))
        draw(figures, arguments.save / f"{stem}.png")


def steps_table(figures: dict[str, dict[str, Any]]) -> Any:
    from memory import REFERENCE

    reference = figures[REFERENCE]
    made = _table("peaks and steps", "", "peak", "of\nours", "FLOPs", "step s", "least–most", "predicted\npeak")
    for column in ("simulated\nstep", "by\nprofile", "compile\ns"):
        made.add_column(column, justify="right", no_wrap=True)
    for name, of_one in figures.items():
        seconds = of_one["seconds"]
        made.add_row(
            name,
            _mb(of_one["peak"]),
            f"{of_one['peak'] / reference['peak']:.0%}",
            f"{of_one['flops'] / reference['flops']:.2f}",
            f"{seconds:.3f}",
            f"{of_one['least']:.2f}–{of_one['most']:.2f}",
            f"{of_one['predicted'] / of_one['peak']:.3f}" if "predicted" in of_one else "",
            *(f"{of_one[key] / seconds:.2f}" if key in of_one else "" for key in ("simulated", "simulated_by_profile")),
            f"{of_one['compile_seconds']:.1f}",
        )
    made.caption = "Predicted and simulated: divided by what was counted and measured."
    made.caption_justify = "left"
    return made


def parts_table(figures: dict[str, dict[str, Any]]) -> Any:
    names = list(next(iter(figures.values()))["at_peak"])
    made = _table("what the peak consists of", "", *(name.replace(" ", "\n", 1) for name in names), "after\nforward")
    for name, of_one in figures.items():
        made.add_row(name, *map(_mb, of_one["at_peak"].values()), _mb(of_one["after_forward"][names[-1]]))
    made.caption = "After forward: activations and others, when forward has returned."
    made.caption_justify = "left"
    return made


def points_table(figures: dict[str, dict[str, Any]], points: list[Point]) -> Any:
    made = _table("at equal peak", "", "budget", "peak", "step s", "ours /\nbest", "", "its\npeak", "its\nstep s")
    for point in points:
        ours = figures[point.ours]
        row = [point.ours, _mb(point.budget), _mb(ours["peak"]), f"{ours['seconds']:.3f}"]
        if point.best is not None:
            best = figures[point.best]
            row += [f"{point.ratio:.2f}", point.best, _mb(best["peak"]), f"{best['seconds']:.3f}"]
        made.add_row(*row)
    made.caption = (
        "The best of the other systems whose peak is at most the budget; medians of the ratios in each round."
    )
    made.caption_justify = "left"
    return made


def _table(title: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
    made.pad_edge, made.collapse_padding = False, True
    for column in columns:
        made.add_column(column, justify="right" if column else "left", no_wrap=True)
    return made


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


def draw(figures: dict[str, dict[str, Any]], path: Any) -> None:
    """Draw step times over peaks, a line for each family of systems."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.5, 4.5))
    families: dict[str, list[str]] = {}
    for name, of_one in figures.items():
        if "budget" in of_one:
            family = "ours with max_memory"
        else:
            family = name.split(",")[0]
            family += " (compiled)" * ("compiled" in name) + " (selective)" * ("selective" in name)
        families.setdefault(family, []).append(name)
    for family, names in families.items():
        places = sorted((figures[name]["peak"] / 1e6, figures[name]["seconds"]) for name in names)
        ours = family.startswith("ours")
        axis.plot(
            *zip(*places, strict=True),
            marker="o" if ours else "s",
            markersize=4,
            linewidth=2 if ours else 1,
            linestyle="-" if len(names) > 1 else "none",
            label=family,
        )
    axis.set_xlabel("peak of a step, MB")
    axis.set_ylabel("step, s")
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
