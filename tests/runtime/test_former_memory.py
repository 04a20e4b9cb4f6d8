"""A view of a parameter created before sharding keeps the old values, so a forward that reads one is refused."""

from __future__ import annotations

from types import SimpleNamespace

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from ranks import on_ranks
from torch import nn


def _reading(way: str, view: torch.Tensor) -> nn.Module:
    """Return a module whose forward reads a tensor that something holds."""

    class Reads(nn.Module):
        in_class = view

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.namespace = SimpleNamespace(held=view)
            self.function = lambda: None
            self.function.held = view

        def forward(self, x: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
            if way == "closure":
                read = view
            elif way == "class":
                read = self.in_class
            elif way == "object":
                read = self.namespace.held
            elif way == "function":
                read = self.function.held
            return (self.b(x) @ read).sum()

    return Reads()


@pytest.mark.parametrize("way", ["closure", "class", "object", "function", "argument"])
@on_ranks(2)
def test_forward_must_not_read_a_view_created_before_sharding(way: str) -> None:
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(2, 4)
    view = weight.detach().t()
    torch.manual_seed(0)
    with_copy = _reading(way, copy := view.clone())
    module = _reading(way, view)
    module.a.weight = weight
    model = thunder.jit(module, transforms=[fsdp()])
    for _ in range(2):  # the second call is refused as well
        with pytest.raises(
            ValueError, match=r"forward reads '.*', a view of parameter 'a\.weight' that was created before"
        ):
            model(x, view)
    expected = with_copy(x, copy)
    assert torch.allclose(thunder.jit(with_copy, transforms=[fsdp()])(x, copy), expected)
