"""Replay of histories: on worker processes, with the failures of all ranks, and their stacks if they hang."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from history_runner import HistoryRunner
from random_models import TOO_FEW_BYTES, without_limit
from ranks import RankError, Ranks

TIMEOUT = timedelta(seconds=float(os.environ.get("HISTORIES_TIMEOUT", "90")))
"""How long a rank waits in a collective. Long, because other ranks may be compiling."""

SHRINK = float(os.environ.get("HISTORIES_SHRINK", "120"))
"""How many seconds to search for a smaller failure."""


def fail_at(
    runners: Sequence[HistoryRunner],
    actions: Iterable[Any],
    finishes: Callable[[Any], bool] = lambda runner: True,
) -> str | None:
    """Run actions from the initial parameters and return what went wrong on this rank, or ``None``.

    Args:
        finishes: whether a runner compares once more after all actions.
    """
    for runner in runners:
        runner.reset()
    first: str | None = None
    for number, action in enumerate(actions):
        runner = runners[action.model_index % len(runners)]
        try:
            runner.run_action(action)
        except Exception:
            return first or f"at {number}: {action}\n{traceback.format_exc()}"
        if runner.mismatch and first is None:
            # Other ranks may not have found a mismatch. Continue, because they need this rank in their collectives.
            first = f"at {number}: {action}\n{runner.mismatch}"
    for runner in filter(finishes, runners):
        runner.finish()
    return first or next((f"at the end: {runner.mismatch}" for runner in runners if runner.mismatch), None)


def failure_of_histories(
    rank: int, histories: Iterable[Any], failing: Callable[[Any], str | None], *, control: Any, folder: Path
) -> str:
    """Run histories until one fails on some rank, and return its failures on all ranks; empty if all are right.

    Args:
        failing: runs one history and returns what went wrong on this rank, or ``None``.
        control: a process group of all ranks in which they exchange failures.
        folder: where each rank writes the number of its history.
    """
    for number, history in enumerate(histories):
        (folder / f"at-{rank}").write_text(f"history {number}")
        failure = failing(history)
        if TOO_FEW_BYTES in (failure or ""):
            return TOO_FEW_BYTES
        everywhere: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, failure, group=control)
        if failures := [f"rank {rank} {text}" for rank, text in enumerate(everywhere) if text]:
            return "\n".join([f"history {number}:", *failures])
    return ""


def failure_of(ranks: Ranks, run_scenario: Callable[..., str], scenario: Any, *, timeout: float) -> str:
    """Run a scenario and return what went wrong, with the stacks of all ranks if they hang.

    A scenario whose limit of bytes is refused runs without it, so that none counts as passed without having run.
    """
    with tempfile.TemporaryDirectory(prefix="histories-") as folder:
        try:
            failure = ranks.run(run_scenario, scenario, Path(folder), timeout=timeout)[0]
        except RankError as error:
            at = sorted(f"rank {path.name[3:]} in {path.read_text()}" for path in Path(folder).glob("at-*"))
            return f"{at}: {error}"
    if failure == TOO_FEW_BYTES:
        return failure_of(ranks, run_scenario, without_limit(scenario), timeout=timeout)
    return failure


def smaller(ranks: Ranks, scenario: Any, run_scenario: Callable[..., str], *, seconds: float) -> Any:
    """Return a scenario with fewer histories and actions that fails as well, found within some seconds."""
    end = time.monotonic() + seconds

    def fails(history: tuple[Any, ...]) -> bool:
        left = end - time.monotonic()
        tried = replace(scenario, histories=(history,))
        return left > 0 and bool(failure_of(ranks, run_scenario, tried, timeout=min(left, 120)))

    history = next((each for each in reversed(scenario.histories) if fails(each)), None)
    if history is None:  # not without the histories before it, or not again
        return scenario
    for position in reversed(range(len(history))):
        if fails(without := history[:position] + history[position + 1 :]):
            history = without
    return replace(scenario, histories=(history,))


def replay_scenario(ranks: Ranks, scenario: Any, run_scenario: Callable[..., str]) -> None:
    """Run a scenario, and if it fails, search for a smaller one and print it as a call of ``replay``."""
    if failure := failure_of(ranks, run_scenario, scenario, timeout=900):
        scenario = smaller(ranks, scenario, run_scenario, seconds=SHRINK)
        raise AssertionError(f"{failure}\nreplay(ranks, {scenario!r})")
