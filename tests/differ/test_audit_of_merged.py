"""The audit of merged traces, and rounds in which only some ranks audit, compile or build."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import ScheduleDisagreement, VerificationError, fsdp
from thunder_fsdp_sched.proof import audit

import pytest
import thunder
import torch
from coded import coded
from ranks import on_ranks
from torch import nn

change: Callable[[torch.Tensor], object] | None = None  # called by the operator below on its argument


def total(w: torch.Tensor) -> torch.Tensor:
    return w.sum()


def _total(w: torch.Tensor) -> torch.Tensor:
    assert w.data_ptr()  # which fake tensors do not have, so it cannot be observed
    if change is not None:
        change(w)
    return w.sum()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return (self.left(x) if left else self.right(x)).square().sum() + total(self.first.weight.detach())


def jit_with_operator() -> Any:
    executor = thunder.extend.OperatorExecutor("liar")
    thunder.extend.register_executor(executor)
    like = thunder.core.proxies.TensorProxy
    operator = executor.register_operator(
        "liar_total", meta=lambda w: like(like=w, shape=()), fn=_total, replaces=total
    )
    executor.register_implementation(operator, operator, grad_transform=lambda w: operator(w))  # no gradient
    torch.manual_seed(0)
    transforms, executors = [fsdp(ranks_may_differ=True)], [executor, *thunder.get_default_executors()]
    return thunder.jit(Branches(), transforms=transforms, executors=executors)


def starts(model: Any) -> list[Any]:
    traces = [trace for compiled in model._lc_transforms[-1].compiled for trace in compiled.traces]
    return [b.args[0] for trace in traces for b in trace.bound_symbols if b.sym.name == "fsdp_agreed_or_merged"]


def audited_programs(model: Any) -> list[bool]:
    """Return for each merged trace whether the next run of its program is audited."""
    return [
        "fsdp_audit" in inspect.unwrap(start._merged.run).__globals__
        for start in starts(model)
        if start._merged is not None
    ]


def grads_of(model: Any) -> list[torch.Tensor]:
    return [p.grad.to_local().clone() for p in model.parameters()]


def raises_on_all(rank: int, run: Callable[[], object], *names: str) -> None:
    own, theirs = coded("proof.wrong-operator-facts"), coded("ranks.actions-differ", "rank 1: the audit of a trace")
    expected = (own if rank else theirs).naming(*names)
    with pytest.raises(VerificationError if rank else ScheduleDisagreement, check=expected):
        run()


@on_ranks()
def test_the_first_run_of_a_merged_trace_is_audited_and_an_error_is_raised_on_all_ranks(rank: int) -> None:
    global change
    model, x = jit_with_operator(), torch.randn(3, 4)
    for left in (True, False):  # the own traces are right
        model(x, left).backward()
    model.zero_grad()
    real_compare = audit.Auditor._compare

    def compare(auditor: audit.Auditor, expected: Any, *found: Any) -> None:
        real_compare(auditor, expected, *found)
        if rank and auditor.name == "audit_backward":
            auditor._fail(expected, "lies")

    try:
        change = (lambda w: w.data.add_(1)) if rank else None
        for _ in range(2):  # no run has been right
            raises_on_all(rank, lambda: model(x, rank == 0), "audit_forward", "parameter 'first.weight'")
    finally:
        change = None
    loss = model(x, rank == 0)
    with mock.patch.object(audit.Auditor, "_compare", compare):
        raises_on_all(rank, loss.backward, "audit_backward", "lies")
    assert all(p.grad is None for p in model.parameters())
    model(x, rank == 0).backward()
    grads = grads_of(model)
    model.zero_grad()
    channel = model._lc_transforms[-1].sharded.control.channel
    model(x, rank == 0).backward()
    assert audited_programs(model) == [False, False]
    rounds = channel.rounds
    model(x, rank == 0).backward()
    assert channel.rounds == rounds + 2
    assert all(torch.equal(p, 2 * q) for p, q in zip(grads_of(model), grads, strict=True))


@on_ranks()
def test_ranks_that_always_differ_meet_once_for_each_trace(rank: int) -> None:
    """Although their own traces, which never run, are never audited."""
    model, x = thunder.jit(Branches(), transforms=[fsdp(ranks_may_differ=True)]), torch.ones(3, 4)
    channel = model._lc_transforms[-1].sharded.control.channel
    for step in range(4):
        rounds = channel.rounds
        model(x, rank == 0).backward()
        if step >= 2:
            assert channel.rounds == rounds + 2
    # A rank compiles alone, builds alone and audits alone, then another one, then both in one round.
    for shapes in ((3, 5), (2, 5), (6, 7)):
        for _ in range(2):
            model(torch.ones(shapes[rank], 4), rank == 0).backward()
        loss = tfs.without_batch(model) if rank else model(x, True)
        loss.backward()
    rounds = channel.rounds
    model(torch.ones((6, 7)[rank], 4), rank == 0).backward()
    assert channel.rounds == rounds + 2
    assert not any(audited_programs(model))
