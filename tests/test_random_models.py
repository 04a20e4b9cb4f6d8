"""Random models and options: schedules keep their promises on fake ranks, and results are unsharded ones on real ranks.

``-m long`` tries thousands.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from thunder_fsdp_sched import fsdp, testing
from thunder_fsdp_sched.planning.fake_ranks import compile_as_rank

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, note, reject, settings
from hypothesis import strategies as st
from memory_count import compare, count_on_fake_ranks
from profiles import LONG
from random_models import Case, RandomModel, cases, options_of, quiet
from ranks import Ranks
from reference import Twins


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage only after the test: Thunder's tracing makes millions of objects, and collecting doubles the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("part", range(2 if LONG else 1))  # so that pytest-xdist can divide them
@quiet(8)
@given(case=cases(), world_size=st.sampled_from([1, 2, 3, 4, 8, 64]), data=st.data())
def test_every_promise_holds_on_fake_ranks(part: int, case: Case, world_size: int, data: Any) -> None:
    rank = data.draw(st.integers(0, world_size - 1))

    def make() -> tuple[RandomModel, tuple[torch.Tensor, ...]]:
        model = RandomModel(case.model)
        return model, model.inputs(torch.Generator().manual_seed(0))

    def ask() -> Any:
        return fsdp(
            **options_of(case, lambda: dist.new_group(list(range(world_size)), group_desc="others"), world_size)
        )

    try:
        transform = compile_as_rank(make, ask, rank=rank, world_size=world_size)  # includes ``verify``
    except ValueError as error:
        assert "bytes are too few: with prefetch=" in str(error)
        reject()
    note(str(transform.schedules[-1].forward))
    testing.assert_waits_right_before_first_consumer(transform)
    testing.assert_gathers_in_consumer_order(transform)
    testing.assert_no_parameter_copies(transform)
    testing.assert_reductions_right_after_last_gradient(transform)
    prefetch = case.options["prefetch"]
    if "max_gathers_in_flight" in case.options:
        testing.assert_buckets_in_flight_at_most(transform, case.options["max_gathers_in_flight"])
    elif isinstance(prefetch, int) and "max_unsharded_bytes" not in case.options:
        testing.assert_prefetch_distance(transform, prefetch)


@quiet(3)
@given(case=cases(), world_size=st.sampled_from([1, 2, 3, 4, 8]), window=st.booleans())
def test_predicted_memory_is_counted_at_every_position_of_a_run(case: Case, world_size: int, window: bool) -> None:
    def ask() -> Any:
        return fsdp(
            **options_of(case, lambda: dist.new_group(list(range(world_size)), group_desc="others"), world_size)
        )

    model = RandomModel(case.model)
    try:
        found = count_on_fake_ranks(model, ask, rank=world_size - 1, world_size=world_size, window=window)
    except ValueError as error:
        assert "bytes are too few: with prefetch=" in str(error)
        reject()
    for step, (compiled, memory, tracker) in found.items():
        count = compare(memory, compiled, tracker)
        assert not count.wrong, f"{step}: {count}"


def _train(rank: int, world_size: int, case: Case) -> None:
    options = options_of(case, lambda: dist.new_group(list(range(world_size))), world_size)
    mixed = len({block.double for block in case.model.blocks}) > 1 or not all(b.double for b in case.model.blocks)
    twins = Twins(rank, world_size, RandomModel(case.model), tolerance=2e-4 if mixed else 1e-10, **options)
    if any(p.requires_grad for p in twins.reference.parameters()):
        twins.train(steps=2)


@pytest.mark.parametrize("part", range(2 if LONG else 1))
@quiet(4)
@given(case=cases(numeric=True))
def test_training_gives_the_values_of_the_unsharded_model(ranks: Ranks, part: int, case: Case) -> None:
    ranks.run(_train, case)


def test_cases_are_of_every_kind() -> None:
    """Check that drawn cases have the features that the tests above rely on."""
    seen: set[str] = set()

    @settings(quiet(), max_examples=200, database=None)
    @given(case=cases())
    def look(case: Case) -> None:
        model = RandomModel(case.model)
        assert model(*model.inputs(torch.Generator())).shape == (3, 3)
        seen.update(block.kind for block in case.model.blocks)
        seen.update(f"{name}={value}" for name, value in case.options.items() if isinstance(value, str))
        seen.update(name for name in case.options)
        if len(dict(model.named_parameters(remove_duplicate=False))) > len(dict(model.named_parameters())):
            seen.add("tied")
        if len(set(case.model.order)) < len(case.model.blocks):
            seen.add("unused")
        if len(case.model.order) > len(set(case.model.order)):
            seen.add("repeated")
        seen.update(name for name in ("kept", "low", "secondary") if getattr(case, name))

    look()
    assert {"tied", "unused", "repeated", "nested", "transport=staged"} <= seen
    assert {
        "kept",
        "low",
        "secondary",
        "mp_policy",
        "max_unsharded_bytes",
        "max_gathers_in_flight",
        "release=bucket",
    } <= seen
