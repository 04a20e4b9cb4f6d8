"""Random models of alike blocks: traces are those of full tracing, up to names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from random_models import CallingModel, ModelSpec, quiet, repeating_models
from test_repeated_modules import check_traces


@pytest.mark.parametrize("part", range(2))  # so that pytest-xdist can divide them
def test_random_models_have_the_traces_of_full_tracing(part: int) -> None:
    repeated = 0

    @quiet(4)
    @given(spec=repeating_models())
    def compare(spec: ModelSpec) -> None:
        nonlocal repeated
        inputs = CallingModel(spec).inputs(torch.Generator().manual_seed(0))
        repeated += check_traces(lambda: CallingModel(spec), *inputs, checks_more=spec.decay).repeated

    compare()
    assert repeated > 0
