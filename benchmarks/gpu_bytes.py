"""Compare the memory that a plan predicts with what a GPU's allocator counts, on one rank with NCCL.

    python benchmarks/gpu_bytes.py
    python benchmarks/gpu_bytes.py --only max_memory --blocks 12

Each row trains a GPT for a few steps beside the unsharded model, and then counts one more step, without optimizer. *over* is
what the allocator's peak has beyond the prediction; negative, if it stays below. cuBLAS has its workspaces before the count.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import re
import sys
from typing import Any

import thunder_fsdp_sched

import thunder
import torch
import torch.distributed as dist
from harness import show_nbytes, table
from systems import Shape
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

STEPS = 4

# Options of ``fsdp``. A limit is a share of the peak that is predicted without one.
CASES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"sharding_strategy": "zero2"},
    "prefetch=0": {"prefetch": 0},
    "prefetch=2": {"prefetch": 2},
    "release=step": {"release": "step"},
    "release=bucket": {"release": "bucket"},
    "parameters offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=True)},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    **{f"max_memory={share}": {"max_memory": share} for share in (0.85, 0.7, 0.55, 0.45)},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="REGEX", default="", help="only cases whose names match")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=512, help="bytes of text in a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"skipped: no GPU here (torch {torch.__version__}, built for CUDA {torch.version.cuda})")
        return 0
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # results that do not depend on the workspace
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    shape = Shape(arguments.blocks, arguments.width, arguments.length, arguments.batch, device="cuda")
    _warm_up()
    reference = _train(thunder.jit(shape.model()), shape)
    rows = {
        name: _measure(shape, reference, options) for name, options in CASES.items() if re.search(arguments.only, name)
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments}\n")
    sizes = {name: (name, show_nbytes) for name in ("between steps", "peak", "predicted")}
    figures = {"over (bytes)": ("over", ",d"), "recomputed": ("recomputed", "d"), "loss": ("loss", ".1e")}
    print(table(rows, {**sizes, **figures}))
    dist.destroy_process_group()
    return 0


def _warm_up() -> None:
    """Let cuBLAS allocate its workspaces, one for each thread that launches kernels."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(256, 256, device="cuda", dtype=dtype, requires_grad=True)
        (x @ x).sum().backward()


def _train(module: Any, shape: Shape) -> list[float]:
    """Take some steps, and return their losses."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    tokens, losses = shape.tokens(), []
    for _ in range(STEPS):
        loss = module(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@functools.cache
def _peak_without_limit(shape: Shape) -> int:
    transform = thunder_fsdp_sched.fsdp(device=shape.device)
    module, tokens = thunder.jit(shape.model(), transforms=[transform]), shape.tokens()
    module(tokens, tokens)
    return transform.compiled[-1].predict_memory().peak.nbytes


def _measure(shape: Shape, reference: list[float], options: dict[str, Any]) -> dict[str, Any]:
    if "max_memory" in options:
        options = {"max_memory": int(options["max_memory"] * _peak_without_limit(shape))}
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    transform = thunder_fsdp_sched.fsdp(device=shape.device, **options)
    module = thunder.jit(shape.model(), transforms=[transform])
    losses, tokens = _train(module, shape), shape.tokens()
    gc.collect()
    torch.cuda.synchronize()
    between = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    module(tokens, tokens).backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    compiled = transform.compiled[-1]
    predicted = compiled.memory.peak.nbytes
    return {
        "between steps": between,
        "peak": peak,
        "predicted": predicted,
        "over": peak - predicted,
        "recomputed": len(compiled.recomputed),
        "loss": max(abs(ours - theirs) for ours, theirs in zip(losses, reference, strict=True)),
    }


if __name__ == "__main__":
    sys.exit(main())
