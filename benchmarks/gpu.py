"""What compute hides of communication on GPUs, what memory a step takes, and which kernels it launches.

    torchrun --nproc-per-node 2 benchmarks/gpu.py --save gpu          # a GPU for each rank: NCCL
    torchrun --nproc-per-node 2 benchmarks/gpu.py --backend gloo      # several ranks on one GPU
    python benchmarks/gpu.py                                          # one rank: kernels, copies, memory

This has not run on a GPU yet. Without one it says so and ends with 0. What reads the profiler's trace (``gpu_trace.py``) is
tested on made-up events in ``tests/test_benchmarks.py``.

Systems take turns, a step of each in every round. Seconds are forward and backward without the optimizer, between two
events on the compute stream, of the slowest rank. Then a step of each runs under ``torch.profiler``.

* Exposed: time in which communication runs and no kernel that computes, by union of intervals. Idle: the GPU does nothing.
* Contention: by which factor a kernel is slower beside communication than without.
* Peak: ``torch.cuda.max_memory_allocated`` over forward and backward, less what was allocated before the system was built.

gloo and symmetric memory work with several ranks on one GPU (this sets ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1``).
They share its multiprocessors then, so times say little, but counts and memory hold. What a backend refuses is named below
the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def main() -> None:
    arguments = parse()
    from thunder_fsdp_sched.compat import prepare  # noqa: F401  # before torch's modules that Thunder misses

    import torch

    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        print(f"skipped: no GPU here (torch {torch.__version__} {built}, {torch.cuda.device_count()} devices)")
        return
    run_rank(arguments)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="auto: NCCL, a GPU a rank")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--length", type=int, default=1024, help="bytes of text in a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each system")
    parser.add_argument("--save", type=Path, help="folder for all figures (gpu.json), the picture and a trace of each")
    return parser.parse_args()


def systems() -> dict[str, Callable[..., Any]]:
    """What builds each system, by its name."""
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


def run_rank(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from systems import Emulation, Shape, interleave, say, unsharded

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
    runs: dict[str, Callable[[], float]] = {}
    figures: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    for name, make in {"compute": unsharded, **systems()}.items():
        say(f"building: {name}")
        before = torch.cuda.memory_allocated()
        try:
            system = make(name, shape, Emulation(shape))
            for _ in range(2):
                timed(system, tokens)
        except (ValueError, RuntimeError, NotImplementedError) as error:  # on all ranks alike
            refused[name] = str(error).split("\n")[0]
            continue
        torch.cuda.reset_peak_memory_stats()
        timed(system, tokens)
        figures[name] = {"peak": torch.cuda.max_memory_allocated() - before, **profiled(arguments, system, tokens)}
        runs[name] = partial(timed, system, tokens)
    seconds = interleave(runs, arguments.rounds, say)
    if rank == 0:
        finish(arguments, backend, world_size, figures, seconds, refused)
    dist.barrier()
    dist.destroy_process_group()


def timed(system: Any, tokens: Any) -> float:
    """One step; seconds of forward and backward, until the GPU has done both."""
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
    """What one step did on this rank's GPU."""
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


def finish(
    arguments: argparse.Namespace,
    backend: str,
    world_size: int,
    figures: dict[str, dict[str, Any]],
    seconds: dict[str, list[float]],
    refused: dict[str, str],
) -> None:
    from thunder_fsdp_sched.demo.show import make_console

    import torch
    from systems import ratio

    for name, of_one in figures.items():
        strategy = "zero2" if "zero2" in name else "zero3"
        of_one |= {"seconds": statistics.median(seconds[name]), "least": min(seconds[name]), "most": max(seconds[name])}
        if f"ours {strategy}" in seconds:
            of_one["ours"] = ratio(seconds[f"ours {strategy}"], seconds[name])
    console = make_console()
    console.print(
        f"{world_size} ranks, {backend}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}; GPT with "
        f"{arguments.blocks} blocks, width {arguments.width}, {arguments.batch} x {arguments.length} bytes a rank, "
        f"{arguments.dtype}; {arguments.rounds} rounds",
        highlight=False,
    )
    console.print(table(figures), highlight=False)
    for name, why in refused.items():
        console.print(f"{name} does not run here: {why}", highlight=False)
    if arguments.save:
        setup = {key: value for key, value in vars(arguments).items() if key != "save"}
        setup |= {"backend": backend, "world_size": world_size, "device": torch.cuda.get_device_name()}
        kept = {"setup": setup, "figures": figures, "seconds": seconds, "refused": refused}
        (arguments.save / "gpu.json").write_text(json.dumps(kept, indent=1))
        draw(figures, arguments.save / "gpu.png")


def table(figures: dict[str, dict[str, Any]]) -> Any:
    from thunder_fsdp_sched.report import human_bytes

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
    """Step times, and how much of each is exposed communication."""
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
