"""What only a GPU can show: kernels, streams, symmetric memory. Several ranks share one GPU and talk through gloo.

TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python -m pytest tests/gpu
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from thunder_fsdp_sched import fsdp, full_state_dict

import pytest
import thunder
import torch
import torch.distributed as dist
from models import Stack
from ranks import Ranks
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here"),
]

WIDTH = 256


@pytest.fixture(scope="module")
def two_on_a_gpu():
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    workers = Ranks(2)
    yield workers
    workers.close()


def _step(sharded: torch.nn.Module, rank: int) -> None:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(rank)).cuda()
    sharded(x).float().square().mean().backward()


def _train(rank: int, world_size: int, transport: str, strategy: str) -> None:
    states = []
    for chosen in ("flat", transport):
        torch.manual_seed(0)
        sharded = thunder.jit(
            Stack(2, width=WIDTH).cuda(), transforms=[fsdp(transport=chosen, sharding_strategy=strategy)]
        )
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        for _ in range(3):
            _step(sharded, rank)
            optimizer.step()
            optimizer.zero_grad()
        states.append(full_state_dict(sharded))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-5, atol=1e-6, msg=f"{name} through {transport}")


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("transport", ["coalesced", "all_reduce", "staged", "symmetric_memory"])
def test_trains_alike_through_every_transport(two_on_a_gpu: Ranks, transport: str, strategy: str) -> None:
    if transport == "coalesced":
        pytest.skip("gloo's coalesced all-gather does not work on CUDA tensors; run it with NCCL on two GPUs")
    two_on_a_gpu.run(_train, transport, strategy)


def _kernels(rank: int, world_size: int, transport: str) -> dict[str, int]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    sharded = thunder.jit(
        Stack(2, width=WIDTH).cuda(), transforms=[ours := fsdp(transport=transport, mp_policy=policy)]
    )
    _step(sharded, rank)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _step(sharded, rank)
        torch.cuda.synchronize()
        dist.barrier()
    counts = {e.key: e.count for e in profile.key_averages()}
    counts["buckets"] = len(ours.plan)
    return counts


def test_no_kernel_concatenates_or_copies_parameters(two_on_a_gpu: Ranks) -> None:
    for counts in two_on_a_gpu.run(_kernels, "flat"):
        assert not [name for name in counts if "CatArrayBatchedCopy" in name]


def test_symmetric_memory_travels_by_copy_engines(two_on_a_gpu: Ranks) -> None:
    for counts in two_on_a_gpu.run(_kernels, "symmetric_memory"):
        copies = sum(count for name, count in counts.items() if "Memcpy" in name)
        assert copies >= 2 * counts["buckets"], counts


def _offload(rank: int, world_size: int) -> None:
    states, on_gpu = [], []
    for policy in (None, CPUOffloadPolicy()):
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated()
        sharded = thunder.jit(
            Stack(2, width=WIDTH).cuda(), transforms=[ours := fsdp(offload_policy=policy, device="cuda")]
        )
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        for _ in range(3):
            _step(sharded, rank)
            optimizer.step()
            optimizer.zero_grad()
        for param in sharded.parameters():
            assert param.is_cpu == (policy is not None)
            assert param.is_cuda or param.is_pinned()
        arena = ours.sharded.buckets[0].arena.nbytes
        states.append(full_state_dict(sharded))
        on_gpu.append(torch.cuda.memory_allocated() - before - arena)
        del sharded, optimizer, param
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert on_gpu[1] < on_gpu[0]


def test_offloaded_shards_are_pinned_and_train_alike(two_on_a_gpu: Ranks) -> None:
    two_on_a_gpu.run(_offload)
