"""Random orders of calls: the sharded model has the values of the unsharded one.

``-m long`` tries about 2,000 histories. A failure prints a call of :func:`replay` that reproduces it.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from garbage import leave_a_group
from history_runner import HistoryRunner
from random_histories import Action, Scenario, scenarios
from random_models import draw_numbered, options_of
from ranks import RankError, Ranks

TIMEOUT = timedelta(seconds=90)
"""How long a rank waits in a collective. Long, because other ranks may be compiling."""


def _fail_at(runners: list[HistoryRunner], history: tuple[Action, ...]) -> str | None:
    """Run a history from the initial parameters and return what went wrong on this rank, or ``None``."""
    for runner in runners:
        runner.reset()
    # The last backward also reduces what no_sync has left unreduced, so that the next history starts without it.
    closing = [
        Action(kind, loss_index=-1, seed=999, model_index=model_index)
        for model_index in range(len(runners))
        for kind in ("forward", "backward", "step")
    ]
    first: str | None = None
    for number, action in enumerate([*history, *closing]):
        runner = runners[action.model_index % len(runners)]
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
    for number, history in enumerate(scenario.histories):
        (folder / f"at-{rank}").write_text(f"history {number}")
        leave_a_group(TIMEOUT)
        failure = _fail_at(runners, history)
        if "bytes are too few" in (failure or ""):
            return ""
        everywhere: list[str | None] = [None] * world_size
        dist.all_gather_object(everywhere, failure, group=control)
        if failures := [f"rank {rank} {text}" for rank, text in enumerate(everywhere) if text]:
            return "\n".join([f"history {number}:", *failures])
    return ""


def replay(ranks: Ranks, scenario: Scenario) -> None:
    """Run a scenario that a failure has printed."""
    with tempfile.TemporaryDirectory(prefix="histories-") as folder:
        try:
            failure = ranks.run(run_scenario, scenario, Path(folder), timeout=900)[0]
        except RankError as error:
            at = sorted(f"rank {path.name[3:]} in {path.read_text()}" for path in Path(folder).glob("at-*"))
            failure = f"{at}: {error}"
    assert not failure, f"{failure}\nreplay(ranks, {scenario!r})"


_long = partial(pytest.param, marks=pytest.mark.long)


@pytest.mark.device
@pytest.mark.parametrize(
    ("world_size", "number", "histories"),
    [
        (2, 0, 10),
        *(_long(2, number, 60) for number in range(34)),
        *(_long(size, 100 * size + number, 40) for size in (3, 4, 8) for number in range(3)),
    ],
)
def test_any_order_of_calls_gives_the_values_of_the_unsharded_model(
    workers: Callable[[int], Ranks], world_size: int, number: int, histories: int
) -> None:
    replay(workers(world_size), draw_numbered(scenarios(histories=histories, world_size=world_size), number))
