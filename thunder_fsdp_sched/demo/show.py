"""The demo's output: progress, the traces before and after sorting, the comparison, and the checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..reports.report import before_and_after, human_bytes, plan_table, summarize_thunder
from .checks import Check, check_run
from .model import GPT
from .options import DemoOptions
from .training import UNSHARDED, Run, Tick, largest_difference, largest_loss_difference

__all__ = ["Screen", "make_console"]


def make_console() -> Console:
    """Return the console to print on, as wide as the terminal, or 132 columns if the output is redirected."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=132)
    return console


class Screen:
    """The output of the demo, which is silent on all ranks but one.

    Args:
        shown: whether this rank prints.
    """

    def __init__(self, options: DemoOptions, *, shown: bool) -> None:
        self.options = options
        self.shown = shown
        self.console = make_console()
        self._plan_shown = False
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not shown,
            transient=True,
        )
        self.task = self.progress.add_task("starting", total=(2 + len(options.strategies)) * options.steps)

    def __enter__(self) -> Screen:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def introduce(self, text: torch.Tensor) -> None:
        """Print the model, the text and the runs."""
        o = self.options
        with torch.device("meta"):
            model = GPT(blocks=o.blocks, width=o.width, heads=o.heads, length=o.length)
        parameters = sum(p.numel() for p in model.parameters())
        self._print(
            f"byte-level GPT, depth {o.blocks}, width {o.width}, {parameters / 1e6:.2f} M parameters in "
            f"{str(o.dtype).removeprefix('torch.')}; text: {human_bytes(len(text))} of this Python's standard library; "
            f"{o.steps} AdamW steps on {o.world_size} x {o.batch} sequences of {o.length} bytes; "
            f"{o.world_size} gloo ranks, one thread each"
        )

    def run(self, train: Callable[[Tick], Run]) -> Run:
        """Execute a training run with a progress bar."""

        done = 0

        def tick(what: str) -> None:
            nonlocal done
            self.progress.update(self.task, description=what, advance=1 if done else 0)
            done += 1

        run = train(tick)
        self.progress.advance(self.task)
        losses = " ".join(f"{loss:.4f}" for loss in run.losses)
        compiled = "" if run.name == UNSHARDED else f"compiled in {run.compile_seconds:.1f} s"
        self._print(f"  {run.name:15s} {compiled:19s} loss {losses}")
        return run

    def compare(self, unsharded: Run, stock: Run, ours: dict[str, Run]) -> int:
        """Print traces, table and checks, and return the number of failed checks."""
        o = self.options
        for run in ours.values():
            self._show_traces(run)
        assert stock.thunder_traces is not None
        for name, trace in zip(("forward", "backward"), stock.thunder_traces, strict=True):
            self._print(Text(f"Thunder's own fsdp (asked for ZeRO-3 and block buckets), {name}", style="bold"))
            self._print("\n".join(summarize_thunder(trace)) + "\n")
        self._print(comparison([unsharded, stock, *ours.values()], width=self.console.width))
        checks = [c for strategy, run in ours.items() for c in check_run(run, strategy, unsharded, stock, o)]
        self._print(checks_table(checks))
        failed = sum(not c.passed for c in checks)
        if failed:
            self._print(Text(f"{failed} of {len(checks)} checks FAILED", style="bold red"))
        else:
            self._print(Text(f"all {len(checks)} checks passed", style="bold green"))
        return failed

    def _show_traces(self, run: Run) -> None:
        traces, plan = run.traces, run.plan
        assert traces is not None and plan is not None
        if not self._plan_shown:
            self._print(plan_table(plan, title="buckets, the same for ZeRO-2 and ZeRO-3"))
            self._plan_shown = True
        for name, before, after in (
            ("forward", traces.forward_before, traces.forward),
            ("backward", traces.backward_before, traces.backward),
        ):
            assert before is not None and after is not None
            self._print(before_and_after(before, after, title=f"{run.name}, {name}", width=self.console.width))
            self._print()

    def _print(self, *what: object) -> None:
        if self.shown:
            self.console.print(*what, highlight=False, soft_wrap=False)


def comparison(runs: list[Run], *, width: int) -> Table:
    """Return the table of all runs, the unsharded one first. In less than 120 columns, each run is a column."""
    unsharded = runs[0]
    measures: dict[str, Callable[[Run], str]] = {
        "collec-\ntives": lambda run: str(len(run.counts.collectives)),
        "parameter\nbytes\ncopied": lambda run: human_bytes(run.counts.parameter_bytes_copied),
        "gradient\nbytes\ncopied": lambda run: human_bytes(run.counts.gradient_bytes_copied),
        "copied\nby gloo": lambda run: human_bytes(run.counts.backend_bytes_copied),
        "peak un-\nsharded,\nforward": lambda run: human_bytes(run.counts.peak_unsharded_bytes["forward"]),
        "peak un-\nsharded,\nbackward": lambda run: human_bytes(run.counts.peak_unsharded_bytes["backward"]),
        "allocated\nin the\nstep": lambda run: human_bytes(run.counts.unsharded_bytes_allocated),
        "kept\nbetween\nsteps": lambda run: human_bytes(run.kept_bytes),
        "step\nseconds": lambda run: f"{run.step_seconds:.2f}",
        "loss\ndiffers\nby": lambda run: _against(largest_loss_difference, run.losses, unsharded.losses),
        "param-\neters\ndiffer by": lambda run: _against(largest_difference, run.parameters, unsharded.parameters),
    }
    table = Table(
        title=f"one step; largest differences from the unsharded run in {len(unsharded.losses)} AdamW steps",
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption=(
            "Counted on rank 0 in the last step, optimizer included. Gradient bytes: copied, or scaled in a pass of "
            "their own. Peak: live from the all-gather to the last read, or until the memory is freed that the step "
            "allocated. Allocated: memory for unsharded parameters. Kept: all slots, for parameters and gradients. "
            "Seconds are for information: the unsharded run is plain PyTorch, in one process, on all batches."
        ),
        caption_justify="left",
    )
    if width >= 120:
        for column in ("", *measures):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        for run in runs:
            table.add_row(run.name, *(measure(run) for measure in measures.values()))
    else:
        for column in ("", *(run.name for run in runs)):
            table.add_column(column, justify="right" if column else "left")
        for name, measure in measures.items():
            table.add_row(name.replace("-\n", "").replace("\n", " "), *map(measure, runs))
    return table


def _against(difference: Callable[[Any, Any], float], ours: Any, unsharded: Any) -> str:
    return "" if ours is unsharded else f"{difference(ours, unsharded):.2g}"


def checks_table(checks: list[Check]) -> Table:
    """Return the table of checks with their evidence."""
    table = Table(title="checks", title_style="bold", title_justify="left", box=None, pad_edge=False, show_header=False)
    for check in checks:
        table.add_row(
            Text("pass" if check.passed else "FAIL", style="green" if check.passed else "bold red"),
            check.run,
            check.promise,
            Text(check.found),
        )
    return table
