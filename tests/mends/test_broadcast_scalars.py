"""Operands without dimensions have the gradients of eager mode, in which they are summed. Thunder's own are not."""

from __future__ import annotations

import copy
from collections.abc import Callable

from thunder_fsdp_sched import Debug, fsdp

import pytest
import thunder
import torch
import torch.nn.functional as F
from profiles import LONG_ONLY
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_rank")

OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mul": lambda y, s: y * y.sum(),
    "add from the left": lambda y, s: y.mean() + y,
    "div": lambda y, s: y / y.norm(),
    "pow": lambda y, s: (y * y + 1) ** (y.sum() / 9),
    "where": lambda y, s: torch.where(y > 0, y, y.sum()),
    "masked_fill": lambda y, s: y.masked_fill(y > 0, y.sum()),
    "maximum": lambda y, s: torch.maximum(y, y.mean()),
    "addcmul": lambda y, s: torch.addcmul(y, y, y.sum()),
    "atan2": lambda y, s: torch.atan2(y, y.sum()),
    "in place": lambda y, s: (y * 1).add_(y.sum()),
    "another dtype": lambda y, s: torch.arange(4).view(2, 2) * y.sum().float(),
    "an element": lambda y, s: torch.sigmoid(y[0, 0]) * y,
    "normalization": lambda y, s: (y - y.mean()) / (y.std() + 1e-3),
    "within a region": lambda y, s: checkpoint(lambda y: torch.sin(y * y.sum()), y, use_reentrant=False),
    "a parameter": lambda y, s: y * s.exp(),
    "mse_loss": lambda y, s: F.mse_loss(y, s, reduction="none"),
}


class Scaled(nn.Module):
    """A block that applies all operators and returns a number for each. Two of them are differentiated once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(2, 2), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.stack([torch.tanh(operator(y, self.scale)).sum() for operator in OPERATORS.values()])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Scaled() for _ in range(2)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


@pytest.mark.parametrize("differentiate_once", [True, pytest.param(False, marks=LONG_ONLY)])
def test_gradients_of_operands_without_dimensions_are_summed(differentiate_once: bool) -> None:
    module, x = Blocks(), torch.linspace(-1, 1, 4, dtype=torch.float64).view(2, 2)
    jitted = thunder.jit(copy.deepcopy(module), transforms=[fsdp(debug=Debug(differentiate_once=differentiate_once))])
    results = [model(x) for model in (jitted, module)]
    for operator, ours, theirs in zip(OPERATORS, *results, strict=True):
        ours.backward(retain_graph=True)
        theirs.backward(retain_graph=True)
        for one, other in zip(jitted.parameters(), module.parameters(), strict=True):
            expected = torch.zeros_like(other) if other.grad is None else other.grad
            torch.testing.assert_close(
                one.grad.full_tensor(), expected, msg=lambda text, name=operator: f"{name}: {text}"
            )
        jitted.zero_grad()
        module.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(jitted(x), module(x))
