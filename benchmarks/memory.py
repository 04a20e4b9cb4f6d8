"""Compare the step time of every system at equal peak memory: a budget for ours, recomputation of blocks for the others.

    sudo python benchmarks/memory.py --save memory                   # 2 ranks, emulated compute
    sudo python benchmarks/memory.py --real --rate 1e9 --save memory # real compute, which shares the cores with gloo
    python benchmarks/memory.py --no-limit --blocks 2 --width 64 --batch 1 --rounds 2      # no root: plain loopback
    sudo python benchmarks/memory.py --loss-chunks 8 --vocabulary 16384 --blocks 2         # a loss in chunks

The systems train a GPT on gloo ranks whose activations need most of the memory. As in ``overlap.py``, each rank runs with
one thread, is pinned to a core, and has its own network namespace with a rate-limited interface. All systems take turns in
one run: one step of each in every round. Seconds are those of forward and backward on the slowest rank.

* Systems: this project's ``fsdp``, without and with ``max_memory``; FSDP2 with asynchronous custom collectives and
  explicit prefetching ("FSDP2 overlapped"), which recomputes nothing, every second or every block
  (``torch.utils.checkpoint``), selectively, or what the activation budget of ``torch.compile`` chooses in each block.
* Kernels: all systems run the same kernels of torch. Thunder has no executor for layer norm, GELU and attention on a CPU,
  so the benchmark gives it one (``memory_systems.py``).
* Emulated compute: every matrix multiplication and attention takes a time in proportion to its FLOPs
  (``memory_systems.py``), recomputed ones included. "FLOPs" is the count of all that ran, compared with a step that
  recomputes nothing.
* Peak: the largest number of bytes after any operator of forward and backward (``live_memory.py``): every storage that
  they touch, with shards, gradients, activations, slots in full, and without the optimizer's state. The largest rank counts.
* Budgets are shares of the peak of ours without a budget. At equal peak: the peak of each "FSDP2 overlapped zero3" is the
  budget of one more of ours, and the best other system is the fastest of those whose peak is at most that. If the count
  of ours is larger than the budget, the others may have as much.
* Predicted: the peak of ``CompiledTraces.memory`` divided by the count. Simulated: the step time by the cluster's
  description, divided by the median of the measured ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from thunder_fsdp_sched.extras.planning.cost import AnalyticCost
from thunder_fsdp_sched.extras.planning.simulate import simulate

import harness
import torch
import torch.distributed as dist
from harness import in_turns, ratio, say, summary
from systems import (
    Make,
    System,
    arenas,
    local,
    matching,
    ours,
    overlapped_fsdp2,
    step,
    these_ranks,
)
from live_memory import LiveMemory
from memory_systems import PacedKernels, RecomputingShape, executor, loss_systems
from thunder.extend import add_default_executor, remove_default_executor

# The system whose peak is 100 %.
REFERENCE = "ours zero3"


# The systems whose peaks are budgets of ours; others are slower at about the same peaks.
COMPARED = "FSDP2 overlapped zero3"


def parse(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = harness.options(__doc__, rate=0.25e9, blocks=4, width=192, length=128, rounds=7)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--budgets", type=float, nargs="*", default=[1.0, 0.8, 0.6, 0.45, 0.35], metavar="SHARE")
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument(
        "--loss-chunks", type=int, metavar="N", help="compare losses in N chunks, not budgets and blocks"
    )
    parser.add_argument("--not-equal", action="store_true", help="omit ours with the peaks of the others as budgets")
    arguments = parser.parse_args(command_line)
    if arguments.loss_chunks:
        arguments.budgets, arguments.not_equal = [], True
    if len(arguments.compute) != 1:
        parser.error("--compute: budgets are chosen for one speed of compute")
    return arguments


def systems() -> dict[str, tuple[Make, str]]:
    """Return the function that builds each system and what the model itself recomputes, keyed by the system's name."""
    made: dict[str, tuple[Make, str]] = {
        REFERENCE: (partial(ours, sharding_strategy="zero3"), "none"),
        f"{REFERENCE}, every block": (partial(ours, sharding_strategy="zero3"), "every block"),
    }
    build = partial(overlapped_fsdp2, reshard=True, ahead=1, max_reductions=1)
    for how in ("none", "every second block", "every block", "selective"):
        made[COMPARED if how == "none" else f"{COMPARED}, {how}"] = build, how
    for share in ("0.5", "0.25", "0"):
        made[f"{COMPARED}, compiled {share}"] = build, share
    return made


def run(arguments: argparse.Namespace) -> None:
    """Measure on the ranks of the default process group; rank 0 prints and saves the results."""
    sizes = arguments.blocks, arguments.width, arguments.length, arguments.batch
    shape = RecomputingShape(*sizes, vocabulary=arguments.vocabulary)
    kernels = PacedKernels(shape)
    add_default_executor(executor)
    try:
        results = Results()
        _measure(arguments, shape, kernels, results)
    finally:
        remove_default_executor(executor)
        kernels.close()
    if dist.get_rank() == 0:
        finish(arguments, results)


def _measure(arguments: argparse.Namespace, shape: RecomputingShape, kernels: PacedKernels, results: Results) -> None:
    """Build and count all systems, then measure them in turns."""
    tokens = shape.tokens(dist.get_rank())
    [emulated] = arguments.compute
    kernels.seconds = emulated
    spec = these_ranks(arguments, kernels.flops_per_second)
    kernels.seconds = 0.0  # until all systems are built and counted
    built: dict[str, System] = {}

    def build(name: str, make: Make, **changes: Any) -> bool:
        say(f"building: {name}")
        try:
            system = make(name, dataclasses.replace(shape, **changes), kernels)
            started = time.perf_counter()
            step(system, tokens)  # compiles
            seconds = time.perf_counter() - started
            step(system, tokens)
        except ValueError as refused:
            if "max_memory" not in str(refused):
                raise
            results.refused[name] = str(refused)
            return False
        results.figures[name] = {"compile_seconds": seconds, **count(system, tokens, kernels)}
        built[name] = system
        return True

    chunks = arguments.loss_chunks
    what, all_systems = ("loss_chunks", loss_systems(chunks)) if chunks else ("recompute", systems())
    for name, (make, change) in matching(all_systems, arguments.only, REFERENCE).items():
        build(name, make, **{what: change})
    whole = results.figures[REFERENCE]["peak"]
    budgets = {f"ours, {share:.0%}": round(share * whole) for share in arguments.budgets}
    others = [] if arguments.not_equal else [name for name in built if name.startswith(COMPARED)]
    budgets |= {f"ours at the peak of {name}": results.figures[name]["peak"] for name in others}
    for name, budget in budgets.items():
        if build(name, partial(ours, sharding_strategy="zero3", max_memory=budget, cluster=spec)):
            results.figures[name]["budget"] = budget
    kernels.seconds = emulated
    simulate_ours(spec, built, results)
    runs = {name: partial(step, system, tokens) for name, system in built.items()}
    results.seconds = in_turns(runs, arguments.rounds)
    results.losses = {name: system.losses for name, system in built.items()}


def count(system: System, tokens: torch.Tensor, kernels: PacedKernels) -> dict[str, Any]:
    """Return the bytes and FLOPs of one step; of the ranks, the bytes of the one with the largest peak."""

    class Phases(LiveMemory):
        forward_end = 0

        @classmethod
        def is_infra_mode(cls) -> bool:
            return True  # otherwise torch.compile's functions would run uncompiled in this mode

        @contextmanager
        def phase(self, name: str) -> Iterator[None]:
            yield
            if name == "forward":
                self.forward_end = len(self._events) - 1

    parameters = [local(parameter) for parameter in system.module.parameters()]
    memory = Phases(parameters, arenas(system))
    kernels.flops = 0
    step(system, tokens, memory)
    held = memory.held()
    gradients = memory.bytes_of(local(p.grad) for p in system.module.parameters() if p.grad is not None)
    shards = memory.bytes_of(parameters)
    peak = max(range(len(held.total)), key=held.total.__getitem__)

    def parts(moment: int) -> list[int]:
        unsharded = held.arena + held.outside[moment]
        others = (shards[moment], gradients[moment], unsharded)
        return [*others, held.total[moment] - sum(others)]

    figures = torch.tensor([held.total[peak], *parts(peak), *parts(memory.forward_end), held.arena])
    ranks = [torch.empty_like(figures) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, figures)
    total, *bytes_of_parts, arena = max(ranks, key=lambda of_rank: int(of_rank[0])).tolist()
    names = ("shards", "sharded gradients", "unsharded parameters and gradients", "activations and others")
    counted = {
        "peak": total,
        "at_peak": dict(zip(names, bytes_of_parts[:4], strict=True)),
        "after_forward": dict(zip(names, bytes_of_parts[4:], strict=True)),
        "slots": arena,
        "flops": kernels.flops,
    }
    if system.transform is not None:
        counted["predicted"] = system.transform.compiled[-1].memory.peak.nbytes
    return counted


def simulate_ours(spec: Any, built: Mapping[str, System], results: Results) -> None:
    """Add to the figures of ours the step time by the description of this cluster."""
    for name, system in built.items():
        if system.transform is not None:
            compiled = system.transform.compiled[-1]
            timeline = simulate(compiled.forward, compiled.backward, AnalyticCost(spec))
            results.figures[name]["simulated"] = timeline.step_seconds


@dataclass
class Results:
    """The figures of a run.

    Attributes:
        figures: figures of each system that ran.
        refused: the messages of budgets that nothing fits.
        seconds: seconds of the slowest rank, for each system and round.
        losses: the losses of each system on this rank.
    """

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """A comparison at equal peak.

    Attributes:
        ours: the name of ours with that budget.
        budget: the budget, in bytes.
        best: the fastest other system whose peak is at most the budget, or that of ours if that is larger; ``None`` if
            there is none.
        ratio: the step time of ours divided by that of ``best``, as the median over rounds.
    """

    ours: str
    budget: int
    best: str | None
    ratio: float | None


def equal_peaks(results: Results) -> list[Point]:
    """Return a comparison for each budget of ours that fits."""
    others = [name for name in results.figures if not name.startswith("ours")]
    points = []
    for name, figures in results.figures.items():
        if "budget" not in figures:
            continue
        limit = max(figures["budget"], figures["peak"])  # the others may have as much as was counted for ours
        fitting = [other for other in others if results.figures[other]["peak"] <= limit]
        best = min(fitting, key=lambda other: statistics.median(results.seconds[other]), default=None)
        of_best = None if best is None else ratio(results.seconds[name], results.seconds[best])
        points.append(Point(name, figures["budget"], best, of_best))
    return points


def finish(arguments: argparse.Namespace, results: Results) -> None:
    """Print the tables, and save the figures."""
    points, reference = equal_peaks(results), results.figures[REFERENCE]
    figures: dict[str, dict[str, Any]] = {}
    for name, of_one in results.figures.items():
        figures[name] = of_one | summary(results.seconds[name])
        figures[name] |= {"share": of_one["peak"] / reference["peak"], "work": of_one["flops"] / reference["flops"]}
        figures[name]["ratio"] = ratio(results.seconds[name], results.seconds[REFERENCE])
        if "predicted" in of_one:
            figures[name]["predicted / counted"] = of_one["predicted"] / of_one["peak"]
        if "simulated" in of_one:
            figures[name]["simulated / measured"] = of_one["simulated"] / figures[name]["seconds"]
    [emulated] = arguments.compute
    result = {"emulated": emulated, "figures": figures, "seconds": results.seconds}
    name = "loss" if arguments.loss_chunks else "memory"
    harness.report(arguments, name if emulated else f"{name}_real", [result], STEPS, results.losses)
    kinds = list(reference["at_peak"])
    parts = {
        name: of_one["at_peak"] | {"after": of_one["after_forward"][kinds[-1]]} for name, of_one in figures.items()
    }
    print(
        "\nThe peak consists of these bytes, MB; the last column are activations and others when forward has returned.\n"
    )
    print(harness.table(parts, {kind: (kind, _mb) for kind in kinds} | {"after forward": ("after", _mb)}))
    if arguments.loss_chunks:
        return
    print("\nThe best of the other systems whose peak is at most the budget:\n")
    print(harness.table({point.ours: _compared(point, figures) for point in points}, POINTS))


def _compared(point: Point, figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    ours = figures[point.ours]
    row = {"budget": point.budget, "peak": ours["peak"], "seconds": ours["seconds"]}
    if point.best is not None:
        best = figures[point.best]
        row |= {"ratio": point.ratio, "best": point.best, "its_peak": best["peak"], "its_seconds": best["seconds"]}
    return row


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


STEPS: harness.Columns = {
    "peak MB": ("peak", _mb),
    "of ours": ("share", ".0%"),
    "FLOPs": ("work", ".2f"),
    **harness.STEP,
    "step / ours": ("ratio", ".2f"),
    "predicted / counted peak": ("predicted / counted", ".3f"),
    "simulated / measured step": ("simulated / measured", ".2f"),
    "compile s": ("compile_seconds", ".1f"),
}

POINTS: harness.Columns = {
    "budget MB": ("budget", _mb),
    "peak MB": ("peak", _mb),
    "step s": ("seconds", ".3f"),
    "ours / best": ("ratio", ".2f"),
    "best": ("best", "s"),
    "its peak MB": ("its_peak", _mb),
    "its step s": ("its_seconds", ".3f"),
}


if __name__ == "__main__":
    arguments = parse()
    harness.run_on_ranks(__file__, arguments, run)
