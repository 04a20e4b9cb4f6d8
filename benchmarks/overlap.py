"""Compare the step time of every system with the longer of compute and communication, on a rate-limited link.

    sudo python benchmarks/overlap.py --save overlap              # 2 ranks, 1 Gbit/s, emulated compute, all systems
    sudo python benchmarks/overlap.py --compute 0.45 0.9 1.8      # several ratios of compute to communication
    sudo python benchmarks/overlap.py --real --length 512         # real compute, which shares the cores with gloo
    sudo python benchmarks/overlap.py --ranks 4 --only 'block|FSDP2|DDP'
    python benchmarks/overlap.py --no-limit --blocks 2 --width 64 --compute 0.05 --rounds 3      # no root: plain loopback

The systems train a GPT on gloo ranks. Each rank runs with one thread, is pinned to a core, and has its own network
namespace with a rate-limited interface (``netns.py``). All systems take turns in one run: one step of each in every round,
in a different order each time. Seconds are those of forward and backward on the slowest rank, without the optimizer.

* Compute: a step of Thunder on one rank, unsharded, and one without a compiler for comparison. All systems emulate the
  same matrix multiplications.
* Communication: the time of the collectives of a schedule in their order, with nothing between them, for ZeRO-2, ZeRO-3
  and each transport. Other systems are compared with the collectives of ``flat``, which sends about the same bytes.
* /max: the step divided by the longer of the two; 1.00 is perfect overlap.
* /sum: the step divided by the sum of both; 1.00 is no overlap.
* Ours / this: the default options of the same strategy.

FSDP2 overlaps with CUDA streams, so on a CPU it overlaps nothing; that says nothing about a GPU. "FSDP2 overlapped" uses
asynchronous custom collectives, and prefetches two blocks ahead in forward and backward.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch.distributed as dist
from harness import ratio, summary
from systems import (
    Emulation,
    Make,
    Shape,
    build,
    communicate,
    ddp,
    fsdp2,
    matching,
    measure,
    ours,
    overlapped_fsdp2,
    step,
    thunders_fsdp,
    unsharded,
    unsharded_eager,
)

NEEDED = ("compute", *(f"ours {strategy}{flat}" for strategy in ("zero2", "zero3") for flat in ("", " flat")))

COLUMNS = harness.STEP | {
    "communication": ("communication", ".3f"),
    "/max": ("of_max", ".2f"),
    "/sum": ("of_sum", ".2f"),
    "ours / this": ("ours", ".2f"),
}


def systems() -> dict[str, Make]:
    """Return the function that builds each system, keyed by the system's name."""
    made: dict[str, Make] = {"compute": unsharded, "compute, eager": unsharded_eager}
    variants: dict[str, dict[str, Any]] = {
        "": {},
        " flat": {"transport": "flat"},
        " without agreement": {"agrees": False},
    }
    variants |= {f" prefetch {prefetch}": {"prefetch": prefetch} for prefetch in (0, 2)}
    variants |= {f" {transport}": {"transport": transport} for transport in ("staged", "coalesced", "all_reduce")}
    variants |= {f" release {when}": {"release": when} for when in ("step", "bucket")}
    for strategy in ("zero2", "zero3"):
        for variant, options in variants.items():
            made[f"ours {strategy}{variant}"] = partial(ours, sharding_strategy=strategy, **options)
        for bucketing in ("none", "layer", "block"):
            name = f"Thunder fsdp {strategy} {bucketing}"
            made[name] = partial(thunders_fsdp, strategy=strategy, bucketing=bucketing)
        made[f"FSDP2 {strategy}"] = partial(fsdp2, reshard=strategy == "zero3")
        made[f"FSDP2 overlapped {strategy}"] = partial(overlapped_fsdp2, reshard=strategy == "zero3")
    made["DDP"] = ddp
    return made


def run(arguments: argparse.Namespace) -> None:
    shape = Shape.of(arguments)
    emulation, tokens = Emulation(shape), shape.tokens(dist.get_rank())
    makes = matching(systems(), arguments.only, *NEEDED)
    built = build(makes, shape, emulation, partial(step, tokens=tokens))
    runs = {name: partial(step, system, tokens) for name, system in built.items()}
    for name, system in built.items():
        if system.transform and not re.search("prefetch|agreement|release", name):  # the same collectives, or about
            runs[_communication_of(name)] = partial(communicate, system)
    results = measure(arguments, emulation, runs, figures_of)
    if dist.get_rank() == 0:
        losses = {name: s.losses for name, s in built.items() if not name.startswith("compute")}  # see one rank's text
        harness.report(arguments, "overlap", results, COLUMNS, losses)
        if arguments.save:
            draw(results, arguments.save / "overlap.png")


def _communication_of(name: str) -> str:
    return name.replace("ours", "communication of")


def figures_of(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return for each system its seconds, and its ratios to compute, communication and ours."""
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
            "of_sum": ratio(steps, [a + b for a, b in zip(compute, communication, strict=True)]),
            "ours": ratio(seconds[f"ours {strategy}"], steps),
        }
    return figures


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    names = [name for name, of_one in results[0]["figures"].items() if "of_max" in of_one]
    size = (1.5 + 4.5 * len(results), 1 + 0.27 * len(names))
    figure, axes = pyplot.subplots(1, len(results), figsize=size, sharey=True, squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        values = [result["figures"][name]["of_max"] for name in names]
        colors = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in names]
        axis.bar_label(axis.barh(range(len(names)), values, color=colors), fmt="%.2f", padding=2, fontsize=8)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.axvline(1.0, color="black", linewidth=1)
        axis.set_title(f"compute {result['figures']['compute']['seconds']:.2f} s", fontsize=9)
        axis.set_xlabel("step / max(compute, communication)", fontsize=8)
        axis.set_xlim(0.9, max(values) * 1.1)
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    arguments = harness.options(__doc__).parse_args()
    harness.run_on_ranks(__file__, arguments, run)
