"""Measure the host time that DTensor parameters and gradients take, beside plain tensors of the same rows.

    python benchmarks/dtensors.py --parameters 300 3000

One process, a gloo group of one rank, linear layers without bias of ``--width`` by ``--width`` elements, one thread.
Timed in processor time, in turns:

- a backward that returns the reduced gradients of each bucket, as compiled traces do, and autograd's accumulation,
- a step of AdamW (single-tensor, foreach, fused) on the parameters, on plain tensors, and on DTensors of torch.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import thunder_fsdp_sched  # before thunder
from thunder_fsdp_sched.runtime.row_dtensor import RowDTensor, local_rows

import thunder
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parameters", type=int, nargs="+", default=[300, 3000], help="parameters of the models")
    parser.add_argument("--width", type=int, default=64, help="rows and columns of each parameter")
    parser.add_argument("--rounds", type=int, default=15, help="repetitions, of which the medians are taken")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for parameters in arguments.parameters:
            measure(parameters, arguments.width, arguments.rounds)
    finally:
        dist.destroy_process_group()


def measure(parameters: int, width: int, rounds: int) -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(parameters))
    jitted = thunder.jit(layers, transforms=[transform := thunder_fsdp_sched.fsdp()])
    dtensors = list(jitted.parameters())
    buckets = transform.sharded.buckets
    plain = plain_copies(dtensors)
    backwards = {
        "plain tensors": backward(plain, lambda: plain_grads(buckets)),
        "DTensors": backward(
            dtensors, lambda: [g for b in buckets for g in b.sharded_grads(torch.zeros_like(b.shard))]
        ),
    }
    times = interleave(backwards, rounds)
    extra = median_difference(times["DTensors"], times["plain tensors"]) / parameters
    print(f"{parameters} parameters of {width} x {width}: backward {extra * 1e6:+.2f} us a parameter", flush=True)
    mesh = dtensors[0].device_mesh
    of_torch = [torch.nn.Parameter(DTensor.from_local(p.detach(), mesh, [Shard(0)])) for p in plain_copies(dtensors)]
    for kernel in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        steps = {}
        for name, params in (("ours", dtensors), ("plain", plain), ("DTensor", of_torch)):
            for param in params:
                param.grad = torch.ones_like(param)
            steps[name] = torch.optim.AdamW(params, **kernel).step
        times = interleave(steps, rounds)
        us = {name: statistics.median(seconds) / parameters * 1e6 for name, seconds in times.items()}
        ratios = [
            statistics.median(a / b for a, b in zip(times["ours"], times[name], strict=True))
            for name in ("plain", "DTensor")
        ]
        print(
            f"    AdamW({kernel}): us a parameter and step: ours {us['ours']:.1f}, plain {us['plain']:.1f}, DTensor "
            f"{us['DTensor']:.1f}; ours is {ratios[0]:.2f} of plain and {ratios[1]:.2f} of DTensor",
            flush=True,
        )


def plain_copies(dtensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return parameters that lie in memory as the rows of ``dtensors`` do, side by side in copies of their buffers."""
    buffers: dict[int, torch.Tensor] = {}
    copies = []
    for rows in map(local_rows, dtensors):
        storage = rows.untyped_storage()
        if storage.data_ptr() not in buffers:
            buffers[storage.data_ptr()] = torch.empty(0).set_(storage.clone())
        buffer = buffers[storage.data_ptr()]
        copies.append(torch.nn.Parameter(buffer.as_strided(rows.shape, rows.stride(), rows.storage_offset())))
    return copies


def plain_grads(buckets: Sequence[Any]) -> list[torch.Tensor]:
    with mock.patch.object(RowDTensor, "of_spec", lambda local, spec: local):
        return [grad for bucket in buckets for grad in bucket.sharded_grads(torch.zeros_like(bucket.shard))]


def backward(params: Sequence[torch.Tensor], grads: Callable[[], Sequence[torch.Tensor]]) -> Callable[[], None]:
    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *params: torch.Tensor) -> torch.Tensor:
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return tuple(grads())

    def run() -> None:
        for param in params:
            param.grad = None
        Step.apply(*params).backward()

    return run


def interleave(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the processor seconds of each function in each round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, function in functions.items():
            started = time.process_time()
            function()
            times[name].append(time.process_time() - started)
    gc.enable()
    return times


def median_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return statistics.median(x - y for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    main()
