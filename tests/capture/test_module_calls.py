"""Calls of modules are traced as calls of ``forward``, and their members are found at once."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401

import pytest
import thunder
import torch
from beside import Beside
from torch import nn

X = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)


class Refusing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


class Catching(nn.Module):
    """Calls a module that is not registered, which raises an error."""

    def __init__(self, *, catches: bool) -> None:
        super().__init__()
        self.linear, self.catches = nn.Linear(4, 4).double(), catches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.catches:
            return Refusing()(x)
        try:
            return Refusing()(self.linear.weight)
        except ValueError:
            return self.linear(x) + 2


def test_an_error_of_a_module_that_is_not_registered_is_its_own(one_rank: None) -> None:
    Beside(Catching(catches=True), leaf_modules=()).check(X)
    with pytest.raises(ValueError, match="no") as raised:
        Beside(Catching(catches=False), leaf_modules=()).model(X)
    notes = getattr(raised.value, "__notes__", ["while tracing a module that is not registered, Refusing"])
    assert any("while tracing a module that is not registered, Refusing" in note for note in notes)


class Asking(nn.Module):
    """Looks up every kind of member, also where a name is missing, and after it has assigned one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.tied = self.linear.weight
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.parts = nn.ModuleDict({"one": nn.Tanh(), "two": nn.Linear(4, 4)})
        self.register_buffer("scale", torch.full((4,), 3.0))
        self.register_buffer("nothing", None)
        self.count = 2.0

    def __getattr__(self, name: str) -> Any:
        return 5.0 if name == "computed" else super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.linear.bias is None and self.nothing is None and not hasattr(self, "missing")
        x = self.parts["two"](self.parts.one(self.linear(x) @ self.tied)) + self.weights[1]
        for name in ("weight", "bias"):
            x = x + getattr(self.other, name)[0] * getattr(self.other, "missing", self.computed)
        self.scale = self.scale + self.count
        with contextlib.suppress(AttributeError):
            x = self.missing
        return x * self.scale + nn.Softplus().beta


def test_members_are_those_that_torch_finds(one_rank: None) -> None:
    Beside(Asking().double(), leaf_modules=()).check(X)


def test_threads_compile_and_call_one_model_in_turn(one_rank: None) -> None:
    both, inputs = Beside(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()), [X[:1], X, X.repeat(2, 1)]
    with ThreadPoolExecutor(len(inputs)) as pool:
        outputs = list(pool.map(both.model, inputs))
    torch.testing.assert_close(outputs, [both.module(x) for x in inputs])
    both.check(X)
    assert thunder.cache_misses(both.model) == len(inputs)
