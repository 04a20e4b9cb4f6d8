"""Start the demo's ranks, and print the traces before and after sorting, the comparison, and the checks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from thunder.core.trace import TraceCtx
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from .. import testing
from ..ir.effects import sends
from ..reports.report import before_and_after, human_bytes, plan_table, summarize_thunder
from .runs import DemoOptions, Run, read_text, run_fsdp, run_thunder, run_unsharded


def make_console(*, quiet: bool = False) -> Console:
    """Return the console to print on, as wide as the terminal, or 132 columns if the output is redirected."""
    console = Console(quiet=quiet, highlight=False)
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
            f"{options.dtype.value}; text: {human_bytes(len(text))} of this Python's standard library; "
            f"{options.steps} AdamW steps on {options.world_size} x {options.batch} sequences of {options.length} bytes; "
            f"{options.world_size} gloo ranks, one thread each"
        )

        def run(what: str, train: Callable[..., Run], *args: Any) -> Run:
            with console.status(f"{what}: compiling and training"):
                done = train(*args, options, text)
            losses = " ".join(f"{loss:.4f}" for loss in done.losses)
            compiled = "" if what == "unsharded" else f"compiled in {done.compile_seconds:.1f} s"
            console.print(f"  {done.name:15s} {compiled:19s} loss {losses}")
            return done

        # The others wait in the first collective of the next run.
        unsharded = run("unsharded", run_unsharded) if first else None
        stock = run("Thunder's fsdp", run_thunder)
        ours = {strategy: run(strategy, run_fsdp, strategy) for strategy in options.sharding.strategies}
        return 0 if unsharded is None else _report(console, options, unsharded, stock, ours)
    finally:
        dist.destroy_process_group()


def _report(console: Console, options: DemoOptions, unsharded: Run, stock: Run, ours: dict[str, Run]) -> int:
    """Print traces, comparison and checks, and return the number of failed checks."""
    plan = next(iter(ours.values())).plan
    assert plan is not None
    console.print(plan_table(plan, title="buckets, the same for ZeRO-2 and ZeRO-3"))
    for run in ours.values():
        for name in ("forward", "backward"):
            before, after = getattr(run.traces, f"{name}_before"), getattr(run.traces, name)
            console.print(before_and_after(before, after, title=f"{run.name}, {name}", width=console.width), "")
    for name, trace in zip(("forward", "backward"), stock.thunder_traces, strict=True):
        console.print(Text(f"Thunder's own fsdp (asked for ZeRO-3 and block buckets), {name}", style="bold"))
        console.print("\n".join(summarize_thunder(trace)) + "\n")
    console.print(_comparison([unsharded, stock, *ours.values()]))
    checks = [(run.name, c) for name, run in ours.items() for c in check_run(run, name, unsharded, stock, options)]
    results = {True: Text("pass", style="green"), False: Text("FAIL", style="bold red")}
    rows = [(results[check.passed], name, check.promise, Text(check.found)) for name, check in checks]
    console.print(_table("checks", ["", "", "", ""], rows))
    failed = sum(not check.passed for _, check in checks)
    verdict = f"{failed} of {len(checks)} checks FAILED" if failed else f"all {len(checks)} checks passed"
    console.print(Text(verdict, style="bold red" if failed else "bold green"))
    return failed


def _comparison(runs: list[Run]) -> Table:
    """Return the table of all runs, a column for each, the unsharded one first."""
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
        "loss differs by": lambda run: f"{run.differences(runs[0])[0]:.2g}",
        "parameters differ by": lambda run: f"{run.differences(runs[0])[1]:.2g}",
    }
    title = f"one step; largest differences from the unsharded run in {len(runs[0].losses)} AdamW steps"
    rows = [(name, *map(measure, runs)) for name, measure in measures.items()]
    table = _table(title, ["", *(run.name for run in runs)], rows)
    table.caption = (
        "Counted on rank 0 in the last step, optimizer included. Gradient bytes: copied, or scaled in a pass of their own. "
        "Peak: live from the all-gather to the last read, or until the memory is freed that the step allocated. "
        "Allocated: memory for unsharded parameters. Kept: all slots, for parameters and gradients. Seconds are for "
        "information: the unsharded run is plain PyTorch, in one process, on all batches."
    )
    return table


def _table(title: str, columns: list[str], rows: list[tuple[Any, ...]]) -> Table:
    """Return a table; columns with a name hold numbers."""
    table = Table(title=title, title_style="bold", title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.pad_edge, table.show_header = False, any(columns)
    for name in columns:
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(*row)
    return table


class Check(NamedTuple):
    """A promise, whether it was kept, and the evidence."""

    promise: str
    passed: bool
    found: str


def check_run(run: Run, strategy: str, unsharded: Run, stock: Run, options: DemoOptions) -> Iterator[Check]:
    """Check a run of this package.

    Args:
        strategy: ``"zero2"`` or ``"zero3"``.
        unsharded: the unsharded run, which it must equal.
        stock: the run of Thunder's own ``fsdp``, which it must equal bit for bit with two ranks (their sum has only one
            order).
    """
    assert run.plan is not None and run.traces is not None
    counts, traces = run.counts, run.traces.traces
    (of_loss, of_parameters), (loss, parameters) = options.tolerances, run.differences(unsharded)
    yield Check(f"losses equal the unsharded run's within {of_loss:g}", loss <= of_loss, f"{loss:.2g}")
    promise = f"parameters equal the unsharded run's within {of_parameters:g} after {options.steps} AdamW steps"
    yield Check(promise, parameters <= of_parameters, f"{parameters:.2g}")
    if options.world_size == 2:
        _, difference = run.differences(stock)
        yield Check("parameters equal those of Thunder's own fsdp bit for bit", difference == 0, f"{difference:.2g}")
    first, last = run.losses[0], run.losses[-1]
    yield Check("the model learns: the last loss is below the first", last < first, f"{first:.3f} -> {last:.3f}")

    copied, allocated = counts.parameter_bytes_copied, counts.unsharded_bytes_allocated
    yield Check("no parameter bytes are copied", copied == 0, human_bytes(copied))
    yield Check("a step allocates no memory for unsharded parameters", allocated == 0, human_bytes(allocated))
    issued = len(counts.collectives)
    yield Check("every rank issues the same collectives in the same order", run.alike, f"{issued} a rank")
    planned = sum(sends(bsym) is not None for trace in traces for bsym in trace.bound_symbols)
    yield Check("the step issues as many collectives as its traces", planned == issued, f"{issued} of {planned}")

    orders: dict[str, Callable[[TraceCtx], None]] = {
        "every wait stands right before its first consumer": testing.assert_waits_right_before_first_consumer,
        "all-gathers are issued in the order of their first consumers": testing.assert_gathers_in_consumer_order,
        f"an all-gather is issued {options.prefetch} ahead of its own wait": partial(
            testing.assert_prefetch_distance, prefetch=options.prefetch
        ),
        "every reduce-scatter is issued right after its last gradient": testing.assert_reductions_right_after_last_gradient,
    }
    if strategy == "zero2":
        gathers = sum(c.kind == "all_gather" for c in counts.collectives if c.phase == "backward")
        yield Check("backward gathers nothing", gathers == 0, f"{gathers} all-gathers")
    else:
        blocks = options.prefetch + 1.1  # 10 % for norms and padding
        allowed = int(blocks * max(bucket.unsharded_bytes for bucket in run.plan))
        orders[f"the traces keep at most {blocks} blocks unsharded"] = partial(
            testing.assert_unsharded_bytes_at_most, nbytes=allowed
        )
        for phase in ("forward", "backward"):
            peak = counts.peak_unsharded_bytes[phase]
            promise = f"{phase} holds at most {blocks} blocks of unsharded parameters ({human_bytes(allowed)})"
            yield Check(promise, 0 < peak <= allowed, human_bytes(peak))
    for promise, assertion in orders.items():
        try:
            for trace in traces:
                assertion(trace)
        except AssertionError as error:
            yield Check(promise, False, str(error))
        else:
            yield Check(promise, True, "forward and backward")
