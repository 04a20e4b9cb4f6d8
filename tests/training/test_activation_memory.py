"""Activations that are recomputed (``max_memory``): no bit of training changes, and a step keeps its limit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from thunder_fsdp_sched import Sharding, fsdp
from thunder_fsdp_sched.planning import MemoryLimitError, compile_as_rank

import pytest
import thunder
import torch
import torch.nn.functional as F
from coded import coded
from internals import facts_of
from models import GPT, FeedForward, Stack
from ranks import on_ranks
from scenario import loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint


class Dropping(nn.Module):
    """Blocks with dropout, one of them a region of ``torch.utils.checkpoint``, between a mask and a running mean."""

    def __init__(self, width: int = 24, blocks: int = 2) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))
        self.width = width
        self.register_buffer("mean", torch.zeros(width))

    def inputs(self, generator: torch.Generator, batch: int = 64) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, self.width, generator=generator, dtype=torch.float64),)

    def block(self, x: torch.Tensor, index: int) -> torch.Tensor:
        y = torch.sin(self.up[index](x))
        return x + self.down[index](torch.tanh(y) * y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - self.mean
        for index in range(len(self.up)):
            if index == 1:
                x = checkpoint(self.block, x, index, use_reentrant=False)
            else:
                x = F.dropout(self.block(x, index), 0.25)
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x


MODELS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: GPT(width=16, blocks=1, length=64, block=FeedForward).double(),
    "dropping": lambda: Dropping().double(),
}


def _made(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    param = next(model.parameters())
    inputs = [x.to(param.device) for x in model.inputs(torch.Generator().manual_seed(0))]
    return model, tuple(x.to(param.dtype) if x.is_floating_point() else x for x in inputs)


def _train(
    name: str, rank: int, *, steps: int = 2, no_sync: bool = False, repeats: bool = True, **options: Any
) -> tuple[Any, list[torch.Tensor]]:
    """Train and return the transform, and losses, gradients, buffers and parameters of all steps.

    Args:
        no_sync: begin each step with a micro-batch under ``no_sync``.
        repeats: run two forwards before their backwards, a dropped one, and a repeated backward.
    """
    model, inputs = _made(name)
    jitted = thunder.jit(model, transforms=[transform := fsdp(**options)])
    optimizer = torch.optim.AdamW(jitted.parameters(), lr=1e-2)
    seen: list[torch.Tensor] = []

    def loss() -> torch.Tensor:
        torch.manual_seed(100 * len(seen) + rank)
        batch = [torch.randn_like(x) if x.is_floating_point() else x.roll(rank + len(seen)) for x in inputs]
        computed = loss_of(jitted(*batch))
        seen.append(computed.detach())
        return computed

    for _ in range(steps):
        with jitted.no_sync() if no_sync else contextlib.nullcontext():
            loss().backward()
        if repeats:
            dropped, earlier, later = loss(), loss(), loss()
            del dropped
            earlier.backward(retain_graph=True)
            later.backward()
            earlier.backward()
        elif no_sync:
            loss().backward()
        seen += [p.grad.to_local().clone() for p in jitted.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    seen += [*(p.to_local() for p in jitted.parameters()), *model.buffers()]
    return transform, [value.detach().clone() for value in seen]


@pytest.mark.parametrize(
    ("name", "options", "within", "share", "most"),
    [
        ("dropping", {"no_sync": True, "sharding_strategy": "zero2"}, {}, 0.85, 2),
        ("gpt", {"steps": 4, "repeats": False}, {"sharding_strategy": Sharding(release=True), "prefetch": 1}, 0.83, 9),
    ],
)
@on_ranks()
def test_recomputation_changes_no_bit_of_a_step(
    rank: int, name: str, options: dict[str, Any], within: dict[str, Any], share: float, most: int
) -> None:
    """Compare steps within a limit with a step without one.

    Args:
        within: options of the step within the limit alone.
        share: the limit as a share of the peak without a limit.
        most: the fewest reductions in flight of any compiled step are at most as many.
    """
    free, expected = _train(name, rank, **options)
    limit = int(share * max(compiled.memory.peak.nbytes for compiled in free.compiled))
    limited, found = _train(name, rank, **options, **within, max_memory=limit)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), f"value {number} of {name}"
    assert all(compiled.memory.peak.nbytes <= limit for compiled in limited.compiled)
    assert any(compiled.settings.recomputed for compiled in limited.compiled)
    assert not within or all(bucket.arena._memory is None for bucket in limited.sharded.buckets)
    assert min(compiled.settings.reductions_in_flight for compiled in limited.compiled) <= most


def _compile(model: str, **options: Any) -> Any:
    return compile_as_rank(partial(_made, model), fsdp(cluster="h100-sxm", **options), rank=0, world_size=2)


def test_random_operators_and_what_they_read_in_place_never_run_again() -> None:
    free = _compile("dropping").compiled[-1]
    limited = _compile("dropping", max_memory=int(0.7 * free.memory.peak.nbytes)).compiled[-1]
    assert limited.settings.recomputed
    for compiled in (free, limited):
        random = [b for b in compiled.backward.bound_symbols if "uniform" in b.sym.name or "rand" in b.sym.name]
        assert not random
    made = {p.name: b for b in limited.joint.bound_symbols for p in b.flat_proxy_outs}
    assert all(facts_of(made[name]).pure for name in limited.settings.recomputed)
    # The buffer is written in forward, so nothing may read it again.
    assert not any("mean" in str(b) for b in limited.backward.bound_symbols)


def _stack_within(limit: int, **options: Any) -> tuple[Any, Any]:
    """Return a function that compiles a step, with or without ``no_sync``, and the transform."""
    model, transform = Stack().double(), fsdp(max_memory=limit, transport="all_to_all", cluster="h100-sxm", **options)
    jitted = thunder.jit(model, transforms=[transform])

    def compile_step(no_sync: bool) -> None:
        with jitted.no_sync() if no_sync else contextlib.nullcontext():
            transform.sharded.compile(jitted, model.inputs(torch.Generator().manual_seed(0)), {})

    return compile_step, transform


@pytest.mark.parametrize("limit", [7_000, 9_060])
def test_a_window_that_was_planned_within_its_limit_is_not_refused(fake_ranks: None, limit: int) -> None:
    """A second model of memory once counted the sum of the reduced gradients twice, and refused 9,060 bytes."""
    compile_step, transform = _stack_within(limit, accumulate="sharded")
    for no_sync in (True, False):
        compile_step(no_sync)
    first, last = transform.compiled
    for step in (first, last):
        assert step.predict_memory(accumulated=[first], others=transform.compiled).peak.nbytes <= limit


def test_a_limit_that_a_later_mode_would_exceed_is_an_error_before_it_runs(fake_ranks: None) -> None:
    compile_step, _ = _stack_within(9_060, accumulate="unsharded")
    compile_step(no_sync=False)
    with pytest.raises(MemoryLimitError, check=coded("plan.traces-exceed-max-memory")):
        compile_step(no_sync=True)
