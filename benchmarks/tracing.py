"""Measure the processor time of compiling: plain ``thunder.jit``, ``fsdp`` with any options, and FSDP2.

    python benchmarks/tracing.py --blocks 8 32
    python benchmarks/tracing.py --blocks 128 --only once      # the others take many minutes
    python benchmarks/tracing.py --blocks 8 32 --only once --passes
    python benchmarks/tracing.py --blocks 8 --only once --passes --options '{"prefetch": "auto"}'

Each measurement runs in a new process, as rank 0 of 8 of torch's fake process group:

* plain: ``thunder.jit(model)``, without sharding;
* once: ``fsdp()`` with ``--options``, which differentiates modules that are alike once;
* fsdp2: the first step of FSDP2 with ``torch.compile`` of each block, its backward and compilers' processes included.

The demo's GPT is compiled with gradients. "Differentiating" is the pass that differentiates and lets executors claim
operators. It takes the place of what Thunder does in plain mode, so "our passes" do
not include it. "Second mode" is compiling the model again under ``no_sync``, and "evaluation" after that under
``torch.no_grad()``. ``--passes`` adds a row for each pass.
The search of ``prefetch="auto"`` and ``max_memory`` is the pass "choose".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import thunder_fsdp_sched  # before thunder
from thunder_fsdp_sched.capture import while_compiling
from thunder_fsdp_sched.logs import following_stages

import harness
import thunder
import torch
from harness import Columns, join_fake_ranks, table
from byte_gpt import GPT, VOCABULARY
from torch.distributed.fsdp import fully_shard

KINDS = ("plain", "once", "fsdp2")
WORLD_SIZE = 8


COLUMNS: Columns = {
    "first mode, s": ("first", ".1f"),
    "tracing, s": ("tracing", ".1f"),
    "differentiating, s": ("differentiating", ".2f"),
    "our passes, s": ("ours", ".2f"),
    "ours, of first": ("ours_of_first", ".1%"),
    "of plain": ("of_plain", ".2f"),
    "second mode, s": ("second", ".1f"),
    "of first": ("second_of_first", ".2f"),
    "evaluation, s": ("evaluation", ".1f"),
    "of first ": ("evaluation_of_first", ".2f"),
}


def main() -> None:
    parser = harness.options(__doc__, rounds=1)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--passes", action="store_true", help="add the seconds of each pass")
    parser.add_argument("--default-gc", action="store_true", help="collect garbage as often as at other times")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="of fsdp")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.setrecursionlimit(100_000)  # Thunder recurses when it splits the trace of a deep model
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments)))
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    figures: dict[str, dict[str, float]] = {}
    for blocks in arguments.blocks:
        for kind in (kind for kind in KINDS if re.search(arguments.only, kind)):
            command = [sys.executable, "-W", "ignore", *sys.argv, "--worker", kind, "--blocks", str(blocks)]
            runs = []
            for _ in range(arguments.rounds):
                run = subprocess.run(command, check=True, capture_output=True, text=True)
                runs.append(json.loads(run.stdout.splitlines()[-1]))
            of = figures[f"{blocks}, {kind}"] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            of |= {f"{key}_of_first": of[key] / of["first"] for key in ("ours", "second", "evaluation") if key in of}
            if f"{blocks}, plain" in figures:
                of["of_plain"] = of["first"] / figures[f"{blocks}, plain"]["first"]
    print(table(figures, COLUMNS))
    if arguments.passes:
        names = [key for key in next(reversed(figures.values())) if key.startswith("pass ")]
        by_pass = {name: {column: of.get(name) for column, of in figures.items()} for name in names}
        print(f"\n{table(by_pass, {column: (column, '.3f') for column in figures})}\n")
    harness.save(arguments, "tracing", figures=figures)


def measure(kind: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the processor seconds of compiling a GPT for a first mode, a second one, and evaluation."""
    blocks = arguments.blocks[-1]
    join_fake_ranks(WORLD_SIZE)
    model = GPT(blocks=blocks, width=arguments.width, heads=2, length=16)
    tokens = torch.randint(0, VOCABULARY, (2, 16))
    if kind == "fsdp2":
        return {"first": first_step_of_fsdp2(model, tokens)}
    transforms: list[Any] = []
    if kind != "plain":
        transforms.append(thunder_fsdp_sched.fsdp(**arguments.options))
    jitted = thunder.jit(model, transforms=transforms)
    if arguments.default_gc:
        while_compiling.THRESHOLD = 0

    def compile_again() -> float:
        started = time.process_time()
        jitted(tokens, tokens)
        return time.process_time() - started

    stages: dict[str, float] = {}
    with following_stages(lambda stage: stages.setdefault(stage, time.process_time())):
        found = {"first": compile_again()}
    if transforms:
        found["tracing"] = stages["differentiating"] - stages["tracing"]
        seconds = transforms[0].compiled[0].pass_seconds
        found["differentiating"] = sum(seconds.get(name, 0.0) for name in ("differentiate", "claim_operators"))
        found["ours"] = sum(seconds.values()) - found["differentiating"]
        found |= {f"pass {name}": of for name, of in sorted(seconds.items(), key=lambda item: -item[1])}
        with jitted.no_sync():
            found["second"] = compile_again()
    with torch.no_grad():
        found["evaluation"] = compile_again()
    return found


def first_step_of_fsdp2(model: Any, tokens: torch.Tensor) -> float:
    """Return the processor seconds of a first step with compiled blocks, of which Inductor has cached nothing."""
    for part in (*model.blocks, model):
        fully_shard(part)
    for block in model.blocks:
        block.compile()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        torch._inductor.config.compile_threads = 1  # so that no pool of processes outlives the measurement
        started = sum(os.times()[:4])  # with the processes that have ended
        model(tokens, tokens).backward()
        return sum(os.times()[:4]) - started


if __name__ == "__main__":
    main()
