"""The audit of merged traces, and rounds in which only some ranks audit, compile or build."""

from __future__ import annotations

import inspect
from typing import Any

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import fsdp

import thunder
import torch
from ranks import on_ranks
from spoiled import changing, executors, fails_in_backward, raises_on_all, total
from torch import nn


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return (self.left(x) if left else self.right(x)).square().sum() + total(self.first.weight.detach())


def _jit(**options: Any) -> Any:
    return thunder.jit(Branches(), transforms=[fsdp(ranks_may_differ=True)], **options)


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


@on_ranks()
def test_the_first_run_of_a_merged_trace_is_audited_and_an_error_is_raised_on_all_ranks(rank: int) -> None:
    torch.manual_seed(0)
    model, x = _jit(executors=executors()), torch.randn(3, 4)
    for left in (True, False):  # the own traces are right
        model(x, left).backward()
    model.zero_grad()
    with changing((lambda w: w.data.add_(1)) if rank else None):
        for _ in range(2):  # no run has been right
            raises_on_all(rank, lambda: model(x, rank == 0), "audit_forward", "parameter 'first.weight'")
    loss = model(x, rank == 0)
    with fails_in_backward(lies=rank == 1):
        raises_on_all(rank, loss.backward, "audit_backward", "on purpose")
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
    model, x = _jit(), torch.ones(3, 4)
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
