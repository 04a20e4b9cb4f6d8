"""Ranks that compile different schedules end in an error that says where they differ, on every rank; none hangs."""

from __future__ import annotations

from datetime import timedelta

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from ranks import RankError, Ranks
from torch import nn


class TwoWays(nn.Module):
    """Reads one of two buckets."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(x).sum()


def _jit(module: nn.Module, seconds: float = 2.0, **options):
    transform = fsdp(**options)
    jitted = thunder.jit(module, transforms=[transform])
    transform.sharded.agreement.timeout = timedelta(seconds=seconds)
    return jitted


def _other_way_on_rank_1(rank: int, world_size: int) -> None:
    _jit(TwoWays(), seconds=60)(torch.ones(2, 4), rank == 0)


def _other_options_on_rank_1(rank: int, world_size: int) -> None:
    bucketing = "block" if rank == 0 else "none"
    _jit(TwoWays(), seconds=60, bucketing_strategy=bucketing)(torch.ones(2, 4), True)


def _other_size_on_rank_1(rank: int, world_size: int) -> None:
    _jit(TwoWays(4 + 4 * rank), seconds=60)(torch.ones(2, 4 + 4 * rank), True)


def _another_order_on_rank_1(rank: int, world_size: int) -> None:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    # Each rank's order is right by itself: rank 1 gathers further ahead, before reductions that rank 0 issues first.
    _jit(module, seconds=60, bucketing_strategy="layer", prefetch=rank)(torch.ones(2, 4)).sum().backward()


def _only_rank_1_compiles_something_new(rank: int, world_size: int) -> None:
    jitted = _jit(TwoWays())
    jitted(torch.ones(2, 4), True).backward()
    jitted(torch.ones(2, 4), rank == 0).backward()  # rank 0 finds its traces in the cache


def _shapes_differ_between_ranks(rank: int, world_size: int) -> list[float]:
    """Batches of other sizes on each rank, in an order in which each compiles when the other does not."""
    jitted = _jit(TwoWays())
    losses = []
    for sizes in [(2, 2), (3, 2), (3, 3), (2, 5)]:
        loss = jitted(torch.ones(sizes[rank], 4), True)
        loss.backward()
        losses.append(loss.item() / sizes[rank])
    return losses


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (_other_way_on_rank_1, r"line 1:\n    rank 0: fsdp_all_gather left .*\n    rank 1: fsdp_all_gather right"),
        (_other_options_on_rank_1, r"rank 0: fsdp_all_gather left .*\n    rank 1: fsdp_all_gather left\.weight"),
        (
            _other_size_on_rank_1,
            r"rank 0: fsdp_all_gather left 80 bytes .*\n    rank 1: fsdp_all_gather left 320 bytes",
        ),
        (
            _another_order_on_rank_1,
            r"backward of a trace, line 2:\n    rank 0: fsdp_reduce_scatter 3 .*\n    rank 1: fsdp_all_gather 2 ",
        ),
    ],
)
def test_ranks_that_compile_differently_are_told_the_first_differing_line(ranks: Ranks, fn, message: str) -> None:
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(fn)
    assert str(caught.value).count("ScheduleDisagreement: fsdp: the ranks of process group") == 2


def test_a_cache_hit_on_one_rank_and_a_new_schedule_on_the_other_is_an_error_on_both(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(_only_rank_1_compiles_something_new, timeout=60)
    message = str(caught.value)
    assert "ScheduleDisagreement" in message
    assert "rank 0 has compiled nothing within" in message
    assert "rank 0: the all-gather of bucket 'left' failed" in message


def test_batches_of_different_sizes_need_no_agreement_where_the_collectives_are_the_same(ranks: Ranks) -> None:
    first, second = ranks.run(_shapes_differ_between_ranks)
    assert first == pytest.approx(second)
