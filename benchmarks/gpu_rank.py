"""One rank on a GPU: what a step costs besides its communication, how it overlaps with compute, and the memory of steps.

    python benchmarks/gpu_rank.py peers
    python benchmarks/gpu_rank.py peers --dtype bfloat16 --blocks 8 --width 2048 --length 1024 --batch 8
    python benchmarks/gpu_rank.py link             # as rank 0 of 8, over an emulated link
    python benchmarks/gpu_rank.py memory
    python benchmarks/gpu_rank.py peers --cpu      # test this program without a GPU

* Peers: all systems train the same GPT in turns. *step* is the median time of forward and backward until the GPU has
  finished, *host* until the host has issued everything; *kernels*, *copied* and *idle* (the GPU's, within *busy + idle*) are
  those of one profiled step, *peak* is what the caching allocator has at most beyond the parameters, gradients and optimizer
  of the system.
* Link: the same over an emulated link (``local_ranks.py``). By default it is as fast as makes the communication of "ours,
  zero3" take as long as the fastest sharded step over a link that takes no time. *alone* is the step over such a link,
  *communication* the time that the link takes for the bytes, and */max* the step divided by the longer of the two.
* Memory: each row trains a GPT for a few steps, and then counts one more step, without optimizer. *over* is what the
  allocator's peak has beyond the prediction; negative, if it stays below. *loss* is the largest difference from the
  unsharded model's losses. cuBLAS has its workspaces before the count.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import thunder_fsdp_sched  # before thunder

import harness
import thunder
import torch
import torch.distributed as dist
from harness import matching, medians, ratio, show_nbytes, table
from systems import (
    Emulation,
    Make,
    Shape,
    System,
    build,
    ddp,
    fsdp2,
    ours,
    thunders_fsdp,
    unsharded,
    unsharded_eager,
)
from gpu import BFLOAT16, NO_GPU, OFFLOAD, make_repeatable, take_steps
from local_ranks import join_emulated_ranks

SHARDED: dict[str, Make] = {
    "FSDP2, resharding": partial(fsdp2, reshard=True),
    "FSDP2": partial(fsdp2, reshard=False),
    "FSDP2, resharding, compiled blocks": partial(fsdp2, reshard=True, compiled=True),
    "Thunder fsdp, zero2": partial(thunders_fsdp, strategy="zero2", bucketing="block"),
    "ours, zero2": partial(ours, sharding_strategy="zero2"),
    "ours, zero3": ours,
    "ours, zero3, blocks as leaves": partial(ours, leaf_modules=("blocks.*",)),
    "ours, zero3, compiled leaves": partial(ours, compiled_blocks=True),
    "ours, zero2, compiled leaves": partial(ours, compiled_blocks=True, sharding_strategy="zero2"),
}
UNSHARDED: dict[str, Make] = {
    "eager": unsharded_eager,
    "eager, compiled blocks": partial(unsharded_eager, compiled=True),
    "Thunder": unsharded,
}
SYSTEMS: dict[str, Make] = {
    **UNSHARDED,
    "DDP": ddp,
    **SHARDED,
    "ours, zero3, torch_kernels": partial(ours, executors=["torch_kernels", "sdpa"]),
}

MEMORY_SHAPE = Shape(blocks=6, width=1024, length=512, batch=8, device="cuda")

# Options of ``fsdp``.
CASES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"sharding_strategy": "zero2"},
    "prefetch=0": {"prefetch": 0},
    "prefetch=2": {"prefetch": 2},
    "release=step": {"sharding_strategy": thunder_fsdp_sched.Sharding(release=True)},
    "parameters offloaded": {"offload_policy": OFFLOAD},
    "bfloat16": {"mp_policy": BFLOAT16},
}
# Values of ``max_memory``, as shares of the peak that is predicted for ``zero3``.
LIMITS = (0.85, 0.7, 0.55, 0.45)


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("part", choices=("peers", "link", "memory"))
    parser.add_argument("--cpu", action="store_true", help="measure peers on the CPU, over a link that takes no time")
    for name in ("blocks", "width", "length", "batch"):
        parser.add_argument(f"--{name}", type=int, help="of the model of peers and link")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the model of peers and link")
    parser.add_argument("--rate", type=float, help="GB/s that a rank sends over the link")
    arguments = parser.parse_args()
    is_memory = arguments.part == "memory"
    device = torch.device("cpu" if arguments.cpu and not is_memory else "cuda:0")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print(NO_GPU)
            return
        if is_memory:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # results that do not depend on the workspace
        torch.cuda.set_device(device)
    print(f"{'the CPU' if device.type == 'cpu' else torch.cuda.get_device_name()}, torch {torch.__version__}")
    if is_memory:
        harness.join_alone("nccl", device)
        measure_memory(arguments)
    elif arguments.part == "link":
        measure_link(arguments, device)
    else:
        harness.join_alone("gloo" if arguments.cpu else "cpu:gloo,cuda:nccl")
        measure_peers(arguments, device)
    dist.destroy_process_group()


def shape_of(arguments: argparse.Namespace, device: torch.device, on_gpu: Shape) -> Shape:
    """Return the shape that the options ask for: ``on_gpu`` or a tiny one, with what they change."""
    default = Shape(1, 64, 8, 1) if arguments.cpu else on_gpu
    asked = {name: getattr(arguments, name) for name in ("blocks", "width", "length", "batch")}
    if arguments.dtype is not None:
        asked["dtype"] = getattr(torch, arguments.dtype)
    return dataclasses.replace(default, device=str(device), **{k: v for k, v in asked.items() if v is not None})


def settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated() -> int:
    settle()
    return torch.cuda.memory_allocated()  # on a CPU 0


def peak_of(work: Callable[[], object]) -> int:
    """Return the bytes that the caching allocator has at most while ``work`` runs; on a CPU 0."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    work()
    settle()
    return torch.cuda.max_memory_allocated()


#
# Peers
#


def measure_peers(arguments: argparse.Namespace, device: torch.device) -> None:
    shape = shape_of(arguments, device, Shape(4, 1024, 512, 4))
    emulation, tokens = Emulation(shape, real=True), shape.tokens()
    systems = build(matching(SYSTEMS, arguments.only, "Thunder"), shape, emulation, partial(step, tokens=tokens))
    for system in systems.values():  # one has compiled, one runs without the audit, one is for the caching allocator
        for _ in range(2):
            step(system, tokens)
    hosts: dict[str, list[float]] = {name: [] for name in systems}
    runs = {name: partial(step, system, tokens, hosts[name]) for name, system in systems.items()}
    seconds = harness.in_turns(runs, arguments.rounds)
    steps, of_host = medians(seconds, unit=1e-3), medians(hosts, unit=1e-3)
    rows: dict[str, dict[str, Any]] = {}
    for name, system in systems.items():
        of_thunder = ratio(seconds[name], seconds["Thunder"])
        rows[name] = {"step": steps[name], "host": of_host[name], "ratio": of_thunder, **profiled(system, tokens)}
    columns = {"step ms": ("step", ".2f"), "/ Thunder": ("ratio", ".2f"), "host ms": ("host", ".2f")}
    columns |= {"kernels": ("kernels", "d"), "busy ms": ("busy", ".2f"), "idle ms": ("idle", ".2f")}
    print(f"{shape}\n\n{table(rows, {**columns, 'copied': ('copied', show_nbytes), 'peak': ('peak', show_nbytes)})}")
    harness.save(arguments, "gpu_peers", figures=rows)


#
# Link
#


def measure_link(arguments: argparse.Namespace, device: torch.device) -> None:
    link = join_emulated_ranks(8)
    shape = shape_of(arguments, device, Shape(8, 2048, 1024, 8, dtype=torch.bfloat16))
    emulation, tokens = Emulation(shape, real=True), shape.tokens()
    makes = matching({**UNSHARDED, **SHARDED}, arguments.only, "ours, zero3")
    systems = build(makes, shape, emulation, partial(step, tokens=tokens))
    sent, alone = {}, {}
    for name, system in systems.items():
        for _ in range(2):
            step(system, tokens)
        link.sent = 0.0
        step(system, tokens)
        sent[name] = link.sent
        alone[name] = statistics.median(step(system, tokens) for _ in range(5))
    rate = (
        arguments.rate * 1e9
        if arguments.rate
        else sent["ours, zero3"] / min(alone[name] for name in systems if sent[name])
    )

    def run(system: System, bytes_per_second: float, hosts: list[float] | None = None) -> float:
        link.bytes_per_second = bytes_per_second if device.type == "cuda" else float("inf")
        return step(system, tokens, hosts)

    hosts: dict[str, list[float]] = {name: [] for name in systems}
    runs = {f"{name}, alone": partial(run, system, float("inf")) for name, system in systems.items()}
    runs |= {name: partial(run, system, rate, hosts[name]) for name, system in systems.items()}
    milliseconds, of_host = medians(harness.in_turns(runs, arguments.rounds), unit=1e-3), medians(hosts, unit=1e-3)
    rows: dict[str, dict[str, Any]] = {}
    for name in systems:
        whole, without, communication = milliseconds[name], milliseconds[f"{name}, alone"], sent[name] / rate * 1e3
        rows[name] = {"step": whole, "alone": without, "communication": communication, "sent": sent[name]}
        rows[name] |= {"of_max": whole / max(without, communication), "host": of_host[name]}
    columns = {f"{name} ms": (name, ".2f") for name in ("alone", "communication", "step", "host")}
    print(f"{shape}, {rate / 1e9:.1f} GB/s\n")
    print(table(rows, {**columns, "/max": ("of_max", ".2f"), "sent": ("sent", show_nbytes)}))
    harness.save(arguments, "gpu_link", figures=rows)


def step(system: System, tokens: torch.Tensor, hosts: list[float] | None = None) -> float:
    """Run forward and backward; return their seconds, and append those of the host."""
    system.module.zero_grad(set_to_none=True)
    settle()
    started = time.perf_counter()
    system.module(tokens, tokens).backward()
    if hosts is not None:
        hosts.append(time.perf_counter() - started)
    settle()
    return time.perf_counter() - started


def profiled(system: System, tokens: torch.Tensor) -> dict[str, Any]:
    """Return the kernels, copied bytes, busy and idle milliseconds of a step on the GPU, and the bytes at its peak."""
    system.module.zero_grad(set_to_none=True)
    before = allocated()
    with torch.profiler.profile() as profiler:
        peak = peak_of(partial(step, system, tokens)) - before
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


#
# Memory
#


def measure_memory(arguments: argparse.Namespace) -> None:
    make_repeatable()
    for dtype in (torch.float32, torch.bfloat16):  # cuBLAS allocates workspaces for each thread that launches kernels
        x = torch.ones(256, 256, device="cuda", dtype=dtype, requires_grad=True)
        (x @ x).sum().backward()
    reference = train(thunder.jit(MEMORY_SHAPE.model()))
    rows = {name: memory_of(reference, options) for name, options in matching(CASES, arguments.only, "zero3").items()}
    for share in LIMITS:
        limit = int(share * rows["zero3"]["predicted"])
        rows[f"max_memory={share}"] = memory_of(reference, {"max_memory": limit})
    sizes = {name: (name, show_nbytes) for name in ("between steps", "peak", "predicted")}
    figures = {"over (bytes)": ("over", ",d"), "recomputed": ("recomputed", "d"), "loss": ("loss", ".1e")}
    print(f"{MEMORY_SHAPE}\n\n{table(rows, {**sizes, **figures})}")
    harness.save(arguments, "gpu_memory", figures=rows)


def train(module: Any) -> torch.Tensor:
    """Take some steps, and return their losses."""
    return take_steps(module, torch.optim.SGD(module.parameters(), lr=0.05), MEMORY_SHAPE.tokens()).cpu()


def memory_of(reference: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    gc.collect()
    before = allocated()
    transform = thunder_fsdp_sched.fsdp(init=thunder_fsdp_sched.Init(device=MEMORY_SHAPE.device), **options)
    module = thunder.jit(MEMORY_SHAPE.model(), transforms=[transform])
    losses, tokens = train(module), MEMORY_SHAPE.tokens()
    gc.collect()
    between = allocated() - before
    peak = peak_of(lambda: module(tokens, tokens).backward()) - before
    compiled = transform.compiled[-1]
    predicted = compiled.memory.peak.nbytes
    return {
        "between steps": between,
        "peak": peak,
        "predicted": predicted,
        "over": peak - predicted,
        "recomputed": len(compiled.settings.recomputed),
        "loss": float((losses - reference).abs().max()),
    }


if __name__ == "__main__":
    main()
