"""Ranks that compile different schedules all raise an error that says where they differ. None hangs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from unittest import mock

from thunder_fsdp_sched import ScheduleDisagreement, fsdp
from thunder_fsdp_sched.sharding import shard_module

import pytest
import thunder
import torch
from ranks import RankError, Ranks
from torch import nn


class TwoBranches(nn.Module):
    """A module that uses one of two buckets, depending on a flag."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(x).sum()


def _jit(module: nn.Module, seconds: float = 2.0, **options):
    return thunder.jit(module, transforms=[fsdp(**options)])


def _other_way_on_rank_1(rank: int, world_size: int) -> None:
    _jit(TwoBranches(), seconds=60)(torch.ones(2, 4), rank == 0)


def _other_options_on_rank_1(rank: int, world_size: int) -> None:
    _jit(TwoBranches(), bucketing_strategy="block" if rank == 0 else "none")


def _communicators_on_rank_1_alone(rank: int, world_size: int) -> None:
    _jit(TwoBranches(), separate_reduce_scatter_group=rank == 1)


def _other_size_on_rank_1(rank: int, world_size: int) -> None:
    _jit(TwoBranches(4 + 4 * rank))


def _other_order_on_rank_1(rank: int, world_size: int) -> None:
    module = TwoBranches()
    if rank == 1:
        module.left = module._modules.pop("left")
    _jit(module)


def _other_version_on_rank_1(rank: int, world_size: int) -> None:
    with mock.patch.object(shard_module, "__version__", "9.9" if rank else "0.1"):
        _jit(TwoBranches())


def _not_installed(rank: int, world_size: int) -> None:
    def version(name: str) -> str:
        if name == "thunder_fsdp_sched":
            raise importlib.metadata.PackageNotFoundError(name)
        return versions(name)

    versions = importlib.metadata.version
    with mock.patch.object(importlib.metadata, "version", version):
        thunder.jit(TwoBranches(), transforms=[fsdp()])


def test_a_package_that_is_only_on_the_path_shards(ranks: Ranks) -> None:
    ranks.run(_not_installed)


def _another_order_on_rank_1(rank: int, world_size: int) -> None:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    # Each rank's order is valid by itself: rank 1 gathers further ahead, before reductions that rank 0 issues first.
    jitted = _jit(module, seconds=60, bucketing_strategy="layer")
    transform = jitted._lc_transforms[-1]
    transform.options = dataclasses.replace(transform.options, prefetch=rank)
    jitted(torch.ones(2, 4)).sum().backward()


def _only_rank_1_compiles_something_new(rank: int, world_size: int) -> None:
    jitted = _jit(TwoBranches())
    jitted(torch.ones(2, 4), True).backward()
    jitted(torch.ones(2, 4), rank == 0).backward()  # rank 0 finds its traces in the cache


def _shapes_differ_between_ranks(rank: int, world_size: int) -> list[float]:
    """Train with batch sizes that differ between ranks, in an order that makes each rank compile alone."""
    jitted = _jit(TwoBranches())
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
        (
            _another_order_on_rank_1,
            r"forward of a trace, line 3:\n    rank 0: fsdp_all_gather 2 [^\n=]*\n    rank 1: .* followed_by=1",
        ),
    ],
)
def test_the_error_of_different_schedules_shows_the_first_differing_line(ranks: Ranks, fn, message: str) -> None:
    with pytest.raises(RankError, match=message) as caught:
        ranks.run(fn)
    assert str(caught.value).count("ScheduleDisagreement: fsdp: the ranks of process group") == 2


def _expect_disagreement(rank: int, world_size: int, fn, message: str) -> None:
    with pytest.raises(ScheduleDisagreement, match=message):
        fn(rank, world_size)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            _other_options_on_rank_1,
            r"rank 0: fsdp\(bucketing_strategy=BucketingStrategy\.BLOCK\)\n    rank 1: .*BucketingStrategy\.NONE",
        ),
        (
            _communicators_on_rank_1_alone,
            r"rank 0: fsdp\(separate_reduce_scatter_group=False\)\n    rank 1: fsdp\(separate_reduce_scatter_group=True\)",
        ),
        (
            _other_size_on_rank_1,
            r"rank 0: left\.weight: float32\[4, 4\] on cpu, .*\n    rank 1: left\.weight: float32\[8, 8",
        ),
        (_other_order_on_rank_1, r"rank 0: left\.weight: .*\n    rank 1: right\.weight: "),
        (_other_version_on_rank_1, r"line 1:\n    rank 0: thunder_fsdp_sched 0.*\n    rank 1: thunder_fsdp_sched 9\.9"),
    ],
)
def test_ranks_that_shard_differently_raise_before_any_collective(ranks: Ranks, fn, message: str) -> None:
    ranks.run(_expect_disagreement, fn, message, timeout=60)


def test_a_cached_schedule_on_one_rank_and_a_new_one_on_the_other_raise_on_both(ranks: Ranks) -> None:
    ranks.run(
        _expect_disagreement,
        _only_rank_1_compiles_something_new,
        r"rank 0: the forward for inputs float32\[2, 4\], True .*\n    rank 1: compiling the forward of a trace of module",
        timeout=60,
    )


def test_different_batch_sizes_are_allowed_if_the_collectives_are_the_same(ranks: Ranks) -> None:
    first, second = ranks.run(_shapes_differ_between_ranks)
    assert first == pytest.approx(second)
