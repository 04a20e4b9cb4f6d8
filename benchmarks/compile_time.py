"""CPU seconds of compiling (Thunder's tracing included) and the share of it that the project's passes take.

    python benchmarks/compile_time.py 8 32
    python benchmarks/compile_time.py --blocks-of linear --no-gc 8 32 128 512

A model on the meta device, as rank 0 of 8 with a fake process group; nothing runs. A process for each number of blocks;
seconds of processor time, so that other work on the machine does not count. Python collects garbage in whatever pass happens
to be running, and a full collection takes longer the more traces Thunder keeps; ``--no-gc`` shows the passes without it.
"""

from __future__ import annotations

import argparse
import gc
import resource
import subprocess
import sys
import time


def _gpt(blocks: int):
    from thunder_fsdp_sched.demo.model import GPT, VOCABULARY

    import torch

    model = GPT(blocks=blocks, width=384, heads=6, length=128)
    tokens = torch.randint(0, VOCABULARY, (2, 128))
    return model, (tokens, tokens)


def _linear(blocks: int):
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(blocks)))
    return model, (torch.empty(2, 64),)


MODELS = {"gpt": _gpt, "linear": _linear}


def measure(name: str, blocks: int, collect: bool) -> None:
    import thunder_fsdp_sched
    from thunder_fsdp_sched.fake_ranks import compile_as_rank

    import torch

    def make():
        with torch.device("meta"):
            return MODELS[name](blocks)

    sys.setrecursionlimit(100_000)  # Thunder's split of deep models
    if not collect:
        gc.disable()
    started = time.process_time()
    transform = compile_as_rank(make, thunder_fsdp_sched.fsdp(), rank=0, world_size=8)
    total = time.process_time() - started
    [compiled] = transform.compiled
    passes = sum(compiled.pass_seconds.values())
    symbols = len(compiled.forward.bound_symbols) + len(compiled.backward.bound_symbols)
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{blocks:4d} blocks  {symbols:7d} symbols  compiled in {total:7.1f} s  passes {passes:6.2f} s  "
        f"{passes / total:5.1%}  {gigabytes:.1f} GB"
    )
    for pass_name, seconds in sorted(compiled.pass_seconds.items(), key=lambda item: -item[1]):
        print(f"      {pass_name:25s} {seconds * 1e3:9.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blocks", type=int, nargs="*", default=[8])
    parser.add_argument("--blocks-of", choices=MODELS, default="gpt")
    parser.add_argument("--no-gc", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.blocks_of, options.blocks[0], not options.no_gc)
    else:
        flags = ["--blocks-of", options.blocks_of, *(["--no-gc"] if options.no_gc else [])]
        for number in options.blocks:
            subprocess.run([sys.executable, "-W", "ignore", __file__, "--one", *flags, str(number)], check=True)
