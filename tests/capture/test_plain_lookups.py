"""Direct look-ups find what Python finds, also where the order of a dictionary or a descriptor matters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")


def _in_order(y: torch.Tensor, **factors: float) -> torch.Tensor:
    for number, factor in enumerate(factors.values()):
        y = y * factor + number
    return y


def _read_late(module: Any, y: torch.Tensor) -> torch.Tensor:
    return _in_order(y * module.factors["b"], **module.factors)


def _partial(module: Any, y: torch.Tensor) -> torch.Tensor:
    call = functools.partial(_in_order, **module.factors)
    return call(y * call.keywords["b"])


def _grouper(module: Any, y: torch.Tensor) -> torch.Tensor:
    for one, other in zip(*[iter(module.values)] * 2, strict=False):
        y = y * one + other
    return y


def _partial_next(module: Any, y: torch.Tensor) -> torch.Tensor:
    take = functools.partial(next, iter(module.values))
    return y * take() + take()


def _reversed(module: Any, y: torch.Tensor) -> torch.Tensor:
    for value in reversed(module.own):
        y = y * value + 1
    return y


class _Own(Sequence):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.values, self.length = [2.0, 3.0, 4.0], 2

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]


class Model(nn.Module):
    __slots__ = ("lazy",)

    def __init__(self, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.call, self.factors, self.values, self.own = call, {"a": 2.0, "b": 3.0}, [2.0, 3.0, 4.0, 5.0], _Own()

    def __getattr__(self, name: str) -> Any:
        return self.linear.weight.sum() * 2 if name == "lazy" else super().__getattr__(name)

    def forward(self, x: torch.Tensor, method: str = "mean", function: float = 1.0) -> torch.Tensor:
        y = self.call(self, self.linear(x)) * function
        return y.sum() if method == "sum" else y.mean()


CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "keywords in the order of the dictionary": _read_late,
    "keywords of a partial": _partial,
    "an iterator that only zip holds": _grouper,
    "an iterator that only a partial holds": _partial_next,
    "a sequence of Python": _reversed,
    "an empty slot": lambda module, y: y * module.lazy,
}


@pytest.mark.parametrize("name", CALLS)
def test_values_are_those_of_eager_mode_before_and_after_a_change(name: str) -> None:
    module, jitted = Model(CALLS[name]), Model(CALLS[name])
    model, x = thunder.jit(jitted, transforms=[fsdp()]), torch.ones(2, 3)
    torch.testing.assert_close(model(x), module(x))
    for each in (module, jitted):
        each.own.length = 3
    torch.testing.assert_close(model(x), module(x))


def test_arguments_may_have_any_name() -> None:
    module = Model(lambda _, y: y)
    model, x = thunder.jit(Model(lambda _, y: y), transforms=[fsdp()]), torch.ones(2, 3)
    torch.testing.assert_close(model(x, method="sum", function=2.0), module(x, method="sum", function=2.0))
