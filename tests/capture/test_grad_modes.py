"""Records of module calls hold with and without gradients; traces, with all tags, are those of full tracing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from thunder_fsdp_sched.capture.bound_symbols import StructuralKeys

import profiles
import pytest
import thunder
import torch
import torch.nn.functional as F
from hypothesis import given
from internals import Repetition, call_forward, trace_module_calls
from models import CASES, GPT, Chain, FeedForward, Stack, running
from profiles import LONG_ONLY, each_case
from random_models import CallingModel, ModelSpec, quiet, repeating_models
from test_repeated_modules import Linear, X, adding, check_traces, seeded
from thunder.core import prims
from thunder.core.compile_data import get_compile_data
from thunder.core.symbol import Symbol
from thunder.core.transform_common import Transform
from torch import nn
from torch.utils.checkpoint import checkpoint
from trace_text import with_numbered_names


class Mode(NamedTuple):
    trains: bool
    grad: bool
    infers: bool = False


GRAD, NO_GRAD, INFERENCE = Mode(True, True), Mode(True, False), Mode(True, False, infers=True)
EVAL, EVAL_GRAD = Mode(False, False), Mode(False, True)


class Compiled(NamedTuple):
    """The first traces of one compilation: text up to names, and structural key of the computation with all tags."""

    prologue: str
    computation: str
    key: Any
    recorded: int
    repeated: int


class Traced(Exception):
    """Ends a compilation after tracing."""


class StopAfterTracing(Transform):
    def transform_traces_pre_prologue(self, prologue: Any, computation: Any, epilogue: Any, **_: Any) -> Any:
        raise Traced(prologue, computation)


def trace_in(modes: Sequence[Mode], make: Callable[[], nn.Module], inputs: Sequence[Any], call: Any) -> list[Compiled]:
    """Trace a model in several modes, one after another."""
    jitted, compiled = thunder.jit(make(), transforms=[StopAfterTracing()]), []
    trace_module_calls(thunder.compile_data(jitted), call)
    for mode in modes:
        jitted.train(mode.trains)
        grad_mode = torch.inference_mode() if mode.infers else torch.set_grad_enabled(mode.grad)
        with grad_mode, pytest.raises(Traced) as traced:
            jitted(*inputs)
        prologue, computation = traced.value.args
        counts = getattr(call, "recorded", 0), getattr(call, "repeated", 0)
        texts = with_numbered_names(str(prologue)), with_numbered_names(str(computation))
        compiled.append(Compiled(*texts, key_of(computation), *counts))
    return compiled


def key_of(trace: Any) -> Any:
    structure = StructuralKeys().of((tuple(trace.args), dict(trace.kwargs)), *trace.bound_symbols)
    assert structure is not None
    return structure.key


def counts_in(
    make: Callable[[], nn.Module], inputs: Sequence[Any], *orders: Sequence[Mode], checks_more: bool = False
) -> list[list[tuple[int, int]]]:
    """Trace a model in the modes of each order, with repetition, and compare each trace with full tracing.

    Args:
        checks_more: the prologue with repetition may have further checks: see ``check_traces``.

    Returns:
        How many module calls were recorded and repeated, for each order and mode.
    """
    modes = list(dict.fromkeys(mode for order in orders for mode in order))
    expected = dict(zip(modes, trace_in(modes, make, inputs, call_forward), strict=True))
    counts: list[list[tuple[int, int]]] = []
    for order in orders:
        compiled = trace_in(order, make, inputs, Repetition())
        for mode, ours in zip(order, compiled, strict=True):
            assert ours.computation == expected[mode].computation
            longer = checks_more and ours.prologue.count("\n") > expected[mode].prologue.count("\n")
            assert longer or ours.prologue == expected[mode].prologue
            assert ours.key == expected[mode].key
        counts.append([(each.recorded, each.repeated) for each in compiled])
    return counts


ALL: dict[str, Callable[[], Any]] = {
    **CASES,
    "gpt": lambda: GPT(blocks=1, block=FeedForward),
    "attention": lambda: GPT(blocks=1),
    "stack": lambda: Stack(3),
}
REFUSED = ("views_of_parameters", "mixed_dtypes")
"""Models that read under a computed name, or call an operator that Thunder registers automatically."""


@pytest.mark.parametrize(
    "name", [*each_case("gpt"), *(pytest.param(n, marks=LONG_ONLY) for n in ("stack", "attention"))]
)
def test_a_record_holds_in_the_other_grad_mode(name: str) -> None:
    make = ALL[name]
    inputs = make().inputs(torch.Generator().manual_seed(0))
    orders = (GRAD, NO_GRAD, EVAL, EVAL_GRAD), (EVAL, EVAL_GRAD, NO_GRAD, GRAD)
    for order in counts_in(seeded(make), inputs, *orders[: 2 if profiles.LONG else 1]):
        (recorded, _), second, third, last = order
        if name not in REFUSED:
            assert recorded and second == last == (0, 1)
            assert third == (0, 1) or name == "buffers"  # whose normalization reads the flag `training`


class Updating(Linear):
    """Updates a buffer in place."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0))
        self.last.copy_(x)
        return self.linear(x) + self.mean + self.last


class InPlace(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y.add_(1.0)
        y[0] = 0.5
        return F.relu(y, inplace=True)


class Normalizing(Linear):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


Checkpointing = running(lambda self, x: checkpoint(self.linear, x, use_reentrant=False))
Dropping = running(lambda self, x: F.dropout(self.linear(x), 0.5, self.training))


class Freezing(Linear):
    """Has a frozen bias, and asks for ``requires_grad``, which does not depend on the grad mode."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.linear.bias.requires_grad_(False)

    def extra(self) -> Any:
        return 1 if self.linear.bias.requires_grad else 2 if self.linear.weight.requires_grad else 3


ORDERS = (GRAD, NO_GRAD, INFERENCE), (INFERENCE, GRAD), (NO_GRAD, GRAD)


@pytest.mark.parametrize(
    "block",
    [Updating, InPlace, Checkpointing, *(pytest.param(b, marks=LONG_ONLY) for b in (Normalizing, Dropping, Freezing))],
)
def test_a_block_that_does_not_use_the_grad_mode_is_repeated_in_both(block: Callable[[int], nn.Module]) -> None:
    for first, *others in counts_in(seeded(lambda: Chain(block, count=2)), (X,), *ORDERS[: 3 if profiles.LONG else 2]):
        assert first[0] >= 3 and first[1] == 1
        assert others == [(0, 1)] * len(others)


class WithoutGradients(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.linear(x)
        return self.linear(x) + y


class Decorated(Linear):
    @torch.no_grad()
    def extra(self) -> Any:
        return torch.tanh(self.linear.bias)


class Setting(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._C._set_grad_enabled(False)
        y = self.linear(x)
        torch._C._set_grad_enabled(torch.is_grad_enabled())
        return self.linear(x) + y


Asking = adding(lambda self: 1 if torch.is_grad_enabled() else 2)
AskingThunder = adding(lambda self: 1 if get_compile_data().is_grad_enabled else 2)
AskingForInference = adding(lambda self: 1 if torch.is_inference_mode_enabled() else 2)

Detaching = running(lambda self, x: self.linear(x.detach()))
Registered = adding(lambda self: torch.sinc(self.linear.bias))
"""Calls an operator that Thunder registers automatically. Its result requires gradients, if torch says so."""


class CopyingAlone(Updating):
    """Chooses the argument that depends on the grad mode otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        prims.copy_(self.linear(x), self.last, grad_enabled=True)
        return self.linear(x)


def _scaled(x: Any) -> Any:
    return x * (1 if torch.is_grad_enabled() else 2)


SCALED = Symbol("scaled", meta=_scaled, id="tests.scaled")
"""A symbol that Thunder does not know."""
Scaling = running(lambda self, x: SCALED(self.linear(x)))


@pytest.mark.parametrize(
    "block",
    [
        Setting,
        AskingThunder,
        Registered,
        CopyingAlone,
        Scaling,
        # Other ways to read or to set the same mode.
        *(
            pytest.param(b, marks=LONG_ONLY)
            for b in (WithoutGradients, Decorated, Asking, AskingForInference, Detaching)
        ),
    ],
)
def test_a_block_that_may_use_the_grad_mode_is_repeated_in_its_own(block: Callable[[int], nn.Module]) -> None:
    orders = (GRAD, NO_GRAD, INFERENCE, GRAD), (INFERENCE, NO_GRAD, GRAD)
    checks_more = block in (Decorated, Registered)
    orders = orders if profiles.LONG else orders[:1]
    for order in counts_in(seeded(lambda: Chain(block, count=2)), (X,), *orders, checks_more=checks_more):
        for recorded, repeated in order[:3]:
            assert recorded >= 2 and repeated  # the model and a block are recorded in each mode
        assert order[3:] in ([], [(0, 1)])


@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_other_contexts_are_traced_in_full(context: Callable[[], Any]) -> None:
    class Entering(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with context():
                return self.linear(x)

    counts = counts_in(seeded(lambda: Chain(Entering)), (X,), (GRAD, NO_GRAD))
    assert counts == [[(0, 0), (0, 0)]]


def test_a_block_that_leaves_another_grad_mode_is_traced_in_full() -> None:
    class Leaving(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            torch._C._set_grad_enabled(False)
            return y

    class Model(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                torch._C._set_grad_enabled(True)
                x = block(x) * 2
            return x

    orders = (GRAD, NO_GRAD), (NO_GRAD, GRAD)
    counts_in(seeded(lambda: Model(Leaving)), (X,), *orders[: 2 if profiles.LONG else 1])


def test_one_forward_with_both_grad_modes() -> None:
    class Model(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = self.blocks[0](x)
                z = self.blocks[1](y)
            return self.blocks[2](x) + self.blocks[0](y) + self.blocks[1](z + x)

    orders = (GRAD, NO_GRAD, GRAD), (NO_GRAD, GRAD, NO_GRAD)
    for order in counts_in(seeded(lambda: Model(Linear)), (X,), *orders, checks_more=True):
        assert all(repeated for _, repeated in order)
        assert order[2][0] <= 1  # the model itself


def test_a_checkpointed_block_does_not_mark_the_others() -> None:
    class Model(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.blocks[0], x, use_reentrant=False)
            return self.blocks[2](self.blocks[1](x))

    counts_in(seeded(lambda: Model(Linear)), (X,), (GRAD,))


@pytest.mark.long  # two examples are no search
def test_random_models_have_the_traces_of_full_tracing() -> None:
    repeated = repeated_as_a_whole = 0

    @quiet(2)
    @given(spec=repeating_models())
    def compare(spec: ModelSpec) -> None:
        nonlocal repeated, repeated_as_a_whole
        inputs = CallingModel(spec).inputs(torch.Generator().manual_seed(0))
        repeated += check_traces(lambda: CallingModel(spec), *inputs, checks_more=spec.decay).repeated
        for order in counts_in(
            lambda: CallingModel(spec), inputs, (GRAD, NO_GRAD), (NO_GRAD, GRAD), checks_more=spec.decay
        ):
            repeated_as_a_whole += order[1] == (0, 1)

    compare()
    assert repeated > 0
    assert repeated_as_a_whole > 0  # in the second grad mode
