"""Tests of what needs a GPU: kernels, streams, NCCL, symmetric memory. They have not run on a GPU yet.

    python -m pytest tests/gpu

Tests use one rank with NCCL, one rank on each GPU with NCCL, or two ranks that share a GPU with gloo. The functions that
ranks run are in ``on_gpus.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import thunder_fsdp_sched  # before thunder  # noqa: F401

import on_gpus
import pytest
import torch
from on_gpus import LARGE
from ranks import Ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TRANSPORTS = ["flat", "all_to_all", "coalesced", "all_reduce", "staged", "symmetric_memory"]
STRATEGIES = ["zero2", "zero3"]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    """One rank with NCCL, whose collectives are copies on NCCL's stream."""
    workers = Ranks(1, backend="nccl", devices=[0])
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def one_rank_per_gpu() -> Iterator[Ranks]:
    """One rank on each GPU, with NCCL."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two CUDA devices; {count} is here")
    workers = Ranks(count, backend="nccl", devices=range(count))
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def two_ranks_on_one_gpu() -> Iterator[Ranks]:
    """Two ranks that share a GPU, with gloo."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    workers = Ranks(2, devices=[0, 0])
    yield workers
    workers.close()


#
# NCCL
#


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_rank_trains_like_the_unsharded_model_with_every_transport(
    one_rank: Ranks, transport: str, strategy: str
) -> None:
    one_rank.run(on_gpus.trains_like_unsharded, LARGE, transport, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_rank_per_gpu_trains_like_the_unsharded_model_with_every_transport(
    one_rank_per_gpu: Ranks, transport: str, strategy: str
) -> None:
    one_rank_per_gpu.run(on_gpus.trains_like_unsharded, LARGE, transport, strategy)


@pytest.mark.parametrize("transport", ["flat", "staged", "symmetric_memory"])
@pytest.mark.parametrize("workers", ["one_rank", "one_rank_per_gpu"])
def test_bfloat16_trains_like_the_unsharded_model(request: pytest.FixtureRequest, workers: str, transport: str) -> None:
    request.getfixturevalue(workers).run(on_gpus.trains_like_unsharded, LARGE, transport, "zero3", torch.bfloat16)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("workers", ["one_rank", "one_rank_per_gpu"])
def test_training_again_gives_the_same_bits(request: pytest.FixtureRequest, workers: str, transport: str) -> None:
    for found, nondeterminism in request.getfixturevalue(workers).run(on_gpus.training_digests, LARGE, transport):
        if nondeterminism:
            pytest.skip(f"a kernel is not deterministic: {nondeterminism}")
        assert len(set(found)) == 1


@pytest.mark.parametrize("transport", ["flat", "coalesced", "symmetric_memory"])
@pytest.mark.parametrize("workers", ["one_rank", "one_rank_per_gpu"])
def test_accumulation_and_clipping_are_those_of_the_unsharded_model(
    request: pytest.FixtureRequest, workers: str, transport: str
) -> None:
    request.getfixturevalue(workers).run(on_gpus.accumulates_and_clips_gradients, LARGE, transport)


@pytest.mark.parametrize("workers", ["one_rank", "one_rank_per_gpu"])
def test_training_continues_after_an_exception(request: pytest.FixtureRequest, workers: str) -> None:
    request.getfixturevalue(workers).run(on_gpus.recovers_after_an_exception, LARGE)


@pytest.mark.parametrize("workers", ["one_rank", "one_rank_per_gpu"])
def test_eager_runs_give_the_output_of_the_unsharded_module(request: pytest.FixtureRequest, workers: str) -> None:
    request.getfixturevalue(workers).run(on_gpus.runs_eagerly, LARGE)


@pytest.mark.parametrize("workers", ["one_rank", "one_rank_per_gpu"])
def test_a_step_is_measured_and_simulated(request: pytest.FixtureRequest, workers: str) -> None:
    for step, simulated in request.getfixturevalue(workers).run(on_gpus.measured_and_simulated_seconds, LARGE):
        assert step > 0
        assert simulated > 0


#
# Two ranks on one GPU
#


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_ranks_on_one_gpu_train_like_the_unsharded_model_with_every_transport(
    two_ranks_on_one_gpu: Ranks, transport: str, strategy: str
) -> None:
    if transport == "coalesced":
        pytest.skip("gloo's coalesced all-gather does not work on CUDA tensors; the tests above cover it with NCCL")
    two_ranks_on_one_gpu.run(on_gpus.trains_like_unsharded, LARGE, transport, strategy)


#
# Devices and memory
#


@pytest.mark.parametrize("workers", ["one_rank", "one_rank_per_gpu", "two_ranks_on_one_gpu"])
def test_a_device_without_an_index_means_the_current_device(request: pytest.FixtureRequest, workers: str) -> None:
    request.getfixturevalue(workers).run(on_gpus.uses_its_own_device, LARGE)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parameters_may_be_on_a_device_that_is_not_current(one_rank: Ranks, transport: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices; one is here")
    one_rank.run(on_gpus.trains_on_a_device_that_is_not_current, LARGE, torch.device("cuda", 1), transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("workers", ["one_rank", "one_rank_per_gpu"])
def test_allocated_bytes_are_the_same_after_every_step(
    request: pytest.FixtureRequest, workers: str, transport: str
) -> None:
    for found in request.getfixturevalue(workers).run(on_gpus.bytes_allocated_after_steps, LARGE, transport):
        assert len(set(found)) == 1, found


@pytest.mark.parametrize("workers", ["one_rank", "one_rank_per_gpu", "two_ranks_on_one_gpu"])
def test_offloaded_shards_are_pinned_and_train_like_resident_ones(request: pytest.FixtureRequest, workers: str) -> None:
    request.getfixturevalue(workers).run(on_gpus.trains_with_offloading, LARGE)


@pytest.mark.parametrize("workers", ["one_rank", "one_rank_per_gpu"])
def test_a_module_on_the_meta_device_is_initialized_on_the_gpu(request: pytest.FixtureRequest, workers: str) -> None:
    request.getfixturevalue(workers).run(on_gpus.initializes_on_the_device, LARGE)


#
# Kernels
#


@pytest.mark.parametrize("transport", ["flat", "coalesced"])
def test_no_kernel_concatenates_parameters(one_rank: Ranks, transport: str) -> None:
    for counts in one_rank.run(on_gpus.launched_kernels, LARGE, transport):
        assert not [name for name in counts if "CatArrayBatchedCopy" in name]


def test_collectives_launch_nccl_kernels(one_rank_per_gpu: Ranks) -> None:
    for counts in one_rank_per_gpu.run(on_gpus.launched_kernels, LARGE, "flat"):
        of_nccl = sum(count for name, count in counts.items() if "nccl" in name.lower())
        assert of_nccl >= 2 * counts["buckets"], counts


@pytest.mark.parametrize("workers", ["one_rank_per_gpu", "two_ranks_on_one_gpu"])
def test_symmetric_memory_uses_copy_engines(request: pytest.FixtureRequest, workers: str) -> None:
    for counts in request.getfixturevalue(workers).run(on_gpus.launched_kernels, LARGE, "symmetric_memory"):
        copies = sum(count for name, count in counts.items() if "Memcpy" in name)
        assert copies >= 2 * counts["buckets"], counts
