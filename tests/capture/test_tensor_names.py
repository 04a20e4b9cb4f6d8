"""Tensors whose paths differ in separators only keep their values: Thunder joins names by "_" and takes them for one."""

from __future__ import annotations

from typing import Any

from thunder_fsdp_sched import Debug

import pytest
import torch
from beside import Beside
from models import Calling
from torch import nn

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
