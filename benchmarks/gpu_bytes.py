"""Compare the memory that a plan predicts with what a GPU's allocator counts, on one rank with NCCL.

    python benchmarks/gpu_bytes.py

Each row trains a GPT for a few steps, and then counts one more step, without optimizer. *over* is what the allocator's peak
has beyond the prediction; negative, if it stays below. *loss* is the largest difference from the unsharded model's losses.
cuBLAS has its workspaces before the count.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import thunder_fsdp_sched

import thunder
import torch
import torch.distributed as dist
from harness import show_nbytes, table
from systems import Shape
from gpu import BFLOAT16, NO_GPU, OFFLOAD, make_repeatable, take_steps

SHAPE = Shape(blocks=6, width=1024, length=512, batch=8, device="cuda")

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
    if not torch.cuda.is_available():
        print(NO_GPU)
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # results that do not depend on the workspace
    make_repeatable()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    _warm_up()
    reference = _train(thunder.jit(SHAPE.model()))
    rows = {name: _measure(reference, options) for name, options in CASES.items()}
    for share in LIMITS:
        limit = int(share * rows["zero3"]["predicted"])
        rows[f"max_memory={share}"] = _measure(reference, {"max_memory": limit})
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {SHAPE}\n")
    sizes = {name: (name, show_nbytes) for name in ("between steps", "peak", "predicted")}
    figures = {"over (bytes)": ("over", ",d"), "recomputed": ("recomputed", "d"), "loss": ("loss", ".1e")}
    print(table(rows, {**sizes, **figures}))
    dist.destroy_process_group()


def _warm_up() -> None:
    """Let cuBLAS allocate its workspaces, one for each thread that launches kernels."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(256, 256, device="cuda", dtype=dtype, requires_grad=True)
        (x @ x).sum().backward()


def _train(module: Any) -> torch.Tensor:
    """Take some steps, and return their losses."""
    return take_steps(module, torch.optim.SGD(module.parameters(), lr=0.05), SHAPE.tokens()).cpu()


def _measure(reference: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    before = _allocated()
    transform = thunder_fsdp_sched.fsdp(init=thunder_fsdp_sched.Init(device=SHAPE.device), **options)
    module = thunder.jit(SHAPE.model(), transforms=[transform])
    losses, tokens = _train(module), SHAPE.tokens()
    between = _allocated() - before
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
        "recomputed": len(compiled.settings.recomputed),
        "loss": float((losses - reference).abs().max()),
    }


def _allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


if __name__ == "__main__":
    main()
