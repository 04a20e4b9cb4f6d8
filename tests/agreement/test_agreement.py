"""Ranks that shard, compile or run different things all raise ``ScheduleDisagreement`` with both sides. None hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import ScheduleDisagreement, fsdp

import pytest
import thunder
import torch
import torch.distributed as dist
from internals import shard_module
from models import Stack
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class TwoBranches(nn.Module):
    """A module that uses one of two buckets, depending on a flag."""

    def __init__(self, width: int = 4, right: int | None = None) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, right or width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, left: bool = True) -> torch.Tensor:
        if x.shape[0] == 3:
            left = not left
        return self.drop((self.left if left else self.right)(x)).sum()


def _jit(module: nn.Module, seconds: float = 60, **options: Any) -> Any:
    """Shard over a new process group; ``seconds`` is how long a rank waits for the others."""
    ranks = options.pop("ranks", tfs.Ranks())
    if isinstance(ranks, tfs.Ranks):
        ranks = replace(ranks, process_group=dist.new_group(timeout=timedelta(seconds=seconds)))
    return thunder.jit(module, transforms=[fsdp(ranks=ranks, **options)])


def _disagree(rank: int, per_rank: list[Callable[[], Any]], *expected: str) -> None:
    """Run another function on each rank and check that every rank's error describes all of them."""
    with pytest.raises(ScheduleDisagreement) as caught:
        per_rank[rank]()
    message = str(caught.value)
    for text in expected:
        assert re.search(text, message), f"{text!r} is not in {message}"


def _reordered(rank: int) -> nn.Module:
    module = TwoBranches()
    if rank == 1:
        module.left = module._modules.pop("left")
    return module


SHARDED: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], dict[str, Any]], str]] = {
    "another option": (
        lambda rank: TwoBranches(),
        lambda rank: {"bucketing_strategy": ("block", "none")[rank]},
        r"rank 0: fsdp\(bucketing_strategy=block\)\n    rank 1: .*bucketing_strategy=none",
    ),
    "communicators on rank 1 alone": (
        lambda rank: TwoBranches(),
        lambda rank: {"ranks": tfs.Ranks(separate_reduce_scatter_group=rank == 1)},
        r"rank 0: fsdp\(ranks=.*separate_reduce_scatter_group=False\)\)\n    rank 1: .*separate_reduce_scatter_group=True\)",
    ),
    "another size": (
        lambda rank: TwoBranches(4 + 4 * rank),
        lambda rank: {},
        r"rank 0: left\.weight: float32\[4, 4\] on cpu, .*\n    rank 1: left\.weight: float32\[8, 8",
    ),
    "another order": (_reordered, lambda rank: {}, r"rank 0: left\.weight: .*\n    rank 1: right\.weight: "),
    "another version": (
        lambda rank: TwoBranches(),
        lambda rank: {},
        r"line 1:\n    rank 0: thunder_fsdp_sched 0.*\n    rank 1: thunder_fsdp_sched 9\.9",
    ),
}


@pytest.mark.parametrize("case", SHARDED)
@on_ranks()
def test_ranks_that_shard_differently_raise_before_any_collective(rank: int, case: str) -> None:
    model, options, message = SHARDED[case]
    other_version = mock.patch.object(shard_module, "__version__", ("0.1", "9.9")[rank])
    with other_version if case == "another version" else contextlib.nullcontext():
        _disagree(rank, [lambda: _jit(model(rank), **options(rank))] * 2, message)


@on_ranks()
def test_the_error_names_a_rank_that_does_not_shard(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    if rank == 0:
        with pytest.raises(
            ScheduleDisagreement, match=r"rank 1 did not come to thunder.jit\(.*\) within 2 s of rank 0"
        ):
            thunder.jit(nn.Linear(4, 4), transforms=[fsdp(ranks=group)])
    dist.barrier()


#
# Compiling
#


@on_ranks()
def test_the_error_of_different_compilations_shows_the_first_differing_line(rank: int) -> None:
    x, model = torch.ones(2, 4), _jit(TwoBranches(right=6))
    _disagree(
        rank,
        [lambda: model(x, rank == 0)] * 2,
        r"forward of a trace, line 1:\n    rank 0: fsdp_all_gather left .*\n    rank 1: fsdp_all_gather right",
    )
    # Each rank's order is valid by itself: rank 1 gathers further ahead, before reductions that rank 0 issues first.
    layers = _jit(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), bucketing_strategy="layer")
    transform = layers._lc_transforms[-1]
    transform.options = dataclasses.replace(transform.options, prefetch=rank)
    _disagree(
        rank,
        [lambda: layers(x)] * 2,
        r"forward of a trace, line 3:\n    rank 0: fsdp_all_gather 2 [^\n=]*\n    rank 1: .* issues_after=1",
    )
    # Rank 0 finds its trace in the cache.
    model(x, True).backward()
    _disagree(
        rank,
        [lambda: model(x, rank == 0)] * 2,
        r"rank 0: the forward for inputs float32\[2, 4\], True .*\n    rank 1: compiling the forward of a trace of module",
    )
    model(x, False).backward()


@on_ranks(4)
def test_different_computations_of_replicas_raise_on_all_ranks_unless_they_are_allowed(rank: int) -> None:
    x, activation = torch.ones(2, 4), torch.relu if rank else torch.tanh
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _disagree(
        rank,
        [lambda: _jit(Stack(1, activation=activation), ranks=mesh)(x)] * 4,
        "forward of a trace: the collectives agree but the computations differ",
        r"line \d+:\n    rank 0: tanh\(%\d+\) -> %\d+: float32\n    rank 1: gt",
    )
    allowed = _jit(Stack(1, activation=activation), ranks=mesh, ranks_may_differ=True)
    allowed(x).sum().backward()
    allowed(x).sum().backward()


class _OneBucket(nn.Module):
    """A module with two branches in one bucket, so that the collectives are the same whatever is computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        return sum(getattr(self, name)(x).square().mean() for name in branch.split())


@on_ranks()
def test_ranks_whose_gradients_differ_within_a_bucket_raise_or_get_the_gradients_of_both(rank: int) -> None:
    x = torch.ones(3, 4) + rank
    for strategy in ("zero2", "zero3"):
        options = {"sharding_strategy": strategy, "bucketing_strategy": 10**6}
        refused = _jit(_OneBucket(), **options)
        _disagree(rank, [lambda: refused(x, ("left", "right")[rank])] * 2, "the computations differ")  # noqa: B023
        model, reference = _jit(_OneBucket(), ranks_may_differ=True, **options), _OneBucket()
        for _ in range(3):
            model(x, ("left", "right")[rank]).backward()
            for other, branch in enumerate(("left", "right")):
                (reference(torch.ones(3, 4) + other, branch) / 2).backward()
            _compare_gradients(model, reference)


@on_ranks()
def test_windows_whose_gradients_differ_between_ranks_are_reduced_together(rank: int) -> None:
    for accumulate in ("unsharded", "sharded"):
        model = _jit(_OneBucket(), bucketing_strategy=10**6, accumulate=accumulate, ranks_may_differ=True)
        for last in ("left right", "left", "right"):
            reference = _OneBucket()
            model.zero_grad()
            for other in range(2):
                for branch in (("left", "right")[other], last):
                    (reference(torch.ones(3, 4) + other, branch) / 2).backward()
            with model.no_sync():
                model(torch.ones(3, 4) + rank, ("left", "right")[rank]).backward()
            model(torch.ones(3, 4) + rank, last).backward()
            _compare_gradients(model, reference)


def _compare_gradients(model: nn.Module, reference: nn.Module) -> None:
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_local(), p.rows.of(q.grad))
