"""What only a GPU can show: kernels, streams, NCCL, symmetric memory. This has not run on a GPU yet.

    python -m pytest tests/gpu

Ranks are processes: one alone with NCCL, one on each GPU with NCCL, and two that share a GPU through gloo. ``on_gpus.py``
has what they do.
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
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here"),
]

TRANSPORTS = ["flat", "all_to_all", "coalesced", "all_reduce", "staged", "symmetric_memory"]
STRATEGIES = ["zero2", "zero3"]


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """One rank, NCCL: collectives are copies on NCCL's stream."""
    workers = Ranks(1, backend="nccl", devices=[0])
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def one_each() -> Iterator[Ranks]:
    """A rank on each GPU, NCCL."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two CUDA devices; {count} is here")
    workers = Ranks(count, backend="nccl", devices=range(count))
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def two_on_a_gpu() -> Iterator[Ranks]:
    """Two ranks that share a GPU, gloo."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    workers = Ranks(2, devices=[0, 0])
    yield workers
    workers.close()


#
# NCCL
#


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_rank_trains_alike_through_every_transport(alone: Ranks, transport: str, strategy: str) -> None:
    alone.run(on_gpus.trains_alike, LARGE, transport, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_on_each_gpu_trains_alike_through_every_transport(
    one_each: Ranks, transport: str, strategy: str
) -> None:
    one_each.run(on_gpus.trains_alike, LARGE, transport, strategy)


@pytest.mark.parametrize("transport", ["flat", "staged", "symmetric_memory"])
@pytest.mark.parametrize("workers", ["alone", "one_each"])
def test_bfloat16_trains_alike(request: pytest.FixtureRequest, workers: str, transport: str) -> None:
    request.getfixturevalue(workers).run(on_gpus.trains_alike, LARGE, transport, "zero3", torch.bfloat16)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("workers", ["alone", "one_each"])
def test_training_again_gives_the_same_bits(request: pytest.FixtureRequest, workers: str, transport: str) -> None:
    for found, loose in request.getfixturevalue(workers).run(on_gpus.digests, LARGE, transport):
        if loose:
            pytest.skip(f"a kernel is not deterministic: {loose}")
        assert len(set(found)) == 1


@pytest.mark.parametrize("transport", ["flat", "coalesced", "symmetric_memory"])
@pytest.mark.parametrize("workers", ["alone", "one_each"])
def test_accumulation_and_clipping_are_those_of_the_unsharded_model(
    request: pytest.FixtureRequest, workers: str, transport: str
) -> None:
    request.getfixturevalue(workers).run(on_gpus.accumulates_and_clips, LARGE, transport)


@pytest.mark.parametrize("workers", ["alone", "one_each"])
def test_training_goes_on_after_an_exception(request: pytest.FixtureRequest, workers: str) -> None:
    request.getfixturevalue(workers).run(on_gpus.goes_on_after_an_exception, LARGE)


@pytest.mark.parametrize("workers", ["alone", "one_each"])
def test_running_uncompiled_gives_what_the_unsharded_module_gives(request: pytest.FixtureRequest, workers: str) -> None:
    request.getfixturevalue(workers).run(on_gpus.generates, LARGE)


@pytest.mark.parametrize("workers", ["alone", "one_each"])
def test_a_step_is_measured_and_simulated(request: pytest.FixtureRequest, workers: str) -> None:
    for step, simulated in request.getfixturevalue(workers).run(on_gpus.measures, LARGE):
        assert step > 0
        assert simulated > 0


#
# Several ranks on a GPU
#


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_ranks_on_a_gpu_train_alike_through_every_transport(
    two_on_a_gpu: Ranks, transport: str, strategy: str
) -> None:
    if transport == "coalesced":
        pytest.skip("gloo's coalesced all-gather does not work on CUDA tensors; with NCCL it is tried above")
    two_on_a_gpu.run(on_gpus.trains_alike, LARGE, transport, strategy)


#
# Devices and memory
#


@pytest.mark.parametrize("workers", ["alone", "one_each", "two_on_a_gpu"])
def test_a_device_without_an_index_is_the_ranks_own(request: pytest.FixtureRequest, workers: str) -> None:
    request.getfixturevalue(workers).run(on_gpus.lives_on_its_own_device, LARGE)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parameters_may_live_on_another_than_the_current_device(alone: Ranks, transport: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices; one is here")
    alone.run(on_gpus.trains_on_another_than_the_current_device, LARGE, torch.device("cuda", 1), transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("workers", ["alone", "one_each"])
def test_steps_allocate_nothing_that_stays(request: pytest.FixtureRequest, workers: str, transport: str) -> None:
    for found in request.getfixturevalue(workers).run(on_gpus.allocates_nothing_more, LARGE, transport):
        assert len(set(found)) == 1, found


@pytest.mark.parametrize("workers", ["alone", "one_each", "two_on_a_gpu"])
def test_offloaded_shards_are_pinned_and_train_alike(request: pytest.FixtureRequest, workers: str) -> None:
    request.getfixturevalue(workers).run(on_gpus.offloads, LARGE)


@pytest.mark.parametrize("workers", ["alone", "one_each"])
def test_a_module_on_the_meta_device_is_initialized_on_the_gpu(request: pytest.FixtureRequest, workers: str) -> None:
    request.getfixturevalue(workers).run(on_gpus.initializes_on_the_device, LARGE)


#
# Kernels
#


@pytest.mark.parametrize("transport", ["flat", "coalesced"])
def test_no_kernel_concatenates_parameters(alone: Ranks, transport: str) -> None:
    for counts in alone.run(on_gpus.kernels, LARGE, transport):
        assert not [name for name in counts if "CatArrayBatchedCopy" in name]


def test_collectives_are_nccls(one_each: Ranks) -> None:
    for counts in one_each.run(on_gpus.kernels, LARGE, "flat"):
        of_nccl = sum(count for name, count in counts.items() if "nccl" in name.lower())
        assert of_nccl >= 2 * counts["buckets"], counts


@pytest.mark.parametrize("workers", ["one_each", "two_on_a_gpu"])
def test_symmetric_memory_travels_by_copy_engines(request: pytest.FixtureRequest, workers: str) -> None:
    for counts in request.getfixturevalue(workers).run(on_gpus.kernels, LARGE, "symmetric_memory"):
        copies = sum(count for name, count in counts.items() if "Memcpy" in name)
        assert copies >= 2 * counts["buckets"], counts
