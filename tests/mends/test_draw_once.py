"""Gradients belong to the sample that forward has drawn, or the operator is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import fsdp, testing

import pytest
import thunder
import torch
import torch.nn.functional as F
from coded import coded
from internals import facts_of
from ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint


class OwnGradient(torch.autograd.Function):
    """An operator whose own backward draws, once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2 + 0 * torch.rand_like(grad)


def attention(y: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=0.5)[0]


SAME_SAMPLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": lambda y: y * torch.rand_like(y),
    "rand": lambda y: y * torch.rand(y.shape, dtype=y.dtype),
    "bernoulli": lambda y: y * torch.bernoulli(torch.sigmoid(y.detach())),
    "poisson": lambda y: y * torch.poisson(torch.exp(y.detach())),
    "exponential_": lambda y: y * torch.ones_like(y).exponential_(),
    "dropout": lambda y: F.dropout(y, 0.5) * 2,
    "rrelu": lambda y: F.rrelu(y, 0.1, 0.3, True),
    "gumbel_softmax": lambda y: F.gumbel_softmax(y, 1.0),
    "dropout2d": lambda y: F.dropout2d(y[None], 0.5)[0],
    "attention": attention,
    "own gradient": OwnGradient.apply,
}

REDRAWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "poisson": lambda y: y * torch.poisson(torch.exp(y)),
    "native_dropout": lambda y: torch.native_dropout(y, 0.5, True)[0],
    "dropout": lambda y: torch.dropout(y, 0.5, True),
}


class Noisy(nn.Module):
    """A block for each operator, with or without ``checkpoint``, and values that are worth recomputing around it."""

    def __init__(self, operators: list[Callable[[torch.Tensor], torch.Tensor]], checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in operators).double()
        self.operators, self.checkpoints = operators, checkpoints

    def block(self, x: torch.Tensor, index: int) -> torch.Tensor:
        y = torch.sin(self.operators[index](torch.tanh(self.linears[index].forward(x))))
        return torch.tanh(y) * torch.exp(y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.operators)):
            if self.checkpoints:
                x = x + checkpoint(self.block, x, index, use_reentrant=False)
            else:
                x = x + self.block(x, index)
        return x


@on_ranks()
def test_backward_has_the_sample_of_forward() -> None:
    """Compare the gradients of all biases along one direction with a finite difference."""
    x = torch.linspace(-1, 1, 240, dtype=torch.double).view(40, 6)
    jitted = thunder.jit(Noisy(list(SAME_SAMPLE.values()), checkpoints=True), transforms=[fsdp()])

    def loss() -> torch.Tensor:
        torch.manual_seed(7)
        return jitted(x).square().mean()

    loss().backward()
    wrong = []
    biases = [param for name, param in jitted.named_parameters() if name.endswith("bias")]
    for name, param in zip(SAME_SAMPLE, biases, strict=True):
        rows, differences = param.detach().to_local(), []
        for sign in (1, -1):
            rows += sign * 1e-6
            differences.append(sign * loss().item())
            rows -= sign * 1e-6
        expected, actual = sum(differences) / 2e-6, param.grad.full_tensor().sum().item()
        if abs(actual - expected) > 1e-5 * max(1, abs(expected)):
            wrong.append(f"{name}: {actual}, expected {expected}")
    assert not wrong, wrong


def _compile(operator: Callable[[torch.Tensor], torch.Tensor], checkpoints: bool = False) -> Any:
    return testing.compile_on_fake_ranks(
        lambda: (Noisy([operator], checkpoints), (torch.ones(4, 6, dtype=torch.double),)), 2
    )[0]


@pytest.mark.parametrize("name", REDRAWN)
def test_an_operator_that_backward_would_draw_again_is_refused_by_name(name: str) -> None:
    operators = [REDRAWN[name], lambda y: OwnGradient.apply(REDRAWN[name](y))]  # also beside a backward that may draw
    for operator in operators:
        with pytest.raises(NotImplementedError, check=coded("trace.random-operator-drawn-again", name)):
            _compile(operator, checkpoints=len(name) % 2 == 0)


def test_a_region_of_checkpoint_saves_the_sample_and_recomputes_the_rest() -> None:
    compiled = _compile(SAME_SAMPLE["rand_like"], checkpoints=True)
    names = [bsym.sym.name for bsym in compiled.backward.bound_symbols]
    assert names.count("tanh") == 2 and names.count("sin") == 1
    assert not any(facts_of(bsym).draws for bsym in compiled.backward.bound_symbols)
