"""Random histories of ranks that differ: gradients and parameters are those of the unsharded model.

``-m long`` tries about 300 histories; ``histories.py`` is a command that runs any number. A failure prints a call of
:func:`replay` that reproduces it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from thunder_fsdp_sched import Sharding

import pytest
from histories import Call, DifferingScenario, RankAction, differing_scenarios
from random_histories import WINDOW, Mode
from random_models import BlockSpec, ModelSpec, draw_numbered
from ranks import Ranks
from replaying import replay

_long = partial(pytest.param, marks=pytest.mark.long)

forward, in_window = partial(RankAction, "forward"), partial(RankAction, "forward", mode=1)
backward = RankAction("backward", loss_index=-1)

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


@pytest.mark.parametrize("accumulate", [pytest.param("unsharded", marks=pytest.mark.long), "sharded"])
def test_histories_that_were_wrong(ranks: Ranks, accumulate: str) -> None:
    linear = BlockSpec("linear", 1, False, True)
    replay(
        ranks,
        DifferingScenario(
            ModelSpec(2, (linear, linear), (), (), False),
            {"sharding_strategy": Sharding(), "accumulate": accumulate},
            modes=(Mode(), WINDOW),
            ways=((0,), (1, 0)),
            calls=(Call(0), Call(1), Call(0, outputs=(0,)), Call(1, outputs=(0,))),
            hooks=True,
            histories=tuple(FOUND.values()),
        ),
    )


@pytest.mark.parametrize(
    ("world_size", "number", "histories"),
    [_long(2, 9, 4), _long(2, 21, 12), *(_long(size, number, 20) for size in (2, 3, 4) for number in range(5))],
)
def test_ranks_that_differ_have_the_gradients_of_the_unsharded_model(
    workers: Callable[[int], Ranks], world_size: int, number: int, histories: int
) -> None:
    strategy = differing_scenarios(histories=histories, world_size=world_size)
    replay(workers(world_size), draw_numbered(strategy, 1000 * world_size + number))
