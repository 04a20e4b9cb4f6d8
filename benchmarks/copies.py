"""Count the bytes that one step of every system copies, sends, allocates and holds.

    python benchmarks/copies.py --fake 8                      # rank 0 of 8 in one process, values are garbage
    sudo python benchmarks/copies.py                          # 2 gloo ranks, each behind an interface of its own
    python benchmarks/copies.py --no-limit                    # the same on plain loopback, without root
    python benchmarks/copies.py --fake 8 --only "ours zero3" --save copies

The figures are those of forward and backward of a GPT on rank 0, after two steps of warm-up. With ``--fake``, collectives
do nothing and everything else runs, so any number of ranks can be examined. Nothing is timed.

* Copied: bytes of parameters and of gradients that operators copy, concatenate, cast or scale, as counted by
  ``examples/step_counter.py``, which defines whose bytes they are; and the bytes that gloo itself copies
  into its results.
* Operators: the number of copies, concatenations and casts of parameters or gradients.
* Wire: the bytes that a rank sends, by the formulas of ring collectives. With N bytes in the unsharded tensor, these are
  N(W-1)/W for an all-gather, a reduce-scatter and an all-to-all, twice that for an all-reduce, and N for a broadcast.
  gloo implements a reduce-scatter as an all-reduce.
* Sent: the bytes that the operating system's kernel counted, in network namespaces only.
* New: storages that the step allocates.
* Peaks: most bytes at once (``live_memory.py``), in units of the bytes of all parameters. Of the arena, only the bytes that
  are yet to be read count (live), or all of it (allocated). Total: every storage that forward and backward touch, including
  activations and shards.
* Step: the total without the shards: at its peak, at the peak if of the arena only the bytes that are yet to be read count,
  and after backward, while the optimizer runs.
"""

from __future__ import annotations

import argparse
import re
from functools import partial
from typing import Any

from thunder_fsdp_sched.sizes import human_bytes

import harness
import overlap
import torch
import torch.distributed as dist
from harness import say, show_nbytes
from systems import Emulation, Shape, System, arenas, local, matching, step, wire_bytes
from live_memory import Held, LiveMemory
from netns import sent_bytes
from step_counter import StepCounter

MOVED: harness.Columns = {
    "params copied": ("parameter_bytes_copied", show_nbytes),
    "grads copied": ("gradient_bytes_copied", show_nbytes),
    "by gloo": ("backend_bytes_copied", show_nbytes),
    "copies / concat. / casts": ("operators", lambda found: " / ".join(str(count) for count, _ in found.values())),
    "calls": ("collectives", "d"),
    "wire": ("wire_bytes", show_nbytes),
    "as gloo does it": ("gloo_bytes", show_nbytes),
    "sent": ("sent_bytes", show_nbytes),
}


def _storages(key: str) -> tuple[str, Any]:
    return "new", lambda new: f"{new[key][0]}, {human_bytes(new[key][1])}"


HELD: harness.Columns = {
    "new, of parameters": _storages("parameters"),
    "of gradients": _storages("gradients"),
    "all": _storages("all"),
    "peak unsharded parameters": ("peak_parameters_share", ".3f"),
    "and gradients": ("peak_parameters_and_gradients_share", ".3f"),
    "allocated": ("peak_allocated_share", ".3f"),
    "total": ("peak_total_share", ".3f"),
    "step": ("step_peak", ".3f"),
    "step, live": ("step_live", ".3f"),
    "after backward": ("after_backward", ".3f"),
}


def run(arguments: argparse.Namespace) -> None:
    shape, rank = Shape.of(arguments), dist.get_rank()
    makes = {name: make for name, make in overlap.systems().items() if not re.search("agreement|compute", name)}
    whole = sum(p.nbytes for p in shape.model().parameters())
    figures = {}
    for name, make in matching(makes, arguments.only).items():
        say(f"counting: {name}")
        figures[name] = count(make(name, shape, Emulation(shape)), shape.tokens(rank), whole, arguments)
    if rank == 0:
        ranks = f"rank 0 of {arguments.fake}, collectives do nothing" if arguments.fake else f"{arguments.ranks} ranks"
        print(f"{ranks}; {arguments.blocks} blocks of width {arguments.width}, {human_bytes(whole)} of parameters\n")
        print(f"{harness.table(figures, MOVED)}\n\n{harness.table(figures, HELD)}")
        harness.save(arguments, "copies", figures=figures)


def count(system: System, tokens: torch.Tensor, whole: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one step on this rank.

    Args:
        whole: bytes of all unsharded parameters.
    """
    is_sharded = system.name != "DDP"
    for _ in range(2):
        step(system, tokens)
    parameters = [local(p) for p in system.module.parameters()]
    counter = StepCounter(parameters, sharded=is_sharded)
    memory = LiveMemory(parameters, arenas(system), whole=not is_sharded)
    sent = None if arguments.fake or arguments.no_limit else partial(sent_bytes, "eth0")
    before = sent() if sent else 0
    step(system, tokens, counter)
    sent_in_step = sent() - before if sent else None
    step(system, tokens, memory)
    counts, held, world_size = counter.counts(), memory.held(), dist.get_world_size()
    collectives = [(c.kind, c.nbytes) for c in counts.collectives]
    figures: dict[str, Any] = {
        "sent_bytes": sent_in_step,
        "parameter_bytes_copied": counts.parameter_bytes_copied,
        "gradient_bytes_copied": counts.gradient_bytes_copied,
        "backend_bytes_copied": counts.backend_bytes_copied,
        "operators": held.operators,
        "collectives": len(collectives),
        "wire_bytes": round(sum(wire_bytes(*c, world_size) for c in collectives)),
        "gloo_bytes": round(sum(wire_bytes(*c, world_size, gloo=True) for c in collectives)),
        "new": held.new,
        **held.peaks(),
        **{f"{key}_share": nbytes / whole for key, nbytes in held.peaks().items()},
        **step_bytes(held, parameters, whole),
    }
    return figures


def step_bytes(held: Held, parameters: list[torch.Tensor], whole: int) -> dict[str, float]:
    """Return the bytes of a step besides its shards, in units of ``whole`` bytes."""
    storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in parameters}
    shards = sum(storage.nbytes() for storage in storages.values())
    total = [nbytes - shards for nbytes in held.total]
    in_arenas = [p + g - o for p, g, o in zip(held.parameters, held.gradients, held.outside, strict=True)]
    live = [t - held.arena + a for t, a in zip(total, in_arenas, strict=True)]
    return {"step_peak": max(total) / whole, "step_live": max(live) / whole, "after_backward": total[-1] / whole}


def main() -> None:
    parser = harness.options(__doc__, rate=10e9)
    parser.add_argument("--fake", type=int, metavar="W", help="run as rank 0 of W in one process")
    arguments = parser.parse_args()
    if arguments.fake:
        harness.join_fake_ranks(arguments.fake)
        run(arguments)
    else:
        harness.run_on_ranks(__file__, arguments, run)


if __name__ == "__main__":
    main()
