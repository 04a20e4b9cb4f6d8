"""The commands of ``python -m thunder_fsdp_sched``."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..api import fsdp
from ..errors import coded_error
from ..logs import following_stages
from ..option_groups import Sharding
from ..plan.specs import ShardingStrategy
from ..transports import TRANSPORTS
from .bench import Disagreement, bench_table, measure
from .bench_systems import SYSTEMS, Setup, parse_systems, torchrun_ranks
from .commands import COMMANDS, make_app
from .planning.clusters import CLUSTERS, as_json, read_cluster
from .planning.dry_run import DryRun, dry_run_step
from .planning.fit import describe_fit, with_optimizer
from .planning.models import find_model
from .replay import load_schedules
from .reports.exposed import exposed_communication
from .reports.output_files import OutputFile, check_outputs
from .reports.plot import plot_memory, plot_timelines, save_memory, save_perfetto
from .reports.report import answer, dry_run_table, make_console, step_before_and_after, window_table
from .reports.texts import plan_table
from .step_memory.step_memory import StepMemory

app = make_app()


PRESETS = f"Clusters: {', '.join(CLUSTERS)}."
UNITS = "Units: sizes are bytes, as 8GiB, 25MB or 8589934592; bandwidths are bytes/s; times are seconds."

Spinner = Callable[[str], None]


@contextmanager
def _spinner(console: Console, text: str) -> Iterator[Spinner]:
    """Show a spinner with the elapsed time; yield a function that changes its text."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda text: progress.update(task, description=text)


@dataclass
class StepOptions:
    """The options of the commands that compile a step, with the same names everywhere."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="MODULE:FACTORY that returns (module, args) or (module, args, kwargs), best on the meta device; "
            "a LitGPT configuration; or a Hugging Face model type (llama). Random weights, nothing is downloaded.",
        ),
    ]
    world_size: Annotated[int, typer.Option(min=1, max=10**6, help="Ranks to compile for; none is started.")] = 8
    cluster: Annotated[
        str, typer.Option(help="The machine: a preset, or a .json file with the attributes of ClusterSpec.")
    ] = "h100-sxm"
    cluster_set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ATTRIBUTE=VALUE",
            help="Change an attribute of the machine, such as inter_node_bandwidth=25GB; may be repeated.",
        ),
    ] = None
    sharding: Annotated[ShardingStrategy, typer.Option(help="The sharding strategy.")] = "zero3"
    bucketing: Annotated[str, typer.Option(help="block, layer, none, or the size of a bucket, such as 25MB.")] = "block"
    prefetch: Annotated[
        str | None,
        typer.Option(
            help="How many buckets ahead of its wait an all-gather is issued, or auto; by default 1, with --max-memory "
            "auto."
        ),
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(
            help="Limit on all memory of a step without optimizer state, such as 70GiB; backward recomputes what does not "
            "fit."
        ),
    ] = None
    max_gathers_in_flight: Annotated[
        int | None,
        typer.Option(min=1, help="Limit on the all-gathers in flight, whatever their size."),
    ] = None
    secondary_ranks: Annotated[
        int | None,
        typer.Option(min=2, help="ZeRO-3: among how many ranks backward gathers; all by default."),
    ] = None
    replicas: Annotated[int, typer.Option(min=1, help="Hybrid sharding: number of copies of the shards.")] = 1
    transport: Annotated[str, typer.Option(help=f"How buckets travel: auto, {', '.join(sorted(TRANSPORTS))}.")] = "auto"
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per rank (models by name only); by default 1.")
    ] = None
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence (models by name only); by default 2048.")
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(help="dtype of parameters and optimizer state (models by name only); by default float32."),
    ] = None
    mixed_precision: Annotated[
        str | None,
        typer.Option(
            help="dtype in which parameters are gathered and computed with, while gradients are reduced in float32, or "
            "none; by default bfloat16 for models by name, and none for MODULE:FACTORY."
        ),
    ] = None

    def compile(self, console: Console, *, micro_batches: int = 1) -> DryRun:
        """Compile the model as one of many ranks and simulate it, with a spinner that shows stage and elapsed time."""
        try:
            spec = read_cluster(self.cluster, self.cluster_set or ())
            make = self.find()
            with _spinner(console, f"{self.model}: making the model") as show:
                with following_stages(lambda stage: show(f"{self.model}: {stage}")):
                    return dry_run_step(
                        make,
                        on=spec,
                        world_size=self.world_size,
                        replicas=self.replicas,
                        micro_batches=micro_batches,
                        mp_policy=self.policy(),
                        **self.fsdp_options(self.sharding),
                    )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    def find(self) -> Callable[[], Any]:
        """Return the function that makes the model and its inputs.

        Raises:
            ValueError, typer.BadParameter: there is none.
        """
        dtype = _dtype("dtype", self.dtype or "float32")
        by_name = {"--batch": self.batch, "--length": self.length, "--dtype": self.dtype}
        if ":" in self.model and (given := [option for option, value in by_name.items() if value is not None]):
            raise coded_error(
                typer.BadParameter, "command.option-of-named-models", options=", ".join(given), model=self.model
            )
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, folder)
        return find_model(self.model, batch=self.batch or 1, length=self.length or 2048, dtype=dtype)

    def policy(self) -> MixedPrecisionPolicy | None:
        lower = self.mixed_precision or ("none" if ":" in self.model else "bfloat16")
        return None if lower == "none" else MixedPrecisionPolicy(_dtype("mixed-precision", lower), torch.float32)

    def fsdp_options(self, strategy: str) -> dict[str, Any]:
        """Return the options that say how :func:`thunder_fsdp_sched.fsdp` shards and schedules."""
        return {
            "sharding_strategy": Sharding(strategy, secondary_ranks=self.secondary_ranks),
            "bucketing_strategy": self.bucketing,
            "prefetch": _prefetch(self.prefetch),
            "max_memory": self.max_memory,
            "max_gathers_in_flight": self.max_gathers_in_flight,
            "transport": self.transport,
        }


def _dtype(option: str, name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise coded_error(typer.BadParameter, "command.unknown-dtype", option=option, name=name)
    return found


def _prefetch(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise coded_error(ValueError, "command.prefetch-not-a-number", got=text) from None


def _takes(
    options: type, *, annotations: Mapping[str, Any] | None = None, only: Collection[str] | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a dataclass as options; it receives an instance as its first argument.

    Args:
        annotations: other annotations of the fields.
        only: the fields that the command has; the others keep their default values. By default all.
        defaults: other default values of the fields.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        declared = inspect.signature(options, eval_str=True).parameters
        others = annotations or {}
        shared = {
            name: p.replace(default=defaults.get(name, p.default), annotation=others.get(name, p.annotation))
            for name, p in declared.items()
            if only is None or name in only
        }
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        @wraps(command)
        def run(**given: Any) -> None:
            command(options(**{name: given.pop(name) for name in shared}), **given)

        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*shared.values(), *own)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


@app.command(
    help=COMMANDS["trace"],
    epilog=f"{PRESETS}\n\n{UNITS}\n\n"
    "Example: python -m thunder_fsdp_sched trace my_models:make --world-size 64 --sharding zero2 --prefetch 2",
)
@_takes(StepOptions)
def trace(options: StepOptions) -> None:
    console = make_console()
    step = options.compile(console)
    console.print(plan_table(step.transform.plan))
    title = f"{options.sharding.replace('zero', 'ZeRO-')}, {options.world_size} ranks"
    console.print(step_before_and_after(step.transform.compiled[-1], title=title, width=console.width))


@app.command(
    help=COMMANDS["plan"],
    epilog=f"{PRESETS}\n\n{UNITS}\n\n"
    "Example: python -m thunder_fsdp_sched plan my_models:make --world-size 64 --cluster h100-sxm "
    "--cluster-set inter_node_bandwidth=25GB --max-memory 70GiB --picture step.png",
)
@_takes(StepOptions, world_size=64)
def plan(
    options: StepOptions,
    micro_batches: Annotated[
        int,
        typer.Option(min=1, help="Micro-batches of a step, each with its batch; all but the last run under no_sync."),
    ] = 1,
    optimizer_bytes: Annotated[
        float | None,
        typer.Option(min=0, help="Bytes of optimizer state for each element that trains; by default those of AdamW."),
    ] = None,
    optimizer_step_bytes: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Bytes that optimizer.step allocates for each element that trains, 0 with fused=True; by default those of "
            "AdamW, on GPUs a copy of the shards.",
        ),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw the timeline (.png, .svg).")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Where to write the timeline for Perfetto (.json).")] = None,
    schedule: Annotated[Path | None, typer.Option(help="Where to save the schedule (.json).")] = None,
    memory_file: Annotated[
        Path | None,
        typer.Option("--memory", help="Where to draw the memory of the step (.png, .svg), or to save it (.json)."),
    ] = None,
) -> None:
    console = make_console()
    for option, number in (("--optimizer-bytes", optimizer_bytes), ("--optimizer-step-bytes", optimizer_step_bytes)):
        if number is not None and not math.isfinite(number):
            raise coded_error(typer.BadParameter, "command.number-not-finite", option=option, got=number)
    _check_outputs(
        picture=OutputFile(picture, picture=True),
        perfetto=OutputFile(perfetto, data=True),
        schedule=OutputFile(schedule, data=True),
        memory=OutputFile(memory_file, picture=True, data=True),
    )
    step = options.compile(console, micro_batches=micro_batches)
    compiled = step.compiled
    memory = with_optimizer(step, optimizer_bytes, optimizer_step_bytes)
    fit = describe_fit(memory, step.cluster.memory, step.cluster.name)
    verdict, _, parts = fit.partition("\n")
    console.print(answer(step, options.model, verdict, memory), markup=False)
    console.print(plan_table(step.transform.plan))
    if step.micro_batches > 1:
        console.print(window_table(step))
    console.print(dry_run_table(step))
    console.print(parts, markup=False)
    if compiled.choice is not None:
        console.print(str(compiled.choice))
    files: dict[str, tuple[Path | None, Callable[[Path], object]]] = {
        "picture": (picture, partial(plot_timelines, [("unsorted", step.before), ("scheduled", step.after)])),
        "Perfetto": (perfetto, partial(save_perfetto, step.after)),
        "schedule": (schedule, step.transform.save_schedules),
        "memory": (memory_file, partial(_write_memory, memory, step)),
    }
    for name, (path, write) in files.items():
        if path is not None:
            write(path)
            console.print(f"{name}: {path}")


def _check_outputs(**outputs: OutputFile) -> None:
    try:
        check_outputs({f"--{name}": output for name, output in outputs.items()})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _write_memory(memory: StepMemory, step: DryRun, path: Path) -> None:
    if path.suffix.lower() == ".json":
        save_memory(memory, path)
    else:
        plot_memory(memory, path, timeline=step.after)


_FACTORY = (
    "A function that returns (module, args) or (module, args, kwargs), on the CPU or on the rank's GPU. It is called for "
    "each system, after torch.manual_seed(0)."
)


@app.command(
    help=COMMANDS["bench"],
    epilog="Example: torchrun --nproc-per-node 2 -m thunder_fsdp_sched bench my_models:make",
)
@_takes(
    StepOptions,
    annotations={"model": Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help=_FACTORY)]},
    only={"model", "bucketing", "prefetch", "max_memory", "max_gathers_in_flight", "transport", "mixed_precision"},
)
def bench(
    options: StepOptions,
    systems: Annotated[str, typer.Option(help="The systems to measure, separated by commas.")] = ", ".join(SYSTEMS),
    rounds: Annotated[int, typer.Option(min=1, help="How many times each system takes its turn.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="How many steps a turn has.")] = 1,
) -> None:
    try:
        names = parse_systems(systems)
        policy = options.policy()
        fsdp(**options.fsdp_options("zero3"))  # which checks them
        with torchrun_ranks() as device:
            setup = Setup(options.find, device, options.fsdp_options, policy)
            console, code = make_console(quiet=dist.get_rank() != 0), 0
            try:
                with _spinner(console, options.model) as show:
                    found = measure(names, setup, rounds=rounds, steps=steps, show=show)
                console.print(bench_table(found, options.model, rounds, steps))
                code = int(all(system.error for system in found))
            except Disagreement as error:
                console.print(f"{options.model}: {error}", markup=False)
                code = 1
            except ValueError as error:  # the same on all ranks, so one prints it
                code = 2
                if dist.get_rank() == 0:
                    typer.BadParameter(str(error)).show()
            dist.barrier()  # torchrun ends the other ranks when one exits with an error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(code)


@app.command(help=COMMANDS["clusters"])
def clusters() -> None:
    print("\n".join(map(as_json, CLUSTERS.values())))


@app.command(
    help=COMMANDS["exposed"],
    epilog="Example: python -m thunder_fsdp_sched exposed rank0.json rank1.json --save exposed.png",
)
def exposed(
    files: Annotated[list[Path], typer.Argument(help="Files of torch's profiler (.json, .json.gz), one of each rank.")],
    save: Annotated[Path | None, typer.Option(help="Where to draw the last step of each rank (.png, .svg).")] = None,
) -> None:
    _check_outputs(save=OutputFile(save, picture=True))
    try:
        found = exposed_communication(files)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console = make_console()
    console.print(found.table())
    if save is not None:
        found.plot(save)
        console.print(f"picture: {save}")


@app.command(help=COMMANDS["diff"])
def diff(
    one: Annotated[Path, typer.Argument(help="A saved schedule (plan --schedule, transform.save_schedules).")],
    other: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    try:
        first, second = load_schedules(one), load_schedules(other)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    console = make_console()
    if len(first) != len(second):
        console.print(f"{one} holds {len(first)} schedules, {other} holds {len(second)}")
    for number, (a, b) in enumerate(zip(first, second, strict=False), start=1):
        if a != b:
            console.print(f"schedule {number}")
            console.print(a.diff(b) or "the compute around it differs", markup=False, soft_wrap=True)
    raise typer.Exit(int(first != second))
