"""Modes that compute the same share a joint trace; the final traces and bits are those of compiling in full."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from thunder_fsdp_sched import CompiledTraces, Debug, fsdp
from thunder_fsdp_sched.logs import following_stages

import pytest
import thunder
import torch
from beside import Beside
from models import Stack
from torch import nn
from trace_text import with_numbered_names

OFFSET = 2.0


class Program(Stack):
    """A small model that also reads its input's dtype, a number, and a global."""

    def __init__(self) -> None:
        super().__init__(1)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor, number: int = 1) -> torch.Tensor:
        x = super().forward(x.double()) if number else x
        return self.dropout(x) + OFFSET


def _train(in_full: bool) -> tuple[list[CompiledTraces], list[list[str]], list[torch.Tensor]]:
    """Call one model in many modes; return what was compiled, the texts of traces, and all outputs and gradients."""
    stages: list[str] = []
    with following_stages(stages.append):
        found = _train_in_many_modes(in_full)
    assert stages.count("tracing") == len(SHARES) - (0 if in_full else TRACED_BEFORE)
    return found


def _train_in_many_modes(in_full: bool) -> tuple[list[CompiledTraces], list[list[str]], list[torch.Tensor]]:
    global OFFSET
    torch.manual_seed(0)
    model = Program().double()
    transform = fsdp(debug=Debug(differentiate_once=not in_full))
    jitted = thunder.jit(model, transforms=[transform])
    found: list[torch.Tensor] = []
    texts: list[list[str]] = []

    def call(x: torch.Tensor, *args: Any, compiles: bool = True, sync: bool = True, **kwargs: Any) -> None:
        compiled = len(transform.compiled)
        torch.manual_seed(0)
        with nullcontext() if sync else jitted.no_sync():
            output = jitted(x, *args, **kwargs)
            if output.requires_grad:
                output.pow(2).sum().backward()
        assert len(transform.compiled) == compiled + compiles
        if compiles:
            texts.append([text(trace) for trace in transform.compiled[-1].traces])
        found.append(output.detach())
        if sync and output.requires_grad:
            found.extend(p.grad.to_local().clone() for p in jitted.parameters() if p.grad is not None)
            jitted.zero_grad()

    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    call(x, sync=False)
    with torch.no_grad():
        call(x)
    call(x)
    call(x, compiles=False, sync=False)
    call(x, compiles=False)
    call(x, 2)
    call(x[:2])
    call(x.float())
    jitted.eval()
    call(x)
    jitted.train()
    model.blocks[0].requires_grad_(False)
    call(x)
    call(x, sync=False)
    OFFSET = 3.0
    call(x, 3)
    OFFSET = 2.0
    with torch.autocast("cpu", torch.bfloat16):
        call(x.float(), 2)
    return transform.compiled, texts, found


SHARES = [None, None, 0, 0, None, None, None, None, 7, None, None]
"""The compilation whose joint trace each compilation of ``_train`` shares."""

TRACED_BEFORE = 2
"""How many of them differ in ``no_sync`` alone, so that Thunder need not trace again."""


def test_modes_share_a_joint_trace_only_if_they_compute_the_same(one_rank: None) -> None:
    compiled, texts, found = _train(in_full=False)
    in_full, texts_in_full, expected = _train(in_full=True)
    assert [c.shares for c in compiled] == SHARES
    assert [c.shares for c in in_full] == [None] * len(SHARES)
    assert texts == texts_in_full
    for ours, full in zip(compiled, in_full, strict=True):
        assert [*ours.parameters.values()] == [*full.parameters.values()]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def text(trace: Any) -> str:
    return with_numbered_names(str(trace))


def test_other_values_in_the_other_mode_are_traced_again(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    transform = fsdp()
    model, x, stages = thunder.jit(Program().double().eval(), transforms=[transform]), torch.randn(6, 4), list[str]()
    with following_stages(stages.append):
        expected = model(x)
        monkeypatch.setitem(globals(), "OFFSET", 5.0)
        with model.no_sync():
            torch.testing.assert_close(model(x), expected + 3)
    assert stages.count("tracing") == 2
    assert [compiled.shares for compiled in transform.compiled] == [None, None]


class KeepsConstants(nn.Linear):
    mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = super().forward(x)
        self.mask = result > 0
        return result, result.detach(), torch.ones(2)


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_each_mode_returns_and_keeps_constants(one_rank: None, first: bool, with_grad: bool) -> None:
    module, x, stages = KeepsConstants(4, 4), torch.randn(3, 4), list[str]()
    expected = module(x)
    model = thunder.jit(module, transforms=[fsdp()])
    with torch.set_grad_enabled(with_grad), following_stages(stages.append):
        for in_window in (first, not first, first):
            with model.no_sync() if in_window else nullcontext():
                torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert stages.count("tracing") == 1
    assert (thunder.cache_misses(model), thunder.cache_hits(model)) == (2, 1)


def test_a_model_that_replaces_a_buffer_is_compiled_in_full(one_rank: None) -> None:
    transform = fsdp()
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = thunder.jit(module, transforms=[transform])
    with model.no_sync():
        model(torch.randn(3, 4))
    model(torch.randn(3, 4))
    assert [compiled.shares for compiled in transform.compiled] == [None, None]
    assert module[1].num_batches_tracked == 2


def test_calls_after_autocast_compute_in_full_precision(one_rank: None) -> None:
    both, x = Beside(Stack(1)), torch.randn(6, 4)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert both.model(x).dtype is torch.bfloat16
        both.check(x, rtol=1e-5, atol=1e-5)
        both.check(x[:3], rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            both.check(x, rtol=1e-5, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            both.check(x[:2], rtol=1e-5, atol=1e-5)
    with both.model.no_sync():
        both.model(x)
    assert both.transform.compiled[-1].shares == 1
