"""What the tests on GPUs do, on two ranks of this machine's CPU: so that each line of it has run before it meets a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import thunder_fsdp_sched  # before thunder  # noqa: F401

import on_gpus
import pytest
import torch
from on_gpus import SMALL
from ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("transport", "strategy", "dtype"),
    [("flat", "zero2", None), ("staged", "zero3", torch.bfloat16), ("all_to_all", "zero3", None)],
)
def test_trains_alike(ranks: Ranks, transport: str, strategy: str, dtype: torch.dtype | None) -> None:
    ranks.run(on_gpus.trains_alike, SMALL, transport, strategy, dtype)


def test_a_model_that_trains_otherwise_is_found(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="of the way that training took"):
        ranks.run(_trains_with_stale_parameters, SMALL)


def _trains_with_stale_parameters(rank: int, world_size: int, size: on_gpus.Size) -> None:
    state = size.model().state_dict()
    expected = on_gpus._unsharded(size, world_size)
    late = {name: state[name] if name.startswith("blocks.0") else value for name, value in expected.items()}
    on_gpus._assert_alike(size, late, world_size, on_gpus.BFLOAT16_TOLERANCE)


def test_training_again_gives_the_same_bits(ranks: Ranks) -> None:
    for found, loose in ranks.run(on_gpus.digests, SMALL, "all_to_all", repeats=2):
        assert not loose
        assert len(found) == 2
        assert len(set(found)) == 1


def test_accumulation_and_clipping(ranks: Ranks) -> None:
    ranks.run(on_gpus.accumulates_and_clips, SMALL, "flat")


def test_going_on_after_an_exception(ranks: Ranks) -> None:
    ranks.run(on_gpus.goes_on_after_an_exception, SMALL)


def test_devices_and_memory(ranks: Ranks) -> None:
    ranks.run(on_gpus.lives_on_its_own_device, SMALL)
    ranks.run(on_gpus.trains_on_another_than_the_current_device, SMALL, CPU, "flat")
    assert ranks.run(on_gpus.allocates_nothing_more, SMALL, "flat") == [[0] * 5] * 2
    ranks.run(on_gpus.initializes_on_the_device, SMALL)


def test_offloading(ranks: Ranks) -> None:
    ranks.run(on_gpus.offloads, SMALL)


def test_running_uncompiled(ranks: Ranks) -> None:
    ranks.run(on_gpus.generates, SMALL)


def test_measuring(ranks: Ranks) -> None:
    for step, simulated in ranks.run(on_gpus.measures, SMALL):
        assert step > 0
        assert simulated > 0


def test_counting_kernels(ranks: Ranks) -> None:
    for counts in ranks.run(on_gpus.kernels, SMALL, "flat"):
        assert counts["buckets"] > 2
        assert counts["aten::mm"] > 2


def test_workers_are_spawned_for_gpus_with_their_own_backend() -> None:
    if torch.cuda.is_available():
        pytest.skip("tests/gpu has the real ones")
    workers = Ranks(1, backend="nccl", devices=[0])
    try:
        with pytest.raises(AssertionError, match="died, exit code"):  # at set_device, before any process group
            workers.run(on_gpus.generates, SMALL)
    finally:
        workers.close()
