"""Blocks that are alike are differentiated once; joint and final traces are those that Thunder makes, up to names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.compiled_traces import CompiledTraces
from thunder_fsdp_sched.ir.operator_facts import Facts, facts_of
from thunder_fsdp_sched.planning.fake_ranks import compile_as_rank
from thunder_fsdp_sched.transforms.differentiate import differentiate

import pytest
import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from models import CASES, GPT, Stack
from random_models import CallingModel, ModelSpec, periodic_models, quiet
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.transforms import get_grad, put_grad
from thunder.extend import Executor, OperatorExecutor, StatefulExecutor, register_executor
from torch import nn
from torch.utils.checkpoint import checkpoint
from trace_text import with_numbered_names

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


class Comparison:
    """Compiles models with and without repeated regions, and compares the text of all traces.

    Attributes:
        regions: how many regions were computed by a program, for each compilation with repeated regions.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.regions: list[int] = []
        expand = differentiate.__globals__["_expand"]

        def counted(bsym: BoundSymbol, trace: TraceCtx) -> Any:
            self.regions[-1] += bsym.args[1] != "backward"
            return expand(bsym, trace)

        patch.setitem(differentiate.__globals__, "_expand", counted)

    def run(
        self,
        make: Callable[[], nn.Module],
        *inputs: Any,
        executors: Sequence[Executor] = (),
        gradients: bool = True,
        **options: Any,
    ) -> int:
        """Compare both ways to compile a model, and return how many regions were computed by a program."""
        self.regions.append(0)
        texts = []
        for once in (True, False):
            compiled = compile_one(make, inputs, executors, gradients, trace_modules_once=once, **options)
            assert compiled.joint is not None
            traces = (compiled.differentiated, compiled.joint, *compiled.traces)
            texts.append([with_numbered_names(str(trace)) for trace in traces])
            for bsym in compiled.joint.bound_symbols if once else ():
                assert unordered(facts_of(bsym)) == unordered(facts_of(BoundSymbol.from_bsym(bsym)))
        for ours, in_full in zip(*texts, strict=True):
            assert ours == in_full
        return self.regions[-1]


def unordered(facts: Facts) -> Facts:
    return facts._replace(aliases={out: tuple(sorted(read)) for out, read in facts.aliases.items()})


def compile_one(
    make: Callable[[], nn.Module], inputs: Sequence[Any], executors: Sequence[Executor], gradients: bool, **options: Any
) -> CompiledTraces:
    def made() -> tuple[nn.Module, Sequence[Any]]:
        torch.manual_seed(0)
        return make().double(), inputs

    with torch.set_grad_enabled(gradients):
        return compile_as_rank(made, fsdp(**options), rank=0, world_size=2, executors=executors).compiled[-1]


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    return Comparison(monkeypatch)


@pytest.mark.parametrize(("name", "regions"), [*((name, 0) for name in CASES), ("gpt", 2), ("stack", 3)])
def test_traces_are_those_of_thunder_up_to_names(name: str, regions: int, comparison: Comparison) -> None:
    make: Any = {**CASES, "gpt": lambda: GPT(blocks=2), "stack": lambda: Stack(3)}[name]
    inputs = make().inputs(torch.Generator().manual_seed(0))
    assert comparison.run(make, *inputs) >= regions
    if name != "gpt":  # it takes long
        comparison.run(make, *inputs, gradients=False)


class Blocks(nn.Module):
    """Four blocks, one after the other."""

    def __init__(self, *kinds: Callable[[], nn.Module], count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kinds[i % len(kinds)]() for i in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Layer(nn.Module):
    """A linear layer with a residual connection, so that the gradient of its input is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear.forward(x))


class Gated(nn.Module):
    """Another kind of layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.forward(F.silu(self.up.forward(x)))


class Dropping(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.5)


class Adding(nn.Module):
    """The gradients of its inputs are the gradient of its output itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Embedded(Blocks):
    """An embedding that needs no gradient comes before the blocks."""

    def __init__(self) -> None:
        super().__init__(Layer)
        self.embedding = nn.Embedding(3, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.embedding(torch.arange(3)) * x)


class FirstFrozen(Blocks):
    def __init__(self) -> None:
        super().__init__(Layer)
        self.blocks[0].requires_grad_(False)


class AllStates(Blocks):
    """The gradient of an input is that of a result, to which that of the block is added afterwards."""

    def forward(self, x: torch.Tensor) -> Any:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return tuple(states)


class WithFactor(Blocks):
    """All blocks read one factor, which needs a gradient if it is a parameter."""

    def __init__(self, trains: bool) -> None:
        super().__init__(Scaled)
        self.factor = nn.Parameter(torch.ones(4), requires_grad=trains)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.sin(self.factor)
        for block in self.blocks:
            x = block(x, factor)
        return x


class Scaled(Layer):
    def forward(self, x: torch.Tensor, factor: Any = 1) -> torch.Tensor:
        return super().forward(x) * factor


class Twice(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class TwoResults(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        for block in self.blocks:
            x, y = block(y), block.linear.forward(x) - y
        return x + y


class Checkpointed(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Stopping(Layer):
    """A part of it has no gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.linear.forward(x).abs().amax()
        return super().forward(x) / scale


class Detaching(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


class Counting(Layer):
    """Its calls cannot be repeated from a record, because it counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def hooked() -> nn.Module:
    layer = Layer()
    layer.register_forward_hook(lambda module, args, output: output * 2)
    return layer


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "alternating kinds": (lambda: Blocks(Layer, Gated), 4),
    "two stacks": (lambda: nn.Sequential(Blocks(Layer), nn.Linear(4, 4), Blocks(Gated)), 8),
    "two calls of one stack of stacks": (lambda: nn.Sequential(Blocks(Layer), Blocks(Layer)), 8),
    "random operators": (lambda: Blocks(Dropping), 4),
    "gradients that are those of the result": (lambda: Blocks(Adding), 4),
    "hooked blocks": (lambda: Blocks(hooked), 4),
    "blocks with effects": (lambda: Blocks(Counting), 4),
    "a first block without gradients": (FirstFrozen, 3),  # its parameters are of another kind
    "a frozen embedding": (Embedded, 4),
    "all hidden states": (lambda: AllStates(Layer), 0),
    "an input of all blocks without a gradient": (lambda: WithFactor(trains=False), 4),
    "an input of all blocks with a gradient": (lambda: WithFactor(trains=True), 0),
    "one block twice": (lambda: Twice(Layer, count=1), 0),
    "two blocks twice": (lambda: Twice(Layer, count=2), 2),
    "two results": (lambda: TwoResults(Layer), 0),
    "checkpoint": (lambda: Checkpointed(Layer), 0),
    "changes of buffers": (lambda: Blocks(lambda: nn.Sequential(Layer(), nn.BatchNorm1d(4))), 4),
    "parts without gradients": (lambda: Blocks(Stopping), 4),
    "detached blocks": (lambda: nn.Sequential(Blocks(Detaching), nn.Linear(4, 4)), 4),
}
"""Models of blocks, and how many regions are computed by a program."""


@pytest.mark.parametrize("name", MODELS)
def test_which_regions_repeat(name: str, comparison: Comparison) -> None:
    make, expected = MODELS[name]
    assert comparison.run(make, X) == expected


def test_without_gradients_more_regions_repeat(comparison: Comparison) -> None:
    assert comparison.run(lambda: AllStates(Layer), X, gradients=False) == 3  # the first one reads the model's input


@pytest.mark.parametrize("option", ["none", "layer", "block"])
def test_buckets_do_not_matter(option: str, comparison: Comparison) -> None:
    assert comparison.run(lambda: Blocks(Layer), X, bucketing_strategy=option) == 4


def test_regions_repeat_under_autocast(comparison: Comparison) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert comparison.run(lambda: Blocks(Layer), X) == 4


def test_rules_of_somebody_else_are_called_for_each_operator(comparison: Comparison) -> None:
    calls = []

    def grad(x: Any) -> Any:
        calls.append(x)
        y = symbol(x)
        put_grad(x, get_grad(y) * (1 - y * y))
        return y

    executor = OperatorExecutor("tanh_of_somebody_else")
    symbol = executor.register_operator("other_tanh", like=ltorch.tanh, fn=torch.tanh)
    executor.register_implementation(ltorch.tanh, symbol, grad_transform=grad)
    register_executor(executor)
    assert comparison.run(lambda: Blocks(Layer), X, executors=[executor]) == 0
    assert len(calls) == 8


def test_executors_that_keep_state_are_asked_for_each_operator(comparison: Comparison) -> None:
    class Stateful(StatefulExecutor):
        """Thunder's kind of executor that keeps state for each operator."""

    assert comparison.run(lambda: Blocks(Layer), X, executors=[Stateful("stateful_of_this_test")]) == 0


def test_random_models_whose_blocks_repeat(comparison: Comparison) -> None:
    @quiet(4)
    @given(spec=periodic_models(), gradients=st.booleans())
    def compare(spec: ModelSpec, gradients: bool) -> None:
        inputs = CallingModel(spec).inputs(torch.Generator().manual_seed(0))
        comparison.run(lambda: CallingModel(spec), *inputs, gradients=gradients)

    compare()
    assert sum(comparison.regions) > 0
