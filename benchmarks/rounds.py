"""Measure a round of agreement: hops of point-to-point messages, beside gloo's own all-gather and broadcast.

    python benchmarks/rounds.py                    # 2, 4, 8 and 16 ranks on loopback, some minutes

The ranks meet in a barrier, and each posts a token and settles the round: at once, or after a pause in which the host does
something else, as between the start of a trace and its first wait for NCCL. The systems take turns in every round. The time
of a round is that of its slowest rank; processor time is that of the median rank, of all of its threads.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from thunder_fsdp_sched.private_distributed import host_backend
from thunder_fsdp_sched.ranks.all_gather import HostAllGather
from thunder_fsdp_sched.ranks.channel import TOKEN

import harness
import torch
import torch.distributed as dist
from harness import table
from netns import Loopback

PAUSE = 0.002
"""Seconds between posting and settling."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments.rounds)
        return
    print("milliseconds of a round, medians\n")
    for world_size in arguments.ranks:
        with Loopback(world_size) as ranks:
            command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:]]
            print(ranks.run(command)[0], flush=True)


class Hops:
    """The all-gather by which :class:`~thunder_fsdp_sched.ranks.channel.Channel` exchanges tokens."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.tags = backend, itertools.count(1)
        self.gather = HostAllGather(dist.get_rank(), [TOKEN.size] * dist.get_world_size())

    def post(self) -> None:
        self.gather.start(bytes(TOKEN.size), self.backend, next(self.tags))

    def settle(self) -> None:
        self.gather.finish(timedelta(minutes=5))
        assert len(set(self.gather.gathered())) == 1


class Ring:
    """gloo's all-gather, which its own threads advance."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.sent = backend, torch.zeros(TOKEN.size, dtype=torch.uint8)
        self.received = torch.zeros(TOKEN.size * dist.get_world_size(), dtype=torch.uint8)

    def post(self) -> None:
        self.work = self.issue()

    def issue(self) -> Any:
        return self.backend._allgather_base(self.received, self.sent)

    def settle(self) -> None:
        self.work.wait()


class Broadcast(Ring):
    """gloo's broadcast from rank 0, for comparison: it tells nobody of the other ranks."""

    def issue(self) -> Any:
        return self.backend.broadcast(self.sent, 0)


def measure(rounds: int) -> None:
    """Measure all systems on this rank of several; rank 0 prints."""
    harness.join_ranks()
    makes: Mapping[str, Callable[[Any], Any]] = {"hops": Hops, "ring": Ring, "broadcast": Broadcast}
    systems = {name: make(host_backend(dist.new_group())) for name, make in makes.items()}
    keys = [(name, pause) for pause in (0.0, PAUSE) for name in systems]
    seconds = torch.zeros(len(keys), rounds, 3, dtype=torch.float64)
    gc.collect()
    gc.freeze()
    gc.disable()
    for round_ in range(rounds):
        for number, (name, pause) in enumerate(keys):
            dist.barrier()
            on_processor, started = time.process_time(), time.perf_counter()
            systems[name].post()
            posted = time.perf_counter()
            if pause:
                time.sleep(pause)
            resumed = time.perf_counter()
            systems[name].settle()
            ended = time.perf_counter()
            spent = time.process_time() - on_processor
            seconds[number, round_] = torch.tensor([posted - started, ended - resumed, spent])
    processor = seconds[..., 2].clone()
    whole = seconds[..., 0] + seconds[..., 1]
    for tensor in (seconds, whole):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    everyones = [torch.zeros_like(processor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, processor)
    if dist.get_rank() == 0:
        show(keys, seconds, whole, torch.stack(everyones).median(0).values)
    dist.barrier()
    dist.destroy_process_group()


def show(keys: list[tuple[str, float]], seconds: torch.Tensor, whole: torch.Tensor, processor: torch.Tensor) -> None:
    rows: dict[str, dict[str, float]] = {name: {} for name, _ in keys}
    for (name, pause), parts, total, spent in zip(keys, seconds, whole, processor, strict=True):
        median = {
            "post": parts[:, 0],
            "settled later" if pause else "settle": parts[:, 1],
            **({} if pause else {"at once": total, "processor": spent}),
        }
        rows[name] |= {key: statistics.median(of.tolist()) * 1e3 for key, of in median.items()}
    print(f"{dist.get_world_size()} ranks")
    titles = ("at once", "post", "settle", "processor", "settled later")
    print(table(rows, {title: (title, ".3f") for title in titles}))


if __name__ == "__main__":
    main()
