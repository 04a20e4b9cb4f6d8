"""What the benchmarks compute from what they saw: a GPU's trace, and the memory of a step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import thunder_fsdp_sched  # before thunder  # noqa: F401

import pytest
import torch
import torch.distributed as dist
from gpu_trace import Activity, contention, counts, exposed, idle, read, split
from live_memory import LiveMemory
from torch.testing._internal.distributed.fake_pg import FakeStore


def kernel(name: str, start: float, end: float, stream: int = 7, category: str = "kernel") -> Activity:
    return Activity(name, category, stream, start, end)


GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_a_trace_gives_what_the_gpu_did_in_seconds() -> None:
    arguments = {"device": 0, "stream": 7, "grid": [4, 1, 1], "block": [128, 1, 1]}
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 2e6, "dur": 5e5, "args": arguments},
            {
                "ph": "X",
                "cat": "gpu_memcpy",
                "name": "Memcpy DtoD",
                "ts": 1e6,
                "dur": 1e5,
                "args": {"device": 0, "stream": 9},
            },
            {
                "ph": "X",
                "cat": "kernel",
                "name": "of another GPU",
                "ts": 0,
                "dur": 1,
                "args": {"device": 1, "stream": 7},
            },
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1, "args": {}},
            {"ph": "i", "cat": "kernel", "name": "no duration", "ts": 0},
        ]
    }
    copy, gemm = read(trace, 0)
    assert copy == Activity("Memcpy DtoD", "gpu_memcpy", 9, 1.0, 1.1)
    assert gemm == Activity("gemm", "kernel", 7, 2.0, 2.5, "[4, 1, 1][128, 1, 1]")
    assert len(read(trace)) == 3


def test_communication_is_nccl_and_what_runs_on_other_streams() -> None:
    gemm, copy = kernel("gemm", 0, 5), kernel("Memcpy DtoD", 5, 6, category="gpu_memcpy")
    gather, same_stream = kernel(GATHER, 0, 9, stream=20), kernel(GATHER, 6, 7)
    pull = kernel("Memcpy PtoP", 1, 2, stream=24, category="gpu_memcpy")
    compute, communication = split([gemm, copy, gather, same_stream, pull])
    assert compute == [gemm, copy]
    assert communication == [gather, same_stream, pull]
    assert counts(compute, communication) == {"kernels": 1, "communication_kernels": 2, "copies": 2}


@pytest.mark.parametrize(
    ("compute", "communication", "seconds"),
    [
        ([], [], 0),
        ([(0, 4)], [(1, 3)], 0),
        ([(0, 2)], [(1, 5)], 3),
        ([(0, 2), (3, 4)], [(1, 5)], 2),  # in the gap between two kernels, and behind them
        ([(2, 3)], [(0, 4), (1, 5)], 4),  # two collectives at once count once
        ([(0, 3), (1, 2)], [(2, 4)], 1),  # so do kernels
    ],
)
def test_exposed_is_communication_beside_which_nothing_computes(
    compute: list[tuple[float, float]], communication: list[tuple[float, float]], seconds: float
) -> None:
    assert exposed([kernel("gemm", *c) for c in compute], [kernel(GATHER, *c) for c in communication]) == seconds


def test_idle_is_the_gaps_between_activities() -> None:
    assert idle([kernel("a", 1, 2), kernel("b", 4, 5), kernel("c", 4, 7)]) == 2
    assert idle([]) == 0


def test_contention_holds_a_kernel_against_itself_alone() -> None:
    alone = [kernel("gemm", 0, 1), kernel("gemm", 1, 2), kernel("norm", 2, 3)]
    beside = [kernel("gemm", 10, 11.5), kernel("other", 12, 13)]
    partly = kernel("gemm", 18.5, 28)  # counts for neither
    communication = [kernel(GATHER, 10, 20, stream=20)]
    assert contention([*alone, *beside, partly], communication) == 1.5
    assert contention(alone, communication) is None


def test_without_a_gpu_the_gpu_benchmark_says_why_and_succeeds() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).parents[1] / "benchmarks/gpu.py"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.startswith("skipped: no GPU here")


@pytest.fixture
def one_of_four() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_an_arena_is_live_until_the_last_read_and_the_wait(one_of_four: None) -> None:
    arena, shard, reduced = torch.zeros(32), torch.zeros(4), torch.empty(4)
    with LiveMemory([shard], [arena]) as memory:
        dist.all_gather_into_tensor(arena[:16], shard)
        y = arena[:16].view(4, 4) @ torch.ones(4, 4)
        torch.mm(y, y, out=arena[:16].view(4, 4))  # a gradient in the place of its parameter
        copied = y + 1
        arena[16:].view(4, 4).copy_(copied)
        dist.reduce_scatter_tensor(reduced, arena[16:])
        reduced.view(2, 2)  # waited for
        dist.reduce_scatter_tensor(reduced, arena[:16])
        reduced.view(2, 2)
        y.neg()
    held = memory.held()
    assert held.arena == 128
    assert max(held.parameters) == 64
    assert max(held.gradients) == 64 + 64 + 64  # two in the arena, and the one that is copied
    assert held.peaks()["peak_parameters_and_gradients"] == 192
    assert held.peaks()["peak_allocated"] == 128 + 64
    assert held.new["gradients"] == (1, 64)
    assert held.new["parameters"] == (0, 0)
    assert held.operators["copy"] == (1, 64)
    assert held.gradients[-1] == 64  # the copied one is still there


def test_a_buffer_outside_of_arenas_is_live_until_it_is_gone(one_of_four: None) -> None:
    shard, reduced = torch.zeros(4), torch.empty(4)
    with LiveMemory([shard]) as memory:
        whole = torch.empty(16)
        dist.all_gather_into_tensor(whole, shard)
        parameter = whole.clone()
        del whole
        grad = parameter * parameter
        del parameter
        mean = grad / 4
        dist.reduce_scatter_tensor(reduced, mean)
        del grad, mean
        reduced.neg()
    held = memory.held()
    assert max(held.parameters) == 128
    assert max(held.gradients) == 128
    assert held.peaks()["peak_parameters_and_gradients"] == 128
    assert held.peaks()["peak_allocated"] == 128
    assert held.new["parameters"] == (2, 128)
    assert held.new["gradients"] == (2, 128)
    assert held.gradients[-1] == 0
