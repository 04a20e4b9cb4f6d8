"""Compare the step time of every system with the longer of compute and communication, on a rate-limited link.

    sudo python benchmarks/overlap.py --save overlap              # 2 ranks, 1 Gbit/s, emulated compute, all systems
    sudo python benchmarks/overlap.py --compute 0.45 0.9 1.8      # several ratios of compute to communication
    sudo python benchmarks/overlap.py --real --length 512         # real compute, which shares the cores with gloo
    sudo python benchmarks/overlap.py --ranks 4 --only 'block|FSDP2|DDP'
    sudo python benchmarks/overlap.py --profile 4 --real --length 512 --only 'ours zero.( prefetch .)?$'  # predict steps
    sudo python benchmarks/overlap.py --formats --compute 0.9 0.45 0.22    # formats on the wire instead
    sudo python benchmarks/overlap.py --windows --blocks 4 --width 512 --compute 0.45 0.225 0.11    # 4 micro-batches
    python benchmarks/overlap.py --count 8                        # copies and bytes of a step, as rank 0 of 8
    python benchmarks/overlap.py --no-limit --blocks 2 --width 64 --compute 0.05 --rounds 3      # no root: plain loopback

The systems train a GPT on gloo ranks. Each rank runs with one thread, is pinned to a core, and has its own network
namespace with a rate-limited interface (``local_ranks.py``). All systems take turns in one run: one step of each in every
round, in a different order each time. Seconds are those of forward and backward on the slowest rank, without the optimizer.

* Compute: a step of Thunder on one rank, unsharded, and one without a compiler for comparison. All systems emulate the
  same matrix multiplications.
* Communication: the time of the collectives of a schedule in their order, with nothing between them, for ZeRO-2, ZeRO-3
  and each transport. Other systems are compared with the collectives of ``flat``, which sends about the same bytes.
* /max: the step divided by the longer of the two; 1.00 is perfect overlap.
* Ours / this: the default options of the same strategy.
* Predicted, with ``--profile``: the step that the simulator predicts from steps of "ours zero3" that torch's profiler has
  recorded.
* Of exact, with ``--formats``: the step divided by that of ours without formats.

With ``--windows``, a step has 4 micro-batches, of which all but the last run under ``no_sync``; FSDP2 does the same with
``set_requires_gradient_sync(False)``, and "kept" is ``set_reshard_after_backward(False)`` for them. All are compared with
ours that gathers in each micro-batch ("each time"), and with the fastest FSDP2. Collectives are those of a step for each
bucket, or for each module that FSDP2 wraps.

With ``--count W``, nothing is timed. Collectives do nothing and everything else runs, so values are garbage:

* Copied: bytes of parameters and of gradients that operators copy, concatenate, cast or scale, as counted by
  ``examples/step_counter.py``, which defines whose bytes they are.
* Sent: the bytes that a rank sends, by the formulas of ring collectives; gloo sends a reduce-scatter as an all-reduce.
* Peak: the most bytes of unsharded parameters, in units of all parameters: in memory that outlives the step (our slots), of
  those that are yet to be read; elsewhere until they are freed.

FSDP2 overlaps with CUDA streams, so on a CPU it overlaps nothing; that says nothing about a GPU. "FSDP2 overlapped" uses
asynchronous custom collectives, and prefetches two blocks ahead in forward and backward.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from thunder_fsdp_sched import CommPolicy, Sharding
from thunder_fsdp_sched.extras.planning.clusters import cluster
from thunder_fsdp_sched.extras.planning.cost import AnalyticCost
from thunder_fsdp_sched.extras.planning.recorded import RecordedStep
from thunder_fsdp_sched.extras.planning.simulate import simulate
from thunder_fsdp_sched.extras.planning.timeline import COMPUTE, Interval, Timeline, gaps, length, overlaps, union
from thunder_fsdp_sched.extras.reports.exposed import calibrate

import harness
import torch
import torch.distributed as dist
from harness import matching, ratio, say, show_nbytes, summary
from systems import (
    Emulation,
    Make,
    Shape,
    System,
    build,
    communicate,
    ddp,
    fsdp2,
    ours,
    overlapped_fsdp2,
    step,
    thunders_fsdp,
    unsharded,
    unsharded_eager,
    wire_bytes,
)
from step_counter import StepCounter
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

NEEDED = ("compute", *(f"ours {strategy}{flat}" for strategy in ("zero2", "zero3") for flat in ("", " flat")))

COLUMNS = harness.STEP | {
    "communication": ("communication", ".3f"),
    "/max": ("of_max", ".2f"),
    "ours / this": ("ours", ".2f"),
    "of exact": ("of_exact", ".2f"),
    "predicted": ("predicted", ".3f"),
    "predicted / measured": ("predicted / measured", ".2f"),
}

COUNTED: harness.Columns = {
    "parameters copied": ("parameters", show_nbytes),
    "gradients copied": ("gradients", show_nbytes),
    "calls": ("calls", "d"),
    "sent": ("sent", show_nbytes),
    "sent by gloo": ("sent by gloo", show_nbytes),
    "peak of unsharded parameters": ("peak", ".3f"),
}

WINDOWS = harness.STEP | {
    "of each time": ("of_each_time", ".2f"),
    "of FSDP2": ("of_fsdp2", ".2f"),
    "collectives": ("collectives", ".3g"),
    "sent by gloo": ("sent by gloo", show_nbytes),
}

MICRO_BATCHES, EACH_TIME = 4, "ours zero2, each time"

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

FORMATS = {
    " bf16": CommPolicy("bfloat16", "bfloat16"),
    " int8": CommPolicy("int8"),
    " int8, bf16": CommPolicy("int8", "bfloat16"),
    " int8, int8": CommPolicy("int8", "int8"),
    " int8, int8 with feedback": CommPolicy("int8", "int8", error_feedback=True),
}


def systems(*, formats: bool = False) -> dict[str, Make]:
    """Return the function that builds each system, keyed by the system's name.

    Args:
        formats: whether ours are formats on the wire, beside FSDP2 with parameters and reductions in bfloat16.
    """
    made: dict[str, Make] = {"compute": unsharded, "compute, eager": unsharded_eager}
    variants: dict[str, dict[str, Any]] = {"": {}, " flat": {"transport": "flat"}}
    if formats:
        variants |= {name: {"comm_policy": policy} for name, policy in FORMATS.items()}
    else:
        variants |= {f" prefetch {prefetch}": {"prefetch": prefetch} for prefetch in (0, 2)}
        variants |= {f" {transport}": {"transport": transport} for transport in ("coalesced", "all_reduce")}
    for strategy in ("zero2", "zero3"):
        for variant, options in variants.items():
            made[f"ours {strategy}{variant}"] = partial(ours, sharding_strategy=strategy, **options)
        if not formats:
            made[f"ours {strategy} release"] = partial(ours, sharding_strategy=Sharding(strategy, release=True))
        for name in ("none", "layer", "block"):
            made[f"Thunder fsdp {strategy} {name}"] = partial(thunders_fsdp, strategy=strategy, bucketing=name)
        reshards = strategy == "zero3"
        made[f"FSDP2 {strategy}"] = partial(fsdp2, reshard=reshards)
        made[f"FSDP2 overlapped {strategy}"] = partial(overlapped_fsdp2, reshard=reshards)
        if formats:
            made[f"FSDP2 overlapped {strategy} bf16"] = partial(overlapped_fsdp2, reshard=reshards, policy=BF16)
    made["DDP"] = ddp
    return made


def window_systems() -> dict[str, Make]:
    """Return the function that builds each system of windows, keyed by the system's name."""
    each_time = Sharding("zero2", reshard_after_backward=True)
    made: dict[str, Make] = {"compute": unsharded, EACH_TIME: partial(ours, sharding_strategy=each_time)}
    for strategy in ("zero2", "zero3"):
        made[f"ours {strategy}"] = partial(ours, sharding_strategy=strategy)
        made[f"ours {strategy}, sharded"] = partial(ours, sharding_strategy=strategy, accumulate="sharded")
        for kept in ("", ", kept"):
            made[f"FSDP2 {strategy}{kept}"] = partial(overlapped_fsdp2, reshard=strategy == "zero3")
    return made


def run_windows(arguments: argparse.Namespace) -> None:
    shape = Shape.of(arguments)
    emulation = Emulation(shape)
    batches = [shape.tokens(100 * number + dist.get_rank()) for number in range(MICRO_BATCHES)]
    makes = matching(window_systems(), arguments.only, "compute", EACH_TIME)
    built = build(makes, shape, emulation, lambda system: step(system, *batches))
    counted = {name: counts_of(system, *batches) for name, system in built.items() if name != "compute"}
    runs: dict[str, Callable[[], float]] = {name: partial(step, of, *batches) for name, of in built.items()}
    runs["communication of each time"] = partial(communicate_in_window, built[EACH_TIME])
    results = []
    for emulated in arguments.compute:
        emulation.seconds = emulated
        seconds = harness.in_turns(runs, arguments.rounds)
        fastest = min(
            (of for name, of in seconds.items() if name.startswith("FSDP2")), key=statistics.median, default=None
        )
        figures = {name: {**summary(of), **counted.get(name, {})} for name, of in seconds.items()}
        for name in counted:
            figures[name]["of_each_time"] = ratio(seconds[name], seconds[EACH_TIME])
            figures[name]["of_fsdp2"] = ratio(seconds[name], fastest) if fastest else None
        results.append({"emulated": emulated, "seconds": seconds, "figures": figures})
    if dist.get_rank() == 0:
        harness.report(arguments, "windows", results, WINDOWS, {name: built[name].losses for name in counted})


def communicate_in_window(system: System) -> float:
    """Run only the collectives of a window that gathers in each micro-batch; return the seconds on this rank."""
    compiled = {one.no_sync: one for one in system.transform.compiled}
    return sum(communicate(system, compiled[number < MICRO_BATCHES - 1]) for number in range(MICRO_BATCHES))


def run(arguments: argparse.Namespace) -> None:
    shape = Shape.of(arguments)
    emulation, tokens = Emulation(shape), shape.tokens(dist.get_rank())
    makes = matching(systems(formats=arguments.formats), arguments.only, *NEEDED)
    built = build(makes, shape, emulation, lambda system: step(system, tokens))
    runs = {name: partial(step, system, tokens) for name, system in built.items()}
    for name, system in built.items():
        if system.transform and not re.search("prefetch|release", name):  # the same collectives, or about
            runs[name.replace("ours", "communication of")] = partial(communicate, system)
    predicted: dict[str, float] = {}
    if arguments.profile:
        [emulation.seconds] = arguments.compute
        predicted = predict(built, tokens, arguments)
    results = []
    for emulated in arguments.compute:
        emulation.seconds = emulated
        seconds = harness.in_turns(runs, arguments.rounds)
        figures = figures_of(seconds, predicted)
        results.append({"emulated": emulated, "seconds": seconds, "figures": figures})
    if dist.get_rank() == 0:
        losses = {name: system.losses for name, system in built.items() if not name.startswith("compute")}
        harness.report(arguments, "overlap", results, COLUMNS, losses)


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
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(path := f"{folder}/profile.json")
        dist.all_gather_object(of_ranks, read_steps(Path(path), dist.get_rank()))
    recorded = [step for of_step in zip(*of_ranks, strict=True) for step in of_step]
    seconds = statistics.median(step.passes[1] - step.passes[0] for step in recorded)
    say(f"recorded steps: {seconds:.3f} s")
    compiled = {name: system.transform.compiled[-1] for name, system in built.items() if system.transform}
    same_operators = {name: of for name, of in compiled.items() if re.fullmatch(r"ours zero\d( prefetch \d)?", name)}
    spec = calibrate(cluster("cpu-2core"), compiled["ours zero3"], recorded)
    cost = AnalyticCost(spec)
    return {name: simulate(of.forward, of.backward, cost).step_seconds for name, of in same_operators.items()}


def read_steps(path: Path, rank: int) -> list[RecordedStep]:
    """Return the steps that a rank has recorded with torch's profiler on a CPU with gloo, in order.

    gloo's threads record when each collective runs. It is exposed while it runs and the host waits in a range of this
    package. A round of agreement counts as running while the host waits for it. The rest of a step is compute.
    """
    ranges: list[tuple[float, float, str]] = []
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            ranges.append((1e-6 * event["ts"], 1e-6 * (event["ts"] + event["dur"]), event["name"]))
    ranges.sort()
    collectives = _collectives(ranges)
    rounds = [(start, end) for start, end, name in ranges if name == "fsdp_wait_agreement"]
    waits = union((start, end) for start, end, name in ranges if name.startswith("fsdp_wait_"))
    exposed = [span[:2] for span in overlaps(waits, union([*rounds, *(c.span for c in collectives)]))]
    steps = []
    for since, until, name in ranges:
        if name.startswith("ProfilerStep"):
            found = [c for c in collectives if since <= c.start < until]
            running, computing = union(c.span for c in found), gaps(_inside(exposed, since, until), since, until)
            intervals = [Interval(COMPUTE, COMPUTE, COMPUTE, "", *span, 0, 0) for span in computing] + found
            intervals = [i._replace(start=i.start - since, end=i.end - since) for i in intervals]
            busy = {"gloo": length(running)}
            timeline = Timeline(tuple(intervals), (), until - since, length(computing), 0.0, busy)
            first = min(start for start, _, of in ranges if since <= start < until and of.startswith("fsdp_"))
            last = max(end for _, end, of in ranges if since < end <= until and "backward" in of.lower())
            steps.append(RecordedStep(str(path), rank, name, (first - since, last - since), timeline))
    return steps


def _inside(spans: Sequence[tuple[float, float]], since: float, until: float) -> list[tuple[float, float]]:
    return [span[:2] for span in overlaps([(since, until)], spans)]


def _collectives(ranges: Sequence[tuple[float, float, str]]) -> list[Interval]:
    """Return when gloo's threads ran collectives of buckets; those of one kind run in the order of their issue."""
    issued: list[tuple[float, str, str]] = []  # when, the symbol, and the bucket
    for start, end, name in ranges:
        if match := re.fullmatch(r"(fsdp_all_gather|fsdp_reduce_scatter)\((.*)\)", name):
            calls = [of for since, _, of in ranges if start <= since < end and of.startswith("c10d::")]
            issued += [(start, *match.groups()) for _ in calls]
    found = []
    for start, end, name in ranges:
        if not re.match("gloo:.*(gather|reduce|to_?all)", name):
            continue
        gathers = "gather" in name
        of = next((o for o in issued if o[0] <= start and ("gather" in o[1]) is gathers), None)
        if of is not None:
            issued.remove(of)
            found.append(Interval("gloo", of[1], of[1], of[2], start, end, 0, 0))
    return found


def figures_of(seconds: Mapping[str, Sequence[float]], predicted: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return for each system its seconds, and its ratios to compute, communication, ours and its prediction."""
    figures = {}
    for name, steps in seconds.items():
        figures[name] = summary(steps)
        if name.startswith(("comm", "compute")):
            continue
        strategy = "zero3" if "zero3" in name else "zero2"
        same = re.split(" prefetch| release", name)[0] if name.startswith("ours") else f"ours {strategy} flat"
        compute, communication = seconds["compute"], seconds[same.replace("ours", "communication of")]
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


def count(arguments: argparse.Namespace) -> None:
    """Count what a step of each system copies, sends and holds, as rank 0 of ``--count`` ranks."""
    harness.join_fake_ranks(arguments.count)
    shape, figures = Shape.of(arguments), {}
    whole = sum(p.nbytes for p in shape.model().parameters())
    for name, make in matching(systems(), arguments.only).items():
        if name.startswith("compute"):
            continue
        say(f"counting: {name}")
        system = make(name, shape, Emulation(shape))
        for _ in range(2):
            step(system, shape.tokens())
        figures[name] = counts_of(system, shape.tokens())
        figures[name]["peak"] /= whole
    print(f"rank 0 of {arguments.count}, collectives do nothing; {shape}, {show_nbytes(whole)} of parameters\n")
    print(harness.table(figures, COUNTED))
    harness.save(arguments, "counts", figures=figures)


def counts_of(system: System, *batches: torch.Tensor) -> dict[str, float]:
    """Count what a step copies, sends and holds, in bytes, and its collectives; ``"collectives"`` are those of a bucket."""
    counter = StepCounter(system.module.parameters(), sharded=system.name != "DDP")
    step(system, *batches, watch=counter)
    counts, world_size = counter.counts(), dist.get_world_size()
    found = [(c.kind, c.nbytes) for c in counts.collectives if c.kind != "barrier"]
    wrapped = sum(isinstance(module, FSDPModule) for module in system.module.modules())
    buckets = len(system.transform.plan) if system.transform else wrapped
    return {
        "parameters": counts.parameter_bytes_copied,
        "gradients": counts.gradient_bytes_copied,
        "calls": len(found),
        "collectives": len(found) / max(buckets, 1),
        "sent": sum(wire_bytes(*collective, world_size) for collective in found),
        "sent by gloo": sum(wire_bytes(*collective, world_size, gloo=True) for collective in found),
        "peak": max(counts.peak_unsharded_bytes.values()),
    }


if __name__ == "__main__":
    parser = harness.rank_options(__doc__)
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="predict steps from N measured ones")
    parser.add_argument("--formats", action="store_true", help="compare formats on the wire")
    parser.add_argument("--windows", action="store_true", help=f"compare steps of {MICRO_BATCHES} micro-batches")
    parser.add_argument("--count", type=int, metavar="W", help="count copies and bytes, as rank 0 of W in one process")
    parsed = parser.parse_args()
    if parsed.profile and len(parsed.compute) != 1:
        parser.error("--compute: one profile is of one speed of compute")
    if parsed.count:
        count(parsed)
    else:
        harness.run_on_ranks(__file__, parsed, run_windows if parsed.windows else run)
