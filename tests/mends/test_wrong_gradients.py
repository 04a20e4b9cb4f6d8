"""Gradients that Thunder computes wrong, of operands without dimensions and of index_put, are right or refused."""

from __future__ import annotations

from collections.abc import Callable

from thunder_fsdp_sched import Debug, fsdp

import pytest
import thunder
import torch
import torch.nn.functional as F
from beside import AppliedEach, Beside
from coded import coded
from models import Calling
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


class Scaled(AppliedEach):
    def __init__(self) -> None:
        super().__init__((lambda y, s, of=of: torch.tanh(of(y, s)) for of in OPERATORS.values()), 2)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, self.scale)


def test_gradients_of_operands_without_dimensions_are_summed() -> None:
    torch.manual_seed(0)
    both = Beside(Scaled().double())
    x = torch.linspace(-1, 1, 4, dtype=torch.float64).view(2, 2)
    both.check_each(OPERATORS, x, rtol=1e-6, atol=1e-6)  # one computes in float32
    with torch.no_grad():
        both.check(x)


#
# Operators of whose operands Thunder computes no gradient
#

ROWS = torch.tensor([0, 2])


def written(write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a module that writes the result of one layer into that of another."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(2, 2, dtype=torch.float64) for _ in range(2))
    return Calling(lambda self, x: write(self.layers[0](x), self.layers[1](x[:2])).sin(), layers=layers)


def _in_a_copy(y: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    z = y.clone()
    z[ROWS] = values
    return z


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("once", [False, True])
def test_values_that_need_a_gradient_are_refused(accumulate: bool, once: bool) -> None:
    module = written(lambda y, values: y.index_put((ROWS,), values, accumulate=accumulate))
    model = thunder.jit(module, transforms=[fsdp(leaf_modules=(), debug=Debug(differentiate_once=once))])
    with pytest.raises(NotImplementedError, check=coded("trace.no-gradient-of-values", "index_put")):
        model(torch.randn(3, 2, dtype=torch.float64))
    with torch.no_grad():
        assert model(torch.ones(3, 2, dtype=torch.float64)).shape == (3, 2)


@pytest.mark.parametrize(
    "write",
    [
        _in_a_copy,
        lambda y, values: y.scatter_add(0, ROWS[:, None].expand(-1, 2), values),
        lambda y, values: y.index_put((ROWS,), values.detach()),
    ],
    ids=["copy", "scatter_add", "detached values"],
)
def test_what_takes_its_place_has_the_gradients_of_eager_mode(
    write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    Beside(written(write)).check(torch.randn(3, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    "call",
    [
        lambda y, v: torch.hstack([y[:2], v]),
        lambda y, v: torch.vstack((y, v)),
        lambda y, v: torch.column_stack([y[:2], v]),
    ],
    ids=["hstack", "vstack", "column_stack"],
)
def test_gradients_of_tensors_in_a_list_are_not_lost(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    model = thunder.jit(written(call), transforms=[fsdp(leaf_modules=())])
    with pytest.raises(NotImplementedError, check=coded("trace.no-gradient-of-sequence")):
        model(torch.ones(3, 2, dtype=torch.float64))
