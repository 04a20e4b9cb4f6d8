"""Blocks that are alike are differentiated once; joint and final traces are those that Thunder makes, up to names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.ir.operator_facts import Facts, facts_of
from thunder_fsdp_sched.pipeline import CompiledTraces
from thunder_fsdp_sched.planning.fake_ranks import compile_as_rank
from thunder_fsdp_sched.transforms import differentiate

import pytest
import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from models import CASES, GPT, Stack
from random_models import CallingModel, ModelSpec, periodic_models, quiet
from thunder.core.symbol import BoundSymbol
from thunder.core.transforms import get_grad, put_grad
from thunder.extend import Executor, OperatorExecutor, StatefulExecutor, register_executor
from torch import nn
from torch.utils.checkpoint import checkpoint
from trace_text import with_numbered_names

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


class Comparison:
    """Compiles models with and without repeated runs, and compares the text of all traces.

    Attributes:
        runs: how many runs were computed by a program, for each compilation with repeated runs.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.runs: list[int] = []
        with_calls = differentiate.__globals__["_with_calls"]

        def counted(trace: Any, runs: Any) -> Any:
            self.runs[-1] += len(runs)
            return with_calls(trace, runs)

        patch.setitem(differentiate.__globals__, "_with_calls", counted)

    def run(
        self,
        make: Callable[[], nn.Module],
        *inputs: Any,
        executors: Sequence[Executor] = (),
        gradients: bool = True,
        **options: Any,
    ) -> int:
        """Compare both ways to compile a model, and return how many runs were computed by a program."""
        self.runs.append(0)
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
        return self.runs[-1]


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


RUNS = {"gpt": 2, "stack": 3}


@pytest.mark.parametrize("name", [*CASES, "gpt", "stack"])
def test_traces_are_those_of_thunder_up_to_names(name: str, comparison: Comparison) -> None:
    make: Any = {**CASES, "gpt": lambda: GPT(blocks=2), "stack": lambda: Stack(3)}[name]
    inputs = make().inputs(torch.Generator().manual_seed(0))
    assert comparison.run(make, *inputs) == RUNS.get(name, 0)
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


def test_alternating_kinds_repeat_in_pairs(comparison: Comparison) -> None:
    assert comparison.run(lambda: Blocks(Layer, Gated), X) == 2


def test_two_stacks_repeat_each(comparison: Comparison) -> None:
    assert comparison.run(lambda: nn.Sequential(Blocks(Layer), nn.Linear(4, 4), Blocks(Gated)), X) == 8


def test_random_operators_stay_one_for_each_block(comparison: Comparison) -> None:
    assert comparison.run(lambda: Blocks(Dropping), X) == 4


def test_gradients_that_are_the_gradient_of_the_result(comparison: Comparison) -> None:
    assert comparison.run(lambda: Blocks(Adding), X) == 4


@pytest.mark.parametrize("option", ["none", "layer", "block"])
def test_buckets_do_not_matter(option: str, comparison: Comparison) -> None:
    assert comparison.run(lambda: Blocks(Layer), X, bucketing_strategy=option) == 4


def test_a_first_block_whose_input_needs_no_gradient(comparison: Comparison) -> None:
    class Model(Blocks):
        def __init__(self) -> None:
            super().__init__(Layer)
            self.blocks[0].requires_grad_(False)

    assert comparison.run(Model, X) == 3  # the frozen one has other parameters


def test_a_frozen_embedding(comparison: Comparison) -> None:
    class Model(Blocks):
        def __init__(self) -> None:
            super().__init__(Layer)
            self.embedding = nn.Embedding(5, 4)
            self.embedding.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.embedding(x))

    assert comparison.run(Model, torch.tensor([1, 3, 2])) == 4


def test_all_hidden_states_are_returned(comparison: Comparison) -> None:
    class Model(Blocks):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            states = []
            for block in self.blocks:
                x = block(x)
                states.append(x)
            return tuple(states)

    # The gradient of an input is that of a result, to which that of the block is added afterwards.
    assert comparison.run(lambda: Model(Layer), X) == 0
    assert comparison.run(lambda: Model(Layer), X, gradients=False) == 3  # the first one reads the model's input


class WithFactor(nn.Module):
    """All blocks read one factor, which needs a gradient if it is a parameter."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(4))
        self.factor = nn.Parameter(torch.ones(4), requires_grad=trains)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.sin(self.factor)
        for block in self.blocks:
            x = block(x) * factor
        return x


def test_an_input_of_all_blocks_is_allowed_if_it_needs_no_gradient(comparison: Comparison) -> None:
    assert comparison.run(lambda: WithFactor(trains=False), X) == 4
    assert comparison.run(lambda: WithFactor(trains=True), X) == 0


def test_blocks_with_the_same_parameters(comparison: Comparison) -> None:
    class Model(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x))

    assert comparison.run(lambda: Model(Layer, count=1), X) == 0
    assert comparison.run(lambda: Model(Layer, count=2), X) == 0


def test_blocks_with_two_results(comparison: Comparison) -> None:
    class Model(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            for block in self.blocks:
                x, y = block(y), block.linear.forward(x) - y
            return x + y

    assert comparison.run(lambda: Model(Layer), X) == 0


def test_checkpointed_blocks_are_not_repeated(comparison: Comparison) -> None:
    class Model(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    assert comparison.run(lambda: Model(Layer), X) == 0


def test_changes_of_buffers_stay_in_their_place(comparison: Comparison) -> None:
    # Each block is two runs, before and after its change.
    assert comparison.run(lambda: Blocks(lambda: nn.Sequential(Layer(), nn.BatchNorm1d(4))), X) == 8


def test_blocks_without_gradients_inside(comparison: Comparison) -> None:
    class Stopping(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = self.linear.forward(x).abs().amax()
            return super().forward(x) / scale

    assert comparison.run(lambda: Blocks(Stopping), X) == 4


def test_detached_blocks(comparison: Comparison) -> None:
    class Detaching(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).detach()

    comparison.run(lambda: nn.Sequential(Blocks(Detaching), nn.Linear(4, 4)), X)


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
    assert sum(comparison.runs) > 0
