"""Operators that are alike are claimed once; the result is the trace that Thunder's own claims give, up to names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from thunder_fsdp_sched.ir.operator_facts import Facts, facts_of
from thunder_fsdp_sched.pipeline import JointPasses
from thunder_fsdp_sched.private_traces import claim
from thunder_fsdp_sched.transforms.claim_operators import claim_operators

import pytest
import thunder
import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from models import CASES, GPT, Stack
from profiles import each_case
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.extend import Executor, OperatorExecutor, StatefulExecutor
from torch import nn
from trace_text import with_numbered_names


class Claims:
    """Claims the operators of joint traces in both ways, and compares the text.

    Attributes:
        singles: how many operators were claimed by themselves.
        operators: how many there were.
        text: of the claimed trace.
    """

    def __init__(self, *first: Executor) -> None:
        self.executors = (*first, *thunder.get_default_executors(), *thunder.get_always_executors())
        self.singles = self.operators = 0
        self.text = ""

    def run(self, monkeypatch: pytest.MonkeyPatch, model: nn.Module, *inputs: Any) -> list[torch.Tensor]:
        """Return the output and the gradients of the model as compiled with these claims."""
        joint = JointPasses("claims", partial(self._compare, monkeypatch), claims=True)
        jitted = thunder.jit(model, executors=[joint, *self.executors])
        torch.manual_seed(1)
        output = jitted(*inputs)
        if output.requires_grad:
            output.double().pow(2).sum().backward()
        return [output.detach(), *(p.grad for p in jitted.parameters() if p.grad is not None)]

    def _compare(self, monkeypatch: pytest.MonkeyPatch, trace: TraceCtx) -> TraceCtx:
        expected = text(claim_operators(trace, executors=self.executors, once=False))

        def counted(single: TraceCtx, executors: Any) -> TraceCtx:
            self.singles += 1
            return claim(single, executors)

        with monkeypatch.context() as patch:
            patch.setitem(claim_operators.__globals__, "claim", counted)
            once = claim_operators(trace, executors=self.executors)
        stays = claim_operators.__globals__["_stays"]
        self.operators += sum(not stays(bsym) for bsym in trace.bound_symbols)
        assert text(once) == expected
        for bsym in once.bound_symbols:
            in_full = BoundSymbol.from_bsym(bsym)  # without what the other one keeps
            assert unordered(facts_of(bsym)) == unordered(facts_of(in_full))
        self.text = once.python()
        return once


def text(trace: TraceCtx) -> str:
    return with_numbered_names(trace.python())


def unordered(facts: Facts) -> Facts:
    return facts._replace(aliases={out: sorted(read) for out, read in facts.aliases.items()})


def in_eager(model: nn.Module, *inputs: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    output = model(*inputs)
    if output.requires_grad:
        output.double().pow(2).sum().backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def check(monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], *executors: Executor) -> Claims:
    """Compare the traces, and the numbers with those of eager mode; return the claims."""
    torch.manual_seed(0)
    model = make().double()
    inputs = model.inputs(torch.Generator().manual_seed(0))
    claims = Claims(*executors)
    found = claims.run(monkeypatch, model, *inputs)
    model.zero_grad()
    for ours, expected in zip(found, in_eager(model, *inputs), strict=True):
        torch.testing.assert_close(ours, expected)
    return claims


@pytest.mark.parametrize("name", each_case("gpt", "stack"))
def test_the_text_is_that_of_thunders_claims(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = {**CASES, "gpt": lambda: GPT(blocks=2), "stack": lambda: Stack(3)}[name]
    claims = check(monkeypatch, make)
    assert claims.singles < claims.operators


class Tanhs(nn.Module):
    """The hyperbolic tangent, four times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for _ in range(4):
            x = torch.tanh(x)
        return F.softplus(x)

    def inputs(self, generator: torch.Generator) -> tuple[torch.Tensor]:
        return (torch.randn(2, 3, generator=generator, dtype=torch.float64),)


def other_tanh(kind: type[OperatorExecutor], checker: Callable[..., bool] | None) -> OperatorExecutor:
    """Return an executor with a hyperbolic tangent of its own."""
    executor = kind(f"other_tanh_{id(checker)}")
    symbol = executor.register_operator("other_tanh", like=ltorch.tanh, fn=torch.tanh)
    executor.register_implementation(ltorch.tanh, symbol, checker=checker)
    return executor


def test_an_executor_with_a_checker_of_somebody_else_is_asked_about_each_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def every_second(x: Any) -> bool:
        if x.name not in asked:
            asked.append(x.name)
        return asked.index(x.name) % 2 == 0

    with torch.no_grad():  # or Thunder decomposes them before executors claim them
        claims = check(monkeypatch, Tanhs, other_tanh(OperatorExecutor, every_second))
        without = check(monkeypatch, Tanhs, other_tanh(OperatorExecutor, None))
    assert len(asked) == 4
    assert claims.text.count("other_tanh(") == 2
    assert without.text.count("other_tanh(") == 4
    assert without.singles == claims.singles - 3


class Stateful(StatefulExecutor):
    """Thunder's kind of executor that keeps state for each operator."""


def test_nothing_is_repeated_with_an_executor_that_keeps_state(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = check(monkeypatch, Tanhs, Stateful("stateful"))
    assert claims.singles == claims.operators


def test_results_that_other_values_replace_are_replaced_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = OperatorExecutor("wider")
    wider = executor.register_operator(
        "wider_tanh", meta=lambda x: TensorProxy(like=x, shape=(2, 3)), fn=lambda x: torch.tanh(x).expand(2, 3)
    )
    executor.register_implementation(ltorch.tanh, wider)
    claims = Claims(executor)
    x = torch.randn(1, 3, dtype=torch.float64)
    with torch.no_grad():
        (found,) = claims.run(monkeypatch, Tanhs().double(), x)
    torch.testing.assert_close(found, Tanhs().double()(x).expand(2, 3).detach())
    assert '"cpu f64[2, 3]"' in claims.text
