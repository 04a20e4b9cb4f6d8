"""Compare the step time of every system at equal peak memory: a budget for ours, recomputation of blocks for the others.

    sudo python benchmarks/memory.py --save memory                   # 2 ranks, emulated compute
    sudo python benchmarks/memory.py --real --rate 1e9 --save memory # real compute, which shares the cores with gloo
    python benchmarks/memory.py --no-limit --blocks 2 --width 64 --batch 1 --rounds 2      # no root: plain loopback

The systems train a GPT on gloo ranks whose activations need most of the memory. As in ``overlap.py``, each rank runs with
one thread, is pinned to a core, and has its own network namespace with a rate-limited interface. All systems take turns in
one run: one step of each in every round. Seconds are those of forward and backward on the slowest rank.

* Systems: this project's ``fsdp``, without and with ``max_memory``; FSDP2 with asynchronous custom collectives and
  explicit prefetching ("FSDP2 overlapped"), and as it ships, which overlaps nothing on a CPU; Thunder's own FSDP. The others
  recompute nothing, every second or every block (``torch.utils.checkpoint``). FSDP2 also has selective checkpoints and
  the activation budget of ``torch.compile``, which chooses in each block what to save.
* Kernels: all systems run the same kernels of torch. Thunder has no executor for layer norm, GELU and attention on a CPU,
  so the benchmark gives it one (``torch_kernels.py``); ``--decomposed`` omits it.
* Emulated compute: every matrix multiplication and attention takes a time in proportion to its FLOPs
  (``paced_kernels.py``), recomputed ones included. "FLOPs" is the count of all that ran, compared with a step that
  recomputes nothing.
* Peak: the largest number of bytes after any operator of forward and backward (``live_memory.py``): every storage that
  they touch, with shards, gradients, activations, slots in full, and without the optimizer's state. The largest rank counts.
* Budgets are shares of the peak of ours without a budget. At equal peak: the peak of each "FSDP2 overlapped zero3" is the
  budget of one more of ours, and the best other system is the fastest of those whose peak is at most that. If the count
  of ours is larger than the budget, the others may have as much.
* Predicted: the peak of ``CompiledTraces.memory`` divided by the count. Simulated: the step time by the cluster's
  description, and by one measured profile, divided by the median of the measured ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any


def main() -> None:
    from netns import run_on_ranks

    arguments = parse()
    run_on_ranks(__file__, arguments, run_rank, bits_per_second=arguments.rate)


def parse(command_line: list[str] | None = None) -> argparse.Namespace:
    from netns import add_link_options

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_link_options(parser)
    parser.set_defaults(rate=0.25e9)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--length", type=int, default=128, help="bytes of text in a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--compute", type=float, default=0.9, metavar="S", help="seconds to emulate")
    parser.add_argument("--real", action="store_true", help="real compute, nothing emulated")
    parser.add_argument("--decomposed", action="store_true", help="without torch's fused kernels in Thunder")
    parser.add_argument("--budgets", type=float, nargs="*", default=[1.0, 0.8, 0.6, 0.45, 0.35], metavar="SHARE")
    parser.add_argument("--not-equal", action="store_true", help="omit ours with the peaks of the others as budgets")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each system")
    parser.add_argument("--repeats", type=int, default=2, help="measured runs for the profile; 0 for no profile")
    parser.add_argument("--only", metavar="REGEX", help="only matching systems, and ours without a budget")
    parser.add_argument("--save", type=Path, help="folder for all figures and the picture (memory.json, memory.png)")
    return parser.parse_args(command_line)


REFERENCE = "ours zero3"
"""The system whose peak is 100 %."""


COMPARED = "FSDP2 overlapped zero3"
"""The systems whose peaks are budgets of ours; others are slower at about the same peaks."""


def systems(only: str | None) -> dict[str, tuple[Callable[..., Any], str]]:
    """Return the function that builds each system and what the model itself recomputes, keyed by the system's name."""
    from systems import fsdp2, ours, overlapped_fsdp2, thunders_fsdp

    made: dict[str, tuple[Callable[..., Any], str]] = {}
    blocks = ("none", "every second block", "every block")
    for strategy in ("zero3", "zero2"):
        made[f"ours {strategy}"] = partial(ours, sharding_strategy=strategy), "none"
    made["ours zero3, every block"] = partial(ours, sharding_strategy="zero3"), "every block"
    for strategy, reshard in (("zero3", True), ("zero2", False)):
        build = partial(overlapped_fsdp2, reshard=reshard, ahead=1, max_reductions=1)
        for how in (*blocks, "selective"):
            made[_name(f"FSDP2 overlapped {strategy}", how)] = build, how
        for share in ("0.5", "0.25", "0") if reshard else ():
            made[f"FSDP2 overlapped {strategy}, compiled {share}"] = build, share
    for how in blocks:
        made[_name("FSDP2 zero3", how)] = partial(fsdp2, reshard=True), how
    for how in blocks:
        made[_name("Thunder fsdp", how)] = partial(thunders_fsdp, strategy="zero3", bucketing="block"), how
    return {name: of for name, of in made.items() if name == REFERENCE or only is None or re.search(only, name)}


def _name(system: str, how: str) -> str:
    return system if how == "none" else f"{system}, {how}"


def has_budget() -> bool:
    """Return whether ``fsdp`` has the option ``max_memory``."""
    import thunder_fsdp_sched

    return "max_memory" in inspect.signature(thunder_fsdp_sched.fsdp).parameters


def run_rank(arguments: argparse.Namespace) -> None:
    import torch.distributed as dist
    from netns import join_ranks

    join_ranks()
    run(arguments)
    dist.barrier()
    dist.destroy_process_group()


def run(arguments: argparse.Namespace) -> None:
    """Measure on the ranks of the default process group; rank 0 prints and saves the results."""
    from thunder_fsdp_sched.compat import prepare  # noqa: F401  # before thunder

    import torch.distributed as dist
    from memory_tables import Results, finish
    from paced_kernels import PacedKernels
    from recomputing import RecomputingShape
    from thunder.extend import add_default_executor, remove_default_executor
    from torch_kernels import executor

    shape = RecomputingShape(arguments.blocks, arguments.width, arguments.length, arguments.batch)
    kernels = PacedKernels(shape)
    if not arguments.decomposed:
        add_default_executor(executor)
    try:
        results = Results()
        _measure(arguments, shape, kernels, results)
    finally:
        remove_default_executor(executor)
        kernels.close()
    if dist.get_rank() == 0:
        finish(arguments, results)


def _measure(arguments: argparse.Namespace, shape: Any, kernels: Any, results: Any) -> None:
    """Build and count all systems, then measure them in turns."""
    import torch.distributed as dist
    from systems import interleave, ours, say, step, these_ranks

    tokens = shape.tokens(dist.get_rank())
    emulated = 0.0 if arguments.real else arguments.compute
    kernels.seconds = emulated
    spec = these_ranks(None if arguments.no_limit else arguments.rate, kernels.flops_per_second)
    kernels.seconds = 0.0  # until all systems are built and counted
    built: dict[str, Any] = {}

    def build(name: str, make: Callable[..., Any], recompute: str = "none") -> bool:
        say(f"building: {name}")
        try:
            system = make(name, dataclasses.replace(shape, recompute=recompute), kernels)
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

    for name, (make, recompute) in systems(arguments.only).items():
        build(name, make, recompute)
    if has_budget():
        whole = results.figures[REFERENCE]["peak"]
        budgets = {f"ours, {share:.0%}": round(share * whole) for share in arguments.budgets}
        others = [] if arguments.not_equal else [name for name in built if name.startswith(COMPARED)]
        budgets |= {f"ours at the peak of {name}": results.figures[name]["peak"] for name in others}
        for name, budget in budgets.items():
            if build(name, partial(ours, sharding_strategy="zero3", max_memory=budget, cluster=spec)):
                results.figures[name]["budget"] = budget
    kernels.seconds = emulated
    simulate_ours(spec, built, tokens, results, arguments.repeats)
    runs: dict[str, Callable[[], float]] = {name: partial(step, system, tokens) for name, system in built.items()}
    results.seconds = interleave(runs, arguments.rounds, say)
    results.losses = {name: system.losses for name, system in built.items()}


def count(system: Any, tokens: Any, kernels: Any) -> dict[str, Any]:
    """Return the bytes and FLOPs of one step; of the ranks, the bytes of the one with the largest peak."""
    import torch
    import torch.distributed as dist
    from analysis import LiveMemory
    from systems import arenas, local, step

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
        compiled = system.transform.compiled[-1]
        predicted = compiled.memory.peak
        counted |= {
            "predicted": predicted.nbytes,
            "predicted_by_kind": dict(predicted.by_kind),
            "pass_seconds": dict(compiled.pass_seconds),
        }
    return counted


def simulate_ours(spec: Any, built: Any, tokens: Any, results: Any, repeats: int) -> None:
    """Add to the figures of ours the step time by the description of this cluster, and by one measured profile."""
    from thunder_fsdp_sched.planning.cost import AnalyticCost
    from thunder_fsdp_sched.planning.simulate import simulate
    from thunder_fsdp_sched.reports.profiler import MeasuredCost, measure

    from systems import say

    costs: dict[str, Any] = {"simulated": AnalyticCost(spec)}
    if repeats:
        say("measuring a profile")
        costs["simulated_by_profile"] = MeasuredCost(measure(built[REFERENCE].module, tokens, tokens, repeats=repeats))
    for name, system in built.items():
        if system.transform is None:
            continue
        compiled = system.transform.compiled[-1]
        for key, cost in costs.items():
            try:
                seconds = simulate(compiled.forward, compiled.backward, cost).step_seconds
            except ValueError as missing:  # the profile has no such operator
                say(f"{name}: {missing}")
                continue
            results.figures[name][key] = seconds


if __name__ == "__main__":
    main()
