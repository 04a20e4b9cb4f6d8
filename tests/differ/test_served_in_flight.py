"""Served collectives whose waits are put off until their memory is needed."""

from __future__ import annotations

import itertools
from typing import Any

import thunder_fsdp_sched as fs

import pytest
import thunder
import torch
from ranks import on_ranks
from torch import nn


class Experts(nn.Module):
    """Towers of which each rank runs one, between layers that all ranks run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 6)
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(32, 32) for _ in range(2)) for _ in range(3))

    def forward(self, x: torch.Tensor, expert: str) -> torch.Tensor:
        x = self.first(x)
        for layer in self.experts[int(expert)]:
            x = torch.tanh(layer(x))
        return self.last(x).square().mean()


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"sharding_strategy": fs.Sharding("zero3", release=True)}, 1e-6),
        pytest.param(
            {"sharding_strategy": "zero3", "comm_policy": fs.CommPolicy(gather="int8", reduce="int8")},
            0.05,
            marks=pytest.mark.long,
        ),
    ],
    ids=["release", "encoded"],
)
@on_ranks()
def test_gradients_are_right_whichever_experts_ranks_run(rank: int, options: dict[str, Any], tolerance: float) -> None:
    model = thunder.jit(Experts(), transforms=[fs.fsdp(ranks_may_differ=True, **options)])
    inputs = [torch.randn(4, 6, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    for chosen in itertools.permutations("012", 2):
        model.zero_grad()
        model(inputs[rank], chosen[rank]).backward()
        reference = Experts()
        for x, expert in zip(inputs, chosen, strict=True):
            (reference(x, expert) / 2).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                error = (p.grad.to_local() - p.rows.of(q.grad)).abs().amax() if p.grad.to_local().numel() else 0
                assert error <= tolerance * q.grad.abs().amax()
