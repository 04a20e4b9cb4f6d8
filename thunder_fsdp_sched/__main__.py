"""The command line: ``python -m thunder_fsdp_sched``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .api import fsdp
from .demo import DemoOptions, run_demo
from .demo.show import make_console
from .tools.dry_run import check_made, dry_run_step, find_model
from .tools.fake_ranks import compile_as_rank
from .tools.plot import plot_timelines, save_perfetto
from .tools.report import before_and_after, dry_run_table, plan_table
from .trace.schedule import load_schedules

__all__ = ["app"]

app = typer.Typer(
    help="ZeRO-2 and ZeRO-3 for Lightning Thunder, scheduled in the trace.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


class Sharding(str, Enum):
    """The sharding strategy."""

    zero2 = "zero2"
    zero3 = "zero3"
    both = "both"

    @property
    def strategies(self) -> tuple[str, ...]:
        return ("zero2", "zero3") if self is Sharding.both else (self.value,)


class DType(str, Enum):
    """A dtype of parameters."""

    float32 = "float32"
    float64 = "float64"


Prefetch = Annotated[int, typer.Option(min=0, help="How many buckets ahead of its wait an all-gather is issued.")]


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=3, help="AdamW steps of each run.")] = DemoOptions.steps,
    blocks: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = DemoOptions.blocks,
    width: Annotated[int, typer.Option(min=8, help="Width of the model.")] = DemoOptions.width,
    length: Annotated[int, typer.Option(min=2, help="Bytes of a sequence.")] = DemoOptions.length,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank and step.")] = DemoOptions.batch,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks: processes on this machine.")] = DemoOptions.world_size,
    sharding: Annotated[Sharding, typer.Option(help="What to run.")] = Sharding.both,
    prefetch: Prefetch = DemoOptions.prefetch,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and the batches.")] = DemoOptions.seed,
    dtype: Annotated[DType, typer.Option(help="Of the parameters.")] = DType.float32,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest accepted difference from the unsharded run, in loss and parameters.")
    ] = None,
) -> None:
    """Train a byte-level GPT on real text with 2 ranks, show its traces before and after sorting, and check it.

    The exit status is 1 if any check fails.
    """
    options = DemoOptions(
        steps=steps,
        blocks=blocks,
        width=width,
        length=length,
        batch=batch,
        world_size=world_size,
        strategies=sharding.strategies,
        prefetch=prefetch,
        seed=seed,
        dtype=getattr(torch, dtype.value),
        tolerance=tolerance,
    )
    raise typer.Exit(1 if run_demo(options) else 0)


@app.command()
def trace(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY", help="A function that returns (module, args) or (module, args, kwargs)."
        ),
    ],
    world_size: Annotated[int, typer.Option(min=1, help="Ranks to trace for; none is started.")] = 8,
    sharding: Annotated[Sharding, typer.Option(help="What to show.")] = Sharding.zero3,
    bucketing: Annotated[str, typer.Option(help="block, layer, none, or bytes of a bucket.")] = "block",
    prefetch: Prefetch = 1,
) -> None:
    """Show the communication of a model's forward and backward traces, before and after sorting.

    This runs in one process, with a fake process group that sends no data.
    """
    make = _load(factory)
    console = make_console()
    for strategy in sharding.strategies:
        try:
            transform = fsdp(
                sharding_strategy=strategy,
                bucketing_strategy=int(bucketing) if bucketing.isdigit() else bucketing,
                prefetch=prefetch,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        with console.status(f"tracing {factory} for {world_size} ranks"):
            compile_as_rank(lambda: _made(make, factory), transform, rank=0, world_size=world_size)
        console.print(plan_table(transform.plan), highlight=False)
        traces = transform.compiled[-1]
        for name, before, after in (
            ("forward", traces.forward_before, traces.forward),
            ("backward", traces.backward_before, traces.backward),
        ):
            if before is not None and after is not None:
                title = f"{strategy.replace('zero', 'ZeRO-')}, {name}, {world_size} ranks"
                console.print(before_and_after(before, after, title=title, width=console.width))
                console.print()


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Option(
            help="MODULE:FACTORY that returns (module, inputs) on the meta device, a LitGPT configuration (Llama-3-8B) or "
            "a Hugging Face model type (llama). Random weights, nothing is downloaded."
        ),
    ],
    world_size: Annotated[int, typer.Option(min=1, help="Ranks to plan for; none is started.")] = 64,
    cluster: Annotated[str, typer.Option(help="Preset of the machine, such as h100-sxm.")] = "h100-sxm",
    sharding: Annotated[Sharding, typer.Option(help="zero2 or zero3.")] = Sharding.zero3,
    bucketing: Annotated[str, typer.Option(help="block, layer, none, or bytes of a bucket.")] = "block",
    prefetch: Annotated[str, typer.Option(help="Buckets ahead, or auto.")] = "1",
    replicas: Annotated[int, typer.Option(min=1, help="Hybrid sharding: number of copies of the shards.")] = 1,
    transport: Annotated[str, typer.Option(help="How buckets travel.")] = "auto",
    max_unsharded: Annotated[str | None, typer.Option(help="Budget for unsharded memory, such as 8GiB.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a rank.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 2048,
    dtype: Annotated[str, typer.Option(help="Of the parameters.")] = "bfloat16",
    picture: Annotated[Path | None, typer.Option(help="Where to draw the timeline (.png, .svg).")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Where to write the timeline for Perfetto (.json).")] = None,
    schedule: Annotated[Path | None, typer.Option(help="Where to save the schedule (.json).")] = None,
) -> None:
    """Plan a training step on a cluster that you do not have: memory, time, and exposed communication.

    The model is traced on the meta device as one of many ranks, scheduled, and simulated. Deep models take minutes,
    nearly all of it in Thunder's own tracing.
    """
    console = make_console()
    if sharding is Sharding.both:
        raise typer.BadParameter("plan accepts zero2 or zero3, not both")
    try:
        make = find_model(model, batch=batch, length=length, dtype=_dtype(dtype))
        with console.status(f"tracing {model} as rank 0 of {world_size}"):
            step = dry_run_step(
                make,
                world_size=world_size,
                on=cluster,
                sharding_strategy=sharding.value,
                bucketing_strategy=int(bucketing) if bucketing.isdigit() else bucketing,
                prefetch=int(prefetch) if prefetch.isdigit() else prefetch,
                max_unsharded_bytes=max_unsharded,
                replicas=replicas,
                transport=transport,
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console.print(plan_table(step.transform.plan), highlight=False)
    console.print(dry_run_table(step), highlight=False)
    if step.transform.compiled[-1].choice is not None:
        console.print(str(step.transform.compiled[-1].choice), highlight=False)
    if picture is not None:
        plot_timelines([("unsorted", step.before), ("scheduled", step.after)], picture)
        console.print(f"picture: {picture}")
    if perfetto is not None:
        save_perfetto(step.after, perfetto)
        console.print(f"Perfetto: {perfetto}")
    if schedule is not None:
        step.transform.save_schedules(schedule)
        console.print(f"schedule: {schedule}")


@app.command()
def diff(
    one: Annotated[Path, typer.Argument(help="A saved schedule (plan --schedule, transform.save_schedules).")],
    other: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Show the differences between two saved schedules. The exit status is 1 if there are any."""
    try:
        first, second = load_schedules(one), load_schedules(other)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    console = make_console()
    differs = len(first) != len(second)
    if differs:
        console.print(f"{one} holds {len(first)} schedules, {other} holds {len(second)}", highlight=False)
    for number, (a, b) in enumerate(zip(first, second, strict=False), start=1):
        difference = a.diff(b) or ("the compute around it differs" if a != b else "")
        if difference:
            differs = True
            console.print(f"schedule {number}", highlight=False)
            console.print(difference, highlight=False, markup=False)
    raise typer.Exit(1 if differs else 0)


def _load(factory: str) -> Any:
    module, _, name = factory.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise typer.BadParameter(f"{factory!r} cannot be imported: {error}") from error
    if not callable(made):
        raise typer.BadParameter(f"{factory!r} is of type {type(made).__name__}, not a function that makes a model")
    return made


def _made(make: Callable[[], object], factory: str) -> tuple[Any, ...]:
    made = make()
    try:
        return check_made(made, factory)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise typer.BadParameter(f"dtype: torch has no dtype {name!r}; bfloat16, float16 and float32 are some")
    return dtype


if __name__ == "__main__":
    app(prog_name="python -m thunder_fsdp_sched")
