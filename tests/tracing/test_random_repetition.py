"""Random models of alike blocks: traces are those of full tracing, up to names, with and without gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import ModelSpec, RandomModel, models, quiet
from test_grad_modes import GRAD, NO_GRAD, counts_in
from test_repeated_modules import check_traces


class CallingModel(RandomModel):
    """A random model that calls its blocks, because only module calls are repeated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return self.end(x)


@st.composite
def repeating_models(draw: Any) -> ModelSpec:
    """Draw a model in which each block has a twin: of the same kind, width and dtype, with parameters of its own."""
    spec = draw(models())
    twins = {number: number + len(spec.blocks) for number in range(len(spec.blocks))}
    order = [number for index in spec.order for number in (index, twins[index])]
    return replace(spec, blocks=spec.blocks * 2, order=tuple(draw(st.permutations(order))))


@pytest.mark.parametrize("part", range(2))  # so that pytest-xdist can divide them
def test_random_models_have_the_traces_of_full_tracing(part: int) -> None:
    repeated = repeated_as_a_whole = 0

    @quiet(4)
    @given(spec=repeating_models())
    def compare(spec: ModelSpec) -> None:
        nonlocal repeated, repeated_as_a_whole
        inputs = CallingModel(spec).inputs(torch.Generator().manual_seed(0))
        repeated += check_traces(lambda: CallingModel(spec), *inputs, checks_more=spec.decay).repeated
        for order in counts_in(
            lambda: CallingModel(spec), inputs, (GRAD, NO_GRAD), (NO_GRAD, GRAD), checks_more=spec.decay
        ):
            repeated_as_a_whole += order[1] == (0, 1)

    compare()
    assert repeated > 0
    assert repeated_as_a_whole > 0  # in the second grad mode
