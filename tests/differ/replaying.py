"""Replay of histories of ranks that differ: on worker processes, with the stacks of all ranks if they hang."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
from device import DEVICE
from differing_runner import DifferingRunner, half_of
from histories import DifferingScenario, RankAction, differing_scenarios, is_final
from history_replay import TIMEOUT, fail_at, failure_of, failure_of_histories, replay_scenario, smaller
from random_models import draw_numbered, options_of
from ranks import worker_pool
from torch.distributed.device_mesh import init_device_mesh


def _fail_at(runners: list[DifferingRunner], history: tuple[RankAction, ...]) -> str | None:
    """Run a history from the initial parameters and return what went wrong on this rank, or ``None``."""
    # The last backward also reduces what no_sync has left unreduced, so that the next history starts without it.
    closing: list[RankAction] = []
    ends_early = bool(history) and is_final(history[-1])
    if not ends_early:
        forward = RankAction("forward", seed=999, calls=(0,) * dist.get_world_size())
        closing = [
            replace(action, model_index=model_index)
            for model_index in range(len(runners))
            for action in (forward, RankAction("backward", loss_index=-1), RankAction("step"))
        ]
    return fail_at(runners, [*history, *closing], lambda runner: not ends_early and runner.scenario.experts is None)


def run_scenario(rank: int, world_size: int, scenario: DifferingScenario, folder: Path) -> str:
    """Run all histories of a scenario on one jitted model, which compiles each call once; return the first failure."""
    control = dist.new_group(timeout=2 * TIMEOUT)
    group = dist.new_group(timeout=TIMEOUT)
    options = options_of(scenario.case, lambda: dist.new_group(timeout=TIMEOUT), world_size)
    if scenario.replicas:
        mesh = init_device_mesh(DEVICE.type, (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
        options["ranks"] = replace(options["ranks"], mesh=mesh)
    else:
        options["ranks"] = replace(options["ranks"], process_group=group)
    if not scenario.alike:
        options["ranks_may_differ"] = True
    if scenario.experts is not None:
        halves = [
            dist.new_group(list(half), timeout=TIMEOUT)
            for half in (half_of(0, world_size), half_of(world_size - 1, world_size))
        ]
        half = halves[rank in half_of(world_size - 1, world_size)]
        experts = f"blocks.{scenario.experts}."
        in_half = lambda name, param: half if name.startswith(experts) else None  # noqa: E731
        options["ranks"] = replace(options["ranks"], process_group_for=in_half)
    runners = [
        DifferingRunner(scenario, folder=folder / str(number), **options) for number in range(1 + scenario.second)
    ]
    for one, other in zip(runners, reversed(runners), strict=True):
        one.other = other
    failing = partial(_fail_at, runners)
    return failure_of_histories(rank, scenario.histories, failing, control=control, folder=folder)


replay = partial(replay_scenario, run_scenario=run_scenario)
"""Run a scenario that a failure has printed."""


def main() -> None:
    """Run many histories and print the seeds of those that pass, and what fails."""
    parser = argparse.ArgumentParser(description="Random histories of ranks that differ")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", default="0:100", help="first and last (exclusive) history")
    parser.add_argument("--of-a-model", type=int, default=10, help="number of histories that share a compiled model")
    parser.add_argument("--alike", action="store_true", help="all ranks do the same, without the option")
    parser.add_argument("--shrink", type=float, default=0, help="seconds to search for a smaller failure")
    given = parser.parse_args()
    first, last = map(int, given.seeds.split(":"))
    right, wrong, size = 0, [], given.of_a_model
    with worker_pool() as workers:
        for seed in range(first, last, size):
            strategy = differing_scenarios(histories=size, world_size=given.ranks, alike=given.alike)
            scenario = draw_numbered(strategy, 1000 * given.ranks + seed // size)
            start = time.monotonic()
            failure = failure_of(workers(given.ranks), run_scenario, scenario, timeout=600)
            seconds = f"{time.monotonic() - start:.1f} s"
            if failure:
                wrong.append(seed)
                scenario = smaller(workers(given.ranks), scenario, run_scenario, seconds=given.shrink)
                print(
                    f"seeds {seed}:{seed + size} FAILED, {seconds}\n{failure}\nreplay(ranks, {scenario!r})", flush=True
                )
            else:
                right += size
                print(f"seeds {seed}:{seed + size} right, {seconds}", flush=True)
    print(f"{given.ranks} ranks: {right} histories right, models with a failure begin at seeds {wrong}")
    raise SystemExit(bool(wrong))
