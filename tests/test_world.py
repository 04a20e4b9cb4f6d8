"""The world: any history of calls gives the values of the unsharded model, whether ranks make the same calls or differ.

The short run draws other worlds each day, by the date in the environment variable ``WORLD_SEED``. A failure prints the call
that draws the same world, and a test with the smallest one that fails. ``-m long`` tries about 2,000 histories, and
``world.py`` is a command that runs any number.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from thunder_fsdp_sched import Sharding

import pytest
from random_models import BlockSpec, ModelSpec
from ranks import Ranks
from world import WINDOW, Action, Call, World
from world_draws import drawn
from world_replay import IMPORTS, replay, replay_drawn

_long = partial(pytest.param, marks=pytest.mark.long)

forward, in_window, backward = partial(Action, "forward"), partial(Action, "forward", WINDOW), Action("backward")

FOUND = {
    "no rank has a batch in the backward that ends a window": (
        in_window(calls=(0, 0)),
        backward,
        forward(calls=(None, None)),
        backward,
    ),
    "a parameter that only an unused output needs, in a micro-batch of ranks that differ": (
        in_window(calls=(2, 3)),
        backward,
        forward(calls=(2, None)),
        backward,
    ),
}
"""Histories that were wrong once."""

_linear = BlockSpec("linear", 1, False, True)


@pytest.mark.parametrize("accumulate", [_long("unsharded"), "sharded"])
def test_histories_that_were_wrong(ranks: Ranks, accumulate: str) -> None:
    replay(
        ranks,
        World(
            ModelSpec(2, (_linear, _linear), (), (), False),
            {"sharding_strategy": Sharding(), "accumulate": accumulate},
            ways=((0,), (1, 0)),
            calls=(Call(0), Call(1), Call(0, outputs=(0,)), Call(1, outputs=(0,))),
            hooks=True,
            histories=tuple(FOUND.values()),
        ),
    )


@pytest.mark.parametrize("alike", [pytest.param(True, marks=pytest.mark.device), False], ids=["alike", "differing"])
def test_the_world_of_today(ranks: Ranks, alike: bool) -> None:
    replay_drawn(ranks, int(os.environ["WORLD_SEED"]), histories=5, alike=alike)


@pytest.mark.long
@pytest.mark.parametrize("alike", [pytest.param(True, marks=pytest.mark.device), False], ids=["alike", "differing"])
@pytest.mark.parametrize(
    ("world_size", "seed"),
    [
        *((2, seed) for seed in range(32)),
        *((size, 100 * size + seed) for size in (3, 4) for seed in range(8)),
        (8, 800),
    ],
)
def test_any_history_gives_the_values_of_the_unsharded_model(
    workers: Callable[[int], Ranks], world_size: int, seed: int, alike: bool
) -> None:
    replay_drawn(workers(world_size), seed, histories=20, alike=alike)


def test_what_a_failure_prints_makes_the_world_anew() -> None:
    names: dict[str, Any] = {}
    exec(IMPORTS, names)
    for seed in range(20):
        world = drawn(seed, ranks=4, histories=2, alike=seed % 2 == 0)
        assert eval(repr(world), names) == world
