"""Backward uses what its own forward has left in slots, and nothing else that was gathered there."""

from __future__ import annotations

import copy

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from ranks import on_ranks
from torch import nn


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh()))).double()


def _grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@on_ranks()
def test_a_forward_that_a_hook_calls_in_backward_leaves_nothing_for_it(strategy: str) -> None:
    reference, x = _model(), torch.ones(4, 8, dtype=torch.float64)
    model = thunder.jit(
        copy.deepcopy(reference), transforms=[fsdp(sharding_strategy=strategy, bucketing_strategy="layer")]
    )

    def evaluate(grad: torch.Tensor) -> None:
        with torch.no_grad():
            for factor in (2, 0.5):  # an evaluation with other parameters
                for param in model.parameters():
                    param.data.mul_(factor)
                if factor == 2:
                    model(x)

    reference(x).square().sum().backward()
    for _ in range(2):
        model.zero_grad()
        output = model(x)
        output.register_hook(evaluate)
        output.square().sum().backward()
        for ours, theirs in zip(_grads(model), _grads(reference), strict=True):
            torch.testing.assert_close(ours, theirs)


@on_ranks()
def test_a_kept_bucket_of_autocast_that_was_lost_is_gathered_again_where_ranks_may_differ() -> None:
    model = thunder.jit(_model().float(), transforms=[fsdp(sharding_strategy="zero2", ranks_may_differ=True)])
    x, found = torch.ones(4, 8), []
    for evaluates in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
            with torch.no_grad():
                _ = model(x) if evaluates else None
        output.float().square().sum().backward()
        found.append(_grads(model))
    for without, with_evaluation in zip(*found, strict=True):
        assert torch.equal(without, with_evaluation)
