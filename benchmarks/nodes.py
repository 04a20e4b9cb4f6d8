"""Compare the traffic between nodes and the time of a step if backward gathers within a node, on a rate-limited link.

    python benchmarks/nodes.py --save nodes      # root; 2 nodes of 2 ranks, 1 Gbit/s between them, emulated compute

The systems train a GPT on gloo ranks as in ``overlap.py``, and take turns. Two ranks of a node share a network namespace and
reach each other without a limit. "within nodes" is ``reshard_after_forward=2``, ours and FSDP2's.

* Seconds: forward and backward on the slowest rank, without the optimizer. Medians over rounds.
* Sent: what the kernel counts on the interface of the first node in one step, in megabytes.
* Peak: the predicted memory of a step of ours, in megabytes.
* Simulated: from the traces, with links of this rate between nodes and compute as fast as the unsharded step's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

RANKS_PER_NODE = 2
WITHIN = ", within nodes"
_COLUMNS = ("seconds", "least", "most", "of ours zero3", "sent", "peak", "simulated / measured")


def main() -> None:
    from netns import add_link_options, run_on_ranks

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_link_options(parser)
    parser.set_defaults(ranks=2 * RANKS_PER_NODE)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=16, help="bytes of text per rank and step")
    parser.add_argument(
        "--compute", type=float, nargs="+", default=[0.9, 0.3], metavar="S", help="seconds to emulate for each step"
    )
    parser.add_argument("--rounds", type=int, default=5, help="steps of each system")
    parser.add_argument("--save", type=Path, help="folder for all figures (nodes.json)")
    arguments = parser.parse_args()
    run_on_ranks(__file__, arguments, run_rank, bits_per_second=arguments.rate, ranks_per_node=RANKS_PER_NODE)


def systems() -> dict[str, Callable[..., Any]]:
    """Return the function that builds each system, keyed by the system's name."""
    from systems import ours, overlapped_fsdp2

    return {
        "ours zero3": partial(ours, sharding_strategy="zero3"),
        f"ours zero3{WITHIN}": partial(ours, sharding_strategy="zero3", reshard_after_forward=RANKS_PER_NODE),
        "FSDP2 zero3": partial(overlapped_fsdp2, reshard=True),
        f"FSDP2 zero3{WITHIN}": partial(overlapped_fsdp2, reshard=RANKS_PER_NODE),
    }


def sent_in_step(system: Any, tokens: Any, interface: str) -> float:
    """Return the megabytes that this node sends to others in one step."""
    import torch.distributed as dist
    from netns import sent_bytes
    from systems import step

    dist.barrier()
    before = sent_bytes(interface)
    step(system, tokens)
    dist.barrier()
    return (sent_bytes(interface) - before) / 1e6


def run_rank(arguments: argparse.Namespace) -> None:
    import torch.distributed as dist
    from netns import join_ranks
    from systems import Emulation, Shape, interleave, say, step, unsharded

    rank, _ = join_ranks()
    shape = Shape(arguments.blocks, arguments.width, arguments.length)
    emulation = Emulation(shape)
    tokens = shape.tokens(rank)
    built: dict[str, Any] = {}
    sent: dict[str, float] = {}
    for name, make in {"compute": unsharded, **systems()}.items():
        say(f"building: {name}")
        built[name] = make(name, shape, emulation)
        step(built[name], tokens)  # compiles
        if name != "compute":
            sent[name] = sent_in_step(built[name], tokens, "lo" if arguments.no_limit else "eth0")
    results = []
    for seconds in arguments.compute:
        emulation.seconds = seconds
        runs = {name: partial(step, system, tokens) for name, system in built.items()}
        of_one = interleave(runs, arguments.rounds, say)
        results.append({"emulated": seconds, "seconds": of_one, "figures": figures_of(of_one, built, sent, arguments)})
    if rank == 0:
        finish(arguments, results, {name: system.losses for name, system in built.items() if name != "compute"})
    dist.barrier()
    dist.destroy_process_group()


def figures_of(
    seconds: dict[str, list[float]], built: dict[str, Any], sent: dict[str, float], arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return for each system its seconds, its ratio to ours, its traffic, its memory and its prediction."""
    from thunder_fsdp_sched.planning.clusters import cluster
    from thunder_fsdp_sched.planning.cost import AnalyticCost
    from thunder_fsdp_sched.planning.simulate import simulate

    import torch
    from systems import Shape, ratio

    spec, shape = cluster("cpu-2core"), Shape(arguments.blocks, arguments.width, arguments.length)
    between = {} if arguments.no_limit else {"inter_node_bandwidth": arguments.rate / 8 / RANKS_PER_NODE}
    flops = {torch.float32: shape.flops / statistics.median(seconds["compute"]) / spec.efficiency.flops}
    cost = AnalyticCost(
        dataclasses.replace(spec, name="these nodes", devices_per_node=RANKS_PER_NODE, flops=flops, **between)
    )
    figures = {}
    for name, steps in seconds.items():
        figures[name] = {"seconds": statistics.median(steps), "least": min(steps), "most": max(steps)}
        if name in sent:
            figures[name] |= {"sent": sent[name], "of ours zero3": ratio(steps, seconds["ours zero3"])}
        if (transform := built[name].transform) is not None:
            compiled = transform.compiled[-1]
            predicted = simulate(compiled.traces, None, cost).step_seconds
            figures[name]["simulated / measured"] = predicted / statistics.median(steps)
            figures[name]["peak"] = compiled.memory.peak.nbytes / 1e6
    return figures


def finish(arguments: argparse.Namespace, results: list[dict[str, Any]], losses: dict[str, list[float]]) -> None:
    from netns import describe_link
    from windows import table

    print(
        f"{arguments.ranks} gloo ranks, {RANKS_PER_NODE} in a node; {describe_link(arguments)} between nodes; GPT with "
        f"{arguments.blocks} blocks, width {arguments.width}; {arguments.length} bytes a rank; {arguments.rounds} rounds"
    )
    for result in results:
        print(f"\n{result['emulated']} s of emulated compute\n\n{table(result['figures'], _COLUMNS)}")
    reference = losses["ours zero3"]
    spread = max(abs(a - b) for of_one in losses.values() for a, b in zip(of_one, reference, strict=True))
    print(f"\nLosses of all systems on this rank differ by {spread:.1g} at most.")
    assert spread < 1e-2, "the systems do not train alike"
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
        setup = {key: value for key, value in vars(arguments).items() if key != "save"}
        (arguments.save / "nodes.json").write_text(json.dumps({"setup": setup, "results": results}, indent=1))


if __name__ == "__main__":
    main()
