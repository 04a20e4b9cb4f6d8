"""Compare the time and the traffic of accumulation windows, and of steps on two nodes, on a rate-limited link.

    sudo python benchmarks/windows.py --save windows              # 2 ranks, 1 Gbit/s, 4 micro-batches, emulated compute
    sudo python benchmarks/windows.py --nodes --save nodes        # 2 nodes of 2 ranks, 1 Gbit/s between them, one batch
    python benchmarks/windows.py --no-limit --blocks 1 --width 64 --compute 0.02 --rounds 2 --only 'zero2'    # no root

The systems train a GPT on gloo ranks as in ``overlap.py``, and take turns. A window is several micro-batches, of which all
but the last run under ``no_sync``. FSDP2 does the same with ``set_requires_gradient_sync(False)``; "kept" is
``set_reshard_after_backward(False)`` for them, which keeps parameters unsharded until the next micro-batch.

With ``--nodes``, a step has one batch, and two ranks of a node share a network namespace and reach each other without a
limit. "Within nodes" is ``Sharding(secondary_ranks=2)``, and FSDP2's ``reshard_after_forward=2``: backward gathers within a
node.

* Seconds: forward and backward of all micro-batches on the slowest rank, without the optimizer. Medians over rounds.
* Of ours: the ratio to the first of ours. Of FSDP2: the ratio to the fastest FSDP2.
* Compute, communication: the unsharded window, and all collectives of the window of the first of ours with nothing
  between them.
* Collectives: all-gathers, reduce-scatters, exchanges and all-reduces of a window, counted by the dispatcher, for each
  bucket or module that FSDP2 wraps.
* Sent: what the kernel counts on this node's interface.
* Peak: the predicted memory of a step of ours.
* Simulated: from the traces, with a link of this rate and compute as fast as the unsharded window's.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from thunder_fsdp_sched import Sharding
from thunder_fsdp_sched.extras.planning.cost import AnalyticCost
from thunder_fsdp_sched.extras.planning.simulate import simulate

import harness
import torch
import torch.distributed as dist
from harness import ratio, summary
from systems import (
    Emulation,
    Make,
    Shape,
    System,
    build,
    communicate,
    local,
    matching,
    measure,
    ours,
    overlapped_fsdp2,
    these_ranks,
    unsharded,
)
from netns import sent_bytes
from step_counter import StepCounter
from torch.distributed.fsdp import FSDPModule

MICRO_BATCHES, RANKS_PER_NODE = 4, 2
REFERENCE = "ours zero2, each time"

COLUMNS = harness.STEP | {
    "of ours": ("of_reference", ".3g"),
    "of FSDP2": ("of_fsdp2", ".3g"),
    "collectives": ("collectives", ".3g"),
    "MB sent": ("megabytes", ".3g"),
    "peak MB": ("peak", ".3g"),
    "simulated / measured": ("simulated / measured", ".2f"),
}


def window_systems() -> dict[str, Make]:
    """Return the function that builds each system of windows, keyed by the system's name."""
    return {
        REFERENCE: partial(ours, sharding_strategy=Sharding("zero2", reshard_after_backward=True)),
        "ours zero2": partial(ours, sharding_strategy="zero2"),
        "ours zero2, sharded": partial(ours, sharding_strategy="zero2", accumulate="sharded"),
        "ours zero3": partial(ours, sharding_strategy="zero3"),
        "ours zero3, sharded": partial(ours, sharding_strategy="zero3", accumulate="sharded"),
        "FSDP2 zero2": partial(overlapped_fsdp2, reshard=False),
        "FSDP2 zero2, kept": partial(overlapped_fsdp2, reshard=False),
        "FSDP2 zero3": partial(overlapped_fsdp2, reshard=True),
        "FSDP2 zero3, kept": partial(overlapped_fsdp2, reshard=True),
    }


def node_systems() -> dict[str, Make]:
    """Return the function that builds each system of steps on nodes, keyed by the system's name."""
    return {
        "ours zero3": partial(ours, sharding_strategy="zero3"),
        "ours zero3, within nodes": partial(ours, sharding_strategy=Sharding("zero3", secondary_ranks=RANKS_PER_NODE)),
        "FSDP2 zero3": partial(overlapped_fsdp2, reshard=True),
        "FSDP2 zero3, within nodes": partial(overlapped_fsdp2, reshard=RANKS_PER_NODE),
    }


@contextlib.contextmanager
def micro_batch(system: System, *, last: bool) -> Iterator[None]:
    """Run a micro-batch of a system in this context."""
    module = system.module
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        module.set_reshard_after_backward(last or "kept" not in system.name)
        yield
    elif last or system.transform is None:
        yield
    else:
        with module.no_sync():
            yield


def window(system: System, batches: Sequence[torch.Tensor]) -> float:
    """Run a window; return its seconds on this rank. The optimizer runs after it, untimed."""
    system.optimizer.zero_grad(set_to_none=True)
    losses = []
    dist.barrier()
    started = time.perf_counter()
    for number, tokens in enumerate(batches):
        with micro_batch(system, last=number == len(batches) - 1):
            loss = system.module(tokens, tokens) / len(batches)
            loss.backward()
            losses.append(loss)
    system.after_backward()
    seconds = time.perf_counter() - started
    system.optimizer.step()
    system.losses += [loss.item() for loss in losses]
    return seconds


def traffic(system: System, batches: Sequence[torch.Tensor], interface: str) -> dict[str, float]:
    """Return the collectives of one window, for each bucket, and the bytes that this node sends."""
    counter = StepCounter([local(p) for p in system.module.parameters()])
    dist.barrier()
    before = sent_bytes(interface)
    with counter:
        window(system, batches)
    dist.barrier()
    sent = sent_bytes(interface) - before
    wrapped = sum(isinstance(module, FSDPModule) for module in system.module.modules())
    groups = len(system.transform.plan) if system.transform else wrapped
    collectives = [c.kind for c in counter.counts().collectives if c.kind != "barrier"]
    return {"collectives": len(collectives) / groups, "megabytes": sent / 1e6}


def compiled_traces(system: System, micro_batches: int) -> list[Any]:
    """Return the traces of each micro-batch of a window."""
    compiled = {one.no_sync: one for one in system.transform.compiled}
    return [compiled[number < micro_batches - 1] for number in range(micro_batches)]


def only_communicate(system: System, micro_batches: int) -> float:
    """Run only the collectives of a window that gathers in each micro-batch; return the seconds on this rank."""
    return sum(communicate(system, traces) for traces in compiled_traces(system, micro_batches))


def simulated(system: System, micro_batches: int, cost: Any) -> float:
    """Return the simulated seconds of a window."""
    return sum(
        simulate(of.forward, of.backward, cost, in_window=number > 0).step_seconds
        for number, of in enumerate(compiled_traces(system, micro_batches))
    )


def run(arguments: argparse.Namespace) -> None:
    shape = Shape.of(arguments)
    emulation, rank = Emulation(shape), dist.get_rank()
    micro_batches = 1 if arguments.nodes else MICRO_BATCHES
    batches = [shape.tokens(100 * number + rank) for number in range(micro_batches)]
    makes = node_systems() if arguments.nodes else window_systems()
    reference = next(iter(makes))
    makes = matching({"compute": unsharded, **makes}, arguments.only, "compute", reference)
    built = build(makes, shape, emulation, partial(window, batches=batches))
    interface = "lo" if arguments.no_limit else "eth0"
    counted = {name: traffic(s, batches, interface) for name, s in built.items() if name != "compute"}
    runs = {name: partial(window, system, batches) for name, system in built.items()}
    if not arguments.nodes:
        runs["communication"] = partial(only_communicate, built[reference], micro_batches)

    def figures_of(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
        rate = micro_batches * shape.flops / statistics.median(seconds["compute"])
        per_node = RANKS_PER_NODE if arguments.nodes else 1
        cost = AnalyticCost(these_ranks(arguments, rate, ranks_per_node=per_node))
        peers = [steps for name, steps in seconds.items() if name.startswith("FSDP2")]
        fastest = min(peers, key=statistics.median, default=None)
        figures = {}
        for name, steps in seconds.items():
            figures[name] = summary(steps)
            if name not in counted:
                continue
            figures[name] |= counted[name] | {"of_reference": ratio(steps, seconds[reference])}
            if fastest is not None:
                figures[name]["of_fsdp2"] = ratio(steps, fastest)
            if built[name].transform is not None:
                predicted = simulated(built[name], micro_batches, cost)
                figures[name]["simulated / measured"] = predicted / statistics.median(steps)
                figures[name]["peak"] = built[name].transform.compiled[-1].memory.peak.nbytes / 1e6
        return figures

    results = measure(arguments, emulation, runs, figures_of)
    if rank == 0:
        name = "nodes" if arguments.nodes else "windows"
        harness.report(arguments, name, results, COLUMNS, {name: built[name].losses for name in counted})


def main() -> None:
    parser = harness.options(__doc__, blocks=4, width=512, compute=None, rounds=5)
    parser.add_argument("--nodes", action="store_true", help="compare steps on two nodes instead of windows")
    arguments = parser.parse_args()
    if arguments.nodes:
        arguments.ranks = 2 * RANKS_PER_NODE
    if arguments.compute is None:
        arguments.compute = [0.9, 0.3] if arguments.nodes else [0.9, 0.45, 0.225]
    per_node = RANKS_PER_NODE if arguments.nodes else 1
    harness.run_on_ranks(__file__, arguments, run, ranks_per_node=per_node)


if __name__ == "__main__":
    main()
