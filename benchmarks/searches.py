"""Measure the processor time of the searches of ``prefetch="auto"``, ``max_unsharded_bytes`` and ``max_memory``.

    python benchmarks/searches.py --blocks 8

The demo's GPT is compiled as rank 0 of 8 of torch's fake process group, for a cluster of H100 GPUs, on parameters without
memory. ``max_unsharded_bytes`` is half of what the unsharded parameters take, ``max_memory`` a share of the peak with the
default options. "Runs" counts how often the passes ran on candidates.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any
from unittest import mock

import thunder_fsdp_sched  # before thunder
from thunder_fsdp_sched.pipeline import CompiledTraces
from thunder_fsdp_sched.planning.candidate_traces import CandidateTraces
from thunder_fsdp_sched.planning.fake_ranks import compile_as_rank

import torch
from overhead_parts import MODELS, WORLD_SIZE


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, default=8, help="blocks of the model")
    blocks = parser.parse_args().blocks
    torch.set_num_threads(1)
    sys.setrecursionlimit(100_000)  # Thunder recurses when it splits the trace of a deep model
    _compile(1)  # facts about operators are found once in a process
    plain, seconds = _compile(blocks)
    print(f"{blocks} blocks compile in {seconds:.1f} s of processor time without a search.\n")
    unsharded = sum(placement.numel for b in plain.buckets for placement in b.spec.layout.placements) * 4  # float32
    peak = plain.memory.peak.nbytes
    searches: dict[str, dict[str, Any]] = {
        'prefetch="auto"': {"prefetch": "auto"},
        'max_unsharded_bytes, prefetch="auto"': {"max_unsharded_bytes": unsharded // 2, "prefetch": "auto"},
        "max_memory, twice the peak": {"max_memory": 2 * peak},
        "max_memory, 0.8 of the peak": {"max_memory": peak * 4 // 5},
        "max_memory, 0.8 of the peak, prefetch=1": {"max_memory": peak * 4 // 5, "prefetch": 1},
    }
    print("| options | runs | search, s | values computed again |\n| --- | --- | --- | --- |")
    for name, options in searches.items():
        with mock.patch.object(CandidateTraces, "run", autospec=True, side_effect=CandidateTraces.run) as run:
            compiled, _ = _compile(blocks, **options)
        assert compiled.choice is not None
        again = len(compiled.choice.chosen.recomputed)
        print(f"| {name} | {run.call_count} | {compiled.pass_seconds['choose']:.1f} | {again} |")


def _compile(blocks: int, **options: Any) -> tuple[CompiledTraces, float]:
    """Return the traces of a GPT and the processor seconds that compiling took."""

    def make() -> tuple[Any, ...]:
        with torch.device("meta"):
            return MODELS["gpt"](blocks)

    started = time.process_time()
    transform = thunder_fsdp_sched.fsdp(cluster="h100-sxm", **options)
    [compiled] = compile_as_rank(make, transform, rank=0, world_size=WORLD_SIZE).compiled
    return compiled, time.process_time() - started


if __name__ == "__main__":
    main()
