"""Compare predicted and measured step times, on a rate-limited link between real ranks.

    sudo python benchmarks/predicted_vs_measured.py                                # real compute
    sudo python benchmarks/predicted_vs_measured.py --compute 0.9 --length 16      # matrix multiplications sleep
    python benchmarks/predicted_vs_measured.py --no-limit --blocks 1 --width 64 --length 16 --rounds 2    # no root

The benchmark trains a GPT with ZeRO-2 and ZeRO-3 and with prefetch 0, 1 and 2 on gloo ranks, as in ``overlap.py``. The
simulator predicts all six step times from one measured profile (ZeRO-3, prefetch 1). The six configurations take turns. A
step is forward and backward without the optimizer, on the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from thunder_fsdp_sched.planning.simulate import simulate
from thunder_fsdp_sched.reports.profiler import MeasuredCost
from thunder_fsdp_sched.reports.profiler import measure as measure_profile

import harness
import torch.distributed as dist
from harness import say, summary
from systems import Emulation, Make, Shape, build, measure, ours, step

PROFILED = "ZeRO-3, prefetch 1"

COLUMNS: harness.Columns = {
    "compute": ("compute", ".3f"),
    "communication": ("communication", ".3f"),
    "exposed": ("exposed", ".3f"),
    **harness.STEP,
    "predicted": ("predicted", ".3f"),
    "predicted / measured": ("ratio", ".2f"),
}


def run(arguments: argparse.Namespace) -> None:
    shape = Shape.of(arguments)
    emulation, tokens = Emulation(shape), shape.tokens()
    makes: dict[str, Make] = {
        f"ZeRO-{stage}, prefetch {prefetch}": partial(ours, sharding_strategy=f"zero{stage}", prefetch=prefetch)
        for stage in (2, 3)
        for prefetch in (0, 1, 2)
    }
    built = build(makes, shape, emulation, partial(step, tokens=tokens))
    say("measuring a profile")
    emulation.seconds = arguments.compute[0]
    profile = measure_profile(built[PROFILED].module, tokens, tokens, repeats=arguments.repeats)

    def figures_of(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
        figures = {}
        for name, steps in seconds.items():
            compiled = built[name].transform.compiled[-1]
            timeline = simulate(compiled.forward, compiled.backward, MeasuredCost(profile))
            figures[name] = summary(steps) | {
                "compute": timeline.compute_seconds,
                "communication": sum(timeline.communication_seconds.values()),
                "exposed": timeline.exposed_seconds,
                "predicted": timeline.step_seconds,
                "ratio": timeline.step_seconds / statistics.median(steps),
            }
        return figures

    runs = {name: partial(step, system, tokens) for name, system in built.items()}
    results = measure(arguments, emulation, runs, figures_of)
    if dist.get_rank() == 0:
        losses = {name: system.losses for name, system in built.items()}
        harness.report(arguments, "predicted_vs_measured", results, COLUMNS, losses)
        shares = ", ".join(f"{kind.removeprefix('fsdp_')} {share:.0%}" for kind, share in profile.contention.items())
        print(
            f"contention: {shares}; {profile.concurrent} collectives of a group at once; share of the link: "
            f"{profile.gather_share:.2f} for an all-gather, {profile.reduction_share:.2f} for a reduction"
        )
        if arguments.save:
            profile.save(arguments.save / "profile.json")


if __name__ == "__main__":
    parser = harness.options(__doc__, length=512, compute=[0.0], rounds=5)
    parser.add_argument("--repeats", type=int, default=4, help="measured runs for the profile")
    parsed = parser.parse_args()
    if len(parsed.compute) != 1:
        parser.error("--compute: one profile is of one speed of compute")
    harness.run_on_ranks(__file__, parsed, run)
