"""Start the demo's ranks, and print the traces before and after sorting, the comparison, and the checks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from ..reports.report import before_and_after, human_bytes, plan_table, summarize_thunder
from .checks import Check, check_run
from .runs import (
    DemoOptions,
    Run,
    largest_difference,
    largest_loss_difference,
    read_text,
    run_fsdp,
    run_thunder,
    run_unsharded,
)


def make_console(*, quiet: bool = False) -> Console:
    """Return the console to print on, as wide as the terminal, or 132 columns if the output is redirected."""
    console = Console(quiet=quiet)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 132
    return console


def run_demo(options: DemoOptions) -> int:
    """Run the demo in ``options.world_size`` new processes on this machine, as ``torchrun`` does.

    Returns:
        The number of failed checks.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    command = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(options.world_size), "demo"]
    config, *_ = config_from_args(parse_args(command))
    failures: dict[int, int] = elastic_launch(config, run_rank)(options)
    return failures[0]


@record
def run_rank(options: DemoOptions) -> int:
    """Train on one of the ranks, of which the first prints; return the number of failed checks."""
    warnings.filterwarnings("ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor).*deprecated")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    try:
        first = dist.get_rank() == 0
        console, text = make_console(quiet=not first), read_text()
        parameters = sum(p.numel() for p in options.model().parameters())
        console.print(
            f"byte-level GPT, depth {options.blocks}, width {options.width}, {parameters / 1e6:.2f} M parameters in "
            f"{options.dtype.value}; text: {human_bytes(len(text))} of this Python's standard "
            f"library; {options.steps} AdamW steps on {options.world_size} x {options.batch} sequences of "
            f"{options.length} bytes; {options.world_size} gloo ranks, one thread each",
            highlight=False,
        )

        def run(what: str, train: Callable[..., Run], *args: Any) -> Run:
            with console.status(f"{what}: compiling and training"):
                done = train(*args, options, text)
            losses = " ".join(f"{loss:.4f}" for loss in done.losses)
            compiled = "" if what == "unsharded" else f"compiled in {done.compile_seconds:.1f} s"
            console.print(f"  {done.name:15s} {compiled:19s} loss {losses}", highlight=False)
            return done

        # The others wait in the first collective of the next run.
        unsharded = run("unsharded", run_unsharded) if first else None
        stock = run("Thunder's fsdp", run_thunder)
        ours = {strategy: run(strategy, run_fsdp, strategy) for strategy in options.sharding.strategies}
        return 0 if unsharded is None else _compare(console, options, unsharded, stock, ours)
    finally:
        dist.destroy_process_group()


def _compare(console: Console, options: DemoOptions, unsharded: Run, stock: Run, ours: dict[str, Run]) -> int:
    """Print traces, table and checks, and return the number of failed checks."""
    plan = next(iter(ours.values())).plan
    assert plan is not None
    console.print(plan_table(plan, title="buckets, the same for ZeRO-2 and ZeRO-3"), highlight=False)
    for run in ours.values():
        assert run.traces is not None
        for name in ("forward", "backward"):
            before, after = getattr(run.traces, f"{name}_before"), getattr(run.traces, name)
            console.print(before_and_after(before, after, title=f"{run.name}, {name}", width=console.width), "")
    for name, trace in zip(("forward", "backward"), stock.thunder_traces, strict=True):
        console.print(Text(f"Thunder's own fsdp (asked for ZeRO-3 and block buckets), {name}", style="bold"))
        console.print("\n".join(summarize_thunder(trace)) + "\n", highlight=False)
    console.print(comparison([unsharded, stock, *ours.values()]), highlight=False)
    checks = [(run.name, c) for name, run in ours.items() for c in check_run(run, name, unsharded, stock, options)]
    console.print(checks_table(checks), highlight=False)
    failed = sum(not check.passed for _, check in checks)
    if failed:
        console.print(Text(f"{failed} of {len(checks)} checks FAILED", style="bold red"))
    else:
        console.print(Text(f"all {len(checks)} checks passed", style="bold green"))
    return failed


def comparison(runs: list[Run]) -> Table:
    """Return the table of all runs, a column for each, the unsharded one first."""
    unsharded = runs[0]
    measures: dict[str, Callable[[Run], str]] = {
        "collectives": lambda run: str(len(run.counts.collectives)),
        "parameter bytes copied": lambda run: human_bytes(run.counts.parameter_bytes_copied),
        "gradient bytes copied": lambda run: human_bytes(run.counts.gradient_bytes_copied),
        "bytes copied by gloo": lambda run: human_bytes(run.counts.backend_bytes_copied),
        "peak unsharded, forward": lambda run: human_bytes(run.counts.peak_unsharded_bytes["forward"]),
        "peak unsharded, backward": lambda run: human_bytes(run.counts.peak_unsharded_bytes["backward"]),
        "allocated in the step": lambda run: human_bytes(run.counts.unsharded_bytes_allocated),
        "kept between steps": lambda run: human_bytes(run.kept_bytes),
        "step seconds": lambda run: f"{run.step_seconds:.2f}",
        "loss differs by": lambda run: f"{largest_loss_difference(run.losses, unsharded.losses):.2g}",
        "parameters differ by": lambda run: f"{largest_difference(run.parameters, unsharded.parameters):.2g}",
    }
    table = _table(f"one step; largest differences from the unsharded run in {len(unsharded.losses)} AdamW steps")
    table.caption = (
        "Counted on rank 0 in the last step, optimizer included. Gradient bytes: copied, or scaled in a pass of their own. "
        "Peak: live from the all-gather to the last read, or until the memory is freed that the step allocated. "
        "Allocated: memory for unsharded parameters. Kept: all slots, for parameters and gradients. Seconds are for "
        "information: the unsharded run is plain PyTorch, in one process, on all batches."
    )
    for column in ("", *(run.name for run in runs)):
        table.add_column(column, justify="right" if column else "left")
    for name, measure in measures.items():
        table.add_row(name, *map(measure, runs))
    return table


def checks_table(checks: list[tuple[str, Check]]) -> Table:
    """Return the table of checks with their evidence; the first of each pair is the name of the run."""
    table = _table("checks")
    table.show_header = False
    for name, check in checks:
        result = Text("pass", style="green") if check.passed else Text("FAIL", style="bold red")
        table.add_row(result, name, check.promise, Text(check.found))
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption_justify="left",
    )
