"""Training on two gloo ranks, against the unsharded model."""

from __future__ import annotations

import pytest
import torch
from models import CASES
from ranks import Ranks
from reference import Twins, saved_for_backward

STRATEGIES = ("zero2", "zero3")


def check_no_leaks(twins: Twins, saved: list[torch.Tensor]) -> None:
    """Nothing that was saved for backward lies in memory that the next bucket overwrites."""
    arenas = {b.arena for b in twins.transform.sharded.buckets}
    slots = {a._memory.untyped_storage().data_ptr() for a in arenas if a._memory is not None}
    leaked = [tuple(t.shape) for t in saved if t.untyped_storage().data_ptr() in slots]
    assert not leaked, f"saved tensors of shapes {leaked} lie in shared slots"


def train_case(rank: int, world_size: int, case: str, strategy: str) -> None:
    twins = Twins(rank, world_size, CASES[case]().double(), sharding_strategy=strategy)
    with saved_for_backward() as saved:
        twins.train(steps=3)
    assert saved
    check_no_leaks(twins, saved)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_trains_like_the_unsharded_model(ranks: Ranks, case: str, strategy: str) -> None:
    ranks.run(train_case, case, strategy)
