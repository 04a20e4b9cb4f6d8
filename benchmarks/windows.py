"""Compare the time and the traffic of accumulation windows, on a rate-limited link.

    python benchmarks/windows.py --save windows          # root; 2 ranks, 1 Gbit/s, 4 micro-batches, emulated compute
    python benchmarks/windows.py --no-limit --blocks 1 --width 64 --compute 0.02 --rounds 2 --only 'zero2'    # no root

The systems train a GPT on gloo ranks as in ``overlap.py``, and take turns. A window is several micro-batches, of which all
but the last run under ``no_sync``. FSDP2 does the same with ``set_requires_gradient_sync(False)``; "kept" is
``set_reshard_after_backward(False)`` for them, which keeps parameters unsharded until the next micro-batch.

* Seconds: forward and backward of all micro-batches on the slowest rank, without the optimizer. Medians over rounds.
* Compute, communication: the unsharded window, and all collectives of the window of "ours zero2, each time" with nothing
  between them.
* Collectives: all-gathers, reduce-scatters, exchanges and all-reduces of a window, counted by the dispatcher, for each
  bucket or module that FSDP2 wraps.
* Sent: what the kernel counts on this rank's interface.
* Simulated: from the traces, with a link of this rate and compute as fast as the unsharded window's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

REFERENCE = "ours zero2, each time"
_COLLECTIVE = re.compile(r"allgather|alltoall|reduce_scatter|allreduce")


def main() -> None:
    from netns import run_on_ranks

    arguments = parse()
    run_on_ranks(__file__, arguments, run_rank, bits_per_second=arguments.rate)


def parse() -> argparse.Namespace:
    from netns import add_link_options

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_link_options(parser)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=16, help="bytes of text per rank and micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument(
        "--compute", type=float, nargs="+", default=[0.9, 0.45, 0.225], metavar="S", help="seconds to emulate for each"
    )
    parser.add_argument("--rounds", type=int, default=5, help="windows of each system")
    parser.add_argument("--only", metavar="REGEX", help=f"only matching systems, and {REFERENCE!r}")
    parser.add_argument("--save", type=Path, help="folder for all figures (windows.json)")
    return parser.parse_args()


def systems(only: str | None) -> dict[str, Callable[..., Any]]:
    """Return the function that builds each system, keyed by the system's name."""
    from systems import ours, overlapped_fsdp2

    again = {"reshard_after_backward": True}
    made: dict[str, Callable[..., Any]] = {
        REFERENCE: partial(ours, sharding_strategy="zero2", **again),
        "ours zero2": partial(ours, sharding_strategy="zero2"),
        "ours zero2, sharded": partial(ours, sharding_strategy="zero2", accumulate="sharded"),
        "ours zero3": partial(ours, sharding_strategy="zero3"),
        "ours zero3, sharded": partial(ours, sharding_strategy="zero3", accumulate="sharded"),
        "FSDP2 zero2": partial(overlapped_fsdp2, reshard=False),
        "FSDP2 zero2, kept": partial(overlapped_fsdp2, reshard=False),
        "FSDP2 zero3": partial(overlapped_fsdp2, reshard=True),
        "FSDP2 zero3, kept": partial(overlapped_fsdp2, reshard=True),
    }
    return {n: make for n, make in made.items() if n == REFERENCE or only is None or re.search(only, n)}


@contextlib.contextmanager
def micro_batch(system: Any, *, last: bool) -> Any:
    """Run a micro-batch of a system in this context."""
    from torch.distributed.fsdp import FSDPModule

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


def window(system: Any, batches: Sequence[Any]) -> float:
    """Run a window; return its seconds on this rank. The optimizer runs after it, untimed."""
    import torch.distributed as dist

    system.optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    started = time.perf_counter()
    for number, tokens in enumerate(batches):
        with micro_batch(system, last=number == len(batches) - 1):
            loss = system.module(tokens, tokens) / len(batches)
            loss.backward()
            system.losses.append(loss)
    system.after_backward()
    seconds = time.perf_counter() - started
    system.optimizer.step()
    system.losses[-len(batches) :] = [one.item() for one in system.losses[-len(batches) :]]
    return seconds


def traffic(system: Any, batches: Sequence[Any], interface: str) -> dict[str, float]:
    """Return the collectives of one window, for each bucket, and the bytes that this rank sends."""
    import torch.distributed as dist
    from netns import sent_bytes
    from torch.distributed.fsdp import FSDPModule
    from torch.utils._python_dispatch import TorchDispatchMode

    found: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                found[func._schema.name] += 1
            return func(*args, **(kwargs or {}))

    dist.barrier()
    before = sent_bytes(interface)
    with Counting():
        window(system, batches)
    sent = sent_bytes(interface) - before
    groups = (
        len(system.transform.plan)
        if system.transform
        else sum(isinstance(module, FSDPModule) for module in system.module.modules())
    )
    collectives = sum(n for name, n in found.items() if _COLLECTIVE.search(name))
    return {"collectives": collectives / groups, "megabytes": sent / 1e6}


def compiled_traces(system: Any) -> tuple[Any, Any]:
    """Return the traces of the micro-batches under ``no_sync``, and of the last one."""
    waiting, last = (next(c for c in system.transform.compiled if c.no_sync is no_sync) for no_sync in (True, False))
    return waiting, last


def only_communicate(system: Any, micro_batches: int) -> float:
    """Run only the collectives of a window that gathers in each micro-batch; return the seconds on this rank."""
    from systems import communicate

    waiting, last = compiled_traces(system)
    return sum(communicate(system, of) for of in [*[waiting] * (micro_batches - 1), last])


def simulated(system: Any, micro_batches: int, cost: Any) -> float:
    """Return the simulated seconds of a window."""
    from thunder_fsdp_sched.planning.simulate import simulate

    waiting, last = compiled_traces(system)
    first, later, end = (
        simulate(of.forward, of.backward, cost, in_window=in_window).step_seconds
        for of, in_window in ((waiting, False), (waiting, True), (last, True))
    )
    return first + (micro_batches - 2) * later + end


def run_rank(arguments: argparse.Namespace) -> None:
    import torch.distributed as dist
    from netns import join_ranks
    from systems import Emulation, Shape, System, interleave, say, unsharded

    rank, _ = join_ranks()
    shape = Shape(arguments.blocks, arguments.width, arguments.length)
    emulation = Emulation(shape)
    batches = [shape.tokens(100 * number + rank) for number in range(arguments.micro_batches)]
    interface = "lo" if arguments.no_limit else "eth0"
    built: dict[str, System] = {}
    counted: dict[str, dict[str, float]] = {}
    for name, make in {"compute": unsharded, **systems(arguments.only)}.items():
        say(f"building: {name}")
        built[name] = make(name, shape, emulation)
        window(built[name], batches)  # compiles
        if name != "compute":
            counted[name] = traffic(built[name], batches, interface)
    runs: dict[str, Callable[[], float]] = {n: partial(window, s, batches) for n, s in built.items()}
    runs["communication"] = partial(only_communicate, built[REFERENCE], arguments.micro_batches)
    results = []
    for seconds in arguments.compute:
        emulation.seconds = seconds
        of_one = interleave(runs, arguments.rounds, say)
        results.append(
            {"emulated": seconds, "seconds": of_one, "figures": figures_of(of_one, built, counted, arguments)}
        )
    if rank == 0:
        finish(arguments, results, {name: system.losses for name, system in built.items() if name != "compute"})
    dist.barrier()
    dist.destroy_process_group()


def figures_of(
    seconds: dict[str, list[float]], built: dict[str, Any], counted: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return for each system its seconds, its ratios to others (medians over rounds), its traffic and its prediction."""
    from thunder_fsdp_sched.planning.cost import AnalyticCost

    from systems import ratio, these_ranks

    shape = arguments.blocks, arguments.width, arguments.length
    rate = compute_rate(shape, statistics.median(seconds["compute"]) / arguments.micro_batches)
    cost = AnalyticCost(these_ranks(None if arguments.no_limit else arguments.rate, rate))
    peers = [steps for name, steps in seconds.items() if name.startswith("FSDP2")]
    figures = {}
    for name, steps in seconds.items():
        figures[name] = {"seconds": statistics.median(steps), "least": min(steps), "most": max(steps)}
        if name in counted:
            figures[name] |= counted[name] | {"of_reference": ratio(steps, seconds[REFERENCE])}
            if peers:
                fastest = min(peers, key=statistics.median)
                figures[name]["of_fsdp2"] = ratio(steps, fastest)
            if built[name].transform is not None:
                predicted = simulated(built[name], arguments.micro_batches, cost)
                figures[name]["simulated / measured"] = predicted / statistics.median(steps)
    return figures


def compute_rate(shape: tuple[int, int, int], seconds: float) -> float:
    """Return the FLOP/s at which a forward and a backward take these seconds."""
    from systems import Shape

    return Shape(*shape).flops / seconds


def finish(arguments: argparse.Namespace, results: list[dict[str, Any]], losses: dict[str, list[float]]) -> None:
    from netns import describe_link

    print(
        f"{arguments.ranks} gloo ranks, {describe_link(arguments)}; GPT with {arguments.blocks} blocks, width "
        f"{arguments.width}; {arguments.micro_batches} micro-batches of {arguments.length} bytes a rank; "
        f"{arguments.rounds} rounds"
    )
    for result in results:
        print(f"\n{result['emulated']} s of emulated compute for each micro-batch\n\n{table(result['figures'])}")
    spread = max(max(map(abs, _differences(of_one, losses[REFERENCE]))) for of_one in losses.values())
    print(f"\nLosses of all systems on this rank differ by {spread:.1g} at most.")
    assert spread < 1e-2, "the systems do not train alike"
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
        setup = {key: value for key, value in vars(arguments).items() if key != "save"}
        (arguments.save / "windows.json").write_text(json.dumps({"setup": setup, "results": results}, indent=1))


def _differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(ours, theirs, strict=True)]


_COLUMNS = ("seconds", "least", "most", "of_reference", "of_fsdp2", "collectives", "megabytes", "simulated / measured")


def table(figures: dict[str, dict[str, float]], columns: Sequence[str] = _COLUMNS) -> str:
    """Return the figures as a table in Markdown."""
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, of_one in figures.items():
        cells = ["" if column not in of_one else f"{of_one[column]:.3g}" for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
