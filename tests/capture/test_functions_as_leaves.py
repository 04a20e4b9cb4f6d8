"""Functions of torch that Thunder cannot trace, or not with a right gradient, run as they are, as one operator each."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

ROW = torch.tensor([0])
LEAVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flip": lambda y: y.flip(0) + torch.flip(y, (0, 1)) * y,
    "hstack": lambda y: torch.hstack([y, y * 2]),
    "lstm_cell": lambda y: torch.lstm_cell(y, (y, y), y.new_ones(16, 4), y.new_ones(16, 4))[0],
    "index_put": lambda y: y.index_put((ROW,), y[1] * y[2]),
    "index_add": lambda y: y.index_add(0, ROW, y[:1] * 2),
    "lerp": lambda y: torch.lerp(y, y * y, 0.3),
    "minimum": lambda y: torch.minimum(y, y * y),
    "remainder": lambda y: y % 2.0 + torch.remainder(y, 0.7),
    "pad": lambda y: F.pad(y[None], (1, 1), mode="reflect"),
    "tile": lambda y: y.tile(2, 2) * 2,
    "unfold": lambda y: y.unfold(0, 2, 1) ** 2,
    "meshgrid": lambda y: torch.meshgrid([y[0], y[1]], indexing="ij")[0] * 2,
    "prod": lambda y: (y * torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=y.dtype)).prod(-1),
    "plus": lambda y: +y * y,
}
"""Functions that run as they are."""

TRACED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an unused result without dimensions": lambda y: torch.var_mean(y)[0] + torch.std_mean(y)[1],
    "what needs no gradient": lambda y: y * y.detach().floor() * torch.hstack([y.detach()[:, :2], y.detach()[:, 2:]]),
    "another one": lambda y: torch.linalg.slogdet(y)[1],
    "round, straight through": lambda y: y + (y.round() - y).detach() * y,
    "floor": lambda y: torch.floor(y) + y.ceil(),
    "round": lambda y: y.round(),
    "trunc": lambda y: y.trunc() * y,
    "quotients": lambda y: torch.div(y, y[0] + 3, rounding_mode="trunc") + torch.div(y[0], y, rounding_mode="floor"),
    "bernoulli": lambda y: (y > 0).to(y.dtype).mul(y.sigmoid().ceil()).bernoulli(),
    "dropout of all": lambda y: F.dropout(y, 1.0),
    "floor in place": lambda y: (y * 2).floor_(),
    "zeros in place": lambda y: (y * 2).zero_(),
    "a constant in place": lambda y: (y * 2).t().copy_(torch.ones(4, 4)),
}
"""Functions that are traced. Those that are constant have gradients of zeros."""


class _Model(nn.Module):
    """Calls a function in the outermost forward and in a block."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Block(function) for _ in range(2)))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.blocks(x)).sum()


class _Block(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.function(self.linear(x)).mean()


def _compare(function: Callable[[torch.Tensor], torch.Tensor], leaf_modules: Any) -> None:
    torch.manual_seed(0)
    module = _Model(function).double()
    model = thunder.jit(copy.deepcopy(module), transforms=[fsdp(leaf_modules=leaf_modules)])
    x = torch.randn(4, 4, dtype=torch.float64)
    for _ in range(2):
        ours, theirs = model(x), module(x)
        torch.testing.assert_close(ours, theirs)
        for output in (ours, theirs):
            output.backward()
    for found, expected in zip(model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("name", LEAVES)
def test_values_and_gradients_are_those_of_eager_mode(name: str) -> None:
    with pytest.warns(UserWarning, match="runs as it is"):
        _compare(LEAVES[name], ("auto",))


@pytest.mark.parametrize("name", TRACED)
def test_what_can_be_traced_is_traced(name: str) -> None:
    _compare(TRACED[name], ())


@pytest.mark.parametrize("name", ["flip", "hstack", "pad", "meshgrid", "prod", "unfold"])
def test_the_strict_mode_refuses_them(name: str) -> None:
    with pytest.raises((NotImplementedError, RuntimeError)):
        _compare(LEAVES[name], ())


@pytest.mark.parametrize(
    "call",
    [
        lambda y: y.masked_select(y > 0),
        lambda y: y[(y > 0).nonzero()],
        lambda y: y @ y[:3],
        lambda y: torch.flip(y, (7,)),
    ],
    ids=["masked_select", "nonzero", "a mistake", "a mistake in a leaf"],
)
def test_errors_stay_if_a_function_cannot_run_so(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = _Model(call)
    module.blocks = nn.Sequential(nn.Linear(4, 4))
    with warnings.catch_warnings(), pytest.raises((NotImplementedError, RuntimeError, IndexError)):
        warnings.filterwarnings("error", message="fsdp: .*runs as it is")
        thunder.jit(module, transforms=[fsdp()])(torch.ones(4, 4))


def test_a_warning_names_a_function_once() -> None:
    module = _Model(LEAVES["flip"])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        thunder.jit(module, transforms=[fsdp()])(torch.ones(4, 4))
    names = [str(each.message) for each in shown if "runs as it is" in str(each.message)]
    assert len(names) == 2 and all("torch's flip" in name for name in names)  # the function and the method
