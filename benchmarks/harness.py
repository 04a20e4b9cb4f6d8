"""The harness of all benchmarks: command lines, ranks, rounds in turns, medians, ratios in a run, tables, saved figures."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from thunder_fsdp_sched.compat import prepare  # noqa: F401  # before torch's modules that Thunder misses
from thunder_fsdp_sched.sizes import human_bytes

import torch
import torch.distributed as dist
from local_ranks import Links, Loopback, why_not
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))  # the model and the counter of the demo

T = TypeVar("T")

# Titles of columns, each with the key of a figure and its format: a format string, or a function.
Columns = Mapping[str, tuple[str, str | Callable[[Any], str]]]

# The columns of :func:`summary`.
STEP: Columns = {"step s": ("seconds", ".3f"), "least": ("least", ".2f"), "most": ("most", ".2f")}


def options(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark that measures several systems, with other ``defaults``."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each system")
    parser.add_argument("--only", metavar="REGEX", default="", help="only matching rows, and those compared with")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="where to write all figures as JSON")
    parser.set_defaults(**defaults)
    return parser


def rank_options(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser that has the options of benchmarks on real ranks, too."""
    parser = options(doc)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e9, help="bits/s that a rank can send")
    parser.add_argument("--no-limit", action="store_true", help="use plain loopback, which needs no root")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=16, help="bytes of text per rank and step")
    parser.add_argument("--compute", type=float, nargs="+", default=[0.9], metavar="S", help="seconds to emulate")
    parser.add_argument("--real", dest="compute", action="store_const", const=[0.0], help="real compute, not emulated")
    parser.set_defaults(**{"rounds": 9, **defaults})
    return parser


def run_on_ranks(script: str, arguments: argparse.Namespace, measure: Callable[[argparse.Namespace], object]) -> None:
    """Start ``script`` on all ranks and print the output of rank 0; in a rank, call ``measure(arguments)`` instead.

    If the links cannot be created, the process exits with a message.

    Args:
        script: the script to start, with the command line of this process.
        arguments: the parsed command line, with :func:`rank_options`.
    """
    if "RANK" in os.environ:
        join_ranks()
        measure(arguments)
        dist.barrier()
        dist.destroy_process_group()
        return
    if arguments.no_limit:
        ranks = Loopback(arguments.ranks)
    elif (reason := why_not()) is not None:
        sys.exit(f"cannot make rate-limited links: {reason} (or give --no-limit, for plain loopback)")
    else:
        ranks = Links(arguments.ranks, bits_per_second=arguments.rate)
    with ranks:
        command = [sys.executable, "-W", "ignore", script, *sys.argv[1:]]
        print(ranks.run(command)[0], end="")


def join_ranks(*, pin: bool = True) -> None:
    """Create the default process group of a rank, with one thread, by default on a core of its own."""
    if pin:
        os.sched_setaffinity(0, {int(os.environ["RANK_CORE"])})
    torch.set_num_threads(1)
    ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"], **ranks)


def join_fake_ranks(world_size: int) -> None:
    """Join, as rank 0, a process group whose collectives do nothing, with one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def join_alone(backend: str, device: torch.device | None = None) -> None:
    """Create a process group of one rank."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)


def seconds_of(call: Callable[[], object], *, calls: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the mean seconds of a call among several."""
    started = clock()
    for _ in range(calls):
        call()
    return (clock() - started) / calls


def say(text: str) -> None:
    """Print progress on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def in_turns(runs: Mapping[str, Callable[[], float]], rounds: int, *, collect: bool = True) -> dict[str, list[float]]:
    """Run each function once per round, in a different order each round; return the slowest rank's seconds per round.

    Args:
        collect: whether Python's garbage collector may run in a round. Without it, runs of microseconds are not disturbed.
    """
    names = list(runs)
    seconds = torch.zeros(len(names), rounds, dtype=torch.float64)
    gc.collect()
    gc.freeze()  # otherwise a full collection, which takes a second with Thunder's traces, would run in some step
    if not collect:
        gc.disable()
    for round_ in range(rounds):
        say(f"round {round_ + 1} of {rounds}")
        for offset in range(len(names)):
            number = (round_ * (len(names) // 2 + 1) + offset) % len(names)
            seconds[number, round_] = runs[names[number]]()
    gc.enable()
    gc.unfreeze()
    if dist.is_initialized():
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return dict(zip(names, seconds.tolist(), strict=True))


def medians(seconds: Mapping[str, Sequence[float]], *, unit: float = 1.0) -> dict[str, float]:
    """Return the median of each row in multiples of ``unit`` seconds."""
    return {name: statistics.median(of_one) / unit for name, of_one in seconds.items()}


def summary(steps: Sequence[float]) -> dict[str, float]:
    """Return the median and the range of the seconds of all rounds."""
    return {"seconds": statistics.median(steps), "least": min(steps), "most": max(steps)}


def ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the median of the ratios in each round."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def matching(rows: Mapping[str, T], only: str, *needed: str) -> dict[str, T]:
    """Return the rows whose names match a regular expression, and those that are needed for comparison."""
    return {name: row for name, row in rows.items() if name in needed or re.search(only, name)}


def table(figures: Mapping[str, Mapping[str, Any]], columns: Columns) -> str:
    """Return the figures of each system as a table in Markdown, without columns that would be empty."""
    shown = {title: of for title, of in columns.items() if any(f.get(of[0]) is not None for f in figures.values())}
    lines = [f"| | {' | '.join(shown)} |", "|---" * (len(shown) + 1) + "|"]
    for name, of_one in figures.items():
        cells = (_cell(of_one.get(key), form) for key, form in shown.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: Any, form: str | Callable[[Any], str]) -> str:
    if value is None:
        return ""
    return format(value, form) if isinstance(form, str) else form(value)


def show_nbytes(value: float) -> str:
    return human_bytes(round(value))


def report(
    arguments: argparse.Namespace,
    name: str,
    results: Sequence[Mapping[str, Any]],
    columns: Columns,
    losses: Mapping[str, Sequence[float]],
) -> None:
    """Print the tables of a benchmark of training steps, check that all systems train alike, and save the figures.

    Args:
        name: of the file in ``--save``, without its suffix.
        results: for each amount of compute its ``"emulated"`` seconds, ``"seconds"`` and ``"figures"``.
        losses: the losses of each system on this rank.
    """
    link = "plain loopback" if arguments.no_limit else f"{arguments.rate / 1e9:g} Gbit/s"
    print(
        f"{arguments.ranks} gloo ranks, {link}; {arguments.blocks} blocks of width {arguments.width}, "
        f"{arguments.length} bytes a rank; {arguments.rounds} rounds; medians, and medians of the ratios in each round"
    )
    for result in results:
        compute = f"{result['emulated']} s of emulated compute" if result["emulated"] else "real compute"
        print(f"\n{compute}\n\n{table(result['figures'], columns)}")
    reference = next(iter(losses.values()))
    spread = max(abs(a - b) for of_one in losses.values() for a, b in zip(of_one, reference, strict=True))
    print(f"\nLosses of all systems on this rank differ by {spread:.1g} at most.")
    save(arguments, name, results=results)


def save(arguments: argparse.Namespace, name: str, **figures: Any) -> None:
    """Write the command line and all figures into the folder ``--save``, if there is one."""
    if arguments.save is None:
        return
    arguments.save.mkdir(parents=True, exist_ok=True)
    setup = {key: value for key, value in vars(arguments).items() if key != "save"}
    (arguments.save / f"{name}.json").write_text(json.dumps({"setup": setup, **figures}, indent=1))
