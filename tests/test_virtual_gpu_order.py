"""Verdicts on removing a single wait, barrier, event or reference; see ``virtual_gpu.order``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from virtual_gpu import guard
from virtual_gpu.mutations import faults_without
from virtual_gpu.order import Order
from virtual_gpu.world import Rank, run

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")


def verdicts_without(function: Callable[[Rank], object], kind: str, world_size: int = 1) -> list[str]:
    """Return the verdict on each mutation of a kind, in the order of the log. Both checkers must agree."""
    result = run(function, world_size=world_size)
    result.assert_clean()
    order = Order(result.logs)
    assert order.is_clean
    verdicts = [v for v in order.verdicts(lambda entry: entry.phase == "step") if v.mutation.kind == kind]
    for mutation, verdict in verdicts:
        assert bool(faults_without(result.logs, mutation)) is (verdict == "flagged")
    return [verdict for _, verdict in verdicts]


def test_a_needed_wait_and_its_event_are_flagged() -> None:
    def write_and_read(rank: Rank) -> None:
        x, side = torch.zeros(8, device=rank.device), torch.cuda.Stream(rank.device)
        with rank.phase("step"):
            side.wait_stream(torch.cuda.current_stream(rank.device))
            with torch.cuda.stream(side):
                x.add_(1)

    assert verdicts_without(write_and_read, "wait") == ["flagged"]
    assert verdicts_without(write_and_read, "event") == ["flagged"]


def test_two_waits_for_the_same_work_imply_each_other() -> None:
    def wait_twice(rank: Rank) -> None:
        x, side = torch.zeros(8, device=rank.device), torch.cuda.Stream(rank.device)
        with rank.phase("step"):
            for _ in range(2):
                side.wait_stream(torch.cuda.current_stream(rank.device))
            with torch.cuda.stream(side):
                x.add_(1)

    assert verdicts_without(wait_twice, "wait") == ["implied", "implied"]


def test_a_wait_between_uses_of_different_bytes_is_apart() -> None:
    def use_halves(rank: Rank) -> None:
        x, side = torch.zeros(8, device=rank.device), torch.cuda.Stream(rank.device)
        side.wait_stream(torch.cuda.current_stream(rank.device))
        with torch.cuda.stream(side):
            x[:4].add_(1)
        with rank.phase("step"):
            torch.cuda.current_stream(rank.device).wait_stream(side)
        x[4:].add_(1)

    assert verdicts_without(use_halves, "wait") == ["apart"]


def test_a_missing_host_wait_before_using_pinned_memory_is_flagged() -> None:
    def upload(rank: Rank) -> None:
        source = torch.zeros(8).pin_memory()
        copy = torch.empty(8, device=rank.device).copy_(source, non_blocking=True)
        with rank.phase("step"):
            torch.cuda.current_stream(rank.device).synchronize()
        source.add_(1)
        del copy

    def download(rank: Rank) -> None:
        with rank.phase("step"):
            on_host = torch.zeros(8).pin_memory().copy_(torch.ones(8, device=rank.device))
        on_host.add_(1)

    assert verdicts_without(upload, "host wait") == ["flagged"]
    assert verdicts_without(download, "host wait") == ["flagged"]


@pytest.mark.parametrize("kind", ["record_stream", "reference"])
def test_memory_not_kept_alive_for_another_stream_is_flagged(kind: str) -> None:
    def lend(rank: Rank) -> None:
        main, side = torch.cuda.current_stream(rank.device), torch.cuda.Stream(rank.device)
        with rank.phase("step"):
            x = torch.zeros(8, device=rank.device)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                y = x * 2
            if kind == "record_stream":
                x.record_stream(side)
                del x
            torch.ones(8, device=rank.device)
            if kind == "reference":
                main.wait_stream(side)
                del x
            torch.ones(8, device=rank.device)
            main.wait_stream(side)
        del y

    assert verdicts_without(lend, kind) == ["flagged"]


def test_a_barrier_is_removed_on_all_ranks_together() -> None:
    def pull(rank: Rank) -> None:
        own = symmetric_memory.empty(8, device=rank.device)
        handle = symmetric_memory.rendezvous(own, dist.group.WORLD)
        own.fill_(rank.rank)
        with rank.phase("step"):
            handle.barrier(0)
            torch.empty(8, device=rank.device).copy_(handle.get_buffer(1 - rank.rank, (8,), own.dtype))
            handle.barrier(1)
            handle.barrier(0)
            own.fill_(7)

    assert verdicts_without(pull, "barrier", world_size=2) == ["flagged", "implied", "implied"]
