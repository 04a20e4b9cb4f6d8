"""Predicted against measured step time, on a link of a given rate between real ranks.

    python benchmarks/predicted_vs_measured.py [--ranks 2] [--rate 1e9] [--tokens 512]

Trains a GPT under ZeRO-2 and ZeRO-3 with prefetch 0, 1 and 2, each rank in a network namespace of its own, pinned to a core,
one thread. One profile is measured (ZeRO-3, prefetch 1); the simulator predicts all six steps from it. Measured steps of all
six take turns. A step is forward and backward without the optimizer, of the slowest rank. Needs root (see ``netns.py``).
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
        step_ahead()
    with Links(arguments.ranks, bits_per_second=arguments.rate) as links:
        print(links.run([sys.executable, "-W", "ignore", __file__, *sys.argv[1:]])[0], end="")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e9, help="bits/s that a rank can send")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=512, help="tokens a rank and step, in sequences of 256 at most")
    parser.add_argument("--rounds", type=int, default=7, help="measured steps of each configuration")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs for the profile")
    parser.add_argument("--save", type=Path, help="folder for the profile (profile.json) and all times (times.json)")
    parser.add_argument(
        "--ahead-of-others",
        action="store_true",
        help="take processor time before everybody else's processes, where others use this machine too",
    )
    return parser.parse_args()


def step_ahead() -> None:
    """Puts this process and its children into a scheduling group of their own, with the highest weight."""
    os.setsid()
    Path("/proc/self/autogroup").write_text("-19")


def run_rank(arguments: argparse.Namespace) -> None:
    import thunder_fsdp_sched
    from thunder_fsdp_sched.demo.model import GPT, VOCABULARY
    from thunder_fsdp_sched.measure import MeasuredCost, measure
    from thunder_fsdp_sched.simulate import simulate

    import thunder
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"], rank=rank, world_size=world_size)
    length = min(arguments.tokens, 256)
    tokens = torch.randint(0, VOCABULARY, (max(arguments.tokens // length, 1), length))

    jitted: dict[tuple[str, int], Any] = {}
    compiled = {}
    for strategy, prefetch in CONFIGURATIONS:
        torch.manual_seed(0)
        model = GPT(blocks=arguments.blocks, width=arguments.width, heads=6, length=length)
        transform = thunder_fsdp_sched.fsdp(sharding_strategy=strategy, prefetch=prefetch)
        jitted[strategy, prefetch] = thunder.jit(model, transforms=[transform])
        step(jitted[strategy, prefetch], tokens)
        compiled[strategy, prefetch] = transform.compiled[-1]

    times: dict[tuple[str, int], list[float]] = {c: [] for c in CONFIGURATIONS}
    half = (arguments.rounds + 1) // 2
    for round_ in range(arguments.rounds):
        if round_ == half:  # in the middle, so that a drift of the machine falls on both sides
            profile = measure(jitted["zero3", 1], tokens, tokens, repeats=arguments.repeats)
        for configuration, module in jitted.items():
            slowest = torch.tensor(step(module, tokens), dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[configuration].append(slowest.item())

    if rank == 0:
        if arguments.save:
            arguments.save.mkdir(parents=True, exist_ok=True)
            profile.save(arguments.save / "profile.json")
            (arguments.save / "times.json").write_text(json.dumps({" ".join(map(str, c)): t for c, t in times.items()}))
        cost = MeasuredCost(profile)
        parameters = sum(
            p.numel() for p in GPT(blocks=arguments.blocks, width=arguments.width, heads=6, length=length).parameters()
        )
        print(
            f"{world_size} ranks, {arguments.rate / 1e9:g} Gbit/s, GPT with {arguments.blocks} blocks and "
            f"{parameters / 1e6:.1f} M parameters, {tokens.numel()} tokens a rank; contention "
            + ", ".join(f"{kind.removeprefix('fsdp_')} {share:.0%}" for kind, share in profile.contention.items())
            + f"; {profile.concurrent} collectives at once, shares {profile.gather_share:.2f}, {profile.reduction_share:.2f}"
        )
        print(
            f"{'':15s} {'compute':>8s} {'comm':>8s} {'measured':>9s} {'min':>7s} {'max':>7s} {'predicted':>9s} {'ratio':>7s} {'exposed':>8s}"
        )
        for configuration, of_one in times.items():
            timeline = simulate(compiled[configuration].forward, compiled[configuration].backward, cost)
            measured = statistics.median(of_one)
            print(
                f"{configuration[0]} prefetch {configuration[1]} {timeline.compute_seconds:8.3f} "
                f"{sum(timeline.communication_seconds.values()):8.3f} {measured:9.3f} {min(of_one):7.3f} {max(of_one):7.3f} "
                f"{timeline.step_seconds:9.3f} {timeline.step_seconds / measured:7.3f} {timeline.exposed_seconds:8.3f}"
            )
    dist.barrier()
    dist.destroy_process_group()


def step(module: Any, tokens: Any) -> float:
    """Seconds of one forward and backward on this rank."""
    import torch.distributed as dist

    module.zero_grad(set_to_none=True)
    dist.barrier()
    started = time.perf_counter()
    module(tokens, tokens).backward()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
