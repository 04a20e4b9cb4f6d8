"""Measure a node of CPU ranks on this machine, as a :class:`ClusterSpec`: ``python benchmarks/this_machine.py``.

The result can be saved with ``thunder_fsdp_sched.planning.cluster_files.save_cluster`` and named in ``--cluster``.
"""

from __future__ import annotations

import os
import time

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched.planning.clusters import GLOO, ClusterSpec, Protocol, describe

import torch


def measure_this_machine(world_size: int | None = None) -> ClusterSpec:
    """Measure a node of CPU ranks on this machine: one thread and one core each, gloo between them. This takes a minute.

    Args:
        world_size: number of ranks; the default is one for each core that this process may use.
    """
    from torch.multiprocessing import get_context  # here, because importing it is only needed to start processes

    cores = sorted(os.sched_getaffinity(0))
    world_size = world_size or len(cores)
    context = get_context("spawn")
    results = context.SimpleQueue()
    port = 20000 + os.getpid() % 20000
    processes = [
        context.Process(target=_measure_rank, args=(rank, world_size, cores[rank % len(cores)], port, results))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a rank failed; its traceback is above")
    figures = [results.get() for _ in processes]
    mean = {key: sum(f[key] for f in figures) / world_size for key in figures[0]}
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return ClusterSpec(
        name=f"cpu-{world_size}core",
        source=f"measured on this machine: {world_size} ranks, a thread and a core each, gloo over the loopback device",
        devices_per_node=world_size,
        memory=pages // world_size,
        flops={dtype: mean[str(dtype)] for dtype in _MEASURED_DTYPES},
        memory_bandwidth=mean["memory"],
        intra_node_bandwidth=mean["link"],
        inter_node_bandwidth=mean["link"],
        protocols=(Protocol(0.0, mean["hop"], mean["hop"]),),
        launch_overhead=mean["launch"],
        **GLOO,
    )


_MEASURED_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def _measure_rank(rank: int, world_size: int, core: int, port: int, results: object) -> None:
    import torch.distributed as dist

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    figures: dict[str, float] = {}
    for dtype in _MEASURED_DTYPES:
        a, b = torch.randn(512, 512).to(dtype), torch.randn(512, 2048).to(dtype)
        figures[str(dtype)] = 2 * 512 * 512 * 2048 / _seconds(lambda a=a, b=b: torch.mm(a, b))
    big = torch.ones(1 << 25)
    other = torch.empty_like(big)
    figures["memory"] = 2 * big.nbytes / _seconds(lambda: other.copy_(big))
    small = torch.ones(1)
    figures["launch"] = _seconds(lambda: torch.neg(small), calls=1000)
    shards = torch.ones(big.numel() // world_size)
    gather = dist.all_gather_into_tensor
    tiny = torch.empty(world_size)
    hops = max(world_size - 1, 1)
    figures["hop"] = _seconds(lambda: gather(tiny, small), calls=20) / hops
    figures["link"] = big.nbytes * hops / world_size / _seconds(lambda: gather(big, shards))
    dist.barrier()
    dist.destroy_process_group()
    results.put(figures)  # type: ignore[attr-defined]


def _seconds(call: object, *, calls: int = 3, repeats: int = 7) -> float:
    """Return the least mean time of one call among ``repeats`` runs of ``calls`` calls; disturbances only add time."""
    assert callable(call)
    call()
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - started) / calls)
    return best


if __name__ == "__main__":
    print(describe(measure_this_machine()))
