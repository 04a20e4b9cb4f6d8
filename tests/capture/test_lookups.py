"""Globals and items of dictionaries, lists and tuples are looked up without interpreting Thunder's own functions."""

from __future__ import annotations

from collections import Counter
from typing import Any

from thunder_fsdp_sched import private_interpreter
from thunder_fsdp_sched.capture.input_reads import InputReads

import pytest
import thunder
import torch
from internals import call_forward, trace_module_calls
from torch import nn

SCALE = 2.0


class Looking(nn.Module):
    """Looks up globals, builtins, and items that are there or not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.tables = {"scales": [1.0, 3.0], "names": ("one", "two"), 4: {"deep": (5.0,)}}

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        x = self.linear(batch["x"]) * SCALE
        if "mask" in batch and "two" in self.tables["names"] and 7.0 not in self.tables["scales"]:
            x = x * batch["mask"][-1] + self.tables["scales"][1]
        try:
            x = x + batch["more"]
        except KeyError:
            x = x + self.tables[4]["deep"][0]
        return x[:, 1:] + len(self.tables["scales"][:1])


def _compile(model: nn.Module) -> tuple[list[str], dict[Any, Any]]:
    """Return the traces with Thunder's checks, and this package's checks."""
    jitted = thunder.jit(model)
    reads = InputReads()
    trace_module_calls(thunder.compile_data(jitted), call_forward, reads)
    jitted({"x": torch.ones(2, 3), "mask": [torch.zeros(3), torch.ones(3)]})
    checks = dict(reads._checks)
    assert reads.take() is not None
    return [str(history(jitted)[0]) for history in (thunder.last_prologue_traces, thunder.last_traces)], checks


def test_direct_lookups_give_the_traces_and_checks_of_interpreted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = Counter[str]()
    direct = private_interpreter._direct_lookup

    def counted(function: Any, args: Any) -> Any:
        found = direct(function, args)
        looked_up[getattr(function, "__qualname__", "")] += found is not None
        return found

    monkeypatch.setattr(private_interpreter, "_direct_lookup", counted)
    model = Looking()
    traces, checks = _compile(model)
    # All are in this Thunder under the names that are known.
    assert all(looked_up[name] for name in private_interpreter._LOOKUPS), looked_up
    monkeypatch.setattr(private_interpreter, "_direct_lookup", lambda function, args: None)
    assert _compile(model) == (traces, checks)
    assert checks
