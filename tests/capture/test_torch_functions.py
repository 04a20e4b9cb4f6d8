"""Functions of torch that Thunder does not know, or not with these arguments, are traced by others that it knows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.nn.functional as F
from coded import coded
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")


def _attend(y: torch.Tensor) -> torch.Tensor:
    heads = y.view(1, 4, 2, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(heads.repeat(1, 2, 1, 1), heads, heads, None, 0.0, True, enable_gqa=True)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "eye": lambda y: (
        y @ torch.eye(4) + torch.eye(4, 5, dtype=torch.int64, device=y.device)[:, 1:] * y + torch.eye(4, m=4)
    ),
    "norm": lambda y: y / y.norm(p=2, dim=-1, keepdim=True) + y.norm(p=1, dim=0) * torch.norm(y, p="fro", dim=(0, 1)),
    "norm of a matrix": lambda y: (
        y.norm(2) + y.norm(1) + torch.norm(y, 3) + y.norm(float("inf")) + y.norm(2, 1) + y.norm()
    ),
    "reshape": lambda y: y.reshape(shape=(16,)) * torch.reshape(y, shape=[16]).sum(),
    "repeat_interleave": lambda y: (
        torch.repeat_interleave(y, 2, dim=0, output_size=8) * y.repeat_interleave(2, 0, output_size=8)
    ),
    "grouped attention": _attend,
    "named results": lambda y: y.max(dim=-1).values * torch.min(y, dim=1, keepdim=True).values + y.topk(2).values.sum(),
    "named indices": lambda y: y.sort(dim=-1, descending=True).values * torch.sort(y, dim=0).indices,
    "results without a rule of Thunder": lambda y: y.median(dim=-1).values + y.cummax(0).values * torch.mode(y).indices,
    "unpacked results": lambda y: torch.stack([value.double() for value in y.max(-1)]).sum(0) * len(y.max(-1)),
    "a slice of results": lambda y: y.max(-1)[:1][0] * y.min(-1)[0],
    "without a dimension": lambda y: y * y.max() + torch.max(y, -y) + torch.median(y),
}


class _Block(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.function(self.linear(x)).sum()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_eager_mode(name: str) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        module = nn.Sequential(*(_Block(FUNCTIONS[name]) for _ in range(2)))
        model = thunder.jit(copy.deepcopy(module), transforms=[fsdp(leaf_modules=())])
        x = torch.randn(4, 4)
        ours, theirs = model(x), module(x)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(ours, theirs)
    for output in (ours, theirs):
        output.sum().backward()
    for found, expected in zip(model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad)


class _Results(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        assert x.max(-1)._fields == ("values", "indices")
        return {"largest": x.max(-1), "both": [torch.topk(x, 2)], "sum": x.sum()}


@pytest.mark.parametrize("leaves", [(), ("1",)])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_scalars_have_the_default_dtype(default: torch.dtype, leaves: tuple[str, ...]) -> None:
    class Scalars(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.tensor(0.1), torch.tensor(1), x * torch.tensor(0.1)

    module = nn.Sequential(nn.Linear(2, 2), Scalars())
    model = thunder.jit(copy.deepcopy(module), transforms=[fsdp(leaf_modules=leaves)])
    x = torch.ones(2, 2)
    for dtype in (torch.float32, default):
        torch.set_default_dtype(dtype)
        try:
            expected, actual = module(x), model(x)
        finally:
            torch.set_default_dtype(torch.float32)
        assert [(each.dtype, each.tolist()) for each in actual] == [(each.dtype, each.tolist()) for each in expected]


def test_forward_returns_results_as_tuples() -> None:
    x = torch.randn(3, 4)
    output = thunder.jit(_Results(), transforms=[fsdp(leaf_modules=())])(x)
    torch.testing.assert_close(output["largest"], tuple(x.max(-1)))
    torch.testing.assert_close(output["both"], [tuple(torch.topk(x, 2))])


class _Pair(NamedTuple):
    first: torch.Tensor
    second: Any


class _Returns(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.part, self.make = nn.Linear(4, 4), make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.part(x))


@pytest.mark.parametrize("leaves", [(), ("0",)], ids=["traced", "leaf"])
def test_named_tuples_of_forward_are_refused_but_for_those_of_torch(leaves: tuple[str, ...]) -> None:
    x, jitted = torch.randn(3, 4), []
    for make in (lambda y: y.max(-1), lambda y: {"pairs": [_Pair(y, None)]}):
        module = nn.Sequential(_Returns(make))
        jitted.append((module, thunder.jit(copy.deepcopy(module), transforms=[fsdp(leaf_modules=leaves)])))
    (module, model), (_, refused) = jitted
    torch.testing.assert_close(model(x), tuple(module(x)))
    with pytest.raises(NotImplementedError, check=coded("module.not-reproduced-by-trace", "named tuple (_Pair)")):
        refused(x)
