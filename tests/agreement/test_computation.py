"""Ranks must compute the same: identical traces for inputs of equal shapes, else equal up to numbers derived from sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import ScheduleDisagreement, fsdp

import pytest
import thunder
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor, nn

Forward = Callable[[Any, Tensor], Tensor]

DIFFERENT: dict[str, tuple[Forward, Forward]] = {
    "a constant": (lambda m, x: m.b(m.a(x)) * 0.5, lambda m, x: m.b(m.a(x)) * 2.0),
    "a dimension": (lambda m, x: torch.softmax(m.b(m.a(x)), 0), lambda m, x: torch.softmax(m.b(m.a(x)), 1)),
    "the order of two layers": (lambda m, x: m.b(m.a(x)), lambda m, x: m.a(m.b(x))),
    "the order of operands": (lambda m, x: torch.tanh(m.a(x) - m.b(x)), lambda m, x: torch.tanh(m.b(x) - m.a(x))),
    "an operand": (lambda m, x: m.a(x) * m.b(x) + m.a(x), lambda m, x: m.a(x) * m.b(x) + m.b(x)),
    "a flag": (lambda m, x: F.gelu(m.b(m.a(x))), lambda m, x: F.gelu(m.b(m.a(x)), approximate="tanh")),
    "an index": (lambda m, x: m.b(m.a(x))[:, 1], lambda m, x: m.b(m.a(x))[:, 2]),
    "the returned tensor": (lambda m, x: (m.a(x), m.b(x))[0] + 0, lambda m, x: (m.a(x), m.b(x))[1] + 0),
    "a number of the module": (lambda m, x: m.b(m.a(x)) * m.scale, lambda m, x: m.b(m.a(x)) * m.other_scale),
}


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.other_scale = 0.5, 0.25
        self.calls = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.calls(self, x).square().mean()


def _jit(forward: Forward, **options: Any) -> Any:
    # With one bucket, the collectives are the same whatever is computed.
    return thunder.jit(Model(forward), transforms=[fsdp(bucketing_strategy=10**6, **options)])


@pytest.mark.parametrize("what", DIFFERENT)
@on_ranks(timeout=400)
def test_ranks_that_compile_different_computations_raise(rank: int, what: str) -> None:
    model = _jit(DIFFERENT[what][rank])
    with pytest.raises(ScheduleDisagreement, match="the collectives agree but the computations differ"):
        model(torch.ones(3, 4))
    _jit(DIFFERENT[what][rank], allow_different_computation=True)(torch.ones(3, 4)).backward()


def _switched(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * m.scale


@on_ranks(timeout=400)
def test_ranks_whose_cached_traces_differ_by_a_number_raise(rank: int) -> None:
    model, x = _jit(_switched), torch.ones(3, 4)
    for scale in (0.5, 2.0):
        model._model.scale = scale
        model(x).backward()
    model._model.scale = (0.5, 2.0)[rank]
    with pytest.raises(
        ScheduleDisagreement, match=r"Their traces differ in line \d+:\n    rank 0: .*0\.5.*\n    rank 1: .*2\.0"
    ):
        model(x)
    model._model.scale = 2.0
    model(x).backward()


def _other_shapes(m: Any, x: Tensor) -> Tensor:
    """Compute with every kind of number that can derive from the size of an input."""
    rows = x.shape[0]
    positions = torch.arange(rows, dtype=x.dtype) / rows
    h = m.a(x).reshape(rows * 2, 2).reshape(x.shape) + positions[:, None]
    h = h[: rows // 2 + 1] * rows**-0.5
    return m.b(h).mean(0) - h.var(0)


@on_ranks(timeout=400)
def test_ranks_with_inputs_of_different_sizes_may_differ_by_numbers_derived_from_sizes(rank: int) -> None:
    model = _jit(_other_shapes)
    reference = Model(_other_shapes)
    for step in range(6):
        rows = 3 + (rank + step) % 4  # so that ranks compile alone, compile together, and run cached traces
        x = torch.arange(4.0 * rows).reshape(rows, 4) / 10
        loss, expected = model(x), reference(x)
        assert torch.allclose(loss, expected)
        loss.backward()
    # Dimensions, and constants that derive from no size, are compared for all inputs.
    for what in ("a dimension", "the order of two layers"):
        other = _jit(DIFFERENT[what][rank])
        with pytest.raises(ScheduleDisagreement, match="the computations differ"):
            other(torch.ones(3 + rank, 4))
    tenth = _jit(lambda m, x: m.b(m.a(x)) * (0.3, 0.7)[rank])
    with pytest.raises(ScheduleDisagreement, match="the computations differ"):
        tenth(torch.ones(3 + rank, 4))
