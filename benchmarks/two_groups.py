"""Shard over two process groups with separate links, and check that compute waits only for the gather that it needs.

    sudo python benchmarks/two_groups.py
    sudo python benchmarks/two_groups.py --rates 1e9 0.5e9 --experts 1        # the experts' link is the slow one
    sudo python benchmarks/two_groups.py --real                               # real compute instead of emulated

Experts of a model are often sharded over other ranks than its dense parameters, and sent over other links. Here two process
groups have the same ranks, but each has its own rate-limited interface (``netns.py``). Dense parameters and experts
alternate. Three systems take turns, with the same compute, buckets, order and bytes:

* *side by side*: dense parameters are sent over the first link and experts over the second (``process_group_for``);
* *waits for all*: the same, but each wait for a gather waits for all gathers issued so far, of both groups, as if one stream
  or one event served all groups;
* *one group*: everything is sent over the first link, by one communicator.

The limit of a step is the longer of its compute and its communication. The communication is the maximum of both links if
there are two, and the sum if there is one. These times are measured in the same rounds, with the same collectives without
compute. In *one after the other*, the collectives of both groups never overlap. Seconds are those of forward and backward on
the slowest rank, as medians. The last columns show how long compute waited for the gathers of each group and for reductions,
as means over ranks. Compute alone is the time of a step minus these waits.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SYSTEMS = ("side by side", "waits for all", "one group")
ALONE = ("compute", "dense", "experts", "both at once", "one after the other", "all over the first link")


class Block(nn.Module):
    """A dense perceptron, followed by experts whose outputs a gate mixes."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleDict(
            {"up": nn.Linear(width, 2 * width * experts), "down": nn.Linear(2 * width * experts, width)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        hidden = F.gelu(self.experts["up"](x))
        weights = torch.softmax(self.gate(x), -1).unsqueeze(-1)
        hidden = hidden.unflatten(-1, (weights.shape[-2], -1)) * weights
        return x + self.experts["down"](hidden.flatten(-2))


class Model(nn.Module):
    def __init__(self, blocks: int, width: int, experts: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, experts) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def main() -> None:
    from netns import run_on_ranks

    arguments = parse()
    run_on_ranks(__file__, arguments, run_rank, bits_per_second=arguments.rates)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs=2, default=[1e9, 1e9], help="bits/s of the two links")
    parser.add_argument("--no-limit", action="store_true", help="use plain loopback, which needs no root")
    parser.add_argument("--strategy", choices=("zero2", "zero3"), default="zero3")
    parser.add_argument("--prefetch", type=int, default=2, help="2 gathers one bucket of each group ahead")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--experts", type=int, default=2, help="experts per block; 2 are as large as its dense part")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per rank and step, with --real")
    parser.add_argument("--emulate", type=float, metavar="SECONDS", default=0.6, help="seconds of compute to emulate")
    parser.add_argument("--real", action="store_true", help="real compute")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds until a rank counts as hanging")
    return parser.parse_args()


def run_rank(arguments: argparse.Namespace) -> None:
    import torch.distributed as dist
    from netns import join_ranks
    from systems import say

    rank, world_size = join_ranks()
    groups = {}
    for number, name in enumerate(("dense", "experts")):
        if not arguments.no_limit:
            os.environ["GLOO_SOCKET_IFNAME"] = f"eth{number}"  # gloo reads it when it creates a group
        groups[name] = dist.new_group(list(range(world_size)), group_desc=name)

    ledger = Ledger()
    systems = {}
    for name in SYSTEMS:
        say(f"compiling: {name}")
        systems[name] = build(arguments, name, groups, ledger)
    x = torch.randn(16 if not arguments.real else arguments.tokens, arguments.width)
    for module, _ in systems.values():
        step(module, x)
    alone = Alone(systems["side by side"][1], groups)

    seconds: dict[str, list[float]] = defaultdict(list)
    waited: dict[str, list[dict[str, float]]] = defaultdict(list)
    sent: dict[str, list[list[int]]] = defaultdict(list)
    gc.collect()
    gc.freeze()  # otherwise a full collection, which takes a second with Thunder's traces, would run in some step
    everything = [*SYSTEMS, *ALONE[1:]]
    for round_ in range(arguments.rounds):
        say(f"round {round_ + 1} of {arguments.rounds}")
        for offset in range(len(everything)):
            name = everything[(round_ + offset) % len(everything)]
            dist.barrier()
            before = counters(arguments)
            ledger.seconds.clear()
            seconds[name].append(step(systems[name][0], x) if name in systems else alone.run(name))
            dist.barrier()
            sent[name].append([b - a for a, b in zip(before, counters(arguments), strict=True)])
            waited[name].append(dict(ledger.seconds))
    slowest = torch.tensor([seconds[name] for name in everything], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    of_ranks: list[Any] = [None] * world_size
    dist.all_gather_object(of_ranks, (seconds, waited))
    if rank == 0:
        medians = {name: statistics.median(row) for name, row in zip(everything, slowest.tolist(), strict=True)}
        medians["compute"] = min(  # it is the same for all three systems
            statistics.median(
                s - sum(w.values()) for times, w_ in of_ranks for s, w in zip(times[n], w_[n], strict=True)
            )
            for n in SYSTEMS
        )
        figures = {
            name: {
                "seconds": medians[name],
                "seconds_of_rounds": dict(zip(everything, slowest.tolist(), strict=True)).get(name),
                "sent_bytes": [round(statistics.median(column)) for column in zip(*sent[name], strict=True)],
                "waited": {
                    kind: statistics.median(
                        statistics.mean(waits[name][round_].get(kind, 0.0) for _, waits in of_ranks)
                        for round_ in range(arguments.rounds)
                    )
                    for kind in ("dense", "experts", "reductions")
                }
                if name in SYSTEMS
                else {},
            }
            for name in (*SYSTEMS, *ALONE)
        }
        report(arguments, figures, alone.nbytes)
        if arguments.json:
            setup = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
            arguments.json.write_text(json.dumps({"setup": setup, "bytes": alone.nbytes, "figures": figures}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


class Ledger:
    """The seconds that compute waited, keyed by what it waited for, and the gathers in flight."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.gathers: list[Any] = []

    def transport(self, name: str, *, waits_for_all: bool) -> None:
        """Register a transport under this name: ``flat`` with a clock at every wait."""
        from thunder_fsdp_sched.transports import register_transport
        from thunder_fsdp_sched.transports.flat import Flat

        ledger = self

        class Clocked:
            def __init__(self, work: Any, kind: str) -> None:
                self.work, self.kind = work, kind

            def wait(self) -> None:
                started = time.perf_counter()
                for work in list(ledger.gathers) if waits_for_all and self in ledger.gathers else [self]:
                    work.work.wait()
                    if work in ledger.gathers:
                        ledger.gathers.remove(work)
                ledger.seconds[self.kind] += time.perf_counter() - started

        class ClockedFlat(Flat):
            def all_gather(self, bucket: Any, shard: Any, unsharded: Any) -> Any:
                of_experts = any(".experts." in p.name for p in bucket.spec.params)
                kind = "experts" if of_experts else "dense"
                works = [Clocked(work, kind) for work in super().all_gather(bucket, shard, unsharded)]
                ledger.gathers += works
                return works

            def reduce_scatter(self, bucket: Any, unsharded: Any, shard: Any) -> Any:
                return [Clocked(work, "reductions") for work in super().reduce_scatter(bucket, unsharded, shard)]

        transport = ClockedFlat()
        transport.name = name
        register_transport(transport)


def build(arguments: argparse.Namespace, name: str, groups: dict[str, Any], ledger: Ledger) -> tuple[Any, Any]:
    import thunder_fsdp_sched

    import thunder

    ledger.transport(name, waits_for_all=name == "waits for all")
    torch.manual_seed(0)
    model = Model(arguments.blocks, arguments.width, arguments.experts)
    parameters = sum(p.numel() for p in model.parameters())

    def bucket(parameter: str, _: Any) -> str:  # the same buckets for all systems
        block = ".".join(parameter.split(".")[:2])
        return f"{block}.experts" if ".experts." in parameter else block

    def group(parameter: str, _: Any) -> Any:
        return groups["experts" if ".experts." in parameter and name != "one group" else "dense"]

    transform = thunder_fsdp_sched.fsdp(
        sharding_strategy=arguments.strategy,
        prefetch=arguments.prefetch,
        bucketing_strategy=bucket,
        process_group_for=group,
        transport=name,
    )
    transforms = [transform]
    if not arguments.real:
        from systems import sleeping

        seconds_per_flop = arguments.emulate / (6 * parameters * 16)
        transforms.append(sleeping(lambda flops: time.sleep(flops * seconds_per_flop)))
    return thunder.jit(model, transforms=transforms), transform


def step(module: Any, x: torch.Tensor) -> float:
    """Run one step; return the seconds of forward and backward on this rank."""
    module.zero_grad(set_to_none=True)
    torch.distributed.barrier()
    started = time.perf_counter()
    module(x).backward()
    return time.perf_counter() - started


class Alone:
    """The collectives of a step without its compute, in the same order, with at most two of a group in flight.

    Attributes:
        nbytes: bytes that a rank sends over each link in a step with gloo (a reduce-scatter as an all-reduce).
    """

    def __init__(self, transform: Any, groups: dict[str, Any]) -> None:
        from thunder_fsdp_sched.ir.symbols import fsdp_all_gather, fsdp_reduce_scatter

        self.groups = groups
        self.calls: list[tuple[str, bool, torch.Tensor, torch.Tensor]] = []
        self.nbytes = dict.fromkeys(groups, 0)
        schedule = transform.compiled[-1].schedule
        for op in (*schedule.forward, *schedule.backward):
            if op.travels and op.kind in (fsdp_all_gather.name, fsdp_reduce_scatter.name):
                layout, gathers = transform.plan[op.bucket].layout, op.kind == fsdp_all_gather.name
                whole, own = torch.zeros(layout.unsharded_numel), torch.zeros(layout.shard_numel)
                whole = whole[: own.numel() * layout.world_size]
                self.calls.append((op.group, gathers, whole, own))
                self.nbytes[op.group] += (whole.nbytes - own.nbytes) * (1 if gathers else 2)

    def run(self, what: str) -> float:
        """Run the collectives that ``what`` names; return the seconds."""
        from thunder_fsdp_sched.transports.flat import all_gather_flat, reduce_scatter_flat

        torch.distributed.barrier()
        started = time.perf_counter()
        in_flight: dict[str, list[Any]] = defaultdict(list)
        calls = [call for call in self.calls if what not in self.groups or call[0] == what]
        for group, gathers, whole, own in calls:
            over = self.groups["dense" if what == "all over the first link" else group]
            works = in_flight["" if what in ("all over the first link", "one after the other") else group]
            while len(works) > (0 if what == "one after the other" else 1):
                works.pop(0).wait()
            if gathers:
                works.append(all_gather_flat(whole, own, group=over, async_op=True))
            else:
                op = torch.distributed.ReduceOp.AVG
                works.append(reduce_scatter_flat(own, whole, op=op, group=over, async_op=True))
        for works in in_flight.values():
            for work in works:
                work.wait()
        return time.perf_counter() - started


def counters(arguments: argparse.Namespace) -> list[int]:
    from netns import sent_bytes

    return [0, 0] if arguments.no_limit else [sent_bytes(f"eth{number}") for number in range(2)]


def report(arguments: argparse.Namespace, figures: dict[str, dict[str, Any]], nbytes: dict[str, int]) -> None:
    from thunder_fsdp_sched.demo.show import make_console
    from thunder_fsdp_sched.reports.report import human_bytes

    from rich import box
    from rich.table import Table

    rates = (
        "plain loopback" if arguments.no_limit else " and ".join(f"{r / 1e9:g}" for r in arguments.rates) + " Gbit/s"
    )
    compute = f"{arguments.tokens} tokens a rank" if arguments.real else f"{arguments.emulate} s of emulated compute"
    lasts = {name: of_one["seconds"] for name, of_one in figures.items()}
    links = max(lasts["dense"], lasts["experts"]), lasts["all over the first link"]
    limits = {name: max(lasts["compute"], links[name == "one group"]) for name in SYSTEMS}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", caption_justify="left", title_style="bold")
    table.title = (
        f"{arguments.ranks} gloo ranks, {rates}; {arguments.blocks} blocks, width {arguments.width}, {arguments.experts} "
        f"experts; {compute}; {arguments.strategy}, prefetch {arguments.prefetch}; {arguments.rounds} rounds"
    )
    waits = ("dense\ngathers", "experts'\ngathers", "reduc-\ntions")
    for column in ("", "sent over\nlink 1", "over\nlink 2", "seconds\n(median)", "limit", "seconds\n/ limit", *waits):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name in (*SYSTEMS, *ALONE):
        of_one = figures[name]
        sizes = ["", ""] if arguments.no_limit or name == "compute" else map(human_bytes, of_one["sent_bytes"])
        row = [name if name in SYSTEMS else f"alone: {name}", *sizes, f"{of_one['seconds']:.3f}"]
        if name in SYSTEMS:
            row += [f"{limits[name]:.3f}", f"{of_one['seconds'] / limits[name]:.2f}"]
            row += [f"{of_one['waited'][kind]:.3f}" for kind in ("dense", "experts", "reductions")]
        table.add_row(*row, end_section=name == SYSTEMS[-1])
    table.caption = (
        f"With gloo, a rank sends {human_bytes(nbytes['dense'])} for dense parameters and "
        f"{human_bytes(nbytes['experts'])} for experts. Limit: the longer of compute and communication, which takes "
        f"{links[0]:.3f} s over two links (the maximum) and {links[1]:.3f} s over one (the sum). "
        "Last three columns: seconds that compute waited."
    )
    console = make_console()
    console.print(table, highlight=False)


if __name__ == "__main__":
    main()
