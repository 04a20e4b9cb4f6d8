"""Calls of modules are traced as calls of ``forward``, and their members are found at once, by their whole paths."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401
from thunder_fsdp_sched import Debug

import pytest
import thunder
import torch
from beside import Beside
from models import Calling
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


pytestmark = pytest.mark.usefixtures("one_rank")


class Scale(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.full((2,), value))
        self.register_buffer("offset", torch.full((2,), value / 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.value + self.offset


class Alike(nn.Module):
    """Has the submodules ``a_b`` and ``a.b``, ``c.0`` and ``c_0``, and ``a_b_1``."""

    def __init__(self) -> None:
        super().__init__()
        self.a_b, self.a, self.a_b_1 = Scale(2.0), nn.Module(), Scale(3.0)
        self.a.b = Scale(5.0)
        self.c, self.c_0 = nn.ModuleList([Scale(7.0)]), Scale(11.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.a_b, self.a.b, self.a_b_1, self.c[0], self.c_0)
        return torch.stack([part(x) * 10**number for number, part in enumerate(parts)]).sum(0).tanh()


@pytest.mark.parametrize("leaf_modules", [(), (Scale,)], ids=["traced", "leaves"])
@pytest.mark.parametrize("once", [True, False])
def test_modules_whose_paths_differ_in_separators_keep_their_parameters(leaf_modules: Any, once: bool) -> None:
    module, x = nn.Sequential(Alike(), Alike()).double(), torch.full((2, 2), 1e-7, dtype=torch.float64)
    with torch.no_grad():
        module[1].a.b.weight.mul_(1.5)
    Beside(module, leaf_modules=leaf_modules, debug=Debug(differentiate_once=once)).check(x)


@pytest.mark.parametrize("leaf_modules", [(), (Scale,)], ids=["traced", "leaves"])
def test_names_that_are_no_identifiers_keep_their_parameters(leaf_modules: Any) -> None:
    module = nn.Module()
    for number, name in enumerate(("a-1", "a_1", "a 1", "ü")):
        module.add_module(name, nn.Sequential(Scale(number + 1.0)))
    module.register_parameter("w-1", nn.Parameter(torch.ones(2)))
    both = Beside(Calling(_product, parts=module).double(), leaf_modules=leaf_modules)
    both.check(torch.full((2, 2), 1e-3, dtype=torch.float64))


def _product(self: Any, x: torch.Tensor) -> torch.Tensor:
    parts = self.parts
    y = parts.get_parameter("w-1") * x
    for name, part in parts.named_children():
        y = part(y) * (2 if name == "a-1" else 3)
    return y


def _sum(self: Any, inputs: Any) -> torch.Tensor:
    return self.linear(inputs["a_b"] + 10 * inputs["a"]["b"] + 100 * inputs["c"][0] + 1000 * inputs["c_0"])


def test_inputs_whose_paths_differ_in_separators_keep_their_values() -> None:
    inputs = {
        "a_b": torch.ones(2),
        "a": {"b": torch.full((2,), 2.0)},
        "c": [torch.full((2,), 3.0)],
        "c_0": torch.ones(2),
    }
    both = Beside(Calling(_sum, linear=nn.Linear(2, 2)), leaf_modules=())
    for _ in range(2):
        both.check(inputs)
        inputs["a"]["b"] = torch.full((2,), 5.0)
