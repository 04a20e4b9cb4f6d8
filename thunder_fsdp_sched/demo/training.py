"""The demo's runs: the same model, text and optimizer, sharded in different ways or not at all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import thunder
import torch
import torch.distributed as dist
from thunder.core.trace import TraceCtx
from thunder.distributed import FSDPBucketingStrategy, FSDPType

from ..api import fsdp
from ..checkpoint import full_state_dict
from ..pipeline import CompiledTraces
from ..plan.plan import Plan
from ..reports.step_counter import StepCounter, StepCounts
from .model import GPT
from .options import DemoOptions
from .text import sample

__all__ = [
    "UNSHARDED",
    "Run",
    "Tick",
    "largest_difference",
    "largest_loss_difference",
    "run_fsdp",
    "run_thunder",
    "run_unsharded",
]

UNSHARDED = "unsharded"
"""The name of the run with which the others are compared."""

Tick = Callable[[str], None]
"""A callback that receives a description of the next action, before each step."""


@dataclass
class Run:
    """One training run.

    Attributes:
        losses: nats per byte before each step, mean over ranks.
        parameters: whole parameters after the last step, by name.
        counts: the counts of the last step, on this rank.
        alike: whether all ranks issued the same collectives in the same order.
        compile_seconds: the first call minus a later one.
        step_seconds: median of all steps except the first and the counted one.
        kept_bytes: memory for unsharded parameters and gradients that stays allocated between steps.
        plan, traces: the plan and the traces, for runs of this package.
        thunder_traces: the forward and backward traces of Thunder's own ``fsdp``.
    """

    name: str
    losses: list[float]
    parameters: dict[str, torch.Tensor]
    counts: StepCounts
    alike: bool
    compile_seconds: float
    step_seconds: float
    kept_bytes: int = 0
    plan: Plan | None = None
    traces: CompiledTraces | None = None
    thunder_traces: tuple[TraceCtx, TraceCtx] | None = None


def run_unsharded(options: DemoOptions, text: torch.Tensor, tick: Tick) -> Run:
    """Train with plain PyTorch without a compiler, in one process, on the batches of all ranks together."""
    model = _model(options)
    return _train(UNSHARDED, model, model.state_dict, options, text, tick, rank=None)


def run_thunder(options: DemoOptions, text: torch.Tensor, tick: Tick) -> Run:
    """Train with Thunder's own ``fsdp``, with its options for ZeRO-3 and block buckets."""
    jitted = thunder.distributed.fsdp(
        thunder.jit(_model(options)),
        device=torch.device("cpu"),
        sharding_strategy=FSDPType.ZERO3,
        bucketing_strategy=FSDPBucketingStrategy.BLOCK,
    )
    # Names at the root begin with a dot.
    whole = lambda: {name.removeprefix("."): value for name, value in jitted.original_state_dict().items()}  # noqa: E731
    run = _train("Thunder's fsdp", jitted, whole, options, text, tick, rank=dist.get_rank())
    run.thunder_traces = (thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1])
    return run


def run_fsdp(strategy: str, options: DemoOptions, text: torch.Tensor, tick: Tick) -> Run:
    """Train with this package's ``fsdp``; ``strategy`` is ``"zero2"`` or ``"zero3"``."""
    transform = fsdp(sharding_strategy=strategy, prefetch=options.prefetch)
    jitted = thunder.jit(_model(options), transforms=[transform])
    name = strategy.replace("zero", "ZeRO-")
    run = _train(name, jitted, lambda: full_state_dict(jitted), options, text, tick, rank=dist.get_rank())
    run.plan, run.traces = transform.plan, transform.compiled[-1]
    buckets = transform.sharded.buckets
    arenas = {b.arena for b in buckets} | {b.private_slot.arena for b in buckets if b.private_slot is not None}
    run.kept_bytes = sum(arena.nbytes for arena in arenas)
    return run


def _model(options: DemoOptions) -> GPT:
    torch.manual_seed(options.seed)
    return GPT(blocks=options.blocks, width=options.width, heads=options.heads, length=options.length).to(options.dtype)


def _train(
    name: str,
    model: Any,
    state_dict: Callable[[], dict[str, torch.Tensor]],
    options: DemoOptions,
    text: torch.Tensor,
    tick: Tick,
    *,
    rank: int | None,
) -> Run:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate)
    rows = slice(None) if rank is None else slice(rank * options.batch, (rank + 1) * options.batch)
    losses, seconds = [], []
    counter = StepCounter(parameters, sharded=rank is not None)
    for step in range(options.steps):
        tick(f"{name}: {'compiling' if step == 0 and rank is not None else 'training'}")
        tokens, targets = (
            part[rows]
            for part in sample(
                text,
                step=step,
                seed=options.seed,
                batch=options.world_size * options.batch,
                length=options.length,
            )
        )
        started = time.perf_counter()
        with ExitStack() as counted:
            if step == options.steps - 1:
                counted.enter_context(counter)
            with counter.phase("forward"):
                loss = model(tokens, targets)
            with counter.phase("backward"):
                loss.backward()
            with counter.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        losses.append(_mean(loss.detach(), rank))
    counts = counter.counts()
    return Run(
        name,
        losses,
        {key: value.detach().clone() for key, value in state_dict().items()},
        counts,
        _alike(counts, rank),
        compile_seconds=max(seconds[0] - statistics.median(seconds[1:-1]), 0.0),
        step_seconds=statistics.median(seconds[1:-1]),
    )


def _mean(loss: torch.Tensor, rank: int | None) -> float:
    if rank is not None:
        loss = loss.clone()
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def _alike(counts: StepCounts, rank: int | None) -> bool:
    if rank is None:
        return True
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, counts.collectives)
    return all(other == everyone[0] for other in everyone)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any element of two state dicts with the same keys."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    return max((a[key] - b[key]).abs().max().item() for key in a)


def largest_loss_difference(a: Iterable[float], b: Iterable[float]) -> float:
    """Return the largest difference of two runs' losses at the same step."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
