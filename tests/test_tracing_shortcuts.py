"""The shortcuts that the other tests take through Thunder's interpreter: traces are the same with and without them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import thunder
import torch
import tracing_shortcuts
from models import CASES, GPT, Model, Stack
from thunder.core import jit_ext
from torch import nn


class Attributes(Model):
    """Looks for what is there and what is not, and writes a buffer."""

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


MODELS = {**CASES, "attributes": Attributes, "gpt": lambda: GPT(blocks=1), "stack": lambda: Stack(1)}


def _traces(name: str, *, hooks: bool = False) -> list[str]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    inputs = model.inputs(torch.Generator().manual_seed(0))
    if hooks:
        for module in model.modules():
            module.register_forward_pre_hook(lambda module, args: tuple(a * 2 for a in args))
            module.register_forward_hook(lambda module, args, output: output + 1)
    jitted = thunder.jit(model)
    jitted(*inputs)
    traces = [thunder.last_prologue_traces(jitted), thunder.last_traces(jitted), thunder.last_backward_traces(jitted)]
    return [re.sub(r"took \d+ milliseconds", "", str(trace)) for stage in traces for trace in (stage[0], stage[-1])]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that the shortcuts have interpreted. The test begins without them."""
    interpreted: list[Any] = []
    interpret = tracing_shortcuts._interpret_call

    def spy(function: Any, *args: Any, **kwargs: Any) -> Any:
        interpreted.append(function)
        return interpret(function, *args, **kwargs)

    monkeypatch.setattr(tracing_shortcuts, "_interpret_call", spy)
    for function in tracing_shortcuts.SHORTCUTS:
        monkeypatch.delitem(jit_ext._general_jit_lookaside_map, function, raising=False)
    return interpreted


@pytest.mark.parametrize("name", MODELS)
def test_traces_are_those_without_shortcuts(calls: list[Any], name: str) -> None:
    stock = _traces(name)
    assert not calls
    with tracing_shortcuts.tracing_shortcuts("all"):
        assert _traces(name) == stock
    assert {tracing_shortcuts._call_forward, dict.__contains__, dict.__getitem__} <= set(calls)
    assert tracing_shortcuts._call_with_hooks not in calls
    assert (tracing_shortcuts._has_no in calls) is (name == "attributes")


def test_hooks_are_interpreted(calls: list[Any]) -> None:
    stock = _traces("stack", hooks=True)
    with tracing_shortcuts.tracing_shortcuts("all"):
        assert _traces("stack", hooks=True) == stock
    assert tracing_shortcuts._call_with_hooks in calls and tracing_shortcuts._call_forward not in calls


def test_shortcuts_end_with_their_context(calls: list[Any]) -> None:
    before = dict(jit_ext._general_jit_lookaside_map)
    with tracing_shortcuts.tracing_shortcuts("all"):
        assert jit_ext._general_jit_lookaside_map == before | tracing_shortcuts.SHORTCUTS
    assert jit_ext._general_jit_lookaside_map == before
