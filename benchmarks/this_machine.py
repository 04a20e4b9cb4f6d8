"""Measure a node of CPU ranks on this machine, as a :class:`ClusterSpec`; this takes a minute.

    python benchmarks/this_machine.py                  # a rank for each core that this process may use

Each rank has one thread and one core, and gloo between them. The output, in a file, is for ``--cluster``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.extras.planning.clusters import GLOO, ClusterSpec, Protocol, as_json

import harness
import torch
import torch.distributed as dist

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def run(arguments: argparse.Namespace) -> None:
    """Measure on all ranks, and print the means."""
    figures = measure_rank(dist.get_world_size())
    means = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(means)
    if dist.get_rank() == 0:
        means /= dist.get_world_size()
        print(as_json(cluster_of(dict(zip(figures, means.tolist(), strict=True)), dist.get_world_size())))


def cluster_of(figures: dict[str, float], world_size: int) -> ClusterSpec:
    """Return the description of a node with these figures for each rank."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return ClusterSpec(
        name=f"cpu-{world_size}core",
        source=f"measured on this machine: {world_size} ranks, a thread and a core each, gloo over the loopback device",
        devices_per_node=world_size,
        memory=pages // world_size,
        flops={dtype: figures[str(dtype)] for dtype in DTYPES},
        memory_bandwidth=figures["memory"],
        intra_node_bandwidth=figures["link"],
        inter_node_bandwidth=figures["link"],
        protocols=(Protocol(0.0, figures["hop"], figures["hop"]),),
        launch_overhead=figures["launch"],
        **GLOO,
    )


def measure_rank(world_size: int) -> dict[str, float]:
    """Return FLOP/s of each dtype, bytes/s of memory and of the link, and the seconds of a launch and a hop."""
    figures: dict[str, float] = {}
    for dtype in DTYPES:
        a, b = torch.randn(512, 512).to(dtype), torch.randn(512, 2048).to(dtype)
        figures[str(dtype)] = 2 * 512 * 512 * 2048 / seconds_of(lambda a=a, b=b: torch.mm(a, b))
    big = torch.ones(1 << 25)
    other = torch.empty_like(big)
    figures["memory"] = 2 * big.nbytes / seconds_of(lambda: other.copy_(big))
    small, tiny = torch.ones(1), torch.empty(world_size)
    figures["launch"] = seconds_of(lambda: torch.neg(small), calls=1000)
    shards, hops = torch.ones(big.numel() // world_size), max(world_size - 1, 1)
    gather = dist.all_gather_into_tensor
    figures["hop"] = seconds_of(lambda: gather(tiny, small), calls=20) / hops
    figures["link"] = big.nbytes * hops / world_size / seconds_of(lambda: gather(big, shards))
    return figures


def seconds_of(call: Callable[[], object], *, calls: int = 3, repeats: int = 7) -> float:
    """Return the least mean time of one call among ``repeats`` runs of ``calls`` calls; disturbances only add time."""
    call()
    return min(harness.seconds_of(call, calls=calls) for _ in range(repeats))


if __name__ == "__main__":
    ranks = len(os.sched_getaffinity(0))
    harness.run_on_ranks(__file__, argparse.Namespace(ranks=ranks, no_limit=True), run)
