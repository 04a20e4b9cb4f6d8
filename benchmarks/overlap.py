"""Compare the step time of every system with the longer of compute and communication, on a rate-limited link.

    sudo python benchmarks/overlap.py --save overlap              # 2 ranks, 1 Gbit/s, emulated compute, all systems
    sudo python benchmarks/overlap.py --compute 0.45 0.9 1.8      # several ratios of compute to communication
    sudo python benchmarks/overlap.py --real --length 512         # real compute, which shares the cores with gloo
    sudo python benchmarks/overlap.py --ranks 4 --only 'block|FSDP2|DDP'
    sudo python benchmarks/overlap.py --profile 4 --real --length 512 --only 'ours zero.( prefetch .)?$'  # predict steps
    sudo python benchmarks/overlap.py --bucketing --save bucketing         # bucketing strategies instead
    sudo python benchmarks/overlap.py --formats --compute 0.9 0.45 0.22    # formats on the wire instead
    python benchmarks/overlap.py --no-limit --blocks 2 --width 64 --compute 0.05 --rounds 3      # no root: plain loopback

The systems train a GPT on gloo ranks. Each rank runs with one thread, is pinned to a core, and has its own network
namespace with a rate-limited interface (``netns.py``). All systems take turns in one run: one step of each in every round,
in a different order each time. Seconds are those of forward and backward on the slowest rank, without the optimizer.

* Compute: a step of Thunder on one rank, unsharded, and one without a compiler for comparison. All systems emulate the
  same matrix multiplications.
* Communication: the time of the collectives of a schedule in their order, with nothing between them, for ZeRO-2, ZeRO-3
  and each transport. Other systems are compared with the collectives of ``flat``, which sends about the same bytes.
* /max: the step divided by the longer of the two; 1.00 is perfect overlap.
* Ours / this: the default options of the same strategy.
* Predicted, with ``--profile``: the step that the simulator predicts from steps of "ours zero3" that torch's profiler has
  recorded.
* Of exact, with ``--formats``: the step divided by that of ours without formats.

With ``--bucketing``:

* Calls: the collectives of a step.
* Latency: the time of the same collectives and waits with one element per rank. It is the time of the host, to issue and to
  wait, and of the network without data.
* Gbit/s: the bits that gloo sends for them (a reduce-scatter as an all-reduce), divided by the time of communication.
* Of none: the step divided by that of the same system with one collective for each parameter.

FSDP2 overlaps with CUDA streams, so on a CPU it overlaps nothing; that says nothing about a GPU. "FSDP2 overlapped" uses
asynchronous custom collectives, and prefetches two blocks ahead in forward and backward.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from thunder_fsdp_sched import CommPolicy, Sharding, exposed_communication
from thunder_fsdp_sched.extras.planning.clusters import cluster
from thunder_fsdp_sched.extras.planning.cost import AnalyticCost
from thunder_fsdp_sched.extras.planning.simulate import simulate
from thunder_fsdp_sched.extras.reports.exposed import ExposedCommunication, calibrate

import harness
import torch
import torch.distributed as dist
from harness import ratio, say, summary
from systems import (
    Emulation,
    Make,
    Shape,
    System,
    build,
    communicate,
    ddp,
    fsdp2,
    local,
    matching,
    measure,
    ours,
    overlapped_fsdp2,
    step,
    thunders_fsdp,
    unsharded,
    unsharded_eager,
    wire_bytes,
)
from step_counter import StepCounter
from torch.distributed.fsdp import MixedPrecisionPolicy

NEEDED = ("compute", *(f"ours {strategy}{flat}" for strategy in ("zero2", "zero3") for flat in ("", " flat")))

COLUMNS = harness.STEP | {
    "communication": ("communication", ".3f"),
    "/max": ("of_max", ".2f"),
    "ours / this": ("ours", ".2f"),
    "of exact": ("of_exact", ".2f"),
    "predicted": ("predicted", ".3f"),
    "predicted / measured": ("predicted / measured", ".2f"),
}


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

BUCKETINGS = {"none": "none", "layer": "layer", "block": "block", "1 MB": 10**6, "4 MB": 4 * 10**6, "25 MB": 25 * 10**6}

FORMATS = {
    " bf16": CommPolicy("bfloat16", "bfloat16"),
    " int8": CommPolicy("int8"),
    " int8, bf16": CommPolicy("int8", "bfloat16"),
    " int8, int8": CommPolicy("int8", "int8"),
    " float8, bf16": CommPolicy("float8_e4m3fn", "bfloat16"),
    " int8, int8 with feedback": CommPolicy("int8", "int8", error_feedback=True),
}

BUCKETING_COLUMNS: harness.Columns = {
    "calls": ("calls", "d"),
    "latency ms": ("latency_ms", ".1f"),
    "communication": ("communication", ".3f"),
    "Gbit/s": ("gigabits_per_second", ".2f"),
    **harness.STEP,
    "of none": ("of_none", ".2f"),
}


def systems(*, bucketing: bool = False, formats: bool = False) -> dict[str, Make]:
    """Return the function that builds each system, keyed by the system's name.

    Args:
        bucketing: whether ours are its bucketing strategies.
        formats: whether they are formats on the wire, beside FSDP2 with parameters and reductions in bfloat16.
    """
    made: dict[str, Make] = {"compute": unsharded, "compute, eager": unsharded_eager}
    variants: dict[str, dict[str, Any]] = {
        "": {},
        " flat": {"transport": "flat"},
        " without agreement": {"agree": "compile"},
    }
    variants |= {f" prefetch {prefetch}": {"prefetch": prefetch} for prefetch in (0, 2)}
    variants |= {f" {transport}": {"transport": transport} for transport in ("coalesced", "all_reduce")}
    if bucketing:
        variants = {f" {name}": {"bucketing_strategy": strategy} for name, strategy in BUCKETINGS.items()}
    if formats:
        variants = {"": {}, " flat": {"transport": "flat"}} | {n: {"comm_policy": p} for n, p in FORMATS.items()}
    for strategy in ("zero2", "zero3"):
        for variant, options in variants.items():
            made[f"ours {strategy}{variant}"] = partial(ours, sharding_strategy=strategy, **options)
        if not (bucketing or formats):
            made[f"ours {strategy} release"] = partial(ours, sharding_strategy=Sharding(strategy, release=True))
        for name in ("none", "layer", "block"):
            made[f"Thunder fsdp {strategy} {name}"] = partial(thunders_fsdp, strategy=strategy, bucketing=name)
        made[f"FSDP2 {strategy}"] = partial(fsdp2, reshard=strategy == "zero3")
        made[f"FSDP2 overlapped {strategy}"] = partial(overlapped_fsdp2, reshard=strategy == "zero3")
        if formats:
            made[f"FSDP2 overlapped {strategy} bf16"] = partial(
                overlapped_fsdp2, reshard=strategy == "zero3", policy=BF16
            )
    made["DDP"] = ddp
    return made


def run(arguments: argparse.Namespace) -> None:
    shape = Shape.of(arguments)
    emulation, tokens = Emulation(shape), shape.tokens(dist.get_rank())
    needed = ("compute",) if arguments.bucketing else NEEDED
    makes = matching(systems(bucketing=arguments.bucketing, formats=arguments.formats), arguments.only, *needed)
    built = build(makes, shape, emulation, partial(step, tokens=tokens))
    runs = {name: partial(step, system, tokens) for name, system in built.items()}
    for name, system in built.items():
        if system.transform and not re.search("prefetch|agreement|release", name):  # the same collectives, or about
            runs[_communication_of(name)] = partial(communicate, system)
            if arguments.bucketing:
                runs[f"latency of {name}"] = partial(communicate, system, empty=True)
    sharded = {name: system for name, system in built.items() if not name.startswith("compute")}
    predicted: dict[str, float] = {}
    if arguments.profile:
        [emulation.seconds] = arguments.compute
        predicted = predict(built, tokens, arguments)
    evaluate = partial(figures_of, predicted=predicted)
    if arguments.bucketing:
        counted = {name: count(system, tokens) for name, system in sharded.items()}
        evaluate = partial(bucketing_figures, counted=counted)
    results = measure(arguments, emulation, runs, evaluate)
    if dist.get_rank() == 0:
        name, columns = ("bucketing", BUCKETING_COLUMNS) if arguments.bucketing else ("overlap", COLUMNS)
        harness.report(arguments, name, results, columns, {n: system.losses for n, system in sharded.items()})


def predict(built: Mapping[str, System], tokens: torch.Tensor, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the predicted seconds of a step of each of our systems, from recorded steps of one of them."""
    of, count = built["ours zero3"], arguments.profile
    of = dataclasses.replace(
        of, losses=[], optimizer=torch.optim.SGD(of.module.parameters(), lr=0.0)
    )  # changes nothing
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=1, active=count, repeat=1)) as profiler:
        for _ in range(count + 1):
            step(of, tokens)
            profiler.step()
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, exposed_communication(profiler).steps)
    recorded = [step for of_step in zip(*of_ranks, strict=True) for step in of_step]
    seconds = statistics.median(step.passes[1] - step.passes[0] for step in recorded)
    say(f"recorded steps: {seconds:.3f} s\n{ExposedCommunication(recorded)}")
    compiled = {name: system.transform.compiled[-1] for name, system in built.items() if system.transform}
    same_operators = {name: of for name, of in compiled.items() if re.fullmatch(r"ours zero\d( prefetch \d)?", name)}
    spec = calibrate(cluster("cpu-2core"), compiled["ours zero3"], recorded)
    cost = AnalyticCost(spec)
    return {name: simulate(of.forward, of.backward, cost).step_seconds for name, of in same_operators.items()}


def _communication_of(name: str) -> str:
    return name.replace("ours", "communication of")


def figures_of(seconds: Mapping[str, Sequence[float]], predicted: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return for each system its seconds, and its ratios to compute, communication, ours and its prediction."""
    figures = {}
    for name, steps in seconds.items():
        figures[name] = summary(steps)
        if name.startswith("comm") or name.startswith("compute"):
            continue
        strategy = "zero3" if "zero3" in name else "zero2"
        same = re.split(" prefetch| without| release", name)[0] if name.startswith("ours") else f"ours {strategy} flat"
        compute, communication = seconds["compute"], seconds[_communication_of(same)]
        figures[name] |= {
            "communication": statistics.median(communication),
            "of_max": ratio(steps, [max(a, b) for a, b in zip(compute, communication, strict=True)]),
            "ours": ratio(seconds[f"ours {strategy}"], steps),
            "of_exact": ratio(steps, seconds[f"ours {strategy}"]),
        }
        if name in predicted:
            share = predicted[name] / figures[name]["seconds"]
            figures[name] |= {"predicted": predicted[name], "predicted / measured": share}
    return figures


def count(system: System, tokens: torch.Tensor) -> dict[str, Any]:
    """Count the collectives of one step on this rank, and the bytes that gloo sends for them."""
    counter = StepCounter([local(p) for p in system.module.parameters()])
    step(system, tokens, counter)
    counts, world_size = counter.counts(), dist.get_world_size()
    return {
        "calls": len(counts.collectives),
        "gloo_bytes": sum(wire_bytes(c.kind, c.nbytes, world_size, gloo=True) for c in counts.collectives),
    }


def bucketing_figures(
    seconds: Mapping[str, Sequence[float]], counted: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return for each system its seconds, its counts, and the latency and rate of its collectives."""
    figures: dict[str, dict[str, Any]] = {"compute": summary(seconds["compute"])}
    for name, counts in counted.items():
        figures[name] = {**counts, **summary(seconds[name])}
        none = re.sub(r"(zero\d).*", r"\1 none", name)
        if none in seconds:
            figures[name]["of_none"] = ratio(seconds[name], seconds[none])
        if f"latency of {name}" in seconds:
            communication = statistics.median(seconds[_communication_of(name)])
            figures[name] |= {
                "communication": communication,
                "gigabits_per_second": 8e-9 * counts["gloo_bytes"] / communication,
                "latency_ms": 1e3 * statistics.median(seconds[f"latency of {name}"]),
            }
    return figures


if __name__ == "__main__":
    parser = harness.options(__doc__)
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="predict steps from N measured ones")
    parser.add_argument("--formats", action="store_true", help="compare formats on the wire")
    parser.add_argument("--bucketing", action="store_true", help="compare bucketing strategies")
    parsed = parser.parse_args()
    if parsed.profile and len(parsed.compute) != 1:
        parser.error("--compute: one profile is of one speed of compute")
    harness.run_on_ranks(__file__, parsed, run)
