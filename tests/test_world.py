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

from thunder_fsdp_sched import Sharding, fsdp, testing
from thunder_fsdp_sched.planning import compile_as_rank

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from memory_count import TWICE, compare, count_on_fake_ranks
from profiles import with_long
from random_models import BlockSpec, Calling, Case, ModelSpec, RandomModel, cases, draw_numbered, examples, options_of
from ranks import Ranks, on_ranks
from scenario import Run
from world import EVALUATION, WINDOW, Action, Call, Mode, World
from world_draws import drawn
from world_replay import IMPORTS, replay, replay_drawn

forward, in_window, evaluate = (partial(Action, "forward", mode) for mode in (Mode(), WINDOW, EVALUATION))
backward, step, zero_grad = Action("backward"), Action("step"), Action("zero_grad", value=1)

FIRST, SECOND, SIDE = 2, 3, 4
"""Calls of which the loss uses the first output, of one block and of both, and the second output, which one block gives."""

HISTORIES = {
    # Histories that were wrong once.
    "no rank has a batch in the backward that ends a window": [
        *(in_window(calls=(0, 0)), backward),
        *(forward(calls=(None, None)), backward),
    ],
    "a parameter that only an unused output needs, in a micro-batch of ranks that differ": [
        *(in_window(calls=(FIRST, SECOND)), backward),
        *(forward(calls=(FIRST, None)), backward),
    ],
    # Others that few worlds draw, or that are sharp.
    "a block that the last micro-batch skips": [
        *(in_window(calls=(1, 1)), backward, forward(calls=(0, 0)), backward, step, zero_grad),
        *(in_window(calls=(0, 0)), backward, forward(calls=(1, 1)), backward, step, zero_grad),
    ],
    "micro-batches without a block on some ranks, or without a batch": [
        *(in_window(calls=(1, 0)), backward, in_window(calls=(0, None)), backward),
        *(forward(calls=(None, 0)), backward, step, zero_grad),
        *(in_window(calls=(None, 1)), backward, forward(calls=(0, None)), backward, step, zero_grad),
    ],
    "outputs without a gradient on one rank": [
        *(in_window(calls=(SECOND, SECOND)), backward, forward(calls=(SECOND, SIDE)), backward, step, zero_grad),
        *(in_window(calls=(FIRST, SIDE)), backward, forward(calls=(SIDE, SECOND)), backward, step, zero_grad),
        *(in_window(calls=(SIDE, None)), backward, forward(calls=(SIDE, SIDE)), backward, step),
    ],
    "changed in a window, or a forward fails": [
        *(in_window(calls=(0, 0)), backward, Action("add"), in_window(calls=(0, 0)), backward, Action("add", value=1)),
        *(Action("fail_forward", WINDOW, calls=(0, 0)), Action("fail_forward", WINDOW, calls=(1, 1))),
        *(in_window(calls=(1, 0)), backward, forward(calls=(0, 0)), backward, step, zero_grad),
        *(in_window(calls=(0, 0)), backward, Action("scale"), in_window(calls=(0, 0)), backward, Action("scale")),
        *(forward(calls=(1, 0)), backward, step),
    ],
    "other parameters for a forward between another one and its backward": [
        *(forward(calls=(0, 0)), Action("scale"), evaluate(calls=(0, 0)), Action("scale"), backward, step, zero_grad),
        *(forward(calls=(1, 1)), Action("scale"), forward(calls=(1, 1)), Action("fail_forward", calls=(0, 0))),
        *(Action("scale"), Action("backward", loss_index=0), Action("drop"), step, zero_grad),
    ],
}
"""Histories that a run seldom draws. It often draws those in ``world_draws.PHRASES``."""

OPTIONS: dict[str, dict[str, Any]] = {
    "zero2, one bucket": {"sharding_strategy": Sharding("zero2"), "bucketing_strategy": 1 << 14},
    "zero3, reduced in each micro-batch": {"sharding_strategy": Sharding(), "accumulate": "sharded"},
    "zero3": {"sharding_strategy": Sharding()},
}

_linear = BlockSpec("linear", 1, False, True)


@pytest.mark.parametrize("options", with_long(OPTIONS, "zero3"))
def test_named_histories(ranks: Ranks, options: str) -> None:
    replay(
        ranks,
        World(
            ModelSpec(2, (_linear, _linear), (), (), False),
            OPTIONS[options],
            ways=((0,), (1, 0)),
            calls=(Call(0), Call(1), Call(0, outputs=(0,)), Call(1, outputs=(0,)), Call(1, outputs=(1,))),
            hooks=True,
            histories=tuple(map(tuple, HISTORIES.values())),
        ),
    )


alike_or_differing = pytest.mark.parametrize(
    "alike", [pytest.param(True, marks=pytest.mark.device), False], ids=["alike", "differing"]
)


@alike_or_differing
def test_the_world_of_today(ranks: Ranks, alike: bool) -> None:
    replay_drawn(ranks, int(os.environ["WORLD_SEED"]), histories=5, alike=alike)


@pytest.mark.long
@alike_or_differing
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


#
# Random models without histories
#


def _transform(case: Case, world_size: int) -> Any:
    others = partial(dist.new_group, list(range(world_size)), group_desc="others")
    return fsdp(**options_of(case, others, world_size))


SIZES = st.sampled_from([1, 2, 3, 4, 8, 64])


@examples(5, 155)
def test_every_promise_holds_on_fake_ranks(number: int) -> None:
    case, world_size, share = draw_numbered(st.tuples(cases(), SIZES, st.floats(0, 0.999)), number)

    def make() -> tuple[RandomModel, tuple[torch.Tensor, ...]]:
        model = RandomModel(case.model)
        return model, model.inputs(torch.Generator().manual_seed(0))

    ask = partial(_transform, case, world_size)  # compiling includes ``verify``
    transform = compile_as_rank(make, ask, rank=int(share * world_size), world_size=world_size)
    testing.assert_waits_right_before_first_consumer(transform)
    testing.assert_gathers_in_consumer_order(transform)
    testing.assert_no_parameter_copies(transform)
    testing.assert_reductions_right_after_last_gradient(transform)
    prefetch = case.options["prefetch"]
    if "max_gathers_in_flight" in case.options:
        testing.assert_buckets_in_flight_at_most(transform, case.options["max_gathers_in_flight"])
    elif isinstance(prefetch, int):
        testing.assert_prefetch_distance(transform, prefetch)


@examples(2, 58, 5, 12)
def test_predicted_memory_is_counted_at_every_position_of_a_run(number: int) -> None:
    drawn = st.tuples(cases(), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([(), TWICE]))
    case, world_size, window = draw_numbered(drawn, number)
    shape: dict[str, Any] = {"rank": world_size - 1, "world_size": world_size, "window": window}

    model = RandomModel(case.model)
    leaves = [block for block in model.blocks if isinstance(block, Calling)]
    leaf_is_frozen = not all(p.requires_grad for block in leaves for p in block.parameters())
    found = count_on_fake_ranks(model, partial(_transform, case, world_size), **shape)
    for step, (compiled, memory, tracker) in found.items():
        count = compare(memory, compiled, tracker)
        wrong = [  # what a leaf takes while it runs is an upper bound, and what a frozen one saves
            (predicted, counted)
            for predicted, counted, text in count.wrong
            if predicted < counted or not (leaf_is_frozen or "# runs as it is" in text)
        ]
        assert not wrong, f"{step}: {count}"


@examples(2, 78)
@on_ranks(2)
def test_training_gives_the_values_of_the_unsharded_model(world_size: int, number: int) -> None:
    case = draw_numbered(cases(numeric=True), number)
    options = options_of(case, partial(dist.new_group, list(range(world_size))), world_size)
    mixed = not all(block.double for block in case.model.blocks)
    model = RandomModel(case.model)
    if any(p.requires_grad for p in model.parameters()):
        Run(model, tolerance=2e-4 if mixed else 1e-10, **options).train(steps=2)
