"""The functions of the GPU tests, run on two CPU ranks, so that their lines have run before they meet a GPU.

``test_on_virtual_gpus`` runs ``bytes_allocated_after_steps``, which counts nothing on a CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import thunder_fsdp_sched  # before thunder  # noqa: F401

import on_gpus
import pytest
import torch
from on_gpus import SMALL, TINY, Size
from profiles import LONG_ONLY
from ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("size", "transport", "strategy", "dtype"),
    [(TINY, "flat", "zero2", None), (SMALL, "staged", "zero3", torch.bfloat16)],
)
def test_training_matches_the_unsharded_model(
    ranks: Ranks, size: Size, transport: str, strategy: str, dtype: torch.dtype | None
) -> None:
    ranks.run(on_gpus.trains_like_unsharded, size, transport, strategy, dtype)


def test_comparison_detects_parameters_that_were_not_trained(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="of the distance that training covered"):
        ranks.run(_trains_with_stale_parameters, TINY)


def _trains_with_stale_parameters(rank: int, world_size: int, size: on_gpus.Size) -> None:
    state = size.model().state_dict()
    expected = on_gpus._unsharded(size, world_size)
    stale = {name: state[name] if name.startswith("blocks.0") else value for name, value in expected.items()}
    on_gpus._assert_like_unsharded(size, stale, world_size, on_gpus.BFLOAT16_TOLERANCE)


@LONG_ONLY
def test_training_again_gives_the_same_bits(ranks: Ranks) -> None:
    for found, nondeterminism in ranks.run(on_gpus.training_digests, TINY, "all_to_all", repeats=2):
        assert not nondeterminism
        assert len(found) == 2
        assert len(set(found)) == 1


def test_accumulated_and_clipped_gradients_match_the_unsharded_model(ranks: Ranks) -> None:
    ranks.run(on_gpus.accumulates_and_clips_gradients, TINY, "flat")


@LONG_ONLY
def test_training_continues_after_an_exception(ranks: Ranks) -> None:
    ranks.run(on_gpus.recovers_after_an_exception, TINY)


def test_shards_are_on_the_requested_device(ranks: Ranks) -> None:
    ranks.run(on_gpus.uses_its_own_device, TINY)
    ranks.run(on_gpus.trains_on_a_device_that_is_not_current, TINY, CPU, "flat")
    ranks.run(on_gpus.initializes_on_the_device, TINY)


@LONG_ONLY
def test_offloaded_training_matches_resident_training(ranks: Ranks) -> None:
    ranks.run(on_gpus.trains_with_offloading, TINY)


@LONG_ONLY
def test_eager_runs_give_the_loss_of_the_unsharded_module(ranks: Ranks) -> None:
    ranks.run(on_gpus.runs_eagerly, TINY)


def test_a_step_is_measured_and_simulated(ranks: Ranks) -> None:
    for step, simulated in ranks.run(on_gpus.measured_and_simulated_seconds, TINY):
        assert step > 0
        assert simulated > 0


def test_launched_kernels_are_counted(ranks: Ranks) -> None:
    for counts in ranks.run(on_gpus.launched_kernels, TINY, "flat"):
        assert counts["buckets"] > 2
        assert counts["aten::mm"] > 2


@LONG_ONLY  # of the tests in tests/gpu
def test_workers_are_spawned_for_gpus_with_their_own_backend() -> None:
    if torch.cuda.is_available():
        pytest.skip("tests/gpu has the real ones")
    workers = Ranks(1, backend="nccl", devices=[0])
    try:
        with pytest.raises(AssertionError, match="died, exit code"):  # at set_device, before any process group
            workers.run(on_gpus.runs_eagerly, TINY)
    finally:
        workers.close()
