"""Models whose ranks differ train as without sharding."""

from __future__ import annotations

import contextlib

import thunder_fsdp_sched as tfs  # before thunder

import pytest
import thunder
import torch
from differing_models import CASES, Case, optimizer_of
from ranks import on_ranks
from scenario import whole_of

SHORT = ("experts",)
"""Cases that the short run trains. `examples/ranks_differ.py` has two towers and unequal numbers."""


def used(case: Case, rank: int, number: int) -> list[str]:
    """Return the parameters that a batch gives gradients, in the order of backward; none without a batch."""
    model, batches, order = case.model(), case.batches(rank), []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: order.append(name))
    if number < len(batches):
        case.call(model, batches[number]).backward()
    return order


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.long) for n in CASES])
def test_two_ranks_differ(name: str) -> None:
    """Otherwise the case would prove nothing."""
    case = CASES[name]
    differ = [used(case, 0, number) != used(case, 1, number) for number in range(max(case.counts))]
    assert any(differ) == (name != "alike")


@pytest.mark.parametrize(
    "name", ["experts", *(pytest.param(n, marks=pytest.mark.long) for n in ("branches", "layerdrop", "towers"))]
)
def test_some_parameters_are_used_by_one_rank_alone(name: str) -> None:
    case = CASES[name]
    assert any(set(used(case, 0, n)) ^ set(used(case, 1, n)) for n in range(max(case.counts)))
    assert torch.isfinite(torch.tensor(case.unsharded(2).losses)).all()


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("zero2", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.long) for n in CASES])
@on_ranks()
def test_trains_like_the_unsharded_model(rank: int, world_size: int, name: str, strategy: str) -> None:
    """Losses, gradients before each step, which of them are ``None``, and parameters after AdamW."""
    case = CASES[name]
    expected = case.unsharded(world_size)
    model = thunder.jit(case.model(), transforms=[tfs.fsdp(sharding_strategy=strategy, ranks_may_differ=True)])
    optimizer, losses, gradients = optimizer_of(model), [], iter(expected.gradients)
    with torch.set_grad_enabled(case.trains):
        for number, batch in enumerate(tfs.batches(model, case.batches(rank))):
            with contextlib.nullcontext() if case.ends_step(number) else model.no_sync():
                loss = tfs.without_batch(model) if batch is None else case.call(model, batch)
                if case.trains:
                    loss.backward()
            if batch is not None:
                losses.append(loss.item())
            if case.trains and case.ends_step(number):
                compare({n: p.grad for n, p in model.named_parameters()}, next(gradients), f"gradients, batch {number}")
                optimizer.step()
                optimizer.zero_grad()
    assert next(gradients, None) is None
    assert losses == pytest.approx(expected.losses[rank], rel=1e-9)
    compare(dict(model.named_parameters()), expected.parameters, "parameters")


def compare(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor | None], what: str) -> None:
    assert actual.keys() == expected.keys()
    assert {n for n, v in actual.items() if v is None} == {n for n, v in expected.items() if v is None}, what
    for name, value in actual.items():
        if value is not None:
            torch.testing.assert_close(
                whole_of(value).detach(), expected[name].detach(), rtol=0, atol=1e-9, msg=f"{what}: {name}"
            )


@pytest.mark.usefixtures("one_rank")
def test_a_single_rank_without_a_batch_ends_a_window() -> None:
    module = torch.nn.Linear(2, 2)
    model = thunder.jit(module, transforms=[tfs.fsdp(ranks_may_differ=True)])
    with model.no_sync():
        model(torch.ones(3, 2)).sum().backward()
        tfs.without_batch(model).backward()
    assert module.weight.grad is None
    tfs.without_batch(model).backward()
    assert torch.equal(whole_of(module.weight.grad), torch.full((2, 2), 3.0))
