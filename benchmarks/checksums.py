"""Measure the cost of checksums when saving and loading.

    python benchmarks/checksums.py --folder /path/on/the/disk            # 200 MB of parameters, 2 gloo ranks
    python benchmarks/checksums.py --folder /path/on/the/disk --megabytes 1000 --runs 7

Each figure is the median over the runs, in seconds: the time of the slower rank, and below it the processor time of both
ranks. Runs with and without checksums alternate. Files are in the page cache when they are loaded, so the time of the
disk is not part of the comparison.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path

import thunder_fsdp_sched as tfs

import thunder
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        mp.spawn(_measure, args=(Path(folder), options.megabytes, options.runs), nprocs=2)


def _measure(rank: int, folder: Path, megabytes: int, runs: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    width = 1000
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(megabytes // 4)]
    model = thunder.jit(torch.nn.Sequential(*layers), transforms=[tfs.fsdp()])
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, do: object, *args: object, **kwargs: object) -> None:
        assert callable(do)
        dist.barrier()
        begun, begun_cpu = time.perf_counter(), time.process_time()
        do(*args, **kwargs)
        slowest, cpu = torch.tensor(time.perf_counter() - begun), torch.tensor(time.process_time() - begun_cpu)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        seconds[name].append(float(slowest))
        seconds[f"{name} cpu"].append(float(cpu))

    for run in range(runs):
        for on in (True, False):
            place = folder / f"{run}-{on}"
            timed(f"save_checkpoint {on}", tfs.save_checkpoint, place, model, checksums=on)
            timed(f"save_safetensors {on}", tfs.save_safetensors, model, place / "whole", checksums=on)
        for on in (True, False):
            timed(f"load_checkpoint {on}", tfs.load_checkpoint, folder / f"{run}-True", model, verify_checksums=on)
            timed(
                f"load_safetensors {on}",
                tfs.load_safetensors,
                model,
                place.parent / f"{run}-True" / "whole",
                verify_checksums=on,
            )
        dist.barrier()
        if rank == 0:
            for on in (True, False):
                shutil.rmtree(folder / f"{run}-{on}")
        dist.barrier()
    if rank == 0:
        print(f"{megabytes} MB of parameters on 2 ranks, median of {runs} runs, seconds")
        print(f"{'':18s} {'with':>8s} {'without':>8s} {'more':>8s}")
        for name in ("save_checkpoint", "load_checkpoint", "save_safetensors", "load_safetensors"):
            for shown, kind in ((name, ""), ("  processor time", " cpu")):
                with_, without = (statistics.median(seconds[f"{name} {on}{kind}"]) for on in (True, False))
                print(f"{shown:18s} {with_:8.3f} {without:8.3f} {with_ / without - 1:8.0%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
