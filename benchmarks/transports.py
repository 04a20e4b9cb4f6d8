"""Compare transports and precisions in the same training: bytes sent, copies, collectives, memory, seconds.

    sudo python benchmarks/transports.py                          # 2 ranks, 1 Gbit/s, ZeRO-3, real compute
    sudo python benchmarks/transports.py --compute 0.9 --length 16     # matrix multiplications sleep, 0.9 s in total
    python benchmarks/transports.py --no-limit --blocks 2 --width 64 --length 64     # no root: plain loopback

The systems train a GPT on gloo ranks as in ``overlap.py``, and those of a table take turns. Seconds are those of forward and
backward on the slowest rank, without the optimizer. All other figures are those of one step on rank 0.

* Wire by formula: the bytes that a rank sends according to the transports, for each collective in the traces.
* As gloo reduces: the same, with reduce-scatters as all-reduces, which send twice the bytes.
* Sent: the bytes that the operating system's kernel counted on the interface, including headers.
* Copies, calls and memory are counted in untimed steps, by ``examples/step_counter.py``.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from thunder_fsdp_sched import CommPolicy
from thunder_fsdp_sched.ir.symbols import fsdp_all_gather, fsdp_reduce_scatter
from thunder_fsdp_sched.transports import transport_of

import harness
import torch
import torch.distributed as dist
from harness import ratio, show_nbytes, summary
from systems import Emulation, Shape, System, build, measure, ours, step
from netns import sent_bytes
from step_counter import StepCounter
from torch.distributed.fsdp import MixedPrecisionPolicy

TRIED = ("flat", "all_to_all", "coalesced", "all_reduce")
PRECISIONS = {
    "float32": MixedPrecisionPolicy(),
    "bf16, float32 sums": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 both": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}

FORMATS = {
    "float32": CommPolicy(),
    "bf16": CommPolicy("bfloat16", "bfloat16"),
    "float8": CommPolicy("float8_e4m3fn", "float8_e4m3fn"),
    "int8": CommPolicy("int8", "int8"),
    "int8, bf16": CommPolicy("int8", "bfloat16"),
}

COLUMNS: harness.Columns = {
    "wire by formula": ("formula_bytes", show_nbytes),
    "as gloo reduces": ("formula_bytes_through_gloo", show_nbytes),
    "sent": ("sent_bytes", show_nbytes),
    "params copied": ("parameter_bytes_copied", show_nbytes),
    "grads copied": ("gradient_bytes_copied", show_nbytes),
    "calls": ("collectives", "d"),
    "peak unsharded": ("peak_unsharded_bytes", show_nbytes),
    **harness.STEP,
    "of the first": ("ratio", ".2f"),
}


def run(arguments: argparse.Namespace) -> None:
    tables: dict[str, dict[str, dict[str, Any]]] = {
        "transports": {name: {"transport": name} for name in TRIED},
        "precisions": {name: {"transport": "flat", "mp_policy": policy} for name, policy in PRECISIONS.items()},
        "formats": {name: {"comm_policy": policy} for name, policy in FORMATS.items()},
    }
    for title, variants in tables.items():
        asked = {name: of for name, of in variants.items() if re.search(arguments.only, f"{title}, {name}")}
        if asked:
            compare(arguments, title, asked)


def compare(arguments: argparse.Namespace, title: str, variants: Mapping[str, Mapping[str, Any]]) -> None:
    """Measure the variants of one table in turns, and print it."""
    shape = Shape.of(arguments)
    emulation, tokens = Emulation(shape), shape.tokens(dist.get_rank())
    makes = {name: partial(ours, sharding_strategy=arguments.strategy, **of) for name, of in variants.items()}
    built = build(makes, shape, emulation, partial(step, tokens=tokens))
    counted = {name: by_formula(system.transform) | counts_of(system, tokens) for name, system in built.items()}
    sent: dict[str, list[int]] = {name: [] for name in built}

    def timed(name: str) -> float:
        dist.barrier()
        before = 0 if arguments.no_limit else sent_bytes("eth0")
        seconds = step(built[name], tokens)
        dist.barrier()
        if not arguments.no_limit:
            sent[name].append(sent_bytes("eth0") - before)
        return seconds

    def figures_of(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
        first = next(iter(seconds.values()))
        return {
            name: counted[name]
            | summary(steps)
            | {"ratio": ratio(steps, first), "sent_bytes": statistics.median(sent[name]) if sent[name] else None}
            for name, steps in seconds.items()
        }

    results = measure(arguments, emulation, {name: partial(timed, name) for name in built}, figures_of)
    if dist.get_rank() == 0:
        print(f"\n{title}; {arguments.strategy}")
        harness.report(arguments, title, results, COLUMNS, {name: system.losses for name, system in built.items()})


def by_formula(transform: Any) -> dict[str, int]:
    """Return the bytes of the collectives in the traces, according to the transports."""
    schedule = transform.compiled[-1].schedule
    gathered = reduced = through_gloo = 0
    for op in filter(lambda op: op.travels, (*schedule.forward, *schedule.backward)):
        spec = transform.plan[op.bucket]
        transport = transport_of(spec)
        gathers, reduces = op.kind == fsdp_all_gather.name, op.kind == fsdp_reduce_scatter.name
        if not (gathers or reduces):
            continue
        traffic = transport.gather_traffic(spec) if gathers else transport.reduce_traffic(spec)
        world_size = spec.layout.world_size
        sent = int(sum(traffic.messages) * traffic.passes * (world_size - 1) / world_size)
        gathered += gathers * sent
        reduced += reduces * sent
        through_gloo += reduces * sent * (2 if traffic.is_reduce_scatter else 1)
    return {"formula_bytes": gathered + reduced, "formula_bytes_through_gloo": gathered + through_gloo}


def counts_of(system: System, tokens: torch.Tensor) -> dict[str, int]:
    """Count the copies, collectives and live bytes of one step on this rank."""
    counter = StepCounter(system.module.parameters())
    step(system, tokens, counter)
    counts = counter.counts()
    return {
        "parameter_bytes_copied": counts.parameter_bytes_copied,
        "gradient_bytes_copied": counts.gradient_bytes_copied,
        "backend_bytes_copied": counts.backend_bytes_copied,
        "collectives": len(counts.collectives),
        "peak_unsharded_bytes": max(counts.peak_unsharded_bytes.values()),
    }


if __name__ == "__main__":
    parser = harness.options(__doc__, length=512, compute=[0.0])
    parser.add_argument("--strategy", choices=("zero2", "zero3"), default="zero3")
    parsed = parser.parse_args()
    harness.run_on_ranks(__file__, parsed, run)
