"""Random lives of a model: whatever is called in whatever order, values are the unsharded model's, or every rank raises.

``--hypothesis-profile=long`` tries about 2,000 histories. A failure prints a call of :func:`replay`.
"""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from history_runner import Pair
from hypothesis import settings
from random_histories import Action, Deviation, Life, deviating, lives, numbered
from random_models import options_of
from ranks import RankError, Ranks

LONG = settings().max_examples > 100

TIMEOUT = timedelta(seconds=90)
"""For which a rank waits in a collective: others may be compiling."""


def _fail_at(pairs: list[Pair], history: tuple[Action, ...]) -> str | None:
    """Runs a history from the initial parameters on; what is wrong on this rank."""
    for pair in pairs:
        pair.reset()
    # The last backward also reduces what no_sync has left, so that nothing of it reaches the next history.
    closing = [
        Action(kind, which=-1, seed=999, who=who)
        for who in range(len(pairs))
        for kind in ("forward", "backward", "step")
    ]
    for number, action in enumerate([*history, *closing]):
        pair = pairs[action.who % len(pairs)]
        try:
            pair.do([action] * pair.world_size)
        except Exception:
            return f"at {number}: {action}\n{traceback.format_exc()}"
        if pair.mismatch:
            # The others may not have found it, so this rank continues with them.
            pair.fail("")
            first = f"at {number}: {action}\n{pair.mismatch}"
            _blindly(pairs, [*history, *closing][number + 1 :])
            return first
    for pair in pairs:
        pair.finish()
    return next((f"at the end: {pair.mismatch}" for pair in pairs if pair.mismatch), None)


def _blindly(pairs: list[Pair], actions: list[Action]) -> None:
    for action in actions:
        pairs[action.who % len(pairs)].do([action] * pairs[0].world_size)
    for pair in pairs:
        pair.finish()


def _anywhere(control: dist.ProcessGroup, failure: str | None) -> list[str]:
    """Return the failures of all ranks."""
    everywhere: list[str | None] = [None] * control.size()
    dist.all_gather_object(everywhere, failure, group=control)
    return [f"rank {rank} {text}" for rank, text in enumerate(everywhere) if text]


def _smaller(pairs: list[Pair], control: dist.ProcessGroup, history: tuple[Action, ...]) -> tuple[Action, ...]:
    """The history without actions that do not matter to the failure; as it is if it does not fail again."""
    if not _anywhere(control, _fail_at(pairs, history)):
        return history
    for at in reversed(range(len(history))):
        candidate = (*history[:at], *history[at + 1 :])
        if _anywhere(control, _fail_at(pairs, candidate)):
            history = candidate
    return history


def live(rank: int, world_size: int, life: Life, folder: Path) -> tuple[str, Life | None]:
    """Runs all histories of a life, with the traces that the first compile; the first failure, made small."""
    control = dist.new_group(timeout=2 * TIMEOUT)
    group = dist.new_group(timeout=TIMEOUT)
    specs = [life, replace(life, norm=False, other=(0,))][: 1 + life.second]
    pairs = []
    for number, spec in enumerate(specs):
        options = options_of(life.case, lambda: dist.new_group(timeout=TIMEOUT))
        pairs.append(Pair(spec, rank, world_size, folder=folder / str(number), process_group=group, **options))
    for number, history in enumerate(life.histories):
        (folder / f"at-{rank}").write_text(f"history {number}")
        try:
            failure = _fail_at(pairs, history)
        except Exception:
            failure = f"after a mismatch:\n{traceback.format_exc()}"
        if "bytes are too few" in (failure or ""):
            return "too few", None
        if failures := _anywhere(control, failure):
            text = "\n".join(failures)
            alone = _smaller(pairs, control, history)
            return text, replace(life, histories=(*life.histories[:number], history) if alone == history else (alone,))
    return "", None


def run(ranks: Ranks, life: Life) -> str:
    """Return the failure, empty if there is none."""
    folder = Path(tempfile.mkdtemp(prefix="lives-"))
    try:
        for text, smaller in ranks.run(live, life, folder, timeout=900):
            if smaller is not None:
                return f"{text}\nreplay(ranks, {smaller!r})"
    except RankError as error:
        at = sorted(f"rank {path.name[3:]} in {path.read_text()}" for path in folder.glob("at-*"))
        return f"{at}: {error}\nreplay(ranks, {life!r})"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""


def replay(ranks: Ranks, life: Life) -> None:
    """Runs a life as a failure has printed it."""
    assert not (failure := run(ranks, life)), failure


def _live_through(ranks: Ranks, numbers: range, histories: int) -> None:
    """Run lives, continue after failures, and report all of them."""
    failures: list[str] = []
    for number in numbers:
        life = numbered(lives(histories=histories, world_size=ranks.world_size), number)
        failure = run(ranks, life)
        print(
            f"life {number} of {histories} histories on {ranks.world_size} ranks: {'failed' if failure else 'right'}",
            flush=True,
        )
        if failure:
            failures.append(f"life {number} of {histories} histories on {ranks.world_size} ranks\n{failure}")
            print(failures[-1], flush=True)
    assert not failures, "\n\n".join([f"{len(failures)} of {len(numbers)} lives failed", *failures])


def test_what_is_computed_is_what_the_unsharded_model_computes(ranks: Ranks) -> None:
    _live_through(ranks, range(34) if LONG else range(3), 60)


@pytest.mark.skipif(not LONG, reason="many processes: --hypothesis-profile=long")
@pytest.mark.parametrize("world_size", [3, 4, 8])
def test_on_more_ranks(world_size: int) -> None:
    workers = Ranks(world_size)
    try:
        _live_through(workers, range(100 * world_size, 100 * world_size + 3), 40)
    finally:
        workers.close()


#
# One rank does something else
#

SHORT = timedelta(seconds=15)


def deviate(rank: int, world_size: int, life: Life, deviation: Deviation, folder: Path) -> str:
    """Runs one history in which one rank deviates; how it ended here: "right", "error: ..." or "wrong: ..."."""
    # A rank that skips a forward is one call behind: its next forward, of the same program, is what the others wait for.
    # If it has changed its rows in between, no rank can tell until calls of different kinds meet, which is before a step.
    skips = deviation.instead is None and not deviation.ends
    group = dist.new_group(timeout=SHORT)
    options = options_of(life.case, lambda: dist.new_group(timeout=SHORT))
    [history] = life.histories
    closing = (Action("forward", seed=999), Action("backward", which=-1), Action("step"))
    actions = [deviation.history_of(r, (*history, *closing)) for r in range(world_size)]
    at = "at thunder.jit"
    try:
        pair = Pair(life, rank, world_size, folder=folder, process_group=group, **options)
        pair.transform.sharded.agreement.timeout = SHORT
        for number, at_once in enumerate(zip(*actions, strict=True)):
            if deviation.ends and rank == deviation.rank and number >= deviation.at:
                break
            at = f"at {number}: {at_once[rank]}"
            (folder / f"at-{rank}").write_text(at)
            action = at_once[rank]
            if pair.mismatch and (not skips or (action is not None and action.kind == "step")):
                return f"wrong: before {at}\n{pair.mismatch}"
            pair.do(at_once)
        at = "at the end"
        pair.finish()
    except RuntimeError as error:
        return f"error: {at}: {type(error).__name__}: {error}"
    return f"wrong: {at}\n{pair.mismatch}" if pair.mismatch else "right"


def run_deviating(ranks: Ranks, life: Life, deviation: Deviation) -> tuple[str, str]:
    """How a history with a deviation ended, and what went wrong; empty if nothing did."""
    folder = Path(tempfile.mkdtemp(prefix="lives-"))
    call = f"replay_deviating(ranks, {life!r}, {deviation!r})"
    try:
        ends = ranks.run(deviate, life, deviation, folder, timeout=150)
    except RankError as error:  # no answer in time, or a process has died: -6 is SIGABRT
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


def replay_deviating(ranks: Ranks, life: Life, deviation: Deviation) -> None:
    """Runs a history with a deviation as a failure has printed it."""
    kind, failure = run_deviating(ranks, life, deviation)
    assert not failure, f"{kind}: {failure}"


def test_where_one_rank_deviates_results_are_right_or_every_rank_raises(ranks: Ranks) -> None:
    failures: list[str] = []
    kinds: Counter[str] = Counter()
    for number in range(60 if LONG else 3):
        kind, failure = run_deviating(ranks, *numbered(deviating(world_size=ranks.world_size), number))
        kinds[kind] += 1
        if failure:
            failures.append(f"{number}: {kind}: {failure}")
            print(failures[-1], flush=True)
    assert not failures, "\n\n".join([f"histories ended so: {dict(kinds)}", *failures])
