"""One rank on a GPU beside its peers, and the speed of encoders there: what a step costs besides its communication.

    python benchmarks/gpu_peers.py
    python benchmarks/gpu_peers.py --cpu      # test this program without a GPU

All systems train the same GPT in turns. *step* is the median time of forward and backward until the GPU has finished, *host*
until the host has issued everything; *kernels*, *copied* and *idle* (the GPU's, within *busy + idle*) are those of one
profiled step, *peak* is what the caching allocator has at most beyond the parameters, gradients and optimizer of the system.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from thunder_fsdp_sched import CommPolicy  # before thunder
from thunder_fsdp_sched.extras.low_precision.formats import FORMATS, decode, encode

import torch
import torch.distributed as dist
from harness import in_turns, show_nbytes, table
from systems import Emulation, Shape, System, ddp, fsdp2, ours, thunders_fsdp, unsharded, unsharded_eager

SYSTEMS: dict[str, Callable[..., System]] = {
    "eager": unsharded_eager,
    "DDP": ddp,
    "FSDP2, resharding": partial(fsdp2, reshard=True),
    "FSDP2": partial(fsdp2, reshard=False),
    "Thunder": unsharded,
    "Thunder fsdp, zero2": partial(thunders_fsdp, strategy="zero2", bucketing="block"),
    "ours, zero2": partial(ours, sharding_strategy="zero2"),
    "ours, zero3": ours,
    "ours, zero3, torch_kernels": partial(ours, executors=["torch_kernels", "sdpa"]),
    "ours, zero3, blocks as leaves": partial(ours, leaf_modules=("blocks.*",)),
    "ours, zero3, compiled leaves": partial(ours, compiled_blocks=True),
}
ENCODED = 1 << 26
"""Elements that the encoders get, in bfloat16."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.cpu else "cuda:0")
    shape = Shape(1, 64, 8, 1) if arguments.cpu else Shape(4, 1024, 512, 4, device=str(device))
    if not arguments.cpu:
        torch.cuda.set_device(device)
    backend = "gloo" if arguments.cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    emulation, tokens = Emulation(shape, real=True), shape.tokens()
    systems = {name: make(name, shape, emulation) for name, make in SYSTEMS.items()}
    hosts: dict[str, list[float]] = {name: [] for name in systems}
    for name, system in systems.items():
        for _ in range(3):  # one compiles, one runs without the audit, one is for the caching allocator
            step(system, tokens, hosts[name])
        hosts[name].clear()
    runs = {name: partial(step, system, tokens, hosts[name]) for name, system in systems.items()}
    seconds = in_turns(runs, arguments.rounds)
    rows: dict[str, dict[str, Any]] = {}
    for name, system in systems.items():
        host = statistics.median(hosts[name])
        rows[name] = {"step": statistics.median(seconds[name]) * 1e3, "host": host * 1e3, **profiled(system, tokens)}
        rows[name]["ratio"] = statistics.median(a / b for a, b in zip(seconds[name], seconds["Thunder"], strict=True))
    chip = "the CPU" if arguments.cpu else torch.cuda.get_device_name()
    print(f"{chip}, torch {torch.__version__}, {shape}\n")
    columns = {"step ms": ("step", ".2f"), "/ Thunder": ("ratio", ".2f"), "host ms": ("host", ".2f")}
    columns |= {"kernels": ("kernels", "d"), "busy ms": ("busy", ".2f"), "idle ms": ("idle", ".2f")}
    print(table(rows, {**columns, "copied": ("copied", show_nbytes), "peak": ("peak", show_nbytes)}))
    print(f"\nencoders, {1 << 12 if arguments.cpu else ENCODED} elements in bfloat16:\n")
    speeds = {name: encoder_speed(name, device, 1 << 12 if arguments.cpu else ENCODED) for name in FORMATS}
    print(table(speeds, {"encode GB/s": ("encode", ".0f"), "decode GB/s": ("decode", ".0f")}))
    dist.destroy_process_group()


def settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step(system: System, tokens: torch.Tensor, hosts: list[float]) -> float:
    """Run forward and backward; return their seconds, and append those of the host."""
    system.module.zero_grad(set_to_none=True)
    settle()
    started = time.perf_counter()
    system.module(tokens, tokens).backward()
    hosts.append(time.perf_counter() - started)
    settle()
    return time.perf_counter() - started


def profiled(system: System, tokens: torch.Tensor) -> dict[str, Any]:
    """Return the kernels, copied bytes, busy and idle milliseconds of a step on the GPU, and the bytes at its peak."""
    system.module.zero_grad(set_to_none=True)
    settle()
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile() as profiler:
        step(system, tokens, [])
    peak = torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else 0
    events = profiler.profiler.kineto_results.events()
    on_device = [e for e in events if "CUDA" in str(e.device_type()) and not e.is_user_annotation()]
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_device)
    busy, end = 0, spans[0][0] if spans else 0
    for begin, until in spans:
        busy += max(0, until - max(begin, end))
        end = max(end, until)
    copied = sum(e.nbytes() for e in on_device if "Memcpy" in e.name())
    kernels = sum("Memcpy" not in e.name() and "Memset" not in e.name() for e in on_device)
    whole = end - spans[0][0] if spans else 0
    figures = {"kernels": kernels, "copied": copied, "busy": busy / 1e6, "idle": (whole - busy) / 1e6}
    return {**figures, "peak": peak}


def encoder_speed(name: str, device: torch.device, numel: int) -> dict[str, float]:
    """Return the gigabytes of bfloat16 that are encoded and decoded in a second."""
    form = FORMATS[name]
    block = CommPolicy().block
    x = torch.randn(1, numel // block, block, device=device, dtype=torch.bfloat16)
    codes = torch.empty(1, numel // block, block, device=device, dtype=form.dtype)
    scales = torch.empty(1, numel // block, 1, device=device)
    speeds = {}
    for way, function in (("encode", encode), ("decode", decode)):
        times = []
        for _ in range(10):
            settle()
            started = time.perf_counter()
            function(form, x, codes, scales)
            settle()
            times.append(time.perf_counter() - started)
        speeds[way] = x.nbytes / statistics.median(times) / 1e9
    return speeds


if __name__ == "__main__":
    main()
