"""Measure the overlap, the memory and the kernels of training steps on GPUs.

    python benchmarks/gpu.py first                                    # find out what works: see gpu_first.py
    torchrun --nproc-per-node 2 benchmarks/gpu.py --save gpu          # a GPU for each rank: NCCL
    torchrun --nproc-per-node 2 benchmarks/gpu.py --backend gloo      # several ranks on one GPU
    python benchmarks/gpu.py                                          # one rank: kernels, copies, memory

This has not run on a GPU yet. Without a GPU it says so and exits with 0. The functions that read the profiler's trace
(``gpu_trace.py``) are tested with artificial events in ``tests/test_benchmarks.py``.

Not all systems fit on a GPU together with their optimizer states. So they are measured in groups of ``--together`` systems
(4), which take turns, one step of each in every round, and are then freed. The first system of each group is this
project's, newly built, with default options and the same strategy. ``ours / this`` compares steps of the same rounds;
milliseconds of different groups are comparable only if the GPU's clock is steady. Seconds are those of forward and
backward on the slowest rank, without the optimizer, between two events on the compute stream. One step of each system
also runs under ``torch.profiler``.

* Exposed: the time in which communication runs and no kernel computes, by the union of intervals.
* Idle: the time in which the GPU does nothing.
* Contention: the factor by which kernels are slower during communication.
* Peak: ``torch.cuda.max_memory_allocated`` over forward and backward, minus the bytes that were allocated before the
  system was built. If a group leaves memory allocated after it is freed, a line below the table says so.

gloo and symmetric memory work with several ranks on one GPU (this sets ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1``).
The ranks then share its multiprocessors, so times mean little, but counts and memory are valid. Systems that a backend
refuses are listed below the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any


def main() -> None:
    first = sys.argv[1:2] == ["first"]
    if first:
        import gpu_first

        gpu_first.parse(sys.argv[2:])  # reports wrong arguments without a GPU, too
    else:
        arguments = parse()
    from thunder_fsdp_sched.compat import prepare  # noqa: F401  # before torch's modules that Thunder misses

    import torch

    if not torch.cuda.is_available() and not (first and "--stand-in" in sys.argv):
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        print(f"skipped: no GPU here (torch {torch.__version__} {built}, {torch.cuda.device_count()} devices)")
        return
    if first:
        sys.exit(gpu_first.main(sys.argv[2:], torch.cuda.device_count()))
    run_rank(arguments)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="auto: NCCL, a GPU a rank")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--length", type=int, default=1024, help="bytes of text in a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each system")
    parser.add_argument("--together", type=int, default=4, help="systems in memory at once; at least 2")
    parser.add_argument("--only", metavar="REGEX", default="", help="only systems whose names match")
    parser.add_argument("--save", type=Path, help="folder for all figures (gpu.json), the picture and the traces")
    arguments = parser.parse_args(argv)
    if arguments.together < 2:
        parser.error("--together: at least 2, a system and the one that it is compared with")
    return arguments


def systems() -> dict[str, Callable[..., Any]]:
    """Return the function that builds each system, keyed by the system's name."""
    from systems import ddp, fsdp2, ours, thunders_fsdp

    made: dict[str, Callable[..., Any]] = {}
    for strategy in ("zero2", "zero3"):
        for transport in ("auto", "flat", "coalesced", "staged", "symmetric_memory"):
            name = f"ours {strategy}" if transport == "auto" else f"ours {strategy} {transport}"
            made[name] = partial(ours, sharding_strategy=strategy, transport=transport)
        for prefetch in (0, 2):
            made[f"ours {strategy} prefetch {prefetch}"] = partial(ours, sharding_strategy=strategy, prefetch=prefetch)
        for bucketing in ("none", "block"):
            made[f"Thunder fsdp {strategy} {bucketing}"] = partial(
                thunders_fsdp, strategy=strategy, bucketing=bucketing
            )
        made[f"FSDP2 {strategy}"] = partial(fsdp2, reshard=strategy == "zero3")
    made["DDP"] = ddp
    return made


def groups(names: Sequence[str], together: int) -> list[list[str]]:
    """Divide the systems into groups that are in memory at the same time.

    Each group starts with the system that the others are compared with.

    Args:
        names: the names of all systems.
        together: the maximum number of systems in a group, at least 2.
    """
    made = []
    for strategy in ("zero2", "zero3"):
        first = f"ours {strategy}"
        others = [name for name in names if name != first and strategy_of(name) == strategy]
        if not others and first in names:
            made.append([first])
        for start in range(0, len(others), together - 1):
            made.append([first, *others[start : start + together - 1]])
    return made


def strategy_of(name: str) -> str:
    """Return the strategy of this project's system that a system is compared with."""
    return "zero2" if "zero2" in name else "zero3"


def run_rank(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from systems import Shape, say, unsharded

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, devices = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    backend = arguments.backend
    if backend == "auto":
        backend = "nccl" if devices >= int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) else "gloo"
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", local_rank % devices)
    torch.cuda.set_device(device)
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
    dtype = getattr(torch, arguments.dtype)
    shape = Shape(arguments.blocks, arguments.width, arguments.length, arguments.batch, device=str(device), dtype=dtype)
    tokens = shape.tokens(rank)
    makes = {"compute": unsharded, **systems()}
    chosen = [name for name in makes if re.search(arguments.only, name)]
    results = Results()
    for number, names in enumerate(made := groups(chosen, arguments.together)):
        say(f"group {number + 1} of {len(made)}: {', '.join(names)}")
        before = torch.cuda.memory_allocated()
        run_group({name: makes[name] for name in names}, arguments, shape, tokens, results)
        gc.collect()
        torch.cuda.empty_cache()
        results.left[", ".join(names)] = torch.cuda.memory_allocated() - before
    if rank == 0:
        machine = f"{world_size} ranks, {backend}, {devices} x {torch.cuda.get_device_name()}"
        finish(arguments, machine, results)
    dist.barrier()
    dist.destroy_process_group()


@dataclass
class Results:
    """The measurements, keyed by the names of systems.

    Attributes:
        figures: the figures of a profiled step.
        seconds: the seconds of each round; for a system in several groups, of the rounds of all groups.
        ratios: for each round, the seconds of the first system of the group divided by those of the system.
        refused: the reason why a system does not run.
        left: bytes that were still allocated after a group was freed, keyed by the names of the group.
    """

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    def add(self, seconds: Mapping[str, Sequence[float]], first: str) -> None:
        """Add the rounds of a group, whose systems are compared with ``first``."""
        for name, of_one in seconds.items():
            self.seconds.setdefault(name, []).extend(of_one)
            if first in seconds and name != first:
                self.ratios[name] = [a / b for a, b in zip(seconds[first], of_one, strict=True)]


def run_group(
    makes: Mapping[str, Callable[..., Any]], arguments: argparse.Namespace, shape: Any, tokens: Any, results: Results
) -> None:
    """Build the systems of a group, measure them in turns, and free them."""
    import torch
    from systems import Emulation, interleave, say

    runs: dict[str, Callable[[], float]] = {}
    for name, make in makes.items():
        say(f"building: {name}")
        gc.collect()
        before = torch.cuda.memory_allocated()
        system = None
        try:
            system = make(name, shape, Emulation(shape))
            for _ in range(2):
                timed(system, tokens)
        except (ValueError, RuntimeError, NotImplementedError) as error:  # on all ranks alike
            results.refused[name] = str(error).split("\n")[0]
            system = None  # frees its memory
            continue
        torch.cuda.reset_peak_memory_stats()
        timed(system, tokens)
        peak = torch.cuda.max_memory_allocated() - before
        if name not in results.figures:
            results.figures[name] = {"peak": peak, **profiled(arguments, system, tokens)}
        runs[name] = partial(timed, system, tokens)
    if runs:
        results.add(interleave(runs, arguments.rounds, say), next(iter(makes)))


def timed(system: Any, tokens: Any) -> float:
    """Run one step; return the seconds of forward and backward until the GPU has finished both."""
    import torch
    import torch.distributed as dist

    system.optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    torch.cuda.synchronize()
    started = torch.cuda.Event(enable_timing=True)
    ended = torch.cuda.Event(enable_timing=True)
    started.record()
    system.module(tokens, tokens).backward()
    ended.record()
    torch.cuda.synchronize()
    system.optimizer.step()
    return started.elapsed_time(ended) * 1e-3


def profiled(arguments: argparse.Namespace, system: Any, tokens: Any) -> dict[str, Any]:
    """Profile one step and return its figures on this rank's GPU."""
    import torch
    import torch.distributed as dist
    from gpu_trace import contention, counts, exposed, idle, read, split
    from torch.profiler import ProfilerActivity, profile

    system.optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        system.module(tokens, tokens).backward()
        torch.cuda.synchronize()
    system.optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        if arguments.save and dist.get_rank() == 0:
            arguments.save.mkdir(parents=True, exist_ok=True)
            path = arguments.save / f"{system.name.replace(' ', '_')}.json"
        profiler.export_chrome_trace(str(path))
        activities = read(json.loads(path.read_text()), torch.cuda.current_device())
    compute, communication = split(activities)
    return {
        "exposed": exposed(compute, communication),
        "communication": exposed([], communication),
        "idle": idle(activities),
        "contention": contention(compute, communication),
        **counts(compute, communication),
    }


def finish(arguments: argparse.Namespace, machine: str, results: Results) -> None:
    from thunder_fsdp_sched.demo.show import make_console

    figures = summarized(results)
    console = make_console()
    console.print(
        f"{machine}; GPT with {arguments.blocks} blocks, width {arguments.width}, {arguments.batch} x {arguments.length} "
        f"bytes a rank, {arguments.dtype}; {arguments.rounds} rounds, {arguments.together} systems at a time",
        highlight=False,
    )
    console.print(table(figures), highlight=False)
    for name, why in results.refused.items():
        console.print(f"{name} does not run here: {why}", highlight=False)
    for names, nbytes in results.left.items():
        if nbytes > _LEFT:
            console.print(f"{nbytes:,} bytes were still allocated after these were freed: {names}", highlight=False)
    if arguments.save:
        setup = {key: value for key, value in vars(arguments).items() if key != "save"} | {"machine": machine}
        kept = {"setup": setup, **dataclasses.asdict(results), "figures": figures}
        (arguments.save / "gpu.json").write_text(json.dumps(kept, indent=1))
        draw(figures, arguments.save / "gpu.png")


_LEFT = 2**20
"""Bytes that a freed group may leave allocated without a line in the output."""


def summarized(results: Results) -> dict[str, dict[str, Any]]:
    """Return the figures of each system, with its times and its ratio to the system that it is compared with."""
    figures = {}
    for name, of_one in results.figures.items():
        seconds = results.seconds[name]
        figures[name] = {
            **of_one,
            "seconds": statistics.median(seconds),
            "least": min(seconds),
            "most": max(seconds),
            **({"ours": statistics.median(results.ratios[name])} if name in results.ratios else {}),
        }
    return figures


def table(figures: dict[str, dict[str, Any]]) -> Any:
    from thunder_fsdp_sched.reports.report import human_bytes

    from rich import box
    from rich.table import Table

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "step ms": lambda f: f"{f['seconds'] * 1e3:.2f}",
        "least–most": lambda f: f"{f['least'] * 1e3:.1f}–{f['most'] * 1e3:.1f}",
        "ours\n/ this": lambda f: f"{f['ours']:.2f}" if "ours" in f else "",
        "commu-\nnication": lambda f: f"{f['communication'] * 1e3:.2f}",
        "exposed\nms": lambda f: f"{f['exposed'] * 1e3:.2f}",
        "idle ms": lambda f: f"{f['idle'] * 1e3:.2f}",
        "conten-\ntion": lambda f: "" if f["contention"] is None else f"{f['contention']:.2f}",
        "kernels": lambda f: f"{f['kernels']} + {f['communication_kernels']}",
        "copies": lambda f: str(f["copies"]),
        "peak": lambda f: human_bytes(f["peak"]),
    }
    made = Table(box=box.SIMPLE_HEAD)
    made.pad_edge, made.collapse_padding = False, True
    for column in ("", *columns):
        made.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, of_one in figures.items():
        made.add_row(name, *(show(of_one) for show in columns.values()))
    made.caption = "Medians. Kernels: those that compute, and those that communicate."
    made.caption_justify = "left"
    return made


def draw(figures: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the step times, and the exposed communication of each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(figures)
    figure, axis = pyplot.subplots(figsize=(7, 1 + 0.27 * len(names)))
    axis.barh(range(len(names)), [figures[n]["seconds"] * 1e3 for n in names], color="tab:gray", label="step")
    axis.barh(range(len(names)), [figures[n]["exposed"] * 1e3 for n in names], color="tab:red", label="exposed")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xlabel("ms", fontsize=8)
    axis.legend(fontsize=8)
    axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
