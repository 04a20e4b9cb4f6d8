"""``index_put``, of whose values Thunder computes no gradient, is refused, and what the message names is right."""

from __future__ import annotations

import copy
from collections.abc import Callable

from thunder_fsdp_sched import Debug, fsdp

import pytest
import thunder
import torch
from coded import coded
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

ROWS = torch.tensor([0, 2])


class Written(nn.Module):
    """Writes the result of one layer into that of another."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(2, 2, dtype=torch.float64) for _ in range(2))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.write(self.layers[0](x), self.layers[1](x[:2])).sin()


def _in_a_copy(y: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    z = y.clone()
    z[ROWS] = values
    return z


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("once", [False, True])
def test_values_that_need_a_gradient_are_refused(accumulate: bool, once: bool) -> None:
    module = Written(lambda y, values: y.index_put((ROWS,), values, accumulate=accumulate))
    model = thunder.jit(module, transforms=[fsdp(leaf_modules=(), debug=Debug(differentiate_once=once))])
    with pytest.raises(NotImplementedError, check=coded("trace.no-gradient-of-values", "index_put")):
        model(torch.randn(3, 2, dtype=torch.float64))
    with torch.no_grad():
        assert model(torch.ones(3, 2, dtype=torch.float64)).shape == (3, 2)


@pytest.mark.parametrize(
    "write",
    [
        _in_a_copy,
        lambda y, values: y.scatter_add(0, ROWS[:, None].expand(-1, 2), values),
        lambda y, values: y.index_put((ROWS,), values.detach()),
    ],
    ids=["copy", "scatter_add", "detached values"],
)
def test_what_takes_its_place_has_the_gradients_of_eager_mode(
    write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    module = Written(write)
    expected, x = copy.deepcopy(module), torch.randn(3, 2, dtype=torch.float64)
    model = thunder.jit(module, transforms=[fsdp()])
    for each in (expected, model):
        each(x).sum().backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize(
    "call",
    [
        lambda y, v: torch.hstack([y[:2], v]),
        lambda y, v: torch.vstack((y, v)),
        lambda y, v: torch.column_stack([y[:2], v]),
    ],
    ids=["hstack", "vstack", "column_stack"],
)
def test_gradients_of_tensors_in_a_list_are_not_lost(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    model = thunder.jit(Written(call), transforms=[fsdp(leaf_modules=())])
    with pytest.raises(NotImplementedError, check=coded("trace.no-gradient-of-sequence")):
        model(torch.ones(3, 2, dtype=torch.float64))
