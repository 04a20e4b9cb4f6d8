"""Numbers of models that are sent encoded: gathers decode, reductions keep the bounds of their formats."""

from __future__ import annotations

from functools import partial
from typing import Any

from thunder_fsdp_sched import CommPolicy

import pytest
import shared_memory
import torch
import torch.distributed as dist
from device import SHARED_MEMORY
from hypothesis import strategies as st
from random_models import RandomModel, cases, draw_numbered, examples, options_of
from ranks import on_ranks
from twins import AllKinds, Twins

P = CommPolicy


def check(twins: Twins, rank: int, world_size: int, steps: int = 2) -> float:
    """Train both models and return the largest error of a gradient, as a share of its bound."""
    share, reduces = 0.0, any(b.spec.reduce_wire is not None for b in twins.buckets)
    for step in range(steps):
        twins.backward(step, rank)
        if reduces:
            share = max(share, twins.check_reductions(step, rank))
        else:  # more than two ranks add up in an order that depends on the offset
            single = twins.dtype is torch.float32 or any(b.spec.dtype is torch.float32 for b in twins.buckets)
            twins.compare_gradients(0 if world_size == 2 else 1e-5 if single else 1e-12)
        twins.step()
    return share


# Formats of gathers and reductions, transport, strategy, elements of a block, the fewest dimensions that are encoded.
ROWS: dict[str, tuple[str | None, str | None, str, str, int, int]] = {
    "int8, int8": ("int8", "int8", "all_to_all", "zero2", 6, 0),
    "bfloat16 reductions": (None, "bfloat16", SHARED_MEMORY, "zero2", 128, 0),
}


@pytest.mark.device
@pytest.mark.parametrize("name", ROWS)
@on_ranks(lambda name: 3 if name == "int8, int8" else 2)
def test_every_kind_of_parameter_has_decoded_values_and_gradients_within_bounds(
    rank: int, world_size: int, name: str
) -> None:
    shared_memory.register()
    gather, reduce, transport, strategy, block, min_ndim = ROWS[name]
    policy = P(gather=gather, reduce=reduce, block=block, min_ndim=min_ndim)
    bucketing = "block" if min_ndim else "none"  # the empty parameter alone in a bucket
    twins = Twins(AllKinds, policy, sharding_strategy=strategy, transport=transport, bucketing_strategy=bucketing)
    share = check(twins, rank, world_size)
    assert share <= 1.001 and (reduce is None or share > 0.2)


POLICIES = st.builds(
    P,
    gather=st.sampled_from([None, "bfloat16", "int8"]),
    reduce=st.sampled_from(["bfloat16", "int8", None]),
    block=st.sampled_from([2, 4, 6, 32, 128]),
    min_ndim=st.sampled_from([0, 1, 2]),
    exempt=st.sampled_from([(), (), ("head",), ("blocks.0",)]),
)


@pytest.mark.device
@examples(0, 100)
@on_ranks(lambda number: 2 + number % 2)
def test_random_models_have_decoded_values_and_gradients_within_bounds(rank: int, world_size: int, number: int) -> None:
    case, policy = draw_numbered(st.tuples(cases(numeric=True), POLICIES), 1000 + number)
    options: dict[str, Any] = options_of(case, partial(dist.new_group, list(range(world_size))), world_size)
    if options["transport"] == "all_reduce":
        options["transport"] = "auto"
    model = RandomModel(case.model)
    if any(p.requires_grad for p in model.parameters()):
        twins = Twins(lambda: model, policy, None, **options)
        check(twins, rank, world_size)
