"""The demo's options, text and runs: the same model, batches and optimizer, sharded in different ways or not at all."""

from __future__ import annotations

import contextlib
import statistics
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import thunder
import torch
import torch.distributed as dist
import typer
from thunder.core.trace import TraceCtx
from thunder.distributed import FSDPBucketingStrategy, FSDPType

from ..api import fsdp
from ..compiled_traces import CompiledTraces
from ..plan.plan import Plan
from ..reports.step_counter import StepCounter, StepCounts
from .model import GPT

_TOLERANCES = {"float32": (2e-5, 2e-4), "float64": (1e-12, 1e-9)}


Sharding = Literal["zero2", "zero3", "both"]


def strategies_of(sharding: Sharding) -> tuple[str, ...]:
    """Return the sharding strategies that a command runs."""
    return ("zero2", "zero3") if sharding == "both" else (sharding,)


@dataclass(frozen=True)
class DemoOptions:
    """Options of one demo. The first step of a run compiles, the last is counted and not timed."""

    steps: Annotated[int, typer.Option(min=3, help="AdamW steps of each run.")] = 5
    blocks: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = 8
    width: Annotated[int, typer.Option(min=8, help="Width of the model.")] = 320
    length: Annotated[int, typer.Option(min=2, help="Bytes of a sequence.")] = 64
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank and step.")] = 4
    world_size: Annotated[int, typer.Option(min=1, help="Ranks: processes on this machine.")] = 2
    sharding: Annotated[Sharding, typer.Option(help="What to run.")] = "both"
    prefetch: Annotated[int, typer.Option(min=0, help="Buckets that an all-gather is issued ahead of its wait.")] = 1
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and the batches.")] = 0
    dtype: Annotated[Literal["float32", "float64"], typer.Option(help="Of the parameters.")] = "float32"
    tolerance: Annotated[
        float | None, typer.Option(help="Largest accepted difference from the unsharded run, in loss and parameters.")
    ] = None

    @property
    def tolerances(self) -> tuple[float, float]:
        """The largest accepted differences from the unsharded run: of the loss (nats per byte), and of a parameter element.

        The latter is a fifth of a step in float32. AdamW divides a gradient by its own size, so an element whose gradient
        is almost zero moves by a part of the learning rate that depends on the last bits.
        """
        return _TOLERANCES[self.dtype] if self.tolerance is None else (self.tolerance, self.tolerance)

    def model(self) -> GPT:
        """Return the model, alike on all ranks, with up to 8 attention heads."""
        torch.manual_seed(self.seed)
        heads = next(h for h in range(8, 0, -1) if self.width % h == 0)
        model = GPT(blocks=self.blocks, width=self.width, heads=heads, length=self.length)
        return model.to(getattr(torch, self.dtype))


def read_text(limit: int = 1 << 20) -> torch.Tensor:
    """Return the first ``limit`` bytes of the standard library's modules, in the order of their file names.

    Raises:
        RuntimeError: this interpreter has no sources.
    """
    folder = sysconfig.get_paths()["stdlib"]
    text = b"".join(path.read_bytes() for path in sorted(Path(folder).glob("*.py")))
    if len(text) < 1 << 14:
        raise RuntimeError(f"no Python sources in {folder}, the demo has no text to train on")
    return torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8).long()


def sample(text: torch.Tensor, step: int, options: DemoOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of all ranks in one step: sequences, and for each byte the next one.

    It depends only on the seed and ``step``, so every rank and every run draws the same batch.
    """
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    count = options.world_size * options.batch
    starts = torch.randint(len(text) - options.length, (count,), generator=generator)
    pieces = torch.stack([text[s : s + options.length + 1] for s in starts.tolist()])
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


@dataclass
class Run:
    """One training run."""

    name: str
    losses: list[float]  # nats per byte before each step, mean over ranks
    parameters: dict[str, torch.Tensor]  # whole, after the last step, by name
    counts: StepCounts  # of the last step, on this rank
    alike: bool  # whether all ranks issued the same collectives in the same order
    compile_seconds: float  # the first call minus a later one
    step_seconds: float  # median of all steps except the first and the counted one
    kept_bytes: int = 0  # memory for unsharded parameters and gradients that stays allocated between steps
    plan: Plan | None = None  # of this package
    traces: CompiledTraces | None = None  # of this package
    thunder_traces: tuple[TraceCtx, ...] = ()  # forward and backward of Thunder's own fsdp

    def differences(self, other: Run) -> tuple[float, float]:
        """Return the largest differences between two runs: of the losses of a step, and of an element of a parameter."""
        losses = [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]
        assert self.parameters.keys() == other.parameters.keys()
        return max(losses), max((p - other.parameters[n]).abs().max().item() for n, p in self.parameters.items())


UNSHARDED, STOCK = "unsharded", "Thunder's fsdp"


def train(name: str, options: DemoOptions, text: torch.Tensor) -> Run:
    """Train the model on the same batches, in one of four ways.

    Args:
        name: ``UNSHARDED``: plain PyTorch without a compiler, in one process, on the batches of all ranks. ``STOCK``:
            Thunder's own ``fsdp``, with its options for ZeRO-3 and block buckets. ``"ZeRO-2"``, ``"ZeRO-3"``: this
            package's ``fsdp``.
    """
    model: Any = options.model()
    transform = None
    if name == STOCK:
        strategy, bucketing = FSDPType.ZERO3, FSDPBucketingStrategy.BLOCK
        model = thunder.distributed.fsdp(
            thunder.jit(model), device=torch.device("cpu"), sharding_strategy=strategy, bucketing_strategy=bucketing
        )
    elif name != UNSHARDED:
        transform = fsdp(sharding_strategy=name.replace("ZeRO-", "zero"), prefetch=options.prefetch)
        model = thunder.jit(model, transforms=[transform])
    run = _train(name, model, options, text)
    if name == STOCK:
        run.thunder_traces = (thunder.last_traces(model)[-1], thunder.last_backward_traces(model)[-1])
    if transform is not None:
        run.plan, run.traces = transform.plan, transform.compiled[-1]
        buckets = transform.sharded.buckets
        arenas = {b.arena for b in buckets} | {b.private_slot.arena for b in buckets if b.private_slot is not None}
        run.kept_bytes = sum(arena.nbytes for arena in arenas)
    return run


def _train(name: str, model: Any, options: DemoOptions, text: torch.Tensor) -> Run:
    is_sharded = name != UNSHARDED
    first = dist.get_rank() * options.batch if is_sharded else 0
    rows = slice(first, first + options.batch) if is_sharded else slice(None)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses, seconds = [], []
    counter = StepCounter(parameters, sharded=is_sharded)
    for step in range(options.steps):
        tokens, targets = (part[rows] for part in sample(text, step, options))
        started = time.perf_counter()
        with counter if step == options.steps - 1 else contextlib.nullcontext():
            with counter.phase("forward"):
                loss = model(tokens, targets)
            with counter.phase("backward"):
                loss.backward()
            with counter.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
    counts = counter.counts()
    of_ranks: list[Any] = [(losses, counts.collectives)]
    if is_sharded:
        of_ranks *= options.world_size
        dist.all_gather_object(of_ranks, (losses, counts.collectives))
    whole = model.original_state_dict() if is_sharded else model.state_dict()
    step_seconds = statistics.median(seconds[1:-1])
    return Run(
        name,
        [statistics.mean(of_step) for of_step in zip(*(of for of, _ in of_ranks), strict=True)],
        {key.removeprefix("."): value.detach().clone() for key, value in whole.items()},  # Thunder's names at the root
        counts,
        all(collectives == counts.collectives for _, collectives in of_ranks),
        compile_seconds=max(seconds[0] - step_seconds, 0.0),
        step_seconds=step_seconds,
    )
