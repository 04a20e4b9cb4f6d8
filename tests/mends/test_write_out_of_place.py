"""Writes in place, also through views, have the values and gradients of eager mode, or are refused by name.

In plain Thunder a gradient does not pass between a tensor and a view of it that was changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.nn.functional as F
from beside import Beside
from coded import coded
from models import Calling
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda y: y.view(-1),
    "transpose": lambda y: y.transpose(0, 1),
    "slice": lambda y: y[:1],
    "index": lambda y: y[1],
    "tensor_split": lambda y: torch.tensor_split(y, 2)[0],
    "contiguous": lambda y: y.contiguous(),
    "copy that reshape makes": lambda y: y.t().reshape(-1),
    "view of a view": lambda y: y[:, :2].transpose(0, 1)[1].view(-1),
    "detach": lambda y: y.detach(),
    "other rows": lambda y: y[torch.tensor([1])],  # a copy
    "itself": lambda y: y,
}


class Written(Calling):
    """A linear layer, and then a function of the module and its results."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, linear=nn.Linear(3, 4), norm=nn.BatchNorm1d(4))
        self.register_buffer("total", torch.zeros(2, 4))


def _through(view: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Write through a view and read its base, write to the base and read the view, and write to both."""

    def function(self: Any, x: torch.Tensor) -> Any:
        first = self.linear(x)
        view(first).mul_(0.5)
        second = self.linear(x + 1)
        seen = view(second)
        second.add_(1).mul_(3)
        third = self.linear(x - 1)
        part = view(third)
        part[...] = part * 2
        third.mul_(0.7)
        part.mul_(0.25)
        return first * first, seen + 0, third, part

    return function


def check(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Compare two steps with those of eager mode."""
    torch.manual_seed(0)
    both = Beside(Written(function).double())
    for _ in range(2):
        both.check(*(inputs or (torch.linspace(-1, 1, 6).double().view(2, 3),)))


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_a_view_changes_the_base_and_its_gradient(name: str) -> None:
    check(_through(VIEWS[name]))


def _column_by_column(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(2, 4, dtype=x.dtype)
    for column in range(4):
        y[:, column] = self.linear(x)[:, 3 - column] * (column + 1)
    y[1:].copy_(y[:1] * 2)
    return y * y


def _without_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    with torch.no_grad():
        y.mul_(0.5)
        y[0].add_(1)
    return y * y


def _average(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    with torch.no_grad():
        self.total.mul_(0.9).add_(y * 0.1)
    return y * self.total


def _cached(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.total[:, 1:3] = self.linear(x).detach()[:, :2]
    return self.linear(x) + self.total


def _masked(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    y.masked_fill_(y > 0, -1.0)
    y.view(-1).clamp_(min=-0.5)
    return y.exp()


def _input(self: Any, x: torch.Tensor) -> Any:
    x[:, :2].zero_()
    return self.linear(x), x


def _saved(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    z = y * y  # saves y
    y.add_(1)
    return z + y.pow(3)


def _overwritten(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x).t() @ x
    with torch.no_grad():
        y.copy_(self.linear.weight)
    return y


def _detached(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    part = y[:, 1:].detach()
    part += self.linear.bias[1:]
    y.mul_(3)
    part.t()[0] *= 2
    with torch.no_grad():
        part.add_(1)
    return y * 2, part * part, part.detach() + y[:, 1:]


WRITES: dict[str, Callable[..., Any]] = {
    "a value with a gradient to a detached part": _detached,
    "an output with a parameter": _overwritten,
    "columns of a new tensor": _column_by_column,
    "without gradient": _without_gradient,
    "a buffer without gradient": _average,
    "a part of a buffer": _cached,
    "masked": _masked,
    "an input": _input,
    "activation": lambda self, x: F.relu(self.linear(x), inplace=True).exp(),
    "one batch norm twice": lambda self, x: self.norm(self.norm(self.linear(x)) * 2 + x[:, :1]),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_have_the_values_and_gradients_of_eager_mode(name: str) -> None:
    check(WRITES[name])


def test_a_write_to_a_value_that_backward_needs_changes_no_gradient() -> None:
    # In eager mode this is an error. The values that were saved are those from before the write.
    torch.manual_seed(0)
    both, x = Beside(Written(_saved).double()), torch.linspace(-1, 1, 6).double().view(2, 3)
    both.model(x).sum().backward()
    y = both.module.linear(x)
    (y * y + (y + 1).pow(3)).sum().backward()
    both.compare_gradients()


def _overlapping(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return self.linear(x) + y[:, :1]


def _clamped(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.linear.weight.clamp_(-0.1, 0.1)
    return self.linear(x)


def _diagonal(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    y.diagonal().add_(1)
    return y * y


def _diagonal_seen(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    part = y.diagonal()[1:]
    y.mul_(2)
    return y.sum() + part


def _diagonal_part(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    y.diagonal()[1:].add_(1)
    return y * y


def _reshaped(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.reshape(-1).mul_(2)
    return self.linear(x)


MEMORY, THIS = torch.linspace(-1, 1, 12).double(), "write_out_of_place.py"
ROWS = MEMORY[:6].view(2, 3)
REFUSED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], coded]] = {
    "inputs that overlap": (
        _overlapping,
        (ROWS, MEMORY[3:9].view(2, 3)),
        coded("module.changes-arguments-sharing-memory", "'x'", "'y'"),
    ),
    "parameter": (_clamped, (ROWS,), coded("module.in-place-change-of-parameter", f"{THIS}:", "'linear.weight'")),
    "unknown view": (_diagonal, (ROWS,), coded("module.in-place-change-of-unknown-view", "'diagonal'")),
    "base of a part of an unknown view": (_diagonal_seen, (ROWS,), coded("module.in-place-change-of-unknown-view")),
    "part of an unknown view": (_diagonal_part, (ROWS,), coded("module.in-place-change-of-unknown-view")),
    "strides": (_reshaped, (MEMORY[:6].view(3, 2).t(),), coded("module.changes-view-or-copy-in-place", "'x'")),
    "input": (_input, (ROWS.clone().requires_grad_(),), coded("module.in-place-change-of-argument", "'x'")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_writes_that_cannot_be_right_are_refused_by_name(name: str) -> None:
    function, inputs, expected = REFUSED[name]
    jitted = thunder.jit(Written(function).double(), transforms=[fsdp()])
    with pytest.raises((RuntimeError, NotImplementedError), check=expected):
        jitted(*inputs)


def test_inputs_that_do_not_overlap_are_written() -> None:
    check(_overlapping, MEMORY[:6].view(2, 3).clone(), MEMORY[3:9].view(2, 3).clone())


def test_an_input_of_any_strides_is_written() -> None:
    check(_input, MEMORY[:6].view(3, 2).t())
