"""Random models and options: schedules keep their promises on fake ranks, and results are unsharded ones on real ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from thunder_fsdp_sched import fsdp, testing
from thunder_fsdp_sched.planning import compile_as_rank

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from memory_count import TWICE, compare, count_on_fake_ranks
from random_models import Calling, Case, RandomModel, cases, draw_numbered, examples, options_of
from ranks import on_ranks
from scenario import Run


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
