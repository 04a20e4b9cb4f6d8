"""Compare predicted and measured step times, on a rate-limited link between real ranks.

    python benchmarks/predicted_vs_measured.py                      # real compute
    python benchmarks/predicted_vs_measured.py --emulate 0.9        # matrix multiplications sleep, 0.9 s in total

The benchmark trains a GPT with ZeRO-2 and ZeRO-3 and with prefetch 0, 1 and 2. Each rank runs with one thread, is pinned
to a core, and has its own network namespace. The simulator predicts all six step times from one measured profile (ZeRO-3,
prefetch 1). The six configurations take turns. A step is forward and backward without the optimizer, on the slowest rank.
The benchmark needs root (see ``netns.py``) and takes some minutes, most of them for compiling six times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

CONFIGURATIONS = [(strategy, prefetch) for strategy in ("zero2", "zero3") for prefetch in (0, 1, 2)]


def main() -> None:
    arguments = parse()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    from netns import Links, why_not

    reason = why_not()
    if reason is not None:
        sys.exit(f"cannot measure on a rate-limited link: {reason}")
    if arguments.ahead_of_others:
        os.setsid()  # a separate scheduling group
    with Links(arguments.ranks, bits_per_second=arguments.rate) as links:
        command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:]]
        print(links.run(command, timeout=arguments.timeout)[0], end="")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e9, help="bits/s that a rank can send")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per rank and step, in sequences of 256 at most")
    parser.add_argument("--emulate", type=float, metavar="SECONDS", help="sleep instead of multiplying matrices")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each configuration")
    parser.add_argument("--repeats", type=int, default=4, help="measured runs for the profile")
    parser.add_argument("--save", type=Path, help="folder for the profile (profile.json) and all times (times.json)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds until a rank counts as hanging")
    parser.add_argument(
        "--ahead-of-others",
        action="store_true",
        help="while measuring (not while compiling), run at a higher priority than other processes",
    )
    return parser.parse_args()


def run_rank(arguments: argparse.Namespace) -> None:
    import thunder_fsdp_sched
    from thunder_fsdp_sched.reports.profiler import measure

    import thunder
    import torch
    import torch.distributed as dist
    from netns import join_ranks
    from systems import Emulation, Shape

    rank, world_size = join_ranks()
    count = 16 if arguments.emulate else arguments.tokens
    length = min(count, 256)
    shape = Shape(arguments.blocks, arguments.width, length, max(count // length, 1))
    tokens, emulation = shape.tokens(), Emulation(shape)
    emulation.seconds = arguments.emulate or 0.0

    jitted: dict[tuple[str, int], Any] = {}
    for strategy, prefetch in CONFIGURATIONS:
        model = shape.model()
        parameters = sum(p.numel() for p in model.parameters())
        transforms = [thunder_fsdp_sched.fsdp(sharding_strategy=strategy, prefetch=prefetch)]
        if arguments.emulate:
            transforms.append(emulation.transform())
        jitted[strategy, prefetch] = thunder.jit(model, transforms=transforms)
        step(jitted[strategy, prefetch], tokens)

    autogroup = Path("/proc/self/autogroup")
    dist.barrier()
    if arguments.ahead_of_others:
        autogroup.write_text("-19")
    times: dict[tuple[str, int], list[tuple[float, float]]] = {c: [] for c in CONFIGURATIONS}
    for round_ in range(arguments.rounds):
        if round_ == arguments.rounds // 2:  # in the middle, so that a drift of the machine affects both halves
            profile = measure(jitted["zero3", 1], tokens, tokens, repeats=arguments.repeats)
        for configuration, module in jitted.items():
            slowest = torch.tensor(step(module, tokens), dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            forward, whole = slowest.tolist()
            times[configuration].append((forward, whole))
    if arguments.ahead_of_others:
        autogroup.write_text("0")

    if rank == 0:
        if arguments.save:
            arguments.save.mkdir(parents=True, exist_ok=True)
            profile.save(arguments.save / "profile.json")
            (arguments.save / "times.json").write_text(json.dumps({" ".join(map(str, c)): t for c, t in times.items()}))
        compute = f"{arguments.emulate} s of emulated compute" if arguments.emulate else f"{count} tokens a rank"
        shares = [f"{kind.removeprefix('fsdp_')} {share:.0%}" for kind, share in profile.contention.items()]
        print(
            f"{world_size} ranks, {arguments.rate / 1e9:g} Gbit/s, GPT with {arguments.blocks} blocks and "
            f"{parameters / 1e6:.1f} M parameters, {compute}\n"
            f"contention: {', '.join(shares)}; {profile.concurrent} collectives of a group at once; share of the link: "
            f"{profile.gather_share:.2f} for an all-gather, {profile.reduction_share:.2f} for a reduction\n"
        )
        report(profile, jitted, times)
    dist.barrier()
    dist.destroy_process_group()


def step(module: Any, tokens: Any) -> tuple[float, float]:
    """Run one step; return the seconds of forward, and of forward and backward, on this rank."""
    import torch.distributed as dist

    module.zero_grad(set_to_none=True)
    dist.barrier()
    started = time.perf_counter()
    loss = module(tokens, tokens)
    forward = time.perf_counter() - started
    loss.backward()
    return forward, time.perf_counter() - started


def report(
    profile: Any, jitted: dict[tuple[str, int], Any], times: dict[tuple[str, int], list[tuple[float, float]]]
) -> None:
    """Print a line for each configuration: compute and communication by the profile, measured times, the prediction."""
    from thunder_fsdp_sched.planning.simulate import simulate
    from thunder_fsdp_sched.reports.profiler import MeasuredCost

    import thunder

    titles = ("compute", "comm", "measured", "least", "most", "predicted", "ratio", "forward's", "exposed")
    print(f"{'seconds':17s}" + "".join(f"{title:>10s}" for title in titles))
    for (strategy, prefetch), of_one in times.items():
        module = jitted[strategy, prefetch]
        traces = thunder.last_traces(module)[-1], thunder.last_backward_traces(module)[-1]
        timeline = simulate(*traces, MeasuredCost(profile))
        steps = [whole for _, whole in of_one]
        forward = max(i.end for i in timeline.intervals if i.trace == 0)
        figures = (
            timeline.compute_seconds,
            sum(timeline.communication_seconds.values()),
            statistics.median(steps),
            min(steps),
            max(steps),
            timeline.step_seconds,
            timeline.step_seconds / statistics.median(steps),
            forward / statistics.median(forward for forward, _ in of_one),
            timeline.exposed_seconds,
        )
        print(f"{strategy} prefetch {prefetch} " + "".join(f"{figure:10.3f}" for figure in figures))


if __name__ == "__main__":
    main()
