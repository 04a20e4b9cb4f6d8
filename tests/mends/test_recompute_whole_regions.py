"""Regions of ``torch.utils.checkpoint`` save what torch saves, whichever operator computes their result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import Debug, fsdp, testing

import pytest
import thunder
import torch
import torch.nn.functional as F
from memory_count import Tracker
from models import Calling
from torch import nn
from torch.utils.checkpoint import checkpoint

SIZE = 32
TARGETS = torch.arange(SIZE).flip(0)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        z = torch.sin(y)
        ctx.save_for_backward(y, z)
        return z * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        y, z = ctx.saved_tensors
        return grad * y * z


def _attention(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q = h.view(2, 2, 8, SIZE)
    return F.scaled_dot_product_attention(q, q, q)


OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross_entropy": lambda h, w: F.cross_entropy(h, TARGETS),
    "log_softmax": lambda h, w: F.log_softmax(h, -1),
    "mse_loss": lambda h, w: F.mse_loss(h, w),
    "layer_norm": lambda h, w: F.layer_norm(h, (SIZE,), w[0], w[1]),
    "batch_norm": lambda h, w: F.batch_norm(h, None, None, w[0], w[1], training=True),
    "attention": _attention,
    "gelu": lambda h, w: F.gelu(h),
    "tanh": lambda h, w: torch.tanh(h),
    "linear": lambda h, w: F.linear(h, w),
    "convolution": lambda h, w: F.conv1d(h.view(2, 16, SIZE), w[:16].view(16, 16, 2)),
    "prod": lambda h, w: torch.prod(h, 0),
    "split": lambda h, w: torch.split(torch.exp(h), 8)[1],
    "index_put": lambda h, w: torch.index_put(h, (TARGETS,), w.detach()),
    "autograd.Function": lambda h, w: Doubling.apply(h),
}
"""Operators with grad rules of their own, in Thunder, one of its executors or the model, and some that are decomposed."""


def region(operator: Callable[..., torch.Tensor]) -> nn.Module:
    """Return a layer, and a region of one operator."""

    def forward(self: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(operator, torch.tanh(self.linear(x)), w, use_reentrant=False)

    return Calling(forward, linear=nn.Linear(SIZE, SIZE))


def _saved(module: nn.Module, *inputs: torch.Tensor) -> int:
    """Return the bytes that forward leaves allocated, its result included."""
    module(*inputs)  # allocates what lasts
    with Tracker(others=[*module.parameters(), *inputs]) as tracker:
        result = module(*inputs)
    nbytes = tracker.bytes_now()
    del result
    return nbytes


@pytest.mark.parametrize("name", OPERATORS)
def test_a_region_that_ends_in_any_operator_saves_no_more_than_torch(name: str, fake_ranks: None) -> None:
    x, w = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE, requires_grad=True)
    expected = _saved(region(OPERATORS[name]), x, w)
    assert _saved(thunder.jit(region(OPERATORS[name]), transforms=[fsdp()]), x, w) <= expected


def _expand(h: torch.Tensor) -> torch.Tensor:
    return F.gelu(torch.sin(h))


class Nested(nn.Module):
    """A layer in a region and outside of one, and a region within another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(checkpoint(_expand, torch.cos(x), use_reentrant=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](checkpoint(self.layers[0], x, use_reentrant=False))
        return checkpoint(self.outer, x, use_reentrant=False)


@pytest.mark.parametrize("differentiate_once", [True, False])
def test_nested_regions_and_layers_outside_of_them(differentiate_once: bool, fake_ranks: None) -> None:
    """Backward computes again the GELU whose result the inner region's caller needs, and none outside of regions."""
    jitted = thunder.jit(Nested(), transforms=[transform := fsdp(debug=Debug(differentiate_once=differentiate_once))])
    jitted(torch.randn(3, 4))
    [compiled] = transform.compiled
    gelus = [[b.sym.name for b in trace.bound_symbols].count("torch_gelu") for trace in compiled.traces]
    assert gelus == [4, 1]


def test_an_operator_that_is_observed_is_recomputed_on_all_ranks() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        layer = self.linear
        return checkpoint(lambda x: torch.tanh(torch.addmm(layer.bias, x, layer.weight)), x, use_reentrant=False) * x

    def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return Calling(forward, linear=nn.Linear(5, 5)), (torch.ones(3, 5),)

    for traces in testing.compile_on_fake_ranks(make, 2, ranks=(0, 1)):  # with three and two of the rows
        assert "addmm" in str(traces.backward)
