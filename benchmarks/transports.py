"""Compare transports and precisions in the same training: bytes sent, copies, collectives, memory, seconds.

    sudo python benchmarks/transports.py                          # 2 ranks, 1 Gbit/s, ZeRO-3, real compute
    sudo python benchmarks/transports.py --emulate 0.9            # matrix multiplications sleep, 0.9 s in total
    python benchmarks/transports.py --no-limit --blocks 2 --width 64 --tokens 64     # no root: plain loopback

The systems train a GPT on gloo ranks. Each rank runs with one thread, is pinned to a core, and has its own network
namespace with a rate-limited interface (``netns.py``). The systems of a table take turns in one run: one step of each in
every round, in a different order each time. Seconds are those of forward and backward on the slowest rank, without the
optimizer. All other figures are those of one step on rank 0.

* Wire by formula: the bytes that a rank sends according to the transports, for each collective in the traces.
* As gloo reduces: the same, with reduce-scatters as all-reduces, which send twice the bytes.
* Really sent: the bytes that the operating system's kernel counted on the interface, including headers.
* Copies, calls and memory are counted in untimed steps, by ``thunder_fsdp_sched.reports.step_counter``.
* Casts: casts into memory that collectives read, and casts of the results of reductions. They also count as copies. Casts
  by the model do not count, but are in the JSON file: on a CPU, Thunder's layer norms convert bfloat16 weights that they
  have broadcast.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

TRANSPORTS = ("flat", "all_to_all", "staged", "coalesced", "all_reduce", "symmetric_memory")
PRECISIONS = {  # param_dtype, reduce_dtype
    "float32": (None, None),
    "bf16, float32 sums": ("bfloat16", "float32"),
    "bf16 both": ("bfloat16", "bfloat16"),
}


def main() -> None:
    from netns import run_on_ranks

    arguments = parse()
    run_on_ranks(__file__, arguments, run_rank, bits_per_second=arguments.rate)


def parse() -> argparse.Namespace:
    from netns import add_link_options

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_link_options(parser)
    parser.add_argument("--strategy", choices=("zero2", "zero3"), default="zero3")
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per rank and step, in sequences of 256 at most")
    parser.add_argument("--emulate", type=float, metavar="SECONDS", help="sleep instead of multiplying matrices")
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each system")
    parser.add_argument("--only", choices=("transports", "precisions"), help="one of the two tables")
    parser.add_argument("--json", type=Path, help="file for all figures, including those of single rounds")
    return parser.parse_args()


def run_rank(arguments: argparse.Namespace) -> None:
    import torch.distributed as dist
    from netns import join_ranks

    rank, _ = join_ranks()
    tables = {}
    if arguments.only != "precisions":
        tables["transports"] = measure(arguments, {t: {"transport": t} for t in TRANSPORTS})
    if arguments.only != "transports":
        ways = {name: {"transport": "flat", "mp_policy": policy(*dtypes)} for name, dtypes in PRECISIONS.items()}
        tables["precisions, transport flat"] = measure(arguments, ways)
    if rank == 0:
        report(arguments, tables)
        if arguments.json:
            setup = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
            arguments.json.write_text(json.dumps({"setup": setup, "tables": tables}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def policy(param_dtype: str | None, reduce_dtype: str | None) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, param_dtype) if param_dtype else None,
        reduce_dtype=getattr(torch, reduce_dtype) if reduce_dtype else None,
    )


def measure(arguments: argparse.Namespace, ways: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each way to train, or ``{"refused": why}``."""
    import torch.distributed as dist
    from netns import sent_bytes
    from systems import Emulation, Shape, System, interleave, ours, ratio, say, step

    count = 16 if arguments.emulate else arguments.tokens
    length = min(count, 256)
    shape = Shape(arguments.blocks, arguments.width, length, max(count // length, 1))
    emulation = Emulation(shape)
    emulation.seconds = arguments.emulate or 0.0
    tokens = shape.tokens(dist.get_rank())
    figures: dict[str, dict[str, Any]] = {}
    systems: dict[str, System] = {}
    for name, options in ways.items():
        say(f"compiling: {name}")
        usual = {"sharding_strategy": arguments.strategy, "prefetch": arguments.prefetch}
        try:
            system = ours(name, shape, emulation, **usual, **options)
        except ValueError as error:
            figures[name] = {"refused": str(error)}
            continue
        step(system, tokens)  # compiles
        figures[name] = {**by_formula(system.transform), **counted(system, tokens)}
        systems[name] = system
    sent: dict[str, list[int]] = {name: [] for name in systems}

    def run(name: str) -> float:
        dist.barrier()
        before = 0 if arguments.no_limit else sent_bytes("eth0")
        seconds = step(systems[name], tokens)
        dist.barrier()
        sent[name].append(0 if arguments.no_limit else sent_bytes("eth0") - before)
        return seconds

    seconds = interleave({name: partial(run, name) for name in systems}, arguments.rounds, say)
    base = next(iter(seconds.values()))
    for name, system in systems.items():
        figures[name] |= {
            "sent_bytes": None if arguments.no_limit else round(statistics.median(sent[name])),
            "seconds": statistics.median(seconds[name]),
            "ratio": ratio(seconds[name], base),
            "seconds_of_rounds": seconds[name],
            "losses": system.losses,
        }
    return figures


def by_formula(transform: Any) -> dict[str, int]:
    """Return the bytes and launches of the collectives in the traces, according to the transports."""
    from thunder_fsdp_sched.ir.symbols import fsdp_all_gather, fsdp_reduce_scatter
    from thunder_fsdp_sched.transports import TRANSPORTS

    schedule = transform.compiled[-1].schedule
    gathered = reduced = through_gloo = launches = 0
    for op in filter(lambda op: op.travels, (*schedule.forward, *schedule.backward)):
        transport, spec = TRANSPORTS[op.transport], transform.plan[op.bucket]
        gathers, reduces = op.kind == fsdp_all_gather.name, op.kind == fsdp_reduce_scatter.name
        if not (gathers or reduces):
            continue
        traffic = transport.gather_traffic(spec) if gathers else transport.reduce_traffic(spec)
        sent = traffic.wire_bytes(spec.layout.world_size)
        gathered += gathers * sent
        reduced += reduces * sent
        through_gloo += reduces * sent * (2 if traffic.is_reduce_scatter else 1)
        launches += traffic.launches
    return {
        "formula_bytes": gathered + reduced,
        "formula_bytes_through_gloo": gathered + through_gloo,
        "formula_launches": launches,
    }


def counted(system: Any, tokens: Any) -> dict[str, int]:
    """Count the copies, casts, collectives and live bytes of one step on this rank."""
    from thunder_fsdp_sched.reports.step_counter import StepCounter

    from systems import step

    counter, casts = StepCounter(system.module.parameters()), cast_counter()
    step(system, tokens, counter)
    step(system, tokens, casts)  # in another step, because it keeps memory alive
    counts = counter.counts()
    number, nbytes, by_model = casts.total()
    return {
        "parameter_bytes_copied": counts.parameter_bytes_copied - by_model,
        "gradient_bytes_copied": counts.gradient_bytes_copied,
        "backend_bytes_copied": counts.backend_bytes_copied,
        "collectives": len(counts.collectives),
        "peak_unsharded_bytes": max(counts.peak_unsharded_bytes.values()),
        "casts": number,
        "cast_bytes": nbytes,
        "parameter_bytes_cast_by_model": by_model,
    }


def cast_counter() -> Any:
    from thunder_fsdp_sched.compat import prepare  # noqa: F401  # before torch's modules that Thunder misses

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Casts(TorchDispatchMode):
        """A counter of copies between dtypes, into memory that a collective reads or from the result of a reduction."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # from, to; kept, so that addresses are not reused
            self.operands: dict[int, torch.Tensor] = {}
            self.reduced: dict[int, torch.Tensor] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if func.namespace == "c10d":
                self.operands |= {memory(t): t for t in tree_iter(args) if isinstance(t, torch.Tensor)}
                if "reduce_scatter" in name:
                    self.reduced |= {memory(t): t for t in tree_iter(args[0]) if isinstance(t, torch.Tensor)}
            elif name in ("copy_", "_to_copy"):
                source, target = (args[1], args[0]) if name == "copy_" else (args[0], result)
                if source.dtype != target.dtype:
                    self.seen.append((source, target))
            return result

        def total(self) -> tuple[int, int, int]:
            """Return their number, the bytes written, and the bytes that the model itself cast from gathered parameters."""
            ours = [t for s, t in self.seen if memory(t) in self.operands or memory(s) in self.reduced]
            others = [t for s, t in self.seen if memory(s) in self.operands and not any(t is o for o in ours)]
            return len(ours), sum(t.nbytes for t in ours), sum(t.nbytes for t in others)

    def memory(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    return Casts()


def report(arguments: argparse.Namespace, tables: dict[str, dict[str, dict[str, Any]]]) -> None:
    from thunder_fsdp_sched.demo.show import make_console

    from netns import describe_link

    console = make_console()
    rate = describe_link(arguments)
    compute = f"{arguments.emulate} s of emulated compute" if arguments.emulate else f"{arguments.tokens} tokens a rank"
    console.print(
        f"{arguments.ranks} gloo ranks, {rate}; GPT with {arguments.blocks} blocks, width {arguments.width}; {compute}; "
        f"{arguments.strategy}, prefetch {arguments.prefetch}; {arguments.rounds} rounds",
        highlight=False,
    )
    for title, figures in tables.items():
        console.print(table(title, figures), highlight=False)
        for name, of_one in figures.items():
            if "refused" in of_one:
                console.print(f"{name} does not run here: {of_one['refused']}\n", highlight=False)


def table(title: str, figures: dict[str, dict[str, Any]]) -> Any:
    from thunder_fsdp_sched.reports.report import human_bytes

    from rich import box
    from rich.table import Table

    ran = {name: of_one for name, of_one in figures.items() if "refused" not in of_one}
    base = next(iter(ran))
    # All systems train on the same batches in the same order, so losses differ only because of the systems.
    differ = {n: max(abs(a - b) for a, b in zip(f["losses"], ran[base]["losses"], strict=True)) for n, f in ran.items()}
    columns = {
        "wire by\nformula": lambda f: human_bytes(f["formula_bytes"]),
        "as gloo\nreduces": lambda f: human_bytes(f["formula_bytes_through_gloo"]),
        "really\nsent": lambda f: "" if f["sent_bytes"] is None else human_bytes(f["sent_bytes"]),
        "params\ncopied": lambda f: human_bytes(f["parameter_bytes_copied"]),
        "grads\ncopied": lambda f: human_bytes(f["gradient_bytes_copied"]),
        "casts": lambda f: f"{f['casts']}, {human_bytes(f['cast_bytes'])}",
        "calls": lambda f: f"{f['collectives']}",
        "peak un-\nsharded": lambda f: human_bytes(f["peak_unsharded_bytes"]),
        "step s\nmedian": lambda f: f"{f['seconds']:.3f}",
        "least\nto most": lambda f: f"{min(f['seconds_of_rounds']):.2f}–{max(f['seconds_of_rounds']):.2f}",
        f"ratio to\n{base}": lambda f: f"{f['ratio']:.2f}",
    }
    if not any(f["casts"] for f in ran.values()):
        del columns["casts"]
    made = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
    made.pad_edge, made.collapse_padding = False, True
    for column in ("", *columns, "loss\ndiff."):
        made.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, of_one in ran.items():
        made.add_row(name, *(show(of_one) for show in columns.values()), f"{differ[name]:.1g}")
    made.caption = (
        f"Ratio: median of the ratios in each round. Loss: largest difference from {base} at the same step. "
        "Calls: to the communication library, counted."
    )
    made.caption_justify = "left"
    return made


if __name__ == "__main__":
    main()
