"""Count the bytes that one step of every system copies, sends, allocates and holds.

    python benchmarks/copies.py --fake 8                      # rank 0 of 8 in one process, values are garbage
    sudo python benchmarks/copies.py                          # 2 gloo ranks, each behind an interface of its own
    python benchmarks/copies.py --no-limit                    # the same on plain loopback, without root
    python benchmarks/copies.py --fake 8 --match "ours zero3" --save copies

The figures are those of forward and backward of a GPT on rank 0, after two steps of warm-up. With ``--fake``, collectives
do nothing and everything else runs, so any number of ranks can be examined. Nothing is timed.

* Copied: bytes of parameters and of gradients that operators copy, concatenate, cast or scale, as counted by
  ``thunder_fsdp_sched.reports.step_counter``, which defines whose bytes they are; and the bytes that gloo itself copies
  into its results.
* Copies, concat., casts: the number of operators that copy, concatenate or cast parameters or gradients.
* Wire: the bytes that a rank sends, by the formulas of ring collectives. With N bytes in the unsharded tensor, these are
  N(W-1)/W for an all-gather, a reduce-scatter and an all-to-all, twice that for an all-reduce, and N for a broadcast.
  gloo implements a reduce-scatter as an all-reduce.
* Sent: the bytes that the operating system's kernel counted, in network namespaces only.
* New: storages that the step allocates.
* Peaks: most bytes at once (``live_memory.py``). Of the arena, only the bytes that are yet to be read count (live), or
  all of it (allocated).
* Total: every storage that forward and backward touch, including activations and shards.

Memory is in units of the bytes of all parameters. Below the tables, the program prints the promises of this project and
whether they hold.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PEAK = 0.60
"""Limit on the peak of unsharded bytes with ZeRO-3, as a share of the bytes of all parameters; for 8 blocks and more than 2
ranks."""

SHOWN = ("ours zero2", "ours zero3", "Thunder fsdp zero3 block", "FSDP2 zero3")
"""The systems in the picture."""


def main() -> None:
    from netns import run_on_ranks

    arguments = parse()
    if arguments.fake:
        run_fake(arguments)
    else:
        run_on_ranks(__file__, arguments, run_rank, bits_per_second=arguments.rate)


def parse() -> argparse.Namespace:
    from netns import add_link_options

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_link_options(parser)
    parser.set_defaults(rate=10e9)
    parser.add_argument("--fake", type=int, metavar="W", help="run as rank 0 of W in one process")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=16, help="bytes of text per rank and step")
    parser.add_argument("--match", default="", metavar="REGEX", help="only systems whose names match")
    parser.add_argument("--save", type=Path, help="folder for all figures (copies.json) and the picture (copies.png)")
    return parser.parse_args()


def run_fake(arguments: argparse.Namespace) -> None:
    from thunder_fsdp_sched.compat import prepare  # noqa: F401  # before torch's modules that Thunder misses

    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=arguments.fake)
    run(arguments, rank=0, world_size=arguments.fake)


def run_rank(arguments: argparse.Namespace) -> None:
    from netns import join_ranks

    run(arguments, *join_ranks())


def run(arguments: argparse.Namespace, rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist
    from overlap import systems
    from systems import Emulation, Shape, say

    torch.set_num_threads(1)
    shape = Shape(arguments.blocks, arguments.width, arguments.length)
    built: dict[str, Callable[..., Any]] = {name: make for name, make in systems(None).items() if "overlap" not in name}
    whole_bytes = sum(p.nbytes for p in shape.model().parameters())
    figures = {}
    for name, make in built.items():
        if re.search(arguments.match, name):
            say(f"counting: {name}")
            figures[name] = count(
                make(name, shape, Emulation(shape)), shape.tokens(rank), world_size, whole_bytes, arguments
            )
    if rank == 0:
        finish(arguments, figures, world_size)
    dist.barrier()
    dist.destroy_process_group()


def count(system: Any, tokens: Any, world_size: int, whole_bytes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one step on this rank.

    Args:
        whole_bytes: bytes of all unsharded parameters.
    """
    from thunder_fsdp_sched.reports.step_counter import StepCounter

    from analysis import LiveMemory
    from netns import sent_bytes
    from systems import arenas, local, step, wire_bytes

    whole = system.name == "DDP"
    for _ in range(2):
        step(system, tokens)
    parameters = [local(p) for p in system.module.parameters()]
    counter = StepCounter(parameters, sharded=not whole)
    memory = LiveMemory(parameters, arenas(system), whole=whole)
    counted = not (arguments.fake or arguments.no_limit)
    before = sent_bytes("eth0") if counted else 0
    step(system, tokens, counter)
    figures: dict[str, Any] = {"sent_bytes": sent_bytes("eth0") - before if counted else None}
    step(system, tokens, memory)
    counts, held = counter.counts(), memory.held()
    collectives = [(c.kind, c.nbytes) for c in counts.collectives]
    figures |= {
        "parameter_bytes_copied": counts.parameter_bytes_copied,
        "gradient_bytes_copied": counts.gradient_bytes_copied,
        "backend_bytes_copied": counts.backend_bytes_copied,
        "operators": held.operators,
        "collectives": len(collectives),
        "kinds": {kind: sum(k == kind for k, _ in collectives) for kind in sorted({k for k, _ in collectives})},
        "wire_bytes": round(sum(wire_bytes(*c, world_size) for c in collectives)),
        "gloo_bytes": round(sum(wire_bytes(*c, world_size, gloo=True) for c in collectives)),
        "new": held.new,
        "arena": held.arena,
        "counter_peak_parameters": max(counts.peak_unsharded_bytes.values()),
        **held.peaks(),
        "parameters_over_step": held.parameters,
        "gradients_over_step": held.gradients,
    }
    if system.transform is not None:
        figures["copied_gradients"] = copied_gradients(system.transform.compiled[-1].backward)
        figures["largest_bucket"] = max(bucket.unsharded_bytes for bucket in system.transform.plan)
    figures["all_parameter_bytes"] = whole_bytes
    return figures


def copied_gradients(backward: Any) -> dict[str, int]:
    """Return the bytes of each gradient that is not written in place, keyed by the parameter's name."""
    from thunder_fsdp_sched.ir.symbols import GRAD_WRITERS, fsdp_reduce_scatter

    written = {b.output.name for b in backward.bound_symbols if b.sym.name in GRAD_WRITERS}
    copied = {}
    for reduction in backward.bound_symbols:
        if reduction.sym is fsdp_reduce_scatter:
            spec = reduction.args[0].spec
            for param, place, grad in zip(spec.params, spec.layout.placements, reduction.args[2:], strict=True):
                if grad is not None and grad.name not in written:
                    copied[param.name] = place.numel * spec.reduce_dtype.itemsize
    return copied


def promises(figures: dict[str, dict[str, Any]], blocks: int, world_size: int) -> list[tuple[bool, str]]:
    """Return this project's promises: whether each one holds, and its text with the figure."""
    from thunder_fsdp_sched.reports.report import human_bytes

    made = []
    for name, of_one in figures.items():
        if name not in ("ours zero2", "ours zero3", "ours zero3 prefetch 0", "ours zero3 prefetch 2"):
            continue
        nbytes = of_one["parameter_bytes_copied"]
        made.append((nbytes == 0, f"{name}: parameter bytes copied: {human_bytes(nbytes)}"))
        copied = of_one["copied_gradients"]
        products = {n: b for n, b in copied.items() if n.split(".")[-2] not in ("embedding", "positions")}
        made.append((not products, f"{name}: gradients of matrix multiplications copied: {products or 'none'}"))
        listed = ", ".join(f"{n} {human_bytes(b)}" for n, b in copied.items())
        expected, seen = sum(copied.values()), of_one["gradient_bytes_copied"]
        made.append((expected == seen, f"{name}: gradient bytes copied: {human_bytes(seen)}, by the trace: {listed}"))
        if "zero3" not in name:
            continue
        whole, prefetch = of_one["all_parameter_bytes"], int(name[-1]) if "prefetch" in name else 1
        peak, limit = of_one["peak_parameters"], (prefetch + 1) * of_one["largest_bucket"]
        made.append(
            (peak <= limit, f"{name}: unsharded parameters at the peak: {human_bytes(peak)}, {prefetch + 1} buckets")
        )
        if name == "ours zero3" and blocks == 8 and world_size > 2:
            for what, key in (("live", "peak_parameters_and_gradients"), ("allocated", "peak_allocated")):
                part = of_one[key] / whole
                made.append(
                    (part <= PEAK, f"{name}: unsharded bytes at the peak, {what}: {part:.3f} of all, {PEAK:.2f}")
                )
    return made


def finish(arguments: argparse.Namespace, figures: dict[str, dict[str, Any]], world_size: int) -> None:
    from thunder_fsdp_sched.demo.show import make_console
    from thunder_fsdp_sched.reports.report import human_bytes

    console = make_console()
    whole = next(iter(figures.values()))["all_parameter_bytes"]
    ranks = f"rank 0 of {world_size}, collectives do nothing" if arguments.fake else f"{world_size} gloo ranks"
    console.print(
        f"{ranks}; GPT with {arguments.blocks} blocks, width {arguments.width}, {human_bytes(whole)} of parameters",
        highlight=False,
    )
    console.print(moved_table(figures), highlight=False)
    console.print(memory_table(figures), highlight=False)
    for kept, promise in promises(figures, arguments.blocks, world_size):
        console.print(("kept    " if kept else "BROKEN  ") + promise, highlight=False)
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
        setup = {key: value for key, value in vars(arguments).items() if key != "save"}
        (arguments.save / "copies.json").write_text(json.dumps({"setup": setup, "figures": figures}, indent=1))
        draw(figures, arguments.save / "copies.png")


def moved_table(figures: dict[str, dict[str, Any]]) -> Any:
    from thunder_fsdp_sched.reports.report import human_bytes

    def operators(of_one: dict[str, Any]) -> str:
        return " / ".join(str(of_one["operators"][kind][0]) for kind in ("copy", "concatenation", "cast"))

    columns = {
        "params\ncopied": lambda f: human_bytes(f["parameter_bytes_copied"]),
        "grads\ncopied": lambda f: human_bytes(f["gradient_bytes_copied"]),
        "by gloo": lambda f: human_bytes(f["backend_bytes_copied"]),
        "copies / concat.\n/ casts": operators,
        "calls": lambda f: str(f["collectives"]),
        "wire": lambda f: human_bytes(f["wire_bytes"]),
        "as gloo\ndoes it": lambda f: human_bytes(f["gloo_bytes"]),
    }
    if any(f["sent_bytes"] for f in figures.values()):
        columns["sent"] = lambda f: human_bytes(f["sent_bytes"])
    return table("copied and sent in a step", figures, columns)


def memory_table(figures: dict[str, dict[str, Any]]) -> Any:
    from thunder_fsdp_sched.reports.report import human_bytes

    def part(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda f: f"{f[key] / f['all_parameter_bytes']:.3f}"

    def made(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda f: f"{f['new'][key][0]}, {human_bytes(f['new'][key][1])}"

    columns = {
        "new, of\nparameters": made("parameters"),
        "of gradients": made("gradients"),
        "all": made("all"),
        "peak un-\nsharded par.": part("peak_parameters"),
        "and\ngradients": part("peak_parameters_and_gradients"),
        "allocated": part("peak_allocated"),
        "total": part("peak_total"),
    }
    return table("storages allocated in a step; peaks, in units of all parameters", figures, columns)


def table(title: str, figures: dict[str, dict[str, Any]], columns: dict[str, Callable[[dict[str, Any]], str]]) -> Any:
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
    made.pad_edge, made.collapse_padding = False, True
    for column in ("", *columns):
        made.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, of_one in figures.items():
        made.add_row(name, *(show(of_one) for show in columns.values()))
    return made


def draw(figures: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw unsharded parameters, and gradients on top of them, over the operators of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [name for name in SHOWN if name in figures] or list(figures)[:4]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(1 + 3 * len(shown), 3.2), sharey=True, squeeze=False)
    for axis, name in zip(axes[0], shown, strict=True):
        of_one = figures[name]
        whole = of_one["all_parameter_bytes"]
        series = [[b / whole for b in of_one[f"{what}_over_step"]] for what in ("parameters", "gradients")]
        progress = [moment / len(series[0]) for moment in range(len(series[0]))]
        axis.stackplot(progress, *series, labels=("parameters", "gradients"), colors=("tab:blue", "tab:orange"))
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("operators of the step", fontsize=8)
        axis.axhline(of_one["peak_allocated"] / whole, color="black", linewidth=0.8, linestyle=":", label="allocated")
    axes[0][0].set_ylabel("unsharded bytes / all parameters", fontsize=8)
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
