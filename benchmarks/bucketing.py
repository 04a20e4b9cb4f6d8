"""Compare bucketing strategies: none, layer, block, and buckets of a given size.

    sudo python benchmarks/bucketing.py --save bucketing          # 2 ranks, 1 Gbit/s, emulated compute
    sudo python benchmarks/bucketing.py --real --length 512       # real compute, which shares the cores with gloo
    python benchmarks/bucketing.py --no-limit                     # no root: plain loopback
    python benchmarks/bucketing.py --no-limit --blocks 2 --width 64 --compute 0.05 --rounds 3

The systems train a GPT on gloo ranks. Each rank runs with one thread, is pinned to a core, and has its own network
namespace with a rate-limited interface (``netns.py``). Every system takes one step in every round, in a different order
each time. Seconds are those of the slowest rank, without the optimizer.

* Calls: the collectives of a step.
* Copied: bytes of parameters and gradients that rank 0 copies, counted in an untimed step.
* Communication: the time of this project's collectives in their order, with nothing between them.
* Gbit/s: the bits that gloo sends for them (a reduce-scatter as an all-reduce), divided by that time.
* Latency: the time of the same collectives and waits with one element per rank, for the whole step and per call. It is
  the time of the host, to issue and to wait, and of the network without data.
* Step with block / step with none: the median of the ratios in each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

BUCKETINGS = {"none": "none", "layer": "layer", "block": "block", "1 MB": 10**6, "4 MB": 4 * 10**6, "25 MB": 25 * 10**6}


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
    parser.add_argument("--compute", type=float, default=0.9, metavar="S", help="seconds to emulate")
    parser.add_argument("--real", action="store_true", help="real compute, nothing emulated")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each system")
    parser.add_argument("--only", choices=("zero2", "zero3"), help="one strategy")
    parser.add_argument("--save", type=Path, help="folder for all figures (bucketing.json) and the picture")
    return parser.parse_args()


def systems(only: str | None) -> dict[str, Callable[..., Any]]:
    """Return the function that builds each system, keyed by the system's name."""
    from systems import fsdp2, ours, thunders_fsdp

    made: dict[str, Callable[..., Any]] = {}
    for strategy in (only,) if only else ("zero2", "zero3"):
        for name, bucketing in BUCKETINGS.items():
            made[f"ours {strategy} {name}"] = partial(ours, sharding_strategy=strategy, bucketing_strategy=bucketing)
        for name in ("none", "layer", "block"):
            made[f"Thunder fsdp {strategy} {name}"] = partial(thunders_fsdp, strategy=strategy, bucketing=name)
        made[f"FSDP2 {strategy}"] = partial(fsdp2, reshard=strategy == "zero3")
    return made


def run_rank(arguments: argparse.Namespace) -> None:
    import torch.distributed as dist
    from netns import join_ranks
    from systems import Emulation, Shape, communicate, interleave, say, step, unsharded

    rank, world_size = join_ranks()
    length = min(arguments.length, 256)
    shape = Shape(arguments.blocks, arguments.width, length, max(arguments.length // length, 1))
    emulation = Emulation(shape)
    tokens = shape.tokens(rank)
    runs: dict[str, Callable[[], float]] = {}
    figures: dict[str, dict[str, Any]] = {}
    for name, make in {"compute": unsharded, **systems(arguments.only)}.items():
        say(f"building: {name}")
        system = make(name, shape, emulation)
        step(system, tokens)  # compiles
        runs[name] = partial(step, system, tokens)
        if name == "compute":
            continue
        figures[name] = count(system, tokens, world_size)
        if system.transform:
            runs[f"communication of {name}"] = partial(communicate, system)
            runs[f"latency of {name}"] = partial(latency, system)
    emulation.seconds = 0.0 if arguments.real else arguments.compute
    seconds = interleave(runs, arguments.rounds, say)
    if rank == 0:
        finish(arguments, figures, seconds)
    dist.barrier()
    dist.destroy_process_group()


def count(system: Any, tokens: Any, world_size: int) -> dict[str, Any]:
    """Count the collectives of one step on this rank, the bytes that gloo sends for them, and the bytes copied."""
    from thunder_fsdp_sched.reports.step_counter import StepCounter

    from systems import local, step, wire_bytes

    counter = StepCounter([local(p) for p in system.module.parameters()])
    step(system, tokens, counter)
    counts = counter.counts()
    return {
        "calls": len(counts.collectives),
        "gloo_bytes": sum(wire_bytes(c.kind, c.nbytes, world_size, gloo=True) for c in counts.collectives),
        "copied": counts.parameter_bytes_copied + counts.gradient_bytes_copied,
    }


def latency(system: Any) -> float:
    """Run the collectives of a step in their order, with one element per rank; return the seconds on this rank."""
    from thunder_fsdp_sched.ir.symbols import WAITS, fsdp_all_gather, group_of, issues_collective
    from thunder_fsdp_sched.transports.flat import all_gather_flat, reduce_scatter_flat

    import torch
    import torch.distributed as dist

    compiled = system.transform.compiled[-1]
    order = [
        bsym
        for trace in (compiled.forward, compiled.backward)
        for bsym in trace.bound_symbols
        if issues_collective(bsym) or bsym.sym.name in WAITS
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
        group = group_of(kind, bsym.args[0]).process_group
        gathers = kind == fsdp_all_gather.name
        issue, operands = (all_gather_flat, (whole, own)) if gathers else (reduce_scatter_flat, (own, whole))
        works[bsym.output.name] = issue(*operands, group=group, async_op=True)
    return time.perf_counter() - started


def finish(arguments: argparse.Namespace, figures: dict[str, dict[str, Any]], seconds: dict[str, list[float]]) -> None:
    from thunder_fsdp_sched.demo.show import make_console

    from netns import describe_link
    from systems import ratio

    for name, of_one in figures.items():
        of_one |= {"seconds": statistics.median(seconds[name]), "least": min(seconds[name]), "most": max(seconds[name])}
        if f"latency of {name}" in seconds:
            of_one["communication"] = statistics.median(seconds[f"communication of {name}"])
            of_one["latency"] = statistics.median(seconds[f"latency of {name}"])
            of_one["bits_per_second"] = 8 * of_one["gloo_bytes"] / of_one["communication"]
    console = make_console()
    link = describe_link(arguments)
    compute = "real compute" if arguments.real else f"{arguments.compute} s of emulated compute"
    console.print(
        f"{arguments.ranks} gloo ranks, {link}; GPT with {arguments.blocks} blocks, width {arguments.width}, "
        f"{arguments.length} bytes a rank; {compute}; {arguments.rounds} rounds",
        highlight=False,
    )
    console.print(table(figures), highlight=False)
    console.print(f"compute alone, one rank: {statistics.median(seconds['compute']):.3f} s", highlight=False)
    ratios = {}
    for name in figures:
        if name.endswith(" none"):
            system = name.removesuffix(" none")
            ratios[system] = ratio(seconds[f"{system} block"], seconds[name])
            console.print(f"{system}: step with block / step with none: {ratios[system]:.3f}", highlight=False)
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
        setup = {key: value for key, value in vars(arguments).items() if key != "save"}
        kept = {"setup": setup, "figures": figures, "block_over_none": ratios, "seconds": seconds}
        (arguments.save / "bucketing.json").write_text(json.dumps(kept, indent=1))
        draw(figures, arguments.save / "bucketing.png")


def table(figures: dict[str, dict[str, Any]]) -> Any:
    from thunder_fsdp_sched.reports.report import human_bytes

    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD)
    made.pad_edge, made.collapse_padding = False, True
    columns = (
        "",
        "calls",
        "copied",
        "latency\nms",
        "a call\nms",
        "commu-\nnication s",
        "Gbit/s",
        "step s",
        "least–most",
    )
    for column in columns:
        made.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, of_one in figures.items():
        row = [name, str(of_one["calls"]), human_bytes(of_one["copied"])]
        if "latency" in of_one:
            seconds = of_one["latency"]
            row += [f"{seconds * 1e3:.1f}", f"{seconds / of_one['calls'] * 1e3:.2f}"]
            row += [f"{of_one['communication']:.3f}", f"{of_one['bits_per_second'] / 1e9:.2f}"]
        else:
            row += [""] * 4
        made.add_row(*row, f"{of_one['seconds']:.3f}", f"{of_one['least']:.2f}–{of_one['most']:.2f}")
    return made


def draw(figures: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the step times, and for this project also the time of the collectives alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(figures)
    figure, axis = pyplot.subplots(figsize=(7, 1 + 0.25 * len(names)))
    colors = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in names]
    bars = axis.barh(range(len(names)), [figures[name]["seconds"] for name in names], color=colors)
    axis.bar_label(bars, [f"{figures[name]['calls']} calls" for name in names], padding=3, fontsize=7)
    alone = [(y, figures[name]["communication"]) for y, name in enumerate(names) if "communication" in figures[name]]
    axis.plot([seconds for _, seconds in alone], [y for y, _ in alone], "k|", markersize=9, label="collectives alone")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xlabel("seconds of a step", fontsize=8)
    axis.margins(x=0.12)
    axis.legend(fontsize=8)
    axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
