"""Calls of modules are traced as calls of ``forward``, and their members are found at once."""

from __future__ import annotations

import contextlib
from typing import Any

from thunder_fsdp_sched.capture import module_members
from thunder_fsdp_sched.capture.input_reads import InputReads

import pytest
import thunder
import torch
from internals import trace_module_calls
from torch import nn
from trace_text import with_numbered_names

X = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)


def traces_of(model: nn.Module, *inputs: Any) -> tuple[list[str], Any]:
    """Return the text of the first traces that Thunder makes, with names in the order of appearance, and the output."""
    jitted = thunder.jit(model)
    trace_module_calls(thunder.compile_data(jitted), InputReads())
    output = jitted(*inputs)
    texts = [str(history(jitted)[0]) for history in (thunder.last_prologue_traces, thunder.last_traces)]
    return [with_numbered_names(text) for text in texts], output


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


def test_an_error_of_a_module_that_is_not_registered_is_its_own() -> None:
    model = Catching(catches=True)
    torch.testing.assert_close(traces_of(model, X)[1], model(X))
    with pytest.raises(ValueError, match="no") as raised:
        traces_of(Catching(catches=False), X)
    notes = getattr(raised.value, "__notes__", ["while tracing a module that is not registered, Refusing"])
    assert "while tracing a module that is not registered, Refusing" in notes[0]


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


def asking() -> nn.Module:
    torch.manual_seed(0)
    return Asking().double()


def test_members_that_are_looked_up_at_once_are_those_that_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    look_aside = module_members.look_aside

    def spy(function: Any, args: tuple[Any, ...], paths: Any) -> Any:
        if (lookaside := look_aside(function, args, paths)) is not None:
            found.append(args[1].value)
        return lookaside

    monkeypatch.setattr(module_members, "look_aside", spy)
    traces, output = traces_of(asking(), X)
    assert {"linear", "bias", "tied", "parts", "one", "weight", "nothing", "scale"} <= set(found)
    assert found.count("scale") == 1, "it has been assigned then"
    monkeypatch.setattr(module_members, "look_aside", lambda *_: None)
    in_full, expected = traces_of(asking(), X)
    assert traces == in_full
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    torch.testing.assert_close(output, asking()(X))
