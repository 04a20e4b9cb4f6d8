"""The command line: ``python -m thunder_fsdp_sched``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .demo import DemoOptions, run_demo
from .demo.show import make_console
from .ir.schedule import load_schedules
from .logs import following_stages
from .planning.cluster_files import read_cluster
from .planning.clusters import CLUSTERS
from .planning.dry_run import DryRun, dry_run_step, find_model
from .planning.fit import describe_fit, optimizer_state_bytes
from .planning.suggestions import HEADROOM, suggest
from .reports.memory_files import save_memory
from .reports.plot import plot_timelines, save_perfetto
from .reports.plot_memory import plot_memory
from .reports.report import before_and_after, dry_run_table, plan_table, window_table
from .sizes import parse_bytes
from .transports import TRANSPORTS

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


PRESETS = f"Clusters: {', '.join(CLUSTERS)}."
UNITS = "Units: sizes are bytes, as 8GiB, 25MB or 8589934592; bandwidths are bytes/s; times are seconds."

# The options that several commands share have the same names everywhere.
Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="MODULE:FACTORY that returns (module, args) or (module, args, kwargs), best on the meta device; a LitGPT "
        "configuration (Llama-3-8B); or a Hugging Face model type (llama). Random weights, nothing is downloaded.",
        show_default=False,
    ),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="The same as MODEL.", show_default=False)]
WorldSize = Annotated[int, typer.Option(min=1, help="Ranks to compile for; none is started.")]
Cluster = Annotated[
    str, typer.Option(help="The machine: a preset, or a .json file with the attributes of ClusterSpec.")
]
ClusterSet = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ATTRIBUTE=VALUE",
        help="Change an attribute of the machine, such as inter_node_bandwidth=25GB; may be repeated.",
        show_default=False,
    ),
]
Bucketing = Annotated[str, typer.Option(help="block, layer, none, or the size of a bucket, such as 25MB.")]
Prefetch = Annotated[
    str | None,
    typer.Option(
        help="How many buckets ahead of its wait an all-gather is issued, or auto; by default 1, with --max-memory auto.",
        show_default=False,
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        help="Limit on all memory of a step without optimizer state, such as 70GiB; backward recomputes what does not fit.",
        show_default=False,
    ),
]
MaxUnsharded = Annotated[
    str | None, typer.Option(help="Budget for unsharded memory, such as 8GiB.", show_default=False)
]
MaxGathers = Annotated[
    int | None, typer.Option(min=1, help="Limit on the all-gathers in flight, whatever their size.", show_default=False)
]
Secondary = Annotated[
    int | None,
    typer.Option(min=2, help="ZeRO-3: among how many ranks backward gathers; all by default.", show_default=False),
]
MicroBatches = Annotated[
    int, typer.Option(min=1, help="Micro-batches of a step, each with its batch; all but the last run under no_sync.")
]
Replicas = Annotated[int, typer.Option(min=1, help="Hybrid sharding: number of copies of the shards.")]
Transport = Annotated[str, typer.Option(help=f"How buckets travel: auto, {', '.join(sorted(TRANSPORTS))}.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences per rank (LitGPT and Hugging Face models).")]
Length = Annotated[int, typer.Option(min=1, help="Tokens of a sequence (LitGPT and Hugging Face models).")]
DTypeName = Annotated[str, typer.Option(help="dtype of the parameters (LitGPT and Hugging Face models).")]


@app.command(
    epilog="Example: python -m thunder_fsdp_sched demo --world-size 4 --sharding zero3 --prefetch 2. Times are seconds."
)
def demo(
    steps: Annotated[int, typer.Option(min=3, help="AdamW steps of each run.")] = DemoOptions.steps,
    blocks: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = DemoOptions.blocks,
    width: Annotated[int, typer.Option(min=8, help="Width of the model.")] = DemoOptions.width,
    length: Annotated[int, typer.Option(min=2, help="Bytes of a sequence.")] = DemoOptions.length,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank.")] = DemoOptions.batch,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks: processes on this machine.")] = DemoOptions.world_size,
    sharding: Annotated[Sharding, typer.Option(help="What to run.")] = Sharding.both,
    prefetch: Annotated[
        int, typer.Option(min=0, help="How many buckets ahead of its wait an all-gather is issued.")
    ] = DemoOptions.prefetch,
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


@app.command(
    epilog=f"{PRESETS}\n\n{UNITS}\n\n"
    "Example: python -m thunder_fsdp_sched trace my_models:make --world-size 64 --sharding both --prefetch 2"
)
def trace(
    model: Model = None,
    model_option: ModelOption = None,
    world_size: WorldSize = 8,
    cluster: Cluster = "h100-sxm",
    cluster_set: ClusterSet = None,
    sharding: Annotated[Sharding, typer.Option(help="What to show.")] = Sharding.zero3,
    bucketing: Bucketing = "block",
    prefetch: Prefetch = None,
    max_memory: MaxMemory = None,
    max_unsharded: MaxUnsharded = None,
    max_gathers_in_flight: MaxGathers = None,
    reshard_after_forward: Secondary = None,
    replicas: Replicas = 1,
    transport: Transport = "auto",
    batch: Batch = 1,
    length: Length = 2048,
    dtype: DTypeName = "bfloat16",
) -> None:
    """Show the communication of a model's forward and backward traces, before and after sorting.

    This runs in one process, with a fake process group that sends no data.
    """
    console = make_console()
    for strategy in sharding.strategies:
        step = _compiled(
            console,
            _name_of_model(model, model_option),
            (batch, length, dtype),
            (cluster, cluster_set),
            world_size=world_size,
            sharding_strategy=strategy,
            bucketing_strategy=bucketing,
            prefetch=int(prefetch) if prefetch and prefetch.isdigit() else prefetch,
            max_memory=max_memory,
            max_unsharded_bytes=max_unsharded,
            max_gathers_in_flight=max_gathers_in_flight,
            reshard_after_forward=reshard_after_forward if strategy == "zero3" else None,
            replicas=replicas,
            transport=transport,
        )
        console.print(plan_table(step.transform.plan), highlight=False)
        traces = step.transform.compiled[-1]
        for name, before, after in (
            ("forward", traces.forward_before, traces.forward),
            ("backward", traces.backward_before, traces.backward),
        ):
            if before is not None and after is not None:
                title = f"{strategy.replace('zero', 'ZeRO-')}, {name}, {world_size} ranks"
                console.print(before_and_after(before, after, title=title, width=console.width))
                console.print()


@app.command(
    epilog=f"{PRESETS}\n\n{UNITS}\n\n"
    "Example: python -m thunder_fsdp_sched plan Llama-3-8B --world-size 64 --cluster h100-sxm "
    "--cluster-set inter_node_bandwidth=25GB --prefetch auto --max-unsharded 8GiB --picture step.png"
)
def plan(
    model: Model = None,
    model_option: ModelOption = None,
    world_size: WorldSize = 64,
    cluster: Cluster = "h100-sxm",
    cluster_set: ClusterSet = None,
    sharding: Annotated[Sharding, typer.Option(help="What to plan.")] = Sharding.zero3,
    bucketing: Bucketing = "block",
    prefetch: Prefetch = None,
    max_memory: MaxMemory = None,
    max_unsharded: MaxUnsharded = None,
    max_gathers_in_flight: MaxGathers = None,
    reshard_after_forward: Secondary = None,
    replicas: Replicas = 1,
    micro_batches: MicroBatches = 1,
    transport: Transport = "auto",
    batch: Batch = 1,
    length: Length = 2048,
    dtype: DTypeName = "bfloat16",
    optimizer_bytes: Annotated[
        float | None,
        typer.Option(min=0, help="Bytes of optimizer state for each element that trains; by default those of AdamW."),
    ] = None,
    suggestions: Annotated[
        bool | None,
        typer.Option(
            "--suggest/--no-suggest",
            help="Say what to change, each with its simulated time; by default if the step does not fit with the headroom.",
            show_default=False,
        ),
    ] = None,
    headroom: Annotated[
        str | None,
        typer.Option(help="Memory of the device that shall stay free, such as 2GB; by default 5 % of it."),
    ] = None,
    dry_runs: Annotated[
        int, typer.Option(min=0, help="Dry runs for suggestions, such as half the batch, that need another trace.")
    ] = 2,
    picture: Annotated[Path | None, typer.Option(help="Where to draw the timeline (.png, .svg).")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Where to write the timeline for Perfetto (.json).")] = None,
    schedule: Annotated[Path | None, typer.Option(help="Where to save the schedule (.json).")] = None,
    memory_file: Annotated[
        Path | None,
        typer.Option("--memory", help="Where to draw the memory of the step (.png, .svg), or to save it (.json)."),
    ] = None,
) -> None:
    """Plan a training step on a cluster that you do not have: memory, time, and exposed communication.

    The model is traced on the meta device as one of many ranks, scheduled, and simulated. Deep models take minutes,
    nearly all of it in Thunder's own tracing.
    """
    console = make_console()
    if sharding is Sharding.both and any((picture, perfetto, schedule, memory_file)):
        raise typer.BadParameter("files hold one step: give --sharding zero2 or zero3, not both")
    for strategy in sharding.strategies:
        step = _compiled(
            console,
            _name_of_model(model, model_option),
            (batch, length, dtype),
            (cluster, cluster_set),
            world_size=world_size,
            sharding_strategy=strategy,
            bucketing_strategy=bucketing,
            prefetch=int(prefetch) if prefetch and prefetch.isdigit() else prefetch,
            max_memory=max_memory,
            max_unsharded_bytes=max_unsharded,
            max_gathers_in_flight=max_gathers_in_flight,
            reshard_after_forward=reshard_after_forward if strategy == "zero3" else None,
            replicas=replicas,
            micro_batches=micro_batches,
            transport=transport,
        )
        if sharding is Sharding.both:
            console.print(strategy.replace("zero", "ZeRO-"), style="bold")
        console.print(plan_table(step.transform.plan), highlight=False)
        if step.window is not None:
            console.print(window_table(step), highlight=False)
        console.print(dry_run_table(step), highlight=False)
        compiled = step.compiled
        memory = step.memory.with_optimizer_state(optimizer_state_bytes(compiled.buckets, optimizer_bytes))
        console.print(describe_fit(memory, step.cluster.memory, step.cluster.name), highlight=False)
        free = int(HEADROOM * step.cluster.memory) if headroom is None else _bytes("headroom", headroom)
        if suggestions or (suggestions is None and memory.peak.nbytes + free > step.cluster.memory):
            _print_suggestions(console, step, optimizer_bytes=optimizer_bytes, headroom=free, dry_runs=dry_runs)
        if compiled.choice is not None:
            console.print(str(compiled.choice), highlight=False)
        if picture is not None:
            plot_timelines([("unsorted", step.before), ("scheduled", step.after)], picture)
            console.print(f"picture: {picture}")
        if perfetto is not None:
            save_perfetto(step.after, perfetto)
            console.print(f"Perfetto: {perfetto}")
        if schedule is not None:
            step.transform.save_schedules(schedule)
            console.print(f"schedule: {schedule}")
        if memory_file is not None:
            if memory_file.suffix == ".json":
                save_memory(memory, memory_file)
            else:
                plot_memory(memory, memory_file, timeline=step.after)
            console.print(f"memory: {memory_file}")


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


def _print_suggestions(console: Console, step: DryRun, **options: Any) -> None:
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as spinner, following_stages(lambda stage: None):
        task = spinner.add_task("looking for suggestions", total=None)
        found = suggest(step, progress=lambda text: spinner.update(task, description=text), **options)
    console.print(str(found), highlight=False, markup=False)


def _bytes(name: str, value: str) -> int:
    try:
        return 0 if value == "0" else parse_bytes(name, value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _name_of_model(argument: str | None, option: str | None) -> str:
    if (argument is None) == (option is None):
        raise typer.BadParameter("give one model: as MODEL or with --model")
    return argument or option or ""


def _compiled(
    console: Console,
    model: str,
    inputs: tuple[int, int, str],
    machine: tuple[str, Sequence[str] | None],
    **options: Any,
) -> DryRun:
    """Compile a model as one of many ranks and simulate it, with a spinner that shows stage and elapsed time."""
    batch, length, dtype = inputs
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    try:
        spec = read_cluster(machine[0], machine[1] or ())
        make = find_model(model, batch=batch, length=length, dtype=_dtype(dtype))
        with Progress(*columns, console=console, transient=True) as spinner:
            task = spinner.add_task(f"{model}: making the model", total=None)
            with following_stages(lambda stage: spinner.update(task, description=f"{model}: {stage}")):
                return dry_run_step(make, on=spec, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise typer.BadParameter(f"dtype: torch has no dtype {name!r}; bfloat16, float16 and float32 are some")
    return dtype


if __name__ == "__main__":
    app(prog_name="python -m thunder_fsdp_sched")
