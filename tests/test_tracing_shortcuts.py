"""The shortcuts through Thunder's compilation that other tests use: traces and errors are the same without them."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
import tracing_shortcuts
from models import CASES, GPT, Model, Stack
from profiles import LONG, LONG_ONLY
from thunder.core import interpreter, jit_ext
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


class Raises(Model):
    """A model that raises in a nested call inside a loop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in SCALES.values():
            x = self._scaled(x, scale)
        return x

    def _scaled(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale if scale < 3 else x * {}[scale]


MODELS = {
    **(CASES if LONG else {}),
    "attributes": Attributes,
    "items": Items,
    **({"gpt": lambda: GPT(blocks=1)} if LONG else {}),
    "stack": lambda: Stack(1),
}


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


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the functions whose shortcuts were used, and of the functions that the shortcuts interpreted."""
    names: set[str] = set()

    def noted(name: str, shortcut: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            names.add(name)
            return shortcut(*args, **kwargs)

        return noting

    for function, shortcut in tracing_shortcuts.LOOKASIDES.items():
        monkeypatch.setitem(tracing_shortcuts.LOOKASIDES, function, noted(function.__name__, shortcut))
    for place, shortcut in tracing_shortcuts.REPLACEMENTS.items():
        if place[1] == "dis":
            monkeypatch.setattr(shortcut, "get_instructions", noted("dis", shortcut.get_instructions))
        elif place[1] == "inspect":
            continue  # Thunder reads the caller's frame at a fixed depth, so it cannot be wrapped
        else:
            monkeypatch.setitem(tracing_shortcuts.REPLACEMENTS, place, noted(place[1], shortcut))
    interpret = tracing_shortcuts._interpret_call

    def noting_interpret(function: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(getattr(function, "__name__", ""))
        return interpret(function, *args, **kwargs)

    monkeypatch.setattr(tracing_shortcuts, "_interpret_call", noting_interpret)
    return names


@pytest.mark.parametrize("name", MODELS)
def test_traces_are_the_same_without_shortcuts(taken: set[str], name: str) -> None:
    stock = _traces(name, "none")
    assert not taken
    assert _traces(name, "all") == stock
    loops = {"get_or_make_python_frame"} if name in ("gpt", "stack", "items") else set()
    assert {function.__name__ for function in tracing_shortcuts.LOOKASIDES} | loops <= taken
    missing = {name for _, name in tracing_shortcuts.REPLACEMENTS} - taken
    assert missing <= {"get_or_make_python_frame", "inspect"}
    assert "_call_forward" in taken and "_call_with_hooks" not in taken
    assert ("_has_no" in taken) is (name == "attributes")


def test_hooks_of_modules_run_with_shortcuts(taken: set[str]) -> None:
    assert _traces("stack", "all", hooks=True) == _traces("stack", "none", hooks=True)
    assert "_call_with_hooks" in taken and "_call_forward" not in taken


def test_the_recorded_call_site_is_the_same_without_shortcuts(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = []
    begin = interpreter.InterpreterRuntimeCtx.__init__

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        site = self._original_callsite
        sites.append((site.filename, site.lineno, site.function, site.positions))

    monkeypatch.setattr(interpreter.InterpreterRuntimeCtx, "__init__", noting)
    for which in ("none", "all"):
        with tracing_shortcuts.tracing_shortcuts(which):
            thunder.jit(torch.neg)(torch.ones(2))
    assert len(sites) == 2 and sites[0] == sites[1]


def test_errors_and_tracebacks_are_the_same_without_shortcuts(taken: set[str]) -> None:
    told = []
    for which in ("none", "all", "all"):  # the last time with cached frames
        with tracing_shortcuts.tracing_shortcuts(which), pytest.raises(KeyError) as caught:
            thunder.jit(Raises())(torch.zeros(2, 4))
        ours = [frame for frame in traceback.extract_tb(caught.tb) if frame.filename == __file__]
        told.append((caught.value.args, [(frame.name, frame.lineno, frame.line) for frame in ours]))
    assert told[0] == told[1] == told[2]
    assert told[0][0] == (3.0,)
    assert [name for name, _, _ in told[0][1]][-2:] == ["forward", "_scaled"]
    assert "get_or_make_python_frame" in taken


def _stock() -> list[Any]:
    lookasides = dict(jit_ext._general_jit_lookaside_map)
    return [lookasides, *(getattr(owner, name) for owner, name in tracing_shortcuts.REPLACEMENTS)]


def test_shortcuts_end_with_their_context() -> None:
    with tracing_shortcuts.tracing_shortcuts("none"):
        before = _stock()
        with tracing_shortcuts.tracing_shortcuts("all"):
            lookasides, *replaced = _stock()
            assert lookasides == before[0] | tracing_shortcuts.LOOKASIDES
            assert replaced == list(tracing_shortcuts.REPLACEMENTS.values())
            assert all(now is not then for now, then in zip(replaced, before[1:], strict=True))
            with tracing_shortcuts.tracing_shortcuts("none"):
                assert _stock() == before
        assert _stock() == before


_SAY_WHOSE = """
import thunder_fsdp_sched
from thunder.core import interpreter
print(interpreter.globals_lookup.__module__, __import__("thunder").__spec__.loader.__class__.__name__)
"""


@pytest.mark.parametrize(
    ("which", "module"),
    [("all", "tracing_shortcuts"), pytest.param("none", "thunder.core.interpreter", marks=LONG_ONLY)],
)
def test_subprocesses_use_shortcuts_from_their_start(which: str, module: str) -> None:
    environment = {**tracing_shortcuts.shortcuts_at_start(), "TRACING_SHORTCUTS": which}
    done = subprocess.run(
        [sys.executable, "-c", _SAY_WHOSE], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == [module, "SourceFileLoader"], done.stderr
