"""Count the bytes that a training step needs besides its shards: at its peak, and what stays allocated between steps.

    python benchmarks/step_bytes.py
    python benchmarks/step_bytes.py --match "ours" --width 384

It runs forward and backward of a GPT as rank 0 of 8 in one process. The collectives do nothing, everything else runs.
The dispatcher counts every storage that an operator touches, see ``live_memory.py``. All figures are in units of P, the
bytes of all unsharded parameters. Sharded gradients, activations, inputs and outputs count; shards (P / 8) do not.

* Peak: the most bytes at once, with slots as they are allocated.
* Live: the same, but of slots only the bytes that are yet to be read.
* Allocated / live: both at the position of the peak.
* Between: what is still allocated when backward has returned, while the optimizer runs.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=16, help="bytes of text per rank and step")
    parser.add_argument("--match", default="", metavar="REGEX", help="only systems whose names match")
    parser.add_argument("--save", type=Path, help="file for all figures (JSON)")
    arguments = parser.parse_args()
    start_fake_rank(arguments.ranks)
    figures = measure(arguments)
    print(table(figures))
    if arguments.save:
        arguments.save.write_text(
            json.dumps({"setup": {**vars(arguments), "save": None}, "figures": figures}, indent=1)
        )


def start_fake_rank(world_size: int) -> None:
    """Join, as rank 0, a process group whose collectives do nothing."""
    from thunder_fsdp_sched.compat import prepare  # noqa: F401  # before torch's modules that Thunder misses

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def systems() -> dict[str, Callable[..., Any]]:
    """Return the functions that make each system from a name, a shape and an emulation."""
    from systems import fsdp2, ours, overlapped_fsdp2, thunders_fsdp

    made: dict[str, Callable[..., Any]] = {
        f"ours {strategy}{f' prefetch {prefetch}' * (prefetch != 1)}": partial(
            ours, sharding_strategy=strategy, transport="flat", prefetch=prefetch
        )
        for strategy, prefetch in (("zero2", 1), ("zero3", 1), ("zero3", 0), ("zero3", 2))
    }
    for strategy in ("zero2", "zero3"):
        for release in ("step", "bucket"):
            made[f"ours {strategy} release {release}"] = partial(
                ours, sharding_strategy=strategy, transport="flat", release=release
            )
    made["Thunder fsdp zero2"] = partial(thunders_fsdp, strategy="zero2", bucketing="block")
    for strategy, reshard in (("zero2", False), ("zero3", True)):
        made[f"FSDP2 {strategy}"] = partial(fsdp2, reshard=reshard)
        made[f"FSDP2 {strategy} overlapped"] = partial(overlapped_fsdp2, reshard=reshard)
    return made


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the figures of each system, by its name."""
    from systems import Emulation, Shape

    shape = Shape(arguments.blocks, arguments.width, arguments.length)
    whole = sum(p.nbytes for p in shape.model().parameters())
    return {
        name: count(make(name, shape, Emulation(shape)), shape.tokens(), whole)
        for name, make in systems().items()
        if re.search(arguments.match, name)
    }


def count(system: Any, tokens: Any, whole: int) -> dict[str, float]:
    """Return the figures of the third step of a system, in units of ``whole`` bytes."""
    from analysis import LiveMemory
    from systems import arenas, local, step

    for _ in range(2):
        step(system, tokens)
    parameters = [local(p) for p in system.module.parameters()]
    memory = LiveMemory(parameters, arenas(system))
    step(system, tokens, memory)
    held = memory.held()
    shards = sum(
        storage.nbytes() for storage in {p.untyped_storage()._cdata: p.untyped_storage() for p in parameters}.values()
    )
    total = [nbytes - shards for nbytes in held.total]
    in_arenas = [p + g - o for p, g, o in zip(held.parameters, held.gradients, held.outside, strict=True)]
    live = [t - held.arena + a for t, a in zip(total, in_arenas, strict=True)]
    peak = max(range(len(total)), key=total.__getitem__)
    return {
        "peak": total[peak] / whole,
        "live": max(live) / whole,
        "allocated / live": total[peak] / live[peak],
        "between": total[-1] / whole,
        "peak at": peak / len(total),
    }


def table(figures: dict[str, dict[str, float]]) -> str:
    """Return the figures as a table in Markdown."""
    columns = list(next(iter(figures.values())))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(f'{value:.3f}' for value in of.values())} |" for name, of in figures.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
