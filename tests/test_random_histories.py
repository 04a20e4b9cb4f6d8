"""Random orders of calls: the sharded model has the values of the unsharded one, or every rank raises.

``-m long`` tries about 2,000 histories. A failure prints a call of :func:`replay` that reproduces it.
"""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from history_runner import HistoryRunner
from random_histories import Action, Deviation, Scenario, deviating_scenarios, scenarios
from random_models import draw_numbered, examples, options_of
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
    for number, action in enumerate([*history, *closing]):
        runner = runners[action.model_index % len(runners)]
        try:
            runner.run_actions([action] * runner.world_size)
        except Exception:
            return f"at {number}: {action}\n{traceback.format_exc()}"
        if runner.mismatch:
            # Other ranks may not have found a mismatch. Continue, because they need this rank in their collectives.
            runner.fail("")
            first = f"at {number}: {action}\n{runner.mismatch}"
            _continue(runners, [*history, *closing][number + 1 :])
            return first
    for runner in runners:
        runner.finish()
    return next((f"at the end: {runner.mismatch}" for runner in runners if runner.mismatch), None)


def _continue(runners: list[HistoryRunner], actions: list[Action]) -> None:
    for action in actions:
        runners[action.model_index % len(runners)].run_actions([action] * runners[0].world_size)
    for runner in runners:
        runner.finish()


def _failures_of_all_ranks(control: dist.ProcessGroup, failure: str | None) -> list[str]:
    """Return the failures of all ranks."""
    everywhere: list[str | None] = [None] * control.size()
    dist.all_gather_object(everywhere, failure, group=control)
    return [f"rank {rank} {text}" for rank, text in enumerate(everywhere) if text]


def _shortened(
    runners: list[HistoryRunner], control: dist.ProcessGroup, history: tuple[Action, ...]
) -> tuple[Action, ...]:
    """Remove actions that the failure does not need. Return ``history`` itself if it does not fail a second time."""
    if not _failures_of_all_ranks(control, _fail_at(runners, history)):
        return history
    for at in reversed(range(len(history))):
        candidate = (*history[:at], *history[at + 1 :])
        if _failures_of_all_ranks(control, _fail_at(runners, candidate)):
            history = candidate
    return history


def run_scenario(rank: int, world_size: int, scenario: Scenario, folder: Path) -> tuple[str, Scenario | None]:
    """Run all histories of a scenario on one jitted model, which compiles once for each mode.

    Returns the first failure, and a scenario that reproduces it with a shortened history.
    """
    control = dist.new_group(timeout=2 * TIMEOUT)
    group = dist.new_group(timeout=TIMEOUT)
    variants = [scenario, replace(scenario, norm=False, other=(0,))][: 1 + scenario.second]
    runners = []
    for number, variant in enumerate(variants):
        options = options_of(scenario.case, lambda: dist.new_group(timeout=TIMEOUT), world_size)
        runners.append(HistoryRunner(variant, folder=folder / str(number), process_group=group, **options))
    for number, history in enumerate(scenario.histories):
        (folder / f"at-{rank}").write_text(f"history {number}")
        try:
            failure = _fail_at(runners, history)
        except Exception:
            failure = f"after a mismatch:\n{traceback.format_exc()}"
        if "bytes are too few" in (failure or ""):
            return "too few", None
        if failures := _failures_of_all_ranks(control, failure):
            text = "\n".join(failures)
            alone = _shortened(runners, control, history)
            return text, replace(
                scenario, histories=(*scenario.histories[:number], history) if alone == history else (alone,)
            )
    return "", None


def failure_of(ranks: Ranks, scenario: Scenario) -> str:
    """Return how a scenario failed, or an empty string."""
    folder = Path(tempfile.mkdtemp(prefix="histories-"))
    try:
        for text, smaller in ranks.run(run_scenario, scenario, folder, timeout=900):
            if smaller is not None:
                return f"{text}\nreplay(ranks, {smaller!r})"
    except RankError as error:
        at = sorted(f"rank {path.name[3:]} in {path.read_text()}" for path in folder.glob("at-*"))
        return f"{at}: {error}\nreplay(ranks, {scenario!r})"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""


def replay(ranks: Ranks, scenario: Scenario) -> None:
    """Run a scenario that a failure has printed."""
    assert not (failure := failure_of(ranks, scenario)), failure


_long = partial(pytest.param, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("world_size", "number", "histories"),
    [
        (2, 0, 20),
        *(_long(2, number, 60) for number in range(34)),
        *(_long(size, 100 * size + number, 40) for size in (3, 4, 8) for number in range(3)),
    ],
)
def test_any_order_of_calls_gives_the_values_of_the_unsharded_model(
    workers: Callable[[int], Ranks], world_size: int, number: int, histories: int
) -> None:
    replay(workers(world_size), draw_numbered(scenarios(histories=histories, world_size=world_size), number))


#
# One rank deviates
#

SHORT = timedelta(seconds=15)


def deviate(rank: int, world_size: int, scenario: Scenario, deviation: Deviation, folder: Path) -> str:
    """Run a history in which one rank deviates; return how it ended here: "right", "error: ..." or "wrong: ..."."""
    # A rank that skips a forward is one call late: its next forward, of the same program, meets their current one.
    # If its rows have changed in between, no rank can tell until calls of different kinds meet, which is before a step.
    skips = deviation.instead is None and not deviation.ends
    group = dist.new_group(timeout=SHORT)
    options = options_of(scenario.case, lambda: dist.new_group(timeout=SHORT), world_size)
    [history] = scenario.histories
    closing = (Action("forward", seed=999), Action("backward", loss_index=-1), Action("step"))
    actions = [deviation.history_of(r, (*history, *closing)) for r in range(world_size)]
    at = "at thunder.jit"
    try:
        runner = HistoryRunner(scenario, folder=folder, process_group=group, **options)
        for number, at_once in enumerate(zip(*actions, strict=True)):
            if deviation.ends and rank == deviation.rank and number >= deviation.position:
                break
            at = f"at {number}: {at_once[rank]}"
            (folder / f"at-{rank}").write_text(at)
            action = at_once[rank]
            if runner.mismatch and (not skips or (action is not None and action.kind == "step")):
                return f"wrong: before {at}\n{runner.mismatch}"
            runner.run_actions(at_once)
        at = "at the end"
        runner.finish()
    except RuntimeError as error:
        return f"error: {at}: {type(error).__name__}: {error}"
    return f"wrong: {at}\n{runner.mismatch}" if runner.mismatch else "right"


def outcome_of(ranks: Ranks, scenario: Scenario, deviation: Deviation) -> tuple[str, str]:
    """Return how a history with a deviation ended, and what went wrong, an empty string if nothing did."""
    folder = Path(tempfile.mkdtemp(prefix="histories-"))
    call = f"replay_deviating(ranks, {scenario!r}, {deviation!r})"
    try:
        ends = ranks.run(deviate, scenario, deviation, folder, timeout=150)
    except RankError as error:  # no answer in time, or a process has died (exit code -6 is SIGABRT)
        at = sorted(f"rank {path.name[3:]} {path.read_text()}" for path in folder.glob("at-*"))
        kind = "abort" if "exit code -6" in str(error) else "hang" if "hung" in str(error) else "crash"
        return kind, "\n".join([*at, str(error), call])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if any("bytes are too few" in end for end in ends):
        return "too few", ""
    if any(end.startswith("wrong") for end in ends):
        kind = "wrong"
    elif all(end == "right" for end in ends):
        return "right", ""
    elif all(end.startswith("error") for end in ends):
        return "error", ""
    else:
        kind = "error on some ranks"
    return kind, "\n".join([*(f"rank {rank} {end}" for rank, end in enumerate(ends)), call])


def replay_deviating(ranks: Ranks, scenario: Scenario, deviation: Deviation) -> None:
    """Run a history with a deviation that a failure has printed."""
    kind, failure = outcome_of(ranks, scenario, deviation)
    assert not failure, f"{kind}: {failure}"


@examples(3, 57)
def test_if_one_rank_deviates_results_are_right_or_every_rank_raises(ranks: Ranks, number: int) -> None:
    replay_deviating(ranks, *draw_numbered(deviating_scenarios(world_size=ranks.world_size), number))
