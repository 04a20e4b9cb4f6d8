"""Measure the processor time of compiling: plain ``thunder.jit``, and ``fsdp`` with and without repeated modules.

    python benchmarks/tracing.py --blocks 8 32
    python benchmarks/tracing.py --blocks 128 --only once      # the others take many minutes

Each measurement runs in a new process, on parameters without memory, as rank 0 of 8 of torch's fake process group:

* plain: ``thunder.jit(model)``, without sharding;
* forward: ``fsdp(trace_modules_once=False)``, which traces module calls as calls of ``forward``;
* once: ``fsdp()``, which copies what it traced to modules that are alike.

The model is compiled with gradients. "Differentiating" is the pass that differentiates and lets executors claim operators
(with "forward", it only claims them). It takes the place of what Thunder does in plain mode, so "our passes" do not include
it. "Second mode" is compiling the model again under ``no_sync``, and "evaluation" after that under ``torch.no_grad()``. They
take turns; the tables have medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

KINDS = ("plain", "forward", "once")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--no-gc", action="store_true", help="disable Python's garbage collector while compiling")
    parser.add_argument("--default-gc", action="store_true", help="let it run as often as at other times")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        collector = "none" if arguments.no_gc else "default" if arguments.default_gc else "ours"
        print(json.dumps(measure(arguments.worker, *arguments.blocks, collector=collector)))
        return
    columns = (
        "blocks",
        "kind",
        "first mode, s",
        "tracing, s",
        "differentiating, s",
        "our passes, s",
        "of plain",
        "second mode, s",
        "of first",
        "evaluation, s",
        "of first",
    )
    _print(columns)
    _print(["---"] * len(columns))
    for blocks in arguments.blocks:
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in arguments.only}
        for _ in range(arguments.rounds):
            for kind in arguments.only:
                command = [sys.executable, "-W", "ignore", __file__, "--worker", kind, "--blocks", str(blocks)]
                command += ["--no-gc"] * arguments.no_gc + ["--default-gc"] * arguments.default_gc
                run = subprocess.run(command, check=True, capture_output=True, text=True)
                found[kind].append(json.loads(run.stdout.splitlines()[-1]))
        medians = {k: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for k, runs in found.items()}
        for kind, of in medians.items():
            first = of["first"]
            of_plain = f"{first / medians['plain']['first']:.2f}" if "plain" in medians else ""
            later = [text for s in (of["second"], of["evaluation"]) for text in _compared(s, first)]
            _print(
                (
                    blocks,
                    kind,
                    f"{first:.1f}",
                    f"{of['tracing']:.1f}",
                    f"{of['differentiating']:.2f}",
                    f"{of['ours']:.2f}",
                    of_plain,
                    *later,
                )
            )


def _compared(seconds: float, first: float) -> tuple[str, str]:
    return (f"{seconds:.1f}", f"{seconds / first:.2f}") if seconds else ("", "")


def _print(cells: Iterable[object]) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


def measure(kind: str, blocks: int, *, collector: str = "ours") -> dict[str, float]:
    """Return the processor seconds of compiling a GPT for a first mode, a second one, and evaluation.

    Args:
        collector: how often Python collects garbage: as this package lets it, as by ``"default"``, or never: ``"none"``.
    """
    import gc

    import thunder_fsdp_sched  # first: it prepares torch for Thunder
    from thunder_fsdp_sched.capture import garbage_collection
    from thunder_fsdp_sched.demo.model import GPT, VOCABULARY

    import thunder
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sys.setrecursionlimit(100_000)  # Thunder recurses when it splits the trace of a deep model
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    model = GPT(blocks=blocks, width=64, heads=2, length=16)
    tokens = torch.randint(0, VOCABULARY, (2, 16))
    transforms: list[Any] = []
    if kind != "plain":
        transforms.append(thunder_fsdp_sched.fsdp(trace_modules_once=kind == "once"))
    jitted = thunder.jit(model, transforms=transforms)
    if collector == "none":
        gc.disable()
    elif collector == "default":
        garbage_collection.THRESHOLD = 0
    started = time.process_time()
    jitted(tokens, tokens)
    first = time.process_time() - started
    stats = thunder.compile_stats(jitted)
    tracing = (stats.last_trace_tracing_stop - stats.last_trace_tracing_start) / 1e9
    differentiating = ours = second = 0.0
    if transforms:
        seconds = transforms[0].compiled[0].pass_seconds
        differentiating = sum(seconds[name] for name in ("differentiate", "claim_operators") if name in seconds)
        ours = sum(seconds.values()) - differentiating
        started = time.process_time()
        with jitted.no_sync():
            jitted(tokens, tokens)
        second = time.process_time() - started
    started = time.process_time()
    with torch.no_grad():
        jitted(tokens, tokens)
    evaluation = time.process_time() - started
    return {
        "first": first,
        "tracing": tracing,
        "differentiating": differentiating,
        "ours": ours,
        "second": second,
        "evaluation": evaluation,
    }


if __name__ == "__main__":
    main()
