"""Random orders of calls: the sharded model has the values of the unsharded one.

``-m long`` tries about 2,000 histories. A failure prints a call of :func:`replay` that reproduces it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from garbage import leave_a_group
from history_replay import TIMEOUT, fail_at, failure_of_histories, replay_scenario
from history_runner import HistoryRunner
from random_histories import Action, Scenario, scenarios
from random_models import draw_numbered, options_of
from ranks import Ranks


def _fail_at(runners: list[HistoryRunner], history: tuple[Action, ...]) -> str | None:
    """Run a history from the initial parameters and return what went wrong on this rank, or ``None``."""
    leave_a_group(TIMEOUT)
    # The last backward also reduces what no_sync has left unreduced, so that the next history starts without it.
    closing = [
        Action(kind, loss_index=-1, seed=999, model_index=model_index)
        for model_index in range(len(runners))
        for kind in ("forward", "backward", "step")
    ]
    return fail_at(runners, [*history, *closing])


def run_scenario(rank: int, world_size: int, scenario: Scenario, folder: Path) -> str:
    """Run all histories of a scenario on one jitted model, which compiles once for each mode; return the first failure."""
    control = dist.new_group(timeout=2 * TIMEOUT)
    group = dist.new_group(timeout=TIMEOUT)
    leave_a_group(TIMEOUT)  # before the others shard, so that it has created what they share
    variants = [scenario, replace(scenario, norm=False, other=(0,))][: 1 + scenario.second]
    runners = []
    for number, variant in enumerate(variants):
        options = options_of(scenario.case, lambda: dist.new_group(timeout=TIMEOUT), world_size)
        options["ranks"] = replace(options["ranks"], process_group=group)
        runners.append(HistoryRunner(variant, folder=folder / str(number), **options))
    failing = partial(_fail_at, runners)
    return failure_of_histories(rank, scenario.histories, failing, control=control, folder=folder)


replay = partial(replay_scenario, run_scenario=run_scenario)
"""Run a scenario that a failure has printed."""


_long = partial(pytest.param, marks=pytest.mark.long)


@pytest.mark.device
@pytest.mark.parametrize(
    ("world_size", "number", "histories"),
    [
        (2, 0, 6),
        *(_long(2, number, 60) for number in range(34)),
        *(_long(size, 100 * size + number, 40) for size in (3, 4, 8) for number in range(3)),
    ],
)
def test_any_order_of_calls_gives_the_values_of_the_unsharded_model(
    workers: Callable[[int], Ranks], world_size: int, number: int, histories: int
) -> None:
    replay(workers(world_size), draw_numbered(scenarios(histories=histories, world_size=world_size), number))
