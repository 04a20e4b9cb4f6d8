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
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .. import testing
from ..ir.effects import sends
from ..reports.report import before_and_after, plan_table, summarize_thunder
from ..sizes import human_bytes
from .runs import STOCK, UNSHARDED, DemoOptions, Run, read_text, strategies_of, train


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
    here = "127.0.0.1"
    config = LaunchConfig(1, 1, options.world_size, rdzv_backend="c10d", rdzv_endpoint=f"{here}:0", local_addr=here)
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
            f"{options.dtype}; text: {human_bytes(len(text))} of this Python's standard library; "
            f"{options.steps} AdamW steps on {options.world_size} x {options.batch} sequences of {options.length} bytes; "
            f"{options.world_size} gloo ranks, one thread each"
        )

        def run(name: str) -> Run:
            with console.status(f"{name}: compiling and training"):
                done = train(name, options, text)
            losses = " ".join(f"{loss:.4f}" for loss in done.losses)
            compiled = "" if name == UNSHARDED else f"compiled in {done.compile_seconds:.1f} s"
            console.print(f"  {done.name:15s} {compiled:19s} loss {losses}")
            return done

        # The others wait in the first collective of the next run.
        unsharded = run(UNSHARDED) if first else None
        stock = run(STOCK)
        ours = [run(strategy.replace("zero", "ZeRO-")) for strategy in strategies_of(options.sharding)]
        return 0 if unsharded is None else _report(console, options, unsharded, stock, ours)
    finally:
        dist.destroy_process_group()


def _report(console: Console, options: DemoOptions, unsharded: Run, stock: Run, ours: list[Run]) -> int:
    """Print traces, comparison and checks, and return the number of failed checks."""
    assert ours[0].plan is not None
    console.print(plan_table(ours[0].plan, title="buckets, the same for ZeRO-2 and ZeRO-3"))
    for run in ours:
        for name in ("forward", "backward"):
            before, after = getattr(run.traces, f"{name}_before"), getattr(run.traces, name)
            console.print(before_and_after(before, after, title=f"{run.name}, {name}", width=console.width), "")
    for name, trace in zip(("forward", "backward"), stock.thunder_traces, strict=True):
        console.print(Text(f"Thunder's own fsdp (asked for ZeRO-3 and block buckets), {name}", style="bold"))
        console.print("\n".join(summarize_thunder(trace)) + "\n")
    console.print(_comparison([unsharded, stock, *ours]))
    checks = [(run.name, *check) for run in ours for check in check_run(run, unsharded, stock, options)]
    marks = {True: Text("pass", style="green"), False: Text("FAIL", style="bold red")}
    rows = [(marks[passed], name, promise, Text(found)) for name, promise, passed, found in checks]
    console.print(_table("checks", ["", "", "", ""], rows))
    failed = sum(not passed for _, _, passed, _ in checks)
    verdict = f"{failed} of {len(checks)} checks FAILED" if failed else f"all {len(checks)} checks passed"
    console.print(Text(verdict, style="bold red" if failed else "bold green"))
    return failed


def _comparison(runs: list[Run]) -> Table:
    """Return the table of all runs, a column for each, the unsharded one first."""
    first = runs[0]
    sizes: dict[str, Callable[[Run], int]] = {
        "parameter bytes copied": lambda run: run.counts.parameter_bytes_copied,
        "gradient bytes copied": lambda run: run.counts.gradient_bytes_copied,
        "bytes copied by gloo": lambda run: run.counts.backend_bytes_copied,
        "peak unsharded, forward": lambda run: run.counts.peak_unsharded_bytes["forward"],
        "peak unsharded, backward": lambda run: run.counts.peak_unsharded_bytes["backward"],
        "allocated in the step": lambda run: run.counts.unsharded_bytes_allocated,
        "kept between steps": lambda run: run.kept_bytes,
    }
    differences = [run.differences(first) for run in runs]
    rows = [("collectives", *(str(len(run.counts.collectives)) for run in runs))]
    rows += [(name, *(human_bytes(size(run)) for run in runs)) for name, size in sizes.items()]
    rows += [("step seconds", *(f"{run.step_seconds:.2f}" for run in runs))]
    rows += [("loss differs by", *(f"{loss:.2g}" for loss, _ in differences))]
    rows += [("parameters differ by", *(f"{parameters:.2g}" for _, parameters in differences))]
    title = f"one step; largest differences from the unsharded run in {len(first.losses)} AdamW steps"
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


def check_run(run: Run, unsharded: Run, stock: Run, options: DemoOptions) -> Iterator[Check]:
    """Check a run of this package.

    Args:
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

    prefetch, blocks = options.prefetch, options.prefetch + 1.1  # 10 % for norms and padding
    allowed = int(blocks * max(bucket.unsharded_bytes for bucket in run.plan))
    orders: dict[str, Callable[[TraceCtx], None]] = {
        "every wait stands right before its first consumer": testing.assert_waits_right_before_first_consumer,
        "all-gathers are issued in the order of their first consumers": testing.assert_gathers_in_consumer_order,
        f"an all-gather is issued {prefetch} ahead of its own wait": partial(
            testing.assert_prefetch_distance, prefetch=prefetch
        ),
        "every reduce-scatter is issued right after its last gradient": testing.assert_reductions_right_after_last_gradient,
    }
    if run.name == "ZeRO-2":
        gathers = sum(c.kind == "all_gather" for c in counts.collectives if c.phase == "backward")
        yield Check("backward gathers nothing", gathers == 0, f"{gathers} all-gathers")
    else:
        orders[f"the traces keep at most {blocks} blocks unsharded"] = partial(
            testing.assert_unsharded_bytes_at_most, nbytes=allowed
        )
        for phase in ("forward", "backward"):
            peak = counts.peak_unsharded_bytes[phase]
            promise = f"{phase} holds at most {blocks} blocks of unsharded parameters ({human_bytes(allowed)})"
            yield Check(promise, 0 < peak <= allowed, human_bytes(peak))
    for promise, assertion in orders.items():
        fault = ""
        try:
            assertion(run.traces)
        except AssertionError as error:
            fault = str(error)
        yield Check(promise, not fault, fault or "forward and backward")
