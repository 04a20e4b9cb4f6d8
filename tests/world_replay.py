"""Replay of worlds on worker processes: the failures of all ranks, stacks if they hang, and a smaller world that fails."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from device import DEVICE
from garbage import leave_a_group
from random_models import options_of
from ranks import RankError, Ranks, worker_pool
from torch.distributed.device_mesh import init_device_mesh
from world import Action, World
from world_draws import drawn
from world_run import half_of
from world_runner import WorldRunner

TIMEOUT = timedelta(seconds=float(os.environ.get("WORLD_TIMEOUT", "90")))
"""How long a rank waits in a collective. Long, because other ranks may be compiling."""

SHRINK = float(os.environ.get("WORLD_SHRINK", "120"))
"""How many seconds to search for a smaller failure."""

IMPORTS = """
from thunder_fsdp_sched import CommPolicy, Debug, Ranks, Sharding
import torch
from random_models import BlockSpec, ModelSpec
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from world import Action, Call, Mode, World
from world_draws import drawn
from world_replay import replay
"""
"""The imports of a printed test."""


def fail_at(runners: Sequence[WorldRunner], history: Sequence[Action]) -> str | None:
    """Run a history from the initial parameters and return what went wrong on this rank, or ``None``."""
    leave_a_group(TIMEOUT)
    for runner in runners:
        runner.reset()
    # The last backward also reduces what no_sync has left unreduced, so that the next history starts without it.
    closing = [
        Action(kind, seed=999, model_index=model_index)
        for model_index in range(len(runners))
        for kind in ("forward", "backward", "step")
        if not (history and history[-1].is_final)
    ]
    first: str | None = None
    for number, action in enumerate([*history, *closing]):
        runner = runners[action.model_index]
        try:
            runner.run_action(action)
        except Exception:
            return first or f"at {number}: {action}\n{traceback.format_exc()}"
        if runner.mismatch and first is None:
            # Other ranks may not have found a mismatch. Continue, because they need this rank in their collectives.
            first = f"at {number}: {action}\n{runner.mismatch}"
    for runner in runners:
        runner.finish()
    return first or next((f"at the end: {runner.mismatch}" for runner in runners if runner.mismatch), None)


def run_world(rank: int, world_size: int, world: World, folder: Path) -> str:
    """Run histories until one fails on some rank, and return its failures on all ranks; empty if all are right.

    They share a jitted model, which compiles each call once.

    Args:
        folder: where each rank writes the number of its history.
    """
    control = dist.new_group(timeout=2 * TIMEOUT)  # in which ranks exchange failures
    group = dist.new_group(timeout=TIMEOUT)
    leave_a_group(TIMEOUT)  # before the others shard, so that it has created what they share
    options = options_of(world.case, lambda: dist.new_group(timeout=TIMEOUT), world_size)
    if world.replicas:
        mesh = init_device_mesh(DEVICE.type, (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
        options["ranks"] = replace(options["ranks"], mesh=mesh)
    else:
        options["ranks"] = replace(options["ranks"], process_group=group)
    if world.experts is not None:
        halves = [dist.new_group(list(half_of(first, world_size)), timeout=TIMEOUT) for first in (0, world_size - 1)]
        half = halves[rank in half_of(world_size - 1, world_size)]
        in_half = lambda name, param: half if name.startswith(f"blocks.{world.experts}.") else None  # noqa: E731
        options["ranks"] = replace(options["ranks"], process_group_for=in_half)
    if not world.alike:
        options["ranks_may_differ"] = True
    runners = [WorldRunner(world, folder=folder / str(number), **options) for number in range(1 + world.second)]
    for one, other in zip(runners, reversed(runners), strict=True):
        one.other = other
    for number, history in enumerate(world.histories):
        (folder / f"at-{rank}").write_text(f"history {number}")
        failure = fail_at(runners, history)
        everywhere: list[str | None] = [None] * world_size
        dist.all_gather_object(everywhere, failure, group=control)
        if failures := [f"rank {rank} {text}" for rank, text in enumerate(everywhere) if text]:
            return "\n".join([f"history {number}:", *failures])
    return ""


def failure_of(ranks: Ranks, world: World, *, timeout: float | None = None) -> str:
    """Run a world and return what went wrong, with the stacks of all ranks if they hang.

    By default, ranks count as hanging after 40 seconds for each history, so the output comes before the time limit of a
    test.
    """
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        try:
            limit = timeout or 40 * len(world.histories)
            return ranks.run(run_world, world, Path(folder), timeout=limit)[0]
        except RankError as error:
            at = sorted(f"rank {path.name[3:]} in {path.read_text()}" for path in Path(folder).glob("at-*"))
            return f"{at}: {error}"


def _smaller(world: World) -> Iterator[World]:
    """Yield worlds that are smaller: with one history, without an action, a disturbance, an option or a difference."""
    if len(world.histories) > 1:
        yield from (replace(world, histories=(history,)) for history in reversed(world.histories))
        return
    (history,) = world.histories
    for length in (8, 4, 2, 1):
        for start in reversed(range(0, len(history), length)):
            yield replace(world, histories=(history[:start] + history[start + length :],))
    yield replace(world, histories=(tuple(replace(action, slow=None, collects=()) for action in history),))
    for name in set(world.options) - {"sharding_strategy"}:
        yield replace(world, options={key: value for key, value in world.options.items() if key != name})
    for default in ({"hooks": False}, {"secondary": None}, {"groups": ()}, {"optimizer": "sgd"}, {"replicas": False}):
        yield replace(world, **default)


def _hangs(failure: str) -> bool:
    return "hung: no answer" in failure


def smallest(ranks: Ranks, world: World, failure: str, *, seconds: float) -> World:
    """Return the smallest world that was found within some seconds and fails as well.

    One that hangs counts only if the first does: a slow machine would make any world that small.
    """
    end, tried = time.monotonic() + seconds, [world]
    smaller = _smaller(world)
    while time.monotonic() < end and (candidate := next(smaller, None)):
        if candidate not in tried:
            tried.append(candidate)
            found = failure_of(ranks, candidate, timeout=120)
            if found and _hangs(found) == _hangs(failure):
                world, smaller = candidate, _smaller(candidate)
    return world


def replay(ranks: Ranks, world: World, *, origin: str = "", seconds: float = SHRINK) -> None:
    """Run a world, and if it fails, print a test with the smallest world that fails as well.

    Args:
        origin: the expression that has made the world.
        seconds: how long to search for a smaller world.
    """
    if failure := failure_of(ranks, world):
        small, size = smallest(ranks, world, failure, seconds=seconds), ranks.world_size
        drawn_by = [f"def test_drawn(workers):\n    replay(workers({size}), {origin})\n"] if origin else []
        found = f"def test_found(workers):  # the smallest world that was found\n    replay(workers({size}), {small!r})"
        raise AssertionError("\n".join([failure, IMPORTS, *drawn_by, found]))


def replay_drawn(ranks: Ranks, seed: int, *, histories: int, alike: bool = False, seconds: float = SHRINK) -> None:
    """Draw the world of a seed and run it; see :func:`replay`."""
    given = {"ranks": ranks.world_size, "histories": histories, "alike": alike}
    origin = f"drawn({seed}, {', '.join(f'{name}={value}' for name, value in given.items())})"
    replay(ranks, drawn(seed, **given), origin=origin, seconds=seconds)


def main() -> None:
    """Run many histories, and print the seeds of those that pass, and the failures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", default="0:100", help="first and last (exclusive) seed of a world")
    parser.add_argument("--histories", type=int, default=10, help="number of histories that share a compiled model")
    parser.add_argument("--alike", action="store_true", help="all ranks run the same blocks, without the option")
    parser.add_argument("--shrink", type=float, default=0, help="seconds to search for a smaller failure")
    given = parser.parse_args()
    wrong, seeds = [], range(*map(int, given.seeds.split(":")))
    with worker_pool() as workers:
        for seed in seeds:
            start = time.monotonic()
            try:
                replay_drawn(
                    workers(given.ranks), seed, histories=given.histories, alike=given.alike, seconds=given.shrink
                )
            except AssertionError as error:
                wrong.append(seed)
                print(error)
            verdict = "FAILED" if seed in wrong else "right"
            print(f"seed {seed} {verdict}, {time.monotonic() - start:.1f} s", flush=True)
    print(f"{given.ranks} ranks: {len(seeds) - len(wrong)} worlds of {len(seeds)} right, those that fail: {wrong}")
    raise SystemExit(bool(wrong))
