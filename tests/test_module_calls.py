"""The shortcut through module calls that the other tests take: Thunder's traces are the same with and without it."""

from __future__ import annotations

import re
from typing import Any

import module_calls
import pytest
import thunder
import torch
from models import CASES, GPT, Stack
from thunder.core import jit_ext
from torch import nn

MODELS = {**CASES, "gpt": lambda: GPT(blocks=1), "stack": Stack}
CALL = nn.Module._wrapped_call_impl


def _traces(make: Any, *, hooks: bool = False) -> list[str]:
    torch.manual_seed(0)
    model = make()
    inputs = model.inputs(torch.Generator().manual_seed(0))
    if hooks:
        for module in model.modules():
            module.register_forward_pre_hook(lambda module, args: tuple(a * 2 for a in args))
            module.register_forward_hook(lambda module, args, output: output + 1)
    jitted = thunder.jit(model.double())
    jitted(*inputs)
    traces = [thunder.last_prologue_traces(jitted)[0], thunder.last_traces(jitted)[0]]
    return [re.sub(r"took \d+ milliseconds", "", str(trace)) for trace in traces]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that the shortcut has interpreted; the test switches it on."""
    interpreted: list[Any] = []
    interpret = module_calls._interpret_call

    def spy(function: Any, *args: Any, **kwargs: Any) -> Any:
        interpreted.append(function)
        return interpret(function, *args, **kwargs)

    monkeypatch.setattr(module_calls, "_interpret_call", spy)
    monkeypatch.delitem(jit_ext._general_jit_lookaside_map, CALL, raising=False)
    monkeypatch.delenv("STOCK_MODULE_CALLS", raising=False)
    return interpreted


@pytest.mark.parametrize("name", MODELS)
def test_traces_are_those_of_thunders_own_module_calls(calls: list[Any], name: str) -> None:
    stock = _traces(MODELS[name])
    assert not calls
    with module_calls.shortened_module_calls():
        assert _traces(MODELS[name]) == stock
    assert set(calls) == {module_calls._call_forward}


def test_hooks_are_interpreted(calls: list[Any]) -> None:
    stock = _traces(lambda: Stack(1), hooks=True)
    with module_calls.shortened_module_calls():
        assert _traces(lambda: Stack(1), hooks=True) == stock
    assert set(calls) == {module_calls._call_with_hooks}
    assert stock != _traces(lambda: Stack(1))


def test_the_shortcut_ends_with_its_context(calls: list[Any]) -> None:
    with module_calls.shortened_module_calls():
        assert jit_ext._general_jit_lookaside_map[CALL] is module_calls._call
    assert CALL not in jit_ext._general_jit_lookaside_map
