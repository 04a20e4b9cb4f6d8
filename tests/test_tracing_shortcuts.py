"""The shortcuts through Thunder's compilation that other tests use: traces are the same without them.

Once a week, CI runs all tests without them, which compares everything else.
"""

from __future__ import annotations

import re

import pytest
import thunder
import torch
import tracing_shortcuts
from models import CASES, GPT, Model, Stack
from torch import nn


class Attributes(Model):
    """A model that reads existing and missing attributes and writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("nothing", None)
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "missing") or self.nothing is not None or self.bias is not None:
            return x
        try:
            return x * self.absent
        except AttributeError as error:
            assert "'Attributes' object has no attribute 'absent'" in str(error)
        self.count = self.count + 1
        return self.linear(x) * getattr(self, "scale", 1) + getattr(self, "missing", 2) + self.count


SCALES = {"first": 2.0, "second": 3.0}


class Counts(dict):
    """A dictionary that has an item for every key."""

    def __missing__(self, key: str) -> float:
        return float(len(key))


COUNTS = Counts(first=0.5)


class Items(Model):
    """A model that reads items of containers and globals, and whose loops and lookups end with exceptions."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(4), torch.randn(4), torch.randn(4)])
        self.factors = (1.0, 2.0, [3.0, 4.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * SCALES["first"] * SCALES.get("third", 1) * COUNTS["first"] * COUNTS["other"]
        for factor, weight in zip(self.factors[-1][:], self.weights, strict=False):
            x = x * factor + weight
        for name, scale in SCALES.items():
            x = x + scale * len(name)
        for missing in ("container[7]", "dictionary", "global"):
            try:
                if missing == "container[7]":
                    x = x + self.factors[7]
                elif missing == "dictionary":
                    x = x + SCALES["third"]
                else:
                    x = x + not_there
            except (IndexError, KeyError, NameError) as error:
                x = x + len(type(error).__name__)
        return x[0] + x.sum() + self.factors[0:2][1] + self.weights[1]


MODELS = {"attributes": Attributes, "items": Items, "stack": lambda: Stack(1), "gpt": lambda: GPT(blocks=1), **CASES}
ORDINARY = [("attributes", False), ("items", False), ("stack", False), ("stack", True)]
MORE = [pytest.param(name, False, marks=pytest.mark.long) for name in ("gpt", *CASES)]


def _traces(name: str, which: str, *, hooks: bool = False) -> list[str]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    inputs = model.inputs(torch.Generator().manual_seed(0))
    if hooks:
        for module in model.modules():
            module.register_forward_pre_hook(lambda module, args: tuple(a * 2 for a in args))
            module.register_forward_hook(lambda module, args, output: output + 1)
    jitted = thunder.jit(model)
    with tracing_shortcuts.tracing_shortcuts(which):
        jitted(*inputs)
    traces = [thunder.last_prologue_traces(jitted), thunder.last_traces(jitted), thunder.last_backward_traces(jitted)]
    return [re.sub(r"took \d+ milliseconds", "", str(trace)) for stage in traces for trace in stage]


@pytest.mark.parametrize(("name", "hooks"), [*ORDINARY, *MORE])
def test_traces_are_the_same_without_shortcuts(name: str, hooks: bool) -> None:
    assert _traces(name, "all", hooks=hooks) == _traces(name, "none", hooks=hooks)
