"""Rounds of agreement on virtual GPUs: with NCCL they overlap with a trace, and ranks still issue the same collectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from profiles import with_long
from ranks import Ranks as Workers
from virtual_gpu import guard
from virtual_gpu.histories import make_model
from virtual_gpu.together import late_round, run_together
from virtual_gpu.world import Rank

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=f"no virtual GPU: {guard.missing()}")


def _lose_kept(buckets: Any) -> None:
    buckets[-1].private_slot.arena.contents.clear()  # the bucket whose gradients come first


def _lose_left(buckets: Any) -> None:
    buckets[0].arena.release()


def _lose_window(buckets: Any) -> None:
    buckets[1].private_slot.arena.contents.clear()


LOSSES = {"zero2": (_lose_kept, _lose_window), "zero3": (_lose_left, _lose_left)}
"""How a rank loses a bucket before backward, and before the forward of the next micro-batch."""

STEPS = {"usual": (), "rank 0": (0,), "rank 1": (1,), "both": (0, 1), "late": ()}
"""The ranks that lose a bucket in each step."""


def take_steps(rank: Rank, strategy: str) -> None:
    """Take steps of two micro-batches, in which ranks lose buckets, or rank 1 announces its backwards late."""
    model = make_model(rank, sharding_strategy=strategy)
    sharded = model._lc_transforms[-1].sharded
    buckets, control = sharded.buckets, sharded.control
    before_backward, before_forward = LOSSES[strategy]
    for step, losers in STEPS.items():
        for last in (False, True):
            with ExitStack() as stack:
                stack.enter_context(nullcontext() if last else model.no_sync())
                stack.enter_context(rank.phase(f"{step}, forward {last:d}"))
                if last and rank.rank in losers:
                    before_forward(buckets)
                loss = model(torch.randn(4, 8, device=rank.device)).sum()
            if rank.rank in losers:
                before_backward(buckets)
            is_late = step == "late"
            with late_round(rank, control.channel, f"{step} {last}") if is_late else nullcontext():
                with rank.phase(f"{step}, backward {last:d}"):
                    loss.backward()
        for param in model.parameters():
            param.grad = None


@pytest.mark.parametrize("strategy", with_long(LOSSES, "zero3"))
def test_ranks_that_lose_buckets_issue_the_same_collectives(
    lone_workers: Callable[[int], Workers], strategy: str
) -> None:
    result = run_together(lone_workers(2), take_steps, strategy)
    result.assert_clean()

    def sent(step: str) -> list[int]:
        phases = (f"{step}, {half} {last:d}" for last in range(2) for half in ("forward", "backward"))
        return [result.count(phase)["collective"] for phase in phases]

    for step, losers in STEPS.items():
        more = [a - b for a, b in zip(sent(step), sent("late"), strict=True)]
        assert min(more) >= 0 and (more[1] > 0, more[3] > 0) == (bool(losers),) * 2, (step, more)
