"""With symbolic values, a trace runs for other sizes only if it is right for them, as compared with eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
import torch.nn.functional as F
from beside import Beside
from models import Calling
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

LENGTHS = (2, 3, 5, 1, 2)


class Sized(nn.Module):
    """A linear layer, and then a function of the module, its input and its result."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.positions = nn.Parameter(torch.linspace(-1, 1, 64).view(16, 4))
        self.register_buffer("mask", torch.linspace(-1, 1, 64).view(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x, self.linear(x))


def _loop(self: Sized, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for index in range(x.shape[1]):
        y = y + index
    return y


def _attention(self: Sized, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    batch, length, width = y.shape
    heads = [t.view(batch, length, 1, -1).transpose(1, 2) for t in (y, y * 2, y.exp())]
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(batch, length, width)


NUMBERS = list(range(9))

# With the number of compilations for LENGTHS: 2 if only a length of 1 is compiled by itself, 4 if each length is.
PROGRAMS: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "tuple": (lambda self, x, y: y * 2 if x.shape == (2, 2, 4) else y, 4),
    "loop": (_loop, 4),
    "chunk": (lambda self, x, y: y.chunk(2, 1)[0].sum(1), 4),
    "sliced parameter": (lambda self, x, y: y + self.positions[: x.shape[1]], 4),
    "factor": (lambda self, x, y: y * x.shape[1], 2),
    "view": (lambda self, x, y: y.view(x.shape[0], x.shape[1], 2, 2).sum(-1).flatten(0, 1), 2),
    "sliced buffer": (lambda self, x, y: y + self.mask[: x.shape[1]], 2),
    "slice object": (lambda self, x, y: y + self.mask[slice(x.shape[1])], 2),
    "attention": (_attention, 2),
    "sliced list": (lambda self, x, y: y + len(NUMBERS[: x.shape[1]]), 4),
    "sliced range": (lambda self, x, y: y + len(range(9)[: x.shape[1] : 1]), 4),
    "key": (lambda self, x, y: y + {1: 2, 2: 5, 3: 1, 5: 3}[x.shape[1]], 4),
    "new key": (lambda self, x, y: y + len({2: x, x.shape[1]: y}), 4),
    "key of a comprehension": (lambda self, x, y: y + len({size: x for size in x.shape}), 4),
    "set": (lambda self, x, y: y + len({2, x.shape[1]}), 4),
    "set comprehension": (lambda self, x, y: y + len({size for size in x.shape}), 4),
    "set of sizes": (lambda self, x, y: y + len(set(x.shape)), 4),
    "largest size": (lambda self, x, y: y + sorted(x.shape)[-1], 4),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_traces_with_symbolic_values_are_right_for_all_sizes(name: str) -> None:
    function, compiled = PROGRAMS[name]
    torch.manual_seed(0)
    both = Beside(Sized(function), jit={"cache": "symbolic values"})
    for length in LENGTHS:
        both.check(torch.linspace(-1, 1, 8 * length).view(2, length, 4), rtol=1e-4, atol=1e-4)
    assert thunder.cache_misses(both.model) == compiled


# With arguments of calls one after the other, and the number of compilations for them.
ARGUMENTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...], int]] = {
    "string": (lambda x, way: x.exp() if way == "exp" else x * 2, ("exp", "twice", "exp"), 2),
    "type of a number": (lambda x, factor: x.long() * factor, (2, 3, 2.5, True, 4), 3),
    "number or None": (lambda x, factor: x if factor is None else x * factor, (2, None, 3), 2),
    "compared number": (lambda x, factor: x if factor > 2 else x * factor, (1, 2, 3, 1), 3),
    "truth of a number": (lambda x, number: x * 2 if number else x, (0, 3, 0), 2),
    "range": (lambda x, number: sum((x for _ in range(number)), x), (1, 3, 1), 2),
    "bool": (lambda x, doubles: x * 2 if doubles else x, (False, True, False), 2),
    "slice or None": (lambda x, rows: x if rows is None else x * 2, (slice(0, 2), None, slice(0, 2)), 2),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_traces_with_symbolic_values_are_right_for_all_arguments(name: str) -> None:
    function, values, compiled = ARGUMENTS[name]
    called = Calling(lambda self, x, value: function(x, value))
    model, x = thunder.jit(called, transforms=[fsdp()], cache="symbolic values"), torch.arange(3.0)
    for value in values:
        torch.testing.assert_close(model(x, value), function(x, value))
    assert thunder.cache_misses(model) == compiled


def test_attributes_are_read_anew_with_symbolic_values() -> None:
    double = lambda x, is_doubled: x * 2 if is_doubled else x  # noqa: E731
    module = Calling(lambda self, x: double(x, self.doubles))
    module.doubles = 0
    model, x = thunder.jit(module, transforms=[fsdp()], cache="symbolic values"), torch.arange(3.0)
    torch.testing.assert_close(model(x), x)
    module.doubles = 1
    torch.testing.assert_close(model(x), x * 2)
