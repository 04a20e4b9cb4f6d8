"""Compare bucketing strategies: none, layer, block, and buckets of a given size.

    sudo python benchmarks/bucketing.py --save bucketing          # 2 ranks, 1 Gbit/s, emulated compute
    sudo python benchmarks/bucketing.py --real --length 512       # real compute, which shares the cores with gloo
    python benchmarks/bucketing.py --no-limit                     # no root: plain loopback
    python benchmarks/bucketing.py --no-limit --blocks 2 --width 64 --compute 0.05 --rounds 3

The systems train a GPT on gloo ranks as in ``overlap.py``, and take turns. Seconds are those of the slowest rank, without
the optimizer.

* Calls: the collectives of a step.
* Copied: bytes of parameters and gradients that rank 0 copies, counted in an untimed step.
* Communication: the time of this project's collectives in their order, with nothing between them.
* Gbit/s: the bits that gloo sends for them (a reduce-scatter as an all-reduce), divided by that time.
* Latency: the time of the same collectives and waits with one element per rank, for the whole step and per call. It is
  the time of the host, to issue and to wait, and of the network without data.
* Of none: the step divided by that of the same system with one collective for each parameter.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from thunder_fsdp_sched.ir.effects import sends
from thunder_fsdp_sched.ir.symbols import WAITS
from thunder_fsdp_sched.reports.step_counter import StepCounter
from thunder_fsdp_sched.transports.flat import all_gather_flat, reduce_scatter_flat

import harness
import torch
import torch.distributed as dist
from harness import ratio, show_nbytes, summary
from systems import (
    Emulation,
    Make,
    Shape,
    System,
    build,
    communicate,
    fsdp2,
    local,
    matching,
    measure,
    ours,
    step,
    thunders_fsdp,
    unsharded,
    wire_bytes,
)

BUCKETINGS = {"none": "none", "layer": "layer", "block": "block", "1 MB": 10**6, "4 MB": 4 * 10**6, "25 MB": 25 * 10**6}

COLUMNS = {
    "calls": ("calls", "d"),
    "copied": ("copied", show_nbytes),
    "latency ms": ("latency_ms", ".1f"),
    "of a call": ("call_ms", ".2f"),
    "communication": ("communication", ".3f"),
    "Gbit/s": ("gigabits_per_second", ".2f"),
    **harness.STEP,
    "of none": ("of_none", ".2f"),
}


def systems() -> dict[str, Make]:
    """Return the function that builds each system, keyed by the system's name."""
    made: dict[str, Make] = {"compute": unsharded}
    for strategy in ("zero2", "zero3"):
        for name, bucketing in BUCKETINGS.items():
            made[f"ours {strategy} {name}"] = partial(ours, sharding_strategy=strategy, bucketing_strategy=bucketing)
        for name in ("none", "layer", "block"):
            made[f"Thunder fsdp {strategy} {name}"] = partial(thunders_fsdp, strategy=strategy, bucketing=name)
        made[f"FSDP2 {strategy}"] = partial(fsdp2, reshard=strategy == "zero3")
    return made


def run(arguments: argparse.Namespace) -> None:
    shape = Shape.of(arguments)
    emulation, tokens = Emulation(shape), shape.tokens(dist.get_rank())
    built = build(matching(systems(), arguments.only, "compute"), shape, emulation, partial(step, tokens=tokens))
    runs = {name: partial(step, system, tokens) for name, system in built.items()}
    counted = {}
    for name, system in built.items():
        if name != "compute":
            counted[name] = count(system, tokens)
        if system.transform:
            runs[f"communication of {name}"] = partial(communicate, system)
            runs[f"latency of {name}"] = partial(latency, system)
    results = measure(arguments, emulation, runs, partial(figures_of, counted=counted))
    if dist.get_rank() == 0:
        losses = {name: built[name].losses for name in counted}
        harness.report(arguments, "bucketing", results, COLUMNS, losses)


def count(system: System, tokens: torch.Tensor) -> dict[str, Any]:
    """Count the collectives of one step on this rank, the bytes that gloo sends for them, and the bytes copied."""
    counter = StepCounter([local(p) for p in system.module.parameters()])
    step(system, tokens, counter)
    counts, world_size = counter.counts(), dist.get_world_size()
    return {
        "calls": len(counts.collectives),
        "gloo_bytes": sum(wire_bytes(c.kind, c.nbytes, world_size, gloo=True) for c in counts.collectives),
        "copied": counts.parameter_bytes_copied + counts.gradient_bytes_copied,
    }


def latency(system: System) -> float:
    """Run the collectives of a step in their order, with one element per rank; return the seconds on this rank."""
    compiled = system.transform.compiled[-1]
    order = [
        bsym
        for trace in (compiled.forward, compiled.backward)
        for bsym in trace.bound_symbols
        if sends(bsym) is not None or bsym.sym.name in WAITS
    ]
    own, whole = torch.zeros(1), torch.zeros(dist.get_world_size())
    dist.barrier()
    started = time.perf_counter()
    works: dict[str, Any] = {}
    for bsym in order:
        kind = bsym.sym.name
        if kind in WAITS:
            if bsym.args[1].name in works:
                works.pop(bsym.args[1].name).wait()
            continue
        sent = sends(bsym)
        assert sent is not None and sent.group is not None
        group, gathers = sent.group.process_group, sent.gathers
        issue, operands = (all_gather_flat, (whole, own)) if gathers else (reduce_scatter_flat, (own, whole))
        works[bsym.output.name] = issue(*operands, group=group, async_op=True)
    return time.perf_counter() - started


def figures_of(
    seconds: Mapping[str, Sequence[float]], counted: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {"compute": summary(seconds["compute"])}
    for name, counts in counted.items():
        figures[name] = {**counts, **summary(seconds[name])}
        none = re.sub(r"(zero\d).*", r"\1 none", name)
        if none in seconds:
            figures[name]["of_none"] = ratio(seconds[name], seconds[none])
        if f"latency of {name}" in seconds:
            communication = statistics.median(seconds[f"communication of {name}"])
            milliseconds = 1e3 * statistics.median(seconds[f"latency of {name}"])
            figures[name] |= {
                "communication": communication,
                "gigabits_per_second": 8e-9 * counts["gloo_bytes"] / communication,
                "latency_ms": milliseconds,
                "call_ms": milliseconds / counts["calls"],
            }
    return figures


if __name__ == "__main__":
    arguments = harness.options(__doc__).parse_args()
    harness.run_on_ranks(__file__, arguments, run)
