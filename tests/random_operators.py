"""Operators that Thunder registers, on parameters, views of parameters and activations, with torch's own sample inputs."""

from __future__ import annotations

import functools
import itertools
import sys
import types
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import thunder.torch
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["OperatorModel", "Use", "operators", "uses"]

SAMPLES = 12
"""Sample inputs of an operator that are looked at, the first of those that are small."""

PLACES = ("parameter", "rows", "transposed", "activation")


@dataclass(frozen=True)
class Use:
    """An operator in a block.

    Attributes:
        name: of the operator in torch's database.
        sample: which of the sample inputs.
        places: what stands for each of its floating-point tensors, in turns: a parameter, rows of one, a transposed one,
            or an activation.
    """

    name: str
    sample: int
    places: tuple[str, ...]


@functools.lru_cache(maxsize=1)
def operators() -> dict[str, tuple[Any, Any]]:
    """The callables that Thunder knows and what makes sample inputs for each, by their names in torch's database."""
    stand_in = types.ModuleType("expecttest")  # torch's test utilities import it, the database does not need it
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {} if "expecttest" in sys.modules else {"expecttest": stand_in}):
        from torch.testing._internal.common_methods_invocations import op_db
    known = thunder.torch._torch_to_thunder_function_map
    found = {}
    for entry in op_db:
        own = (entry.op, getattr(torch, entry.name, None), getattr(torch.Tensor, entry.name, None))
        call = next((fn for fn in own if fn in known), None)
        if call is not None and torch.float64 in entry.dtypes:
            found[f"{entry.name}.{entry.variant_test_name}".rstrip(".")] = (call, entry.sample_inputs)
    return found | {f"random {call.__name__}": (call, partial(_random, args)) for call, args in RANDOM.items()}


RANDOM: dict[Any, Any] = {
    torch.bernoulli: (),
    torch.poisson: (),
    torch.randint_like: (9,),
    torch.rand_like: (),
    F.gumbel_softmax: (1.0, True),
    F.rrelu: (0.1, 0.3, True),
    F.alpha_dropout: (0.5, True),
    F.feature_alpha_dropout: (0.5, True),
    F.dropout: (0.5, True),
    F.dropout1d: (0.5, True),
    F.dropout2d: (0.5, True),
}
"""Operators that draw random numbers, which torch's database has without training or not at all, and their arguments."""


def _random(args: tuple[Any, ...], *_: Any, **__: Any) -> Iterator[Any]:
    yield SimpleNamespace(input=torch.rand(2, 3, 4, dtype=torch.float64), args=args, kwargs={})
    yield SimpleNamespace(input=torch.rand(2, 3, 4, 2, dtype=torch.float64), args=args, kwargs={})


@functools.cache
def _samples(name: str) -> list[Any]:
    _, make = operators()[name]
    torch.manual_seed(5)
    small = (
        sample
        for sample in make("cpu", torch.float64, requires_grad=True)
        if all(leaf.numel() <= 400 for leaf in _tensors(sample)) and any(leaf.numel() for leaf in _tensors(sample))
    )
    return list(itertools.islice(small, SAMPLES))


def _tensors(sample: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(((sample.input, *sample.args), sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class OperatorBlock(nn.Module):
    """A linear layer, and an operator whose outputs are added to what the layer gives."""

    def __init__(self, use: Use, width: int) -> None:
        super().__init__()
        call, _ = operators()[use.name]
        samples = _samples(use.name)
        if not samples:
            raise LookupError(f"{use.name}: no small sample inputs")
        sample = samples[use.sample % len(samples)]
        self.linear = nn.Linear(width, width).double()
        places = itertools.cycle(use.places)
        known: dict[str, Any] = {"call": call}

        def text(value: Any) -> str:
            """An expression for an argument: Thunder would take seconds to interpret pytrees in forward."""
            if isinstance(value, torch.Tensor):
                return self._put(f"t{len(self._parameters) + len(self._buffers)}", value, places)
            if type(value) in (list, tuple):
                inside = ", ".join(text(v) for v in value)
                return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
            if value is None or isinstance(value, (bool, int, str)):
                return repr(value)
            known[name := f"c{len(known)}"] = value
            return name

        arguments = [text(value) for value in (sample.input, *sample.args)]
        arguments += [f"{name}={text(value)}" for name, value in sample.kwargs.items()]
        exec(f"def compute(self, x):\n    return call({', '.join(arguments)})", known)
        self.compute = types.MethodType(known["compute"], self)

    def _put(self, name: str, tensor: torch.Tensor, places: Iterator[str]) -> str:
        """Keeps a tensor in the module; an expression for it in ``compute``."""
        value = tensor.detach().clone(memory_format=torch.contiguous_format)
        place = next(places) if value.dtype == torch.float64 else "buffer"
        if place == "rows" and value.ndim:
            setattr(self, name, nn.Parameter(torch.cat([value, value.flip(0)])))
            return f"self.{name}[:{value.shape[0]}]"
        if place == "transposed" and value.ndim > 1:
            setattr(self, name, nn.Parameter(value.transpose(0, 1).contiguous()))
            return f"self.{name}.transpose(0, 1)"
        if place == "activation":  # near the sample, inside the operator's domain
            self.register_buffer(name, value)
            return f"self.{name} * (1 + 0.001 * x.mean())"
        if place == "buffer":
            self.register_buffer(name, value)
        else:
            setattr(self, name, nn.Parameter(value))
        return f"self.{name}"

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = torch.tanh(self.linear.forward(x))
        result = self.compute(x)
        outputs = [leaf for leaf in _flat(result) if isinstance(leaf, torch.Tensor)]
        for output in outputs:
            # Two dimensions: Thunder cannot expand the gradient of a 0-dim value back.
            x = x + 0.1 * torch.tanh(output.double()).sum().reshape(1, 1)
        return x, outputs


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for inside in value for leaf in _flat(inside)]
    return [value]


class OperatorModel(nn.Module):
    """A block for each operator. Gives the last activation, and what the operators gave: maybe views of parameters."""

    def __init__(self, uses: tuple[Use, ...], width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.width = width
        self.blocks = nn.ModuleList(OperatorBlock(use, width) for use in uses)
        self.last = nn.Linear(width, width).double()

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        given = []
        for block in self.blocks:
            x, outputs = block.forward(x)
            given += outputs
        return [self.last.forward(x), *given]


@st.composite
def uses(draw: Any, names: list[str]) -> Use:
    places = draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3))
    return Use(draw(st.sampled_from(names)), draw(st.integers(0, SAMPLES - 1)), tuple(places))
