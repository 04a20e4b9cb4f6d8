"""Random models of alike blocks: traces are those of full tracing, up to names, with and without gradients."""

from __future__ import annotations

import torch
from hypothesis import given
from random_models import CallingModel, ModelSpec, quiet, repeating_models
from test_grad_modes import GRAD, NO_GRAD, counts_in
from test_repeated_modules import check_traces


def test_random_models_have_the_traces_of_full_tracing() -> None:
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
