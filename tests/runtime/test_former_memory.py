"""A view of a parameter created before sharding keeps the old values, so a forward that reads one is refused."""

from __future__ import annotations

from types import SimpleNamespace

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from ranks import on_ranks
from torch import nn

WAYS = ("closure", "class", "object", "function", "argument")


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        return (self.b(x) @ view).sum()


def _holding(way: str, view: torch.Tensor) -> type[nn.Module]:
    class Derived(Holds):
        in_class = view

        def __init__(self) -> None:
            super().__init__()
            self.namespace = SimpleNamespace(held=view)
            self.function = lambda: None
            self.function.held = view

        def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            if way == "closure":
                given = view
            elif way == "class":
                given = self.in_class
            elif way == "object":
                given = self.namespace.held
            elif way == "function":
                given = self.function.held
            return super().forward(x, given)

    return Derived


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_forward_must_not_read_a_view_created_before_sharding(way: str) -> None:
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(2, 4)
    view = weight.detach().t()
    torch.manual_seed(0)
    with_copy = _holding(way, copy := view.clone())()
    module = _holding(way, view)()
    module.a.weight = weight
    model = thunder.jit(module, transforms=[fsdp()])
    for _ in range(2):  # the second call is refused as well
        with pytest.raises(
            ValueError, match=r"forward reads '.*', a view of parameter 'a\.weight' that was created before"
        ):
            model(x, view)
    expected = with_copy(x, copy)
    assert torch.allclose(thunder.jit(with_copy, transforms=[fsdp()])(x, copy), expected)
