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

FSDP2 overlaps with CUDA streams, so on a CPU it overlaps nothing; that says nothing about a GPU. "FSDP2 overlapped" uses
asynchronous custom collectives, and prefetches two blocks ahead in forward and backward.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def main() -> None:
    from netns import run_on_ranks

    arguments = parse()
    run_on_ranks(__file__, arguments, run_rank, bits_per_second=arguments.rate)


def parse() -> argparse.Namespace:
    from netns import add_link_options

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_link_options(parser)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=16, help="bytes of text per rank and step")
    parser.add_argument("--compute", type=float, nargs="+", default=[0.9], metavar="S", help="seconds to emulate")
    parser.add_argument("--real", action="store_true", help="real compute, nothing emulated")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each system")
    parser.add_argument("--only", metavar="REGEX", help="only matching systems, and ours by default and with flat")
    parser.add_argument("--save", type=Path, help="folder for all figures (overlap.json) and the picture (overlap.png)")
    return parser.parse_args()


def systems(only: str | None) -> dict[str, Callable[..., Any]]:
    """Return the function that builds each system, keyed by the system's name."""
    from systems import ddp, fsdp2, ours, overlapped_fsdp2, thunders_fsdp

    made: dict[str, Callable[..., Any]] = {}
    for strategy in ("zero2", "zero3"):
        made[f"ours {strategy}"] = partial(ours, sharding_strategy=strategy)
        made[f"ours {strategy} flat"] = partial(ours, sharding_strategy=strategy, transport="flat")
    needed = list(made)
    for strategy in ("zero2", "zero3"):
        made[f"ours {strategy} without agreement"] = partial(ours, sharding_strategy=strategy, agrees=False)
    for strategy in ("zero2", "zero3"):
        for prefetch in (0, 2):
            made[f"ours {strategy} prefetch {prefetch}"] = partial(ours, sharding_strategy=strategy, prefetch=prefetch)
        for transport in ("staged", "coalesced", "all_reduce"):
            made[f"ours {strategy} {transport}"] = partial(ours, sharding_strategy=strategy, transport=transport)
        for when in ("step", "bucket"):
            made[f"ours {strategy} release {when}"] = partial(ours, sharding_strategy=strategy, release=when)
    for strategy in ("zero2", "zero3"):
        for bucketing in ("none", "layer", "block"):
            made[f"Thunder fsdp {strategy} {bucketing}"] = partial(
                thunders_fsdp, strategy=strategy, bucketing=bucketing
            )
    for strategy, reshard in (("zero2", False), ("zero3", True)):
        made[f"FSDP2 {strategy}"] = partial(fsdp2, reshard=reshard)
        made[f"FSDP2 overlapped {strategy}"] = partial(overlapped_fsdp2, reshard=reshard)
    made["DDP"] = ddp
    return {n: make for n, make in made.items() if n in needed or only is None or re.search(only, n)}


def run_rank(arguments: argparse.Namespace) -> None:
    import torch.distributed as dist
    from netns import join_ranks
    from systems import Emulation, Shape, System, communicate, interleave, say, step, unsharded, unsharded_eager

    rank, _ = join_ranks()
    length = min(arguments.length, 256)
    shape = Shape(arguments.blocks, arguments.width, length, max(arguments.length // length, 1))
    emulation = Emulation(shape)
    tokens = shape.tokens(rank)
    built: dict[str, System] = {}
    for name, make in {"compute": unsharded, "compute, eager": unsharded_eager, **systems(arguments.only)}.items():
        say(f"building: {name}")
        built[name] = make(name, shape, emulation)
        step(built[name], tokens)  # compiles
    runs: dict[str, Callable[[], float]] = {n: partial(step, s, tokens) for n, s in built.items()}
    for name, system in built.items():
        if system.transform and not re.search("prefetch|agreement|release", name):  # the same collectives, or about
            runs[communication_of(name)] = partial(communicate, system)
    results = []
    for seconds in [0.0] if arguments.real else arguments.compute:
        emulation.seconds = seconds
        results.append({"emulated": seconds, "seconds": interleave(runs, arguments.rounds, say)})
    if rank == 0:
        losses = {name: system.losses for name, system in built.items()}
        finish(arguments, results, losses)
    dist.barrier()
    dist.destroy_process_group()


def communication_of(name: str) -> str:
    return name.replace("ours", "communication of")


def finish(arguments: argparse.Namespace, results: list[dict[str, Any]], losses: dict[str, list[float]]) -> None:
    from thunder_fsdp_sched.demo.show import make_console

    from netns import describe_link

    console = make_console()
    link = describe_link(arguments)
    console.print(
        f"{arguments.ranks} gloo ranks, {link}; GPT with {arguments.blocks} blocks, width {arguments.width}, "
        f"{arguments.length} bytes a rank; {arguments.rounds} rounds",
        highlight=False,
    )
    for result in results:
        result["figures"] = figures_of(result["seconds"])
        console.print(table(result), highlight=False)
    sharded = [of_one for name, of_one in losses.items() if not name.startswith("compute")]  # which see one rank's text
    spread = max(abs(a - b) for of_one in sharded for a, b in zip(of_one, sharded[0], strict=True))
    console.print(f"Losses of all systems on this rank differ by {spread:.1g} at most.", highlight=False)
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
        setup = {key: value for key, value in vars(arguments).items() if key != "save"}
        (arguments.save / "overlap.json").write_text(json.dumps({"setup": setup, "results": results}, indent=1))
        draw(results, arguments.save / "overlap.png")


def figures_of(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return for each system its seconds, and its ratios to compute, communication and ours (medians over rounds)."""
    from systems import ratio

    figures = {}
    for name, steps in seconds.items():
        figures[name] = {"seconds": statistics.median(steps), "least": min(steps), "most": max(steps)}
        if name.startswith("comm"):
            continue
        strategy = "zero3" if "zero3" in name else "zero2"
        same = re.split(" prefetch| without| release", name)[0] if name.startswith("ours") else f"ours {strategy} flat"
        communication = seconds[communication_of(same)]
        compute = seconds["compute"]
        figures[name] |= {
            "communication": statistics.median(communication),
            "of_max": ratio(steps, [max(a, b) for a, b in zip(compute, communication, strict=True)]),
            "of_sum": ratio(steps, [a + b for a, b in zip(compute, communication, strict=True)]),
            "ours": ratio(seconds[f"ours {strategy}"], steps),
        }
    return figures


def table(result: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    kind = f"{result['emulated']} s of emulated compute" if result["emulated"] else "real compute"
    made = Table(title=f"{kind}", title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("", "step s", "least–most", "commu-\nnication", "/max", "/sum", "ours\n/ this"):
        made.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, of_one in result["figures"].items():
        row = [name, f"{of_one['seconds']:.3f}", f"{of_one['least']:.2f}–{of_one['most']:.2f}"]
        if "of_max" in of_one and "compute" not in name:
            row += [f"{of_one['communication']:.3f}", *(f"{of_one[key]:.2f}" for key in ("of_max", "of_sum", "ours"))]
        made.add_row(*row)
    made.caption = (
        "Medians; ratios are medians of the ratios in each round. Ours: the default options of the same strategy."
    )
    made.caption_justify = "left"
    return made


def draw(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name, of_one in results[0]["figures"].items() if "of_max" in of_one and "compute" not in name]
    figure, axes = pyplot.subplots(
        1, len(results), figsize=(1.5 + 4.5 * len(results), 1 + 0.27 * len(names)), sharey=True, squeeze=False
    )
    for axis, result in zip(axes[0], results, strict=True):
        values = [result["figures"][name]["of_max"] for name in names]
        colors = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in names]
        bars = axis.barh(range(len(names)), values, color=colors)
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.axvline(1.0, color="black", linewidth=1)
        compute = result["figures"]["compute"]["seconds"]
        axis.set_title(f"compute {compute:.2f} s", fontsize=9)
        axis.set_xlabel("step / max(compute, communication)", fontsize=8)
        axis.set_xlim(0.9, max(values) * 1.1)
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
