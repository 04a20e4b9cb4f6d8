"""Models of random operators from Thunder's registry, applied to parameters, views of parameters and activations.

Sample inputs come from torch's operator database (``op_db``).
"""

from __future__ import annotations

import contextlib
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SAMPLES = 12
"""How many sample inputs of an operator are used: the first small ones."""

SOURCES = ("parameter", "rows", "transposed", "activation")


@dataclass(frozen=True)
class Use:
    """An operator in a block.

    Attributes:
        name: the operator's name in torch's database.
        sample: index of the sample input.
        sources: what the operator's floating-point tensors become, in turn: a parameter, rows of a parameter, a transposed
            parameter, or an activation.
    """

    name: str
    sample: int
    sources: tuple[str, ...]


@functools.lru_cache(maxsize=1)
def operators() -> dict[str, tuple[Any, Any]]:
    """Return, by name in torch's database, each callable that Thunder knows and the function that makes its samples."""
    with _expecttest():
        from torch.testing._internal.common_methods_invocations import op_db
    known = thunder.torch._torch_to_thunder_function_map
    operators_by_name = {}
    for entry in op_db:
        own = (entry.op, getattr(torch, entry.name, None), getattr(torch.Tensor, entry.name, None))
        call = next((fn for fn in own if fn in known), None)
        if call is not None and torch.float64 in entry.dtypes:
            operators_by_name[f"{entry.name}.{entry.variant_test_name}".rstrip(".")] = (call, entry.sample_inputs)
    return operators_by_name | {
        f"random {call.__name__}": (call, partial(_random, args)) for call, args in RANDOM.items()
    }


@contextlib.contextmanager
def _expecttest() -> Iterator[None]:
    """Stand in for a package that torch's test utilities import, but neither the database nor its samples need."""
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {} if "expecttest" in sys.modules else {"expecttest": stand_in}):
        yield


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
"""Random operators that torch's database lacks, or has only in evaluation mode, with their arguments."""


def _random(args: tuple[Any, ...], *_: Any, **__: Any) -> Iterator[Any]:
    yield SimpleNamespace(input=torch.rand(2, 3, 4, dtype=torch.float64), args=args, kwargs={})
    yield SimpleNamespace(input=torch.rand(2, 3, 4, 2, dtype=torch.float64), args=args, kwargs={})


class _Fill(TorchDispatchMode):
    """Fills memory that an operator leaves uninitialized."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.fill_(self.value) if "empty" in func.overloadpacket.__name__ else out


@functools.cache
def returns_uninitialized_memory(name: str) -> bool:
    """Return whether the operator's results depend on memory that it does not initialize, as ``empty_like``'s do."""
    call, _ = operators()[name]
    for sample in _samples(name):
        results_by_fill = []
        for value in (0, 1):
            torch.manual_seed(6)
            with contextlib.suppress(Exception), torch.no_grad(), _Fill(value):  # no model can use such a sample
                results = _flat(call(sample.input, *sample.args, **sample.kwargs))
                tensors = [t.to_dense().to(torch.complex128) for t in results if isinstance(t, torch.Tensor)]
                results_by_fill.append(tensors)
        if len(results_by_fill) == 2:
            pairs = zip(*results_by_fill, strict=True)
            if not all(torch.allclose(a, b, equal_nan=True) for a, b in pairs):
                return True
    return False


@functools.cache
def _samples(name: str) -> list[Any]:
    _, make = operators()[name]
    torch.manual_seed(5)
    small = (
        sample
        for sample in make("cpu", torch.float64, requires_grad=True)
        if all(leaf.numel() <= 400 for leaf in _tensors(sample)) and any(leaf.numel() for leaf in _tensors(sample))
    )
    with _expecttest():
        return list(itertools.islice(small, SAMPLES))


def _tensors(sample: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(((sample.input, *sample.args), sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class OperatorBlock(nn.Module):
    """A linear layer, and an operator whose outputs are added to the layer's output."""

    def __init__(self, use: Use, width: int) -> None:
        super().__init__()
        call, _ = operators()[use.name]
        samples = _samples(use.name)
        if not samples:
            raise LookupError(f"{use.name}: no small sample inputs")
        sample = samples[use.sample % len(samples)]
        self.linear = nn.Linear(width, width).double()
        sources = itertools.cycle(use.sources)
        known: dict[str, Any] = {"call": call}

        def expression(value: Any) -> str:
            """Return an expression for an argument. Thunder would take seconds to interpret pytrees in forward."""
            if isinstance(value, torch.Tensor):
                return self._add_tensor(f"t{len(self._parameters) + len(self._buffers)}", value, sources)
            if type(value) in (list, tuple):
                inside = ", ".join(expression(v) for v in value)
                return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
            if value is None or isinstance(value, (bool, int, str)):
                return repr(value)
            known[name := f"c{len(known)}"] = value
            return name

        arguments = [expression(value) for value in (sample.input, *sample.args)]
        arguments += [f"{name}={expression(value)}" for name, value in sample.kwargs.items()]
        exec(f"def compute(self, x):\n    return call({', '.join(arguments)})", known)
        self.compute = types.MethodType(known["compute"], self)

    def _add_tensor(self, name: str, tensor: torch.Tensor, sources: Iterator[str]) -> str:
        """Register a tensor in the module and return the expression by which ``compute`` reads it."""
        value = tensor.detach().clone(memory_format=torch.contiguous_format)
        source = next(sources) if value.dtype == torch.float64 else "buffer"
        if source == "rows" and value.ndim:
            setattr(self, name, nn.Parameter(torch.cat([value, value.flip(0)])))
            return f"self.{name}[:{value.shape[0]}]"
        if source == "transposed" and value.ndim > 1:
            setattr(self, name, nn.Parameter(value.transpose(0, 1).contiguous()))
            return f"self.{name}.transpose(0, 1)"
        if source == "activation":  # close to the sample, to stay in the operator's domain
            self.register_buffer(name, value)
            return f"self.{name} * (1 + 0.001 * x.mean())"
        if source == "buffer":
            self.register_buffer(name, value)
        else:
            setattr(self, name, nn.Parameter(value))
        return f"self.{name}"

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = torch.tanh(self.linear.forward(x))
        result = self.compute(x)
        outputs = [leaf for leaf in _flat(result) if isinstance(leaf, torch.Tensor)]
        for output in outputs:
            # Two dimensions, because Thunder cannot expand the gradient of a 0-dim value.
            x = x + 0.1 * torch.tanh(output.double()).sum().reshape(1, 1)
        return x, outputs


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for inside in value for leaf in _flat(inside)]
    return [value]


class OperatorModel(nn.Module):
    """A model with one block for each operator. Returns the last activation and all outputs of the operators."""

    def __init__(self, uses: tuple[Use, ...], width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.width = width
        self.blocks = nn.ModuleList(OperatorBlock(use, width) for use in uses)
        self.last = nn.Linear(width, width).double()

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for block in self.blocks:
            x, outputs = block.forward(x)
            results += outputs
        return [self.last.forward(x), *results]


@st.composite
def uses(draw: Any, names: list[str]) -> Use:
    sources = draw(st.lists(st.sampled_from(SOURCES), min_size=1, max_size=3))
    return Use(draw(st.sampled_from(names)), draw(st.integers(0, SAMPLES - 1)), tuple(sources))
