"""CPU seconds of a first call (Thunder's tracing and compiling included) and the share of it that the project's passes take.

    python benchmarks/compile_time.py 8 32

A GPT on the meta device, as rank 0 of 8 with a fake process group. A process for each number of blocks; seconds of
processor time, so that other work on the machine does not count.
"""

from __future__ import annotations

import subprocess
import sys
import time


def measure(blocks: int) -> None:
    import thunder_fsdp_sched
    from thunder_fsdp_sched.demo.model import GPT, VOCABULARY

    import thunder
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    with torch.device("meta"):
        model = GPT(blocks=blocks, width=384, heads=6, length=128)
        tokens = torch.randint(0, VOCABULARY, (2, 128))
    transform = thunder_fsdp_sched.fsdp()
    jitted = thunder.jit(model, transforms=[transform])
    started = time.process_time()
    jitted(tokens, tokens)
    total = time.process_time() - started
    [compiled] = transform.compiled
    passes = sum(compiled.pass_seconds.values())
    symbols = len(compiled.forward.bound_symbols) + len(compiled.backward.bound_symbols)
    print(
        f"{blocks:4d} blocks  {symbols:7d} symbols  first call {total:7.1f} s  passes {passes:6.2f} s  {passes / total:5.1%}"
    )
    for name, seconds in sorted(compiled.pass_seconds.items(), key=lambda item: -item[1]):
        print(f"      {name:25s} {seconds * 1e3:9.1f} ms")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(int(sys.argv[2]))
    else:
        for number in sys.argv[1:] or ["8"]:
            subprocess.run([sys.executable, "-W", "ignore", __file__, "--one", number], check=True)
