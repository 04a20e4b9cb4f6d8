"""Blocks that are alike are differentiated once; joint and final traces are those that Thunder makes, up to names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from thunder_fsdp_sched import CompiledTraces, Debug, fsdp
from thunder_fsdp_sched.planning import compile_as_rank
from thunder_fsdp_sched.transforms.differentiate import differentiate

import pytest
import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from internals import facts_of
from models import CASES, GPT, Calling, Chain, FeedForward, running
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.transforms import get_grad, put_grad
from thunder.extend import Executor, OperatorExecutor, StatefulExecutor, register_executor
from torch import nn
from torch.utils.checkpoint import checkpoint
from trace_text import with_numbered_names

X = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)


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
            compiled = compile_one(make, inputs, executors, gradients, debug=Debug(differentiate_once=once), **options)
            assert compiled.joint is not None
            traces = (compiled.differentiated, compiled.joint, *compiled.traces)
            texts.append([with_numbered_names(str(trace)) for trace in traces])
            for bsym in compiled.joint.bound_symbols if once else ():
                assert unordered(facts_of(bsym)) == unordered(facts_of(BoundSymbol.from_bsym(bsym)))
        for ours, in_full in zip(*texts, strict=True):
            assert ours == in_full
        return self.regions[-1]


def unordered(facts: Any) -> Any:
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


@pytest.mark.parametrize("name", ["buffers", "gpt"])
def test_traces_are_those_of_thunder_up_to_names(name: str, comparison: Comparison) -> None:
    make: Any = {**CASES, "gpt": lambda: GPT(block=FeedForward)}[name]
    inputs = make().inputs(torch.Generator().manual_seed(0))
    assert comparison.run(make, *inputs) >= {"gpt": 2}.get(name, 0)
    if name != "gpt":  # it takes long
        comparison.run(make, *inputs, gradients=False)


def residual(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Add a linear layer to its input, so that the input's gradient is a sum."""
    return x + torch.tanh(self.linear.forward(x))


Layer = running(residual)
Dropping = running(lambda self, x: F.dropout(residual(self, x), 0.5))
Scaled = running(lambda self, x, factor=1: residual(self, x) * factor)
Adding = running(lambda self, x: x + self.linear.weight)  # its gradients are the gradient of its result itself
Gated = running(lambda self, x: F.silu(self.linear.forward(x)))  # another kind of block
blocks = functools.partial(Chain, count=4)


def all_states(self: Any, x: torch.Tensor) -> Any:
    """Return what each block returns: the gradient of an input is that of a result, to which the block's is added."""
    return tuple(x := block(x) for block in self.blocks)


def two_results(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    for block in self.blocks:
        x, y = block(y), block.linear.forward(x) - y
    return x + y


def calling(forward: Callable[..., Any], kind: Callable[[int], nn.Module] = Layer, **members: Any) -> nn.Module:
    """Return blocks that this forward calls."""
    return Calling(forward, blocks=nn.ModuleList(map(kind, range(4))), **members)


def with_factor(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Give all blocks one factor, which needs a gradient."""
    factor = torch.sin(self.factor)
    for block in self.blocks:
        x = block(x, factor)
    return x


def checkpointed(self: Any, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "alternating kinds": (lambda: blocks(Layer, Gated), 4),
    "random operators": (lambda: blocks(Dropping), 4),
    "gradients that are those of the result": (lambda: blocks(Adding), 4),
    "a first block without gradients": (
        lambda: blocks(lambda index: Layer(index).requires_grad_(index > 0)),
        3,
    ),  # its parameters are of another kind
    "all hidden states": (lambda: calling(all_states), 0),
    "an input of all blocks with a gradient": (
        lambda: calling(with_factor, Scaled, factor=nn.Parameter(torch.ones(4))),
        0,
    ),
    "two results": (lambda: calling(two_results), 0),
    "checkpoint": (lambda: calling(checkpointed), 0),
    "changes of buffers": (lambda: blocks(lambda index: nn.Sequential(Layer(index), nn.BatchNorm1d(4))), 4),
}
"""Models of blocks, and how many regions are computed by a program."""


@pytest.mark.parametrize("name", MODELS)
def test_which_regions_repeat(name: str, comparison: Comparison) -> None:
    make, expected = MODELS[name]
    assert comparison.run(make, X) == expected


def test_without_gradients_more_regions_repeat(comparison: Comparison) -> None:
    # The first one reads the model's input.
    assert comparison.run(lambda: calling(all_states), X, gradients=False) == 3


def test_buckets_do_not_matter(comparison: Comparison) -> None:
    assert comparison.run(lambda: blocks(Layer), X, bucketing_strategy="layer") == 4


def test_regions_repeat_under_autocast(comparison: Comparison) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert comparison.run(lambda: blocks(Layer), X) == 4


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
    assert comparison.run(lambda: blocks(Layer), X, executors=[executor]) == 0
    assert len(calls) == 8


def test_executors_that_keep_state_are_asked_for_each_operator(comparison: Comparison) -> None:
    class Stateful(StatefulExecutor):
        """Thunder's kind of executor that keeps state for each operator."""

    assert comparison.run(lambda: blocks(Layer), X, executors=[Stateful("stateful_of_this_test")]) == 0
