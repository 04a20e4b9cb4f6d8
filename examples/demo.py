"""Train a small GPT unsharded, with Thunder's fsdp and with this package, and compare the runs: python examples/demo.py

Processes on this machine are the ranks. Each run trains on the same batches of real text. Traces before and after sorting, a
table of the runs and checks are printed; the exit status is 1 if a check fails. ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import statistics
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from thunder_fsdp_sched import fsdp, testing
from thunder_fsdp_sched.ir.effects import sends
from thunder_fsdp_sched.ir.inspection import statements
from thunder_fsdp_sched.reports import make_console, plan_table, step_before_and_after
from thunder_fsdp_sched.sizes import human_bytes

import thunder
import torch
import torch.distributed as dist
from byte_gpt import GPT
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from step_counter import StepCounter, StepCounts
from thunder.core.trace import TraceCtx
from thunder.distributed import FSDPBucketingStrategy, FSDPType
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_TOLERANCES = {"float32": (2e-5, 2e-4), "float64": (1e-12, 1e-9)}


def _option(default: Any, help: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "type": type(default), **more})


@dataclass(frozen=True)
class DemoOptions:
    """Options of the demo. The first step of a run compiles, the last is counted and not timed."""

    steps: int = _option(5, "AdamW steps of each run, at least 3")
    blocks: int = _option(8, "transformer blocks")
    width: int = _option(320, "width of the model")
    length: int = _option(64, "bytes of a sequence")
    batch: int = _option(4, "sequences per rank and step")
    world_size: int = _option(2, "ranks: processes on this machine")
    sharding: str = _option("both", "what to run", choices=("zero2", "zero3", "both"))
    prefetch: int = _option(1, "buckets that an all-gather is issued ahead of its wait")
    seed: int = _option(0, "seed of the weights and the batches")
    dtype: str = _option("float32", "of the parameters", choices=("float32", "float64"))
    tolerance: float | None = _option(None, "largest accepted difference from the unsharded run", type=float)

    @property
    def tolerances(self) -> tuple[float, float]:
        """The largest accepted differences from the unsharded run: of the loss (nats per byte), and of a parameter element.

        The latter is a fifth of a step in float32. AdamW divides a gradient by its own size, so an element whose gradient
        is almost zero moves by a part of the learning rate that depends on the last bits.
        """
        return _TOLERANCES[self.dtype] if self.tolerance is None else (self.tolerance, self.tolerance)

    def model(self) -> GPT:
        """Return the model, alike on all ranks, with up to 8 attention heads."""
        torch.manual_seed(self.seed)
        heads = next(h for h in range(8, 0, -1) if self.width % h == 0)
        return GPT(blocks=self.blocks, width=self.width, heads=heads, length=self.length).to(getattr(torch, self.dtype))


def read_text(limit: int = 1 << 20) -> torch.Tensor:
    """Return the first ``limit`` bytes of the standard library's modules, in the order of their file names.

    Raises:
        RuntimeError: this interpreter has no sources.
    """
    folder = sysconfig.get_paths()["stdlib"]
    text = b"".join(path.read_bytes() for path in sorted(Path(folder).glob("*.py")))
    if len(text) < 1 << 14:
        raise RuntimeError(f"no Python sources in {folder}, the demo has no text to train on")
    return torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8).long()


def sample(text: torch.Tensor, step: int, options: DemoOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of all ranks in one step: sequences, and for each byte the next one.

    It depends only on the seed and ``step``, so every rank and every run draws the same batch.
    """
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - options.length, (options.world_size * options.batch,), generator=generator)
    pieces = torch.stack([text[s : s + options.length + 1] for s in starts.tolist()])
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


@dataclass
class Run:
    """One training run."""

    name: str
    losses: list[float]  # nats per byte before each step, mean over ranks
    parameters: dict[str, torch.Tensor]  # whole, after the last step, by name
    counts: StepCounts  # of the last step, on this rank
    alike: bool  # whether all ranks issued the same collectives in the same order
    compile_seconds: float  # the first call minus a later one
    step_seconds: float  # median of all steps except the first and the counted one
    kept_bytes: int = 0  # memory for unsharded parameters and gradients that stays allocated between steps
    plan: Any = None  # of this package
    traces: Any = None  # the CompiledTraces of this package
    thunder_traces: tuple[TraceCtx, ...] = ()  # forward and backward of Thunder's own fsdp

    def differences(self, other: Run) -> tuple[float, float]:
        """Return the largest differences between two runs: of the losses of a step, and of an element of a parameter."""
        losses = [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]
        assert self.parameters.keys() == other.parameters.keys()
        return max(losses), max((p - other.parameters[n]).abs().max().item() for n, p in self.parameters.items())


UNSHARDED, STOCK = "unsharded", "Thunder's fsdp"


def train(name: str, options: DemoOptions, text: torch.Tensor) -> Run:
    """Train the model on the same batches, in one of four ways.

    Args:
        name: ``UNSHARDED``: plain PyTorch without a compiler, in one process, on the batches of all ranks. ``STOCK``:
            Thunder's own ``fsdp``, with its options for ZeRO-3 and block buckets. ``"ZeRO-2"``, ``"ZeRO-3"``: this
            package's ``fsdp``.
    """
    model: Any = options.model()
    transform = None
    if name == STOCK:
        strategies = {"sharding_strategy": FSDPType.ZERO3, "bucketing_strategy": FSDPBucketingStrategy.BLOCK}
        # With the kernels that `tfs.fsdp` uses, so that all numbers are the same.
        executors = ["torch_kernels", *thunder.get_default_executors()]
        jitted = thunder.jit(model, executors=executors)
        model = thunder.distributed.fsdp(jitted, device=torch.device("cpu"), **strategies)
    elif name != UNSHARDED:
        transform = fsdp(sharding_strategy=name.replace("ZeRO-", "zero"), prefetch=options.prefetch)
        model = thunder.jit(model, transforms=[transform])
    is_sharded = name != UNSHARDED
    first = dist.get_rank() * options.batch
    rows = slice(first, first + options.batch) if is_sharded else slice(None)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses, seconds = [], []
    counter = StepCounter(parameters, sharded=is_sharded)
    for step in range(options.steps):
        tokens, targets = (part[rows] for part in sample(text, step, options))
        started = time.perf_counter()
        with counter if step == options.steps - 1 else contextlib.nullcontext():
            with counter.phase("forward"):
                loss = model(tokens, targets)
            with counter.phase("backward"):
                loss.backward()
            with counter.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
    counts = counter.counts()
    of_ranks: list[Any] = [(losses, counts.collectives)]
    if is_sharded:
        of_ranks *= options.world_size
        dist.all_gather_object(of_ranks, (losses, counts.collectives))
    whole = model.original_state_dict() if is_sharded else model.state_dict()
    step_seconds = statistics.median(seconds[1:-1])
    run = Run(
        name,
        [statistics.mean(of_step) for of_step in zip(*(of for of, _ in of_ranks), strict=True)],
        {key.removeprefix("."): value.detach().clone() for key, value in whole.items()},  # Thunder's names at the root
        counts,
        all(collectives == counts.collectives for _, collectives in of_ranks),
        compile_seconds=max(seconds[0] - step_seconds, 0.0),
        step_seconds=step_seconds,
    )
    if name == STOCK:
        run.thunder_traces = (thunder.last_traces(model)[-1], thunder.last_backward_traces(model)[-1])
    if transform is not None:
        run.plan, run.traces = transform.plan, transform.compiled[-1]
        sharded = transform.sharded
        arenas = {*(b.arena for b in sharded.buckets), *(b.private_slot.arena for b in sharded.kept_buckets)}
        run.kept_bytes = sum(arena.nbytes for arena in arenas)
    return run


#
# The ranks, and what they print
#


def run_demo(options: DemoOptions) -> int:
    """Run the demo in ``options.world_size`` new processes on this machine, as ``torchrun`` does.

    Returns:
        The number of failed checks.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    here: Any = {"rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    # Without restarts, by which a failed rank would only fail again, later and with another error.
    config = LaunchConfig(1, 1, options.world_size, rdzv_backend="c10d", max_restarts=0, **here)
    return int(elastic_launch(config, run_rank)(options)[0])


@record
def run_rank(options: DemoOptions) -> int:
    """Train on one of the ranks, of which the first prints; return the number of failed checks."""
    warnings.filterwarnings("ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor).*deprecated")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    is_first = dist.get_rank() == 0
    console, text = make_console(quiet=not is_first), read_text()
    parameters = sum(p.numel() for p in options.model().parameters())
    console.print(
        f"byte-level GPT, depth {options.blocks}, width {options.width}, {parameters / 1e6:.2f} M parameters in "
        f"{options.dtype}; text: {human_bytes(len(text))} of this Python's standard library; "
        f"{options.steps} AdamW steps on {options.world_size} x {options.batch} sequences of {options.length} bytes; "
        f"{options.world_size} gloo ranks, one thread each"
    )
    # While the first rank trains unsharded, the others wait in the first collective of the next run.
    runs = []
    strategies = ("zero2", "zero3") if options.sharding == "both" else (options.sharding,)
    ours = [strategy.replace("zero", "ZeRO-") for strategy in strategies]
    for name in [UNSHARDED, STOCK, *ours] if is_first else [STOCK, *ours]:
        with console.status(f"{name}: compiling and training"):
            run = train(name, options, text)
        losses = " ".join(f"{loss:.4f}" for loss in run.losses)
        compiled = "" if name == UNSHARDED else f"compiled in {run.compile_seconds:.1f} s"
        console.print(f"  {name:15s} {compiled:19s} loss {losses}")
        runs.append(run)
    failed = _report(console, options, *runs) if is_first else 0
    dist.destroy_process_group()
    return failed


def _report(console: Console, options: DemoOptions, unsharded: Run, stock: Run, *ours: Run) -> int:
    """Print traces, comparison and checks, and return the number of failed checks."""
    console.print(plan_table(ours[0].plan, title="buckets, the same for ZeRO-2 and ZeRO-3"))
    for run in ours:
        console.print(step_before_and_after(run.traces, title=run.name, width=console.width))
    for name, trace in zip(("forward", "backward"), stock.thunder_traces, strict=True):
        console.print(Text(f"Thunder's own fsdp (asked for ZeRO-3 and block buckets), {name}", style="bold"))
        console.print("\n".join(summarize_thunder(trace)) + "\n")
    console.print(_comparison(unsharded, stock, *ours))
    checks = [(run.name, *check) for run in ours for check in check_run(run, unsharded, stock, options)]
    for name, promise, passed, found in checks:
        console.print("[green]pass" if passed else "[bold red]FAIL", Text(f"{name}: {promise}: {found}"))
    failed = sum(not passed for _, _, passed, _ in checks)
    all_passed = f"[bold green]all {len(checks)} checks passed"
    console.print(f"[bold red]{failed} of {len(checks)} checks FAILED" if failed else all_passed)
    return failed


def _comparison(*runs: Run) -> Table:
    """Return the table of all runs, a column for each, the unsharded one first."""
    title = f"one step; largest differences from the unsharded run in {len(runs[0].losses)} AdamW steps"
    table = Table(title=title, title_style="bold", title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    table.caption = (
        "Counted on rank 0 in the last step, optimizer included. Gradient bytes: copied, or scaled in a pass of their own. "
        "Peak: live from the all-gather to the last read, or until the memory is freed that the step allocated. "
        "Allocated: memory for unsharded parameters. Kept: all slots, for parameters and gradients. Seconds are for "
        "information: the unsharded run is plain PyTorch, in one process, on all batches."
    )
    for name in ("", *(run.name for run in runs)):
        table.add_column(name, justify="right" if name else "left")
    figures = [_figures(run, unsharded=runs[0]) for run in runs]
    for name in figures[0]:
        table.add_row(name, *(of_run[name] for of_run in figures))
    return table


def _figures(run: Run, unsharded: Run) -> dict[str, str]:
    """Return the column of a run in the comparison, keyed by the names of the rows."""
    counts, (loss, parameters) = run.counts, run.differences(unsharded)
    return {
        "collectives": str(len(counts.collectives)),
        "parameter bytes copied": human_bytes(counts.parameter_bytes_copied),
        "gradient bytes copied": human_bytes(counts.gradient_bytes_copied),
        "bytes copied by gloo": human_bytes(counts.backend_bytes_copied),
        "peak unsharded, forward": human_bytes(counts.peak_unsharded_bytes["forward"]),
        "peak unsharded, backward": human_bytes(counts.peak_unsharded_bytes["backward"]),
        "allocated in the step": human_bytes(counts.unsharded_bytes_allocated),
        "kept between steps": human_bytes(run.kept_bytes),
        "step seconds": f"{run.step_seconds:.2f}",
        "loss differs by": f"{loss:.2g}",
        "parameters differ by": f"{parameters:.2g}",
    }


def summarize_thunder(trace: TraceCtx) -> list[str]:
    """Return the communication of a trace of Thunder's own ``fsdp``, one line for each run of the same operation.

    A line has the positions of the run and the number of bound symbols of compute within it.
    """
    found = []
    for position, bsym in enumerate(statements(trace)):
        match = re.search(r"all_gather|reduce_scatter|wait", bsym.sym.name)
        if match is not None:
            found.append((match.group(), position))
    lines = []
    for operation, run in groupby(found, key=lambda entry: entry[0]):
        positions = [position for _, position in run]
        compute = positions[-1] - positions[0] + 1 - len(positions)
        lines.append(
            f"{positions[0]:5d} to {positions[-1]:5d}  {len(positions):4d} x {operation}"
            + (f", {compute} other operations in between" if compute else "")
        )
    return lines


def check_run(run: Run, unsharded: Run, stock: Run, options: DemoOptions) -> Iterator[tuple[str, bool, str]]:
    """Yield the promises of a run of this package, each with whether it was kept, and the evidence.

    Args:
        unsharded: the unsharded run, which it must equal.
        stock: the run of Thunder's own ``fsdp``, which it must equal bit for bit with two ranks (their sum has only one
            order).
    """
    counts, traces = run.counts, run.traces.traces
    (of_loss, of_parameters), (loss, parameters) = options.tolerances, run.differences(unsharded)
    yield f"losses equal the unsharded run's within {of_loss:g}", loss <= of_loss, f"{loss:.2g}"
    promise = f"parameters equal the unsharded run's within {of_parameters:g} after {options.steps} AdamW steps"
    yield promise, parameters <= of_parameters, f"{parameters:.2g}"
    if options.world_size == 2:
        _, difference = run.differences(stock)
        yield "parameters equal those of Thunder's own fsdp bit for bit", difference == 0, f"{difference:.2g}"
    first, last = run.losses[0], run.losses[-1]
    yield "the model learns: the last loss is below the first", last < first, f"{first:.3f} -> {last:.3f}"

    copied, allocated = counts.parameter_bytes_copied, counts.unsharded_bytes_allocated
    yield "no parameter bytes are copied", copied == 0, human_bytes(copied)
    yield "a step allocates no memory for unsharded parameters", allocated == 0, human_bytes(allocated)
    issued = len(counts.collectives)
    yield "every rank issues the same collectives in the same order", run.alike, f"{issued} a rank"
    planned = sum(sends(bsym) is not None for trace in traces for bsym in trace.bound_symbols)
    yield "the step issues as many collectives as its traces", planned == issued, f"{issued} of {planned}"

    in_traces = partial(_check_traces, run.traces)
    promise = "every wait stands right before its first consumer"
    yield in_traces(promise, testing.assert_waits_right_before_first_consumer)
    promise = "all-gathers are issued in the order of their first consumers"
    yield in_traces(promise, testing.assert_gathers_in_consumer_order)
    promise = f"an all-gather is issued {options.prefetch} ahead of its own wait"
    yield in_traces(promise, testing.assert_prefetch_distance, prefetch=options.prefetch)
    promise = "every reduce-scatter is issued right after its last gradient"
    yield in_traces(promise, testing.assert_reductions_right_after_last_gradient)
    if run.name == "ZeRO-2":
        gathers = sum(c.kind == "all_gather" for c in counts.collectives if c.phase == "backward")
        yield "backward gathers nothing", gathers == 0, f"{gathers} all-gathers"
        return
    blocks = options.prefetch + 1.1  # 10 % for norms and padding
    allowed = int(blocks * max(bucket.unsharded_bytes for bucket in run.plan))
    for phase in ("forward", "backward"):
        peak = counts.peak_unsharded_bytes[phase]
        promise = f"{phase} holds at most {blocks} blocks of unsharded parameters ({human_bytes(allowed)})"
        yield promise, 0 < peak <= allowed, human_bytes(peak)
    promise = f"the traces keep at most {blocks} blocks unsharded"
    yield in_traces(promise, testing.assert_unsharded_bytes_at_most, nbytes=allowed)


def _check_traces(traces: Any, promise: str, assertion: Callable[..., None], **options: int) -> tuple[str, bool, str]:
    try:
        assertion(traces, **options)
    except AssertionError as error:
        return promise, False, str(error)
    return promise, True, "forward and backward"


def main(arguments: list[str] | None = None) -> int:
    """Run the demo with options of the command line, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition(":")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for field in dataclasses.fields(DemoOptions):
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, **field.metadata)
    options = DemoOptions(**vars(parser.parse_args(arguments)))
    if options.steps < 3:
        parser.error("--steps: at least 3, because the first and the last are not timed")
    return int(run_demo(options) > 0)


if __name__ == "__main__":
    sys.exit(main())
