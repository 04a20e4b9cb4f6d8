"""Modules that are alike are traced once; traces are those of full tracing, up to names."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched.capture import module_members
from thunder_fsdp_sched.capture.input_reads import InputReads

import pytest
import thunder
import torch
import torch.nn.functional as F
from internals import Repetition, call_forward, trace_module_calls
from models import Chain, LinearBlock, running
from torch import nn
from trace_text import with_numbered_names


def traces_of(
    model: nn.Module, inputs: tuple[Any, ...], call: Any, reads: InputReads | None = None
) -> tuple[list[str], Any]:
    """Return the text of the first traces that Thunder makes, with names in the order of appearance, and the output."""
    jitted = thunder.jit(model)
    trace_module_calls(thunder.compile_data(jitted), call, reads)
    output = jitted(*inputs)
    texts = [str(history(jitted)[0]) for history in (thunder.last_prologue_traces, thunder.last_traces)]
    return [with_numbered_names(text) for text in texts], output


def check_traces(make: Callable[[], nn.Module], *inputs: Any, checks_more: bool = False) -> Repetition:
    """Compare traces with and without repetition; return the repetition.

    Args:
        checks_more: the prologue with repetition may have further checks. It has if the model reads attributes of a
            repeated module from outside: Thunder then checks the module's flags on this path, too.
    """
    repetition = Repetition()
    (prologue, computation), output = traces_of(make(), inputs, repetition)
    (prologue_in_full, in_full), expected = traces_of(make(), inputs, call_forward)
    assert computation == in_full
    assert prologue == prologue_in_full or (checks_more and prologue.count("\n") > prologue_in_full.count("\n"))
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    return repetition


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded_make() -> nn.Module:
        torch.manual_seed(0)
        return make().double()

    return seeded_make


class Linear(LinearBlock):
    """A block whose forward adds ``self.extra()`` to a linear layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.extra()

    def extra(self) -> Any:
        return 1


def adding(extra: Callable[..., Any]) -> type[Linear]:
    """Return a class of blocks that add what the function returns for a block."""
    return type("Adding", (Linear,), {"extra": extra})


X = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)


def repetition_of(block: Callable[[int], nn.Module]) -> Repetition:
    return check_traces(seeded(lambda: Chain(block)), X)


def test_a_block_with_an_index_that_it_does_not_read_is_repeated() -> None:
    assert repetition_of(Linear).repeated == 2


def test_a_block_that_depends_on_its_index_is_traced_again() -> None:
    repetition = repetition_of(adding(lambda self: self.index))
    assert repetition.repeated == 2  # the linear layers of the second and the third block
    assert repetition.recorded == 5  # the model, the blocks, and one linear layer


class Counting(Linear):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.calls = 0

    def extra(self) -> Any:
        self.calls += 1
        return self.calls


CALLS = [0]
CACHE: dict[str, int] = {}
TOTAL = 0


class CountingGlobally(Linear):
    def extra(self) -> Any:
        CALLS[0] = CALLS[0] + 1
        return CALLS[0]


class StoringGlobally(Linear):
    def extra(self) -> Any:
        global TOTAL
        TOTAL = TOTAL + 1
        return 0.5


class CountingOnTheClass(Linear):
    calls = 0

    def extra(self) -> Any:
        type(self).calls += 1
        return type(self).calls


NUMBERS = itertools.count(8)


class Named:
    count = 0

    def __str__(self) -> str:
        Named.count += 1
        return "x" * Named.count


NAMED = Named()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Closing(Linear):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        count = 0

        def extra() -> int:
            nonlocal count
            count += 1
            return count

        self.close = extra

    def extra(self) -> Any:
        return self.close()


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Counting, "modif"),
        (CountingGlobally, "STORE_SUBSCR"),
        (StoringGlobally, "STORE_GLOBAL"),
        (CountingOnTheClass, "STORE_ATTR"),
        (adding(lambda self: CACHE.setdefault("first", 3)), "setdefault"),
        (adding(lambda self, seen=[]: seen.append(1) or 2.0), "append"),
        (adding(lambda self: float(next(NUMBERS))), "count.__next__"),
        (adding(lambda self: random.random()), "random"),
        (adding(lambda self: float(len(f"{NAMED}")) + float(len(str(NAMED)))), "format"),
        (running(lambda self, x: Square.apply(self.linear(x))), "operator"),
        (Closing, "STORE_DEREF"),
    ],
)
def test_a_block_with_effects_is_not_repeated(block: Callable[[int], nn.Module], reason: str) -> None:
    repetition = Repetition()
    torch.manual_seed(0)
    with contextlib.suppress(RuntimeError):  # of a prologue that finds another count than was traced
        traces_of(Chain(block).double(), (X,), repetition)
    assert any(reason in why for why in repetition.refused.values()), repetition.refused
    assert not any(key[0] is block for key, records in repetition._records.items() if records)


def test_a_zero_of_another_sign_is_another_value() -> None:
    class Shifted(Linear):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.shift = -0.0 if index == 1 else 0.0

        def extra(self) -> Any:
            return self.shift

    assert repetition_of(Shifted).repeated == 2  # the linear layer of the second block, and the third block


def test_a_flag_that_changes_between_blocks_is_noticed() -> None:
    class Model(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, block in enumerate(self.blocks):
                x = block(x, is_last=index == 2)
            return x

    class Flagged(Linear):
        def forward(self, x: torch.Tensor, *, is_last: bool) -> torch.Tensor:
            return self.linear(x) if is_last else F.gelu(self.linear(x))

    repetition = check_traces(seeded(lambda: Model(Flagged)), X)
    assert repetition.repeated == 2  # the second block, and the linear layer of the last one


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block, "linear", nn.Linear(4, 4, bias=False)),
        lambda block: setattr(block.linear, "weight", nn.Parameter(block.linear.weight.detach(), requires_grad=False)),
        lambda block: setattr(block, "linear", nn.Sequential(nn.Linear(4, 4))),
        lambda block: block.linear.register_forward_hook(lambda module, args, output: output * 2),
        lambda block: setattr(block, "extra", lambda: 5),
    ],
    ids=["no bias", "frozen", "another class", "hook", "another method"],
)
def test_a_block_that_differs_is_traced_again(change: Callable[[Any], Any]) -> None:
    def make(index: int) -> nn.Module:
        block = Linear(index)
        if index == 1:
            change(block)
        return block

    repetition = repetition_of(make)
    assert 1 <= repetition.repeated <= 2


def test_shared_parameters_and_submodules_stay_shared() -> None:
    shared = nn.Linear(4, 4).double()

    def make(index: int) -> nn.Module:
        block = running(lambda self, x: self.shared(self.linear(x)))(index)
        block.shared, block.linear.bias = shared, shared.bias
        return block

    repetition_of(make)


def test_containers_of_tensors_pass_through_repeated_blocks() -> None:
    class Mixing(Linear):
        def forward(self, x: Any) -> Any:
            a, options = x
            return (self.linear(a) * options["scale"], {"scale": options["scale"], "before": a})

    class Model(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = (x, {"scale": x.sum(), "before": x})
            for block in self.blocks:
                state = block(state)
            return state[0] + state[1]["before"]

    assert check_traces(seeded(lambda: Model(Mixing)), X).repeated >= 2


def test_a_block_is_traced_again_for_another_default_dtype() -> None:
    model = seeded(lambda: Chain(adding(lambda self: torch.ones(4))))()
    jitted, repetition = thunder.jit(model), Repetition()
    trace_module_calls(thunder.compile_data(jitted), repetition)
    jitted(X)
    torch.set_default_dtype(torch.float64)
    try:
        jitted(X)
        made = [b for b in thunder.last_traces(jitted)[0].bound_symbols if b.sym.name == "ones"]
        assert [str(b.output.dtype) for b in made] == ["thunder.dtypes.float64"] * 3
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_later_compilation_repeats_what_an_earlier_one_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(Chain):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x * scale)

    model = seeded(lambda: Model(Linear))()
    jitted, repetition = thunder.jit(model), Repetition()
    trace_module_calls(thunder.compile_data(jitted), repetition)
    monkeypatch.delitem(vars(F), "__warningregistry__", raising=False)
    jitted(X)
    monkeypatch.setitem(vars(F), "__warningregistry__", {})  # as after a warning
    assert repetition.recorded == 3
    with torch.no_grad():
        jitted(X)
    assert repetition.recorded == 0 and repetition.repeated == 1  # the model, without gradients
    torch.testing.assert_close(jitted(X, 2.0), model(X, 2.0), rtol=0, atol=1e-14)
    assert repetition.recorded == 1 and repetition.repeated == 3
    in_full, _ = traces_of(model, (X, 2.0), call_forward)
    texts = [str(history(jitted)[0]) for history in (thunder.last_prologue_traces, thunder.last_traces)]
    assert [with_numbered_names(text) for text in texts] == in_full


class Refusing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


def test_an_error_of_a_module_that_is_not_registered_is_its_own() -> None:
    class Catching(Linear):
        def extra(self) -> Any:
            try:
                return Refusing()(self.linear.weight)
            except ValueError:
                return 2.0

    check_traces(seeded(lambda: Chain(Catching)), X, checks_more=True)
    model = thunder.jit(running(lambda self, x: Refusing()(x))(0))
    trace_module_calls(thunder.compile_data(model), call_forward)
    with pytest.raises(ValueError, match="no") as raised:
        model(X)
    notes = getattr(raised.value, "__notes__", ["while tracing a module that is not registered, Refusing"])
    assert "while tracing a module that is not registered, Refusing" in notes[0]


class Asking(nn.Module):
    """Looks up every kind of member, also where a name is missing, and after it has assigned one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.tied = self.linear.weight
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.parts = nn.ModuleDict({"one": nn.Tanh(), "two": nn.Linear(4, 4)})
        self.register_buffer("scale", torch.full((4,), 3.0))
        self.register_buffer("nothing", None)
        self.count = 2.0

    def __getattr__(self, name: str) -> Any:
        return 5.0 if name == "computed" else super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.linear.bias is None and self.nothing is None and not hasattr(self, "missing")
        x = self.parts["two"](self.parts.one(self.linear(x) @ self.tied)) + self.weights[1]
        for name in ("weight", "bias"):
            x = x + getattr(self.other, name)[0] * getattr(self.other, "missing", self.computed)
        self.scale = self.scale + self.count
        with contextlib.suppress(AttributeError):
            x = self.missing
        return x * self.scale + nn.Softplus().beta


def test_members_that_are_looked_up_at_once_are_those_that_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    look_aside = module_members.look_aside

    def spy(function: Any, args: tuple[Any, ...], paths: Any) -> Any:
        if (lookaside := look_aside(function, args, paths)) is not None:
            found.append(args[1].value)
        return lookaside

    monkeypatch.setattr(module_members, "look_aside", spy)
    traces, output = traces_of(seeded(Asking)(), (X,), call_forward, InputReads())
    assert {"linear", "bias", "tied", "parts", "one", "weight", "nothing", "scale"} <= set(found)
    assert found.count("scale") == 1, "it has been assigned then"
    monkeypatch.setattr(module_members, "look_aside", lambda *_: None)
    in_full, expected = traces_of(seeded(Asking)(), (X,), call_forward, InputReads())
    assert traces == in_full
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    torch.testing.assert_close(output, seeded(Asking)()(X))
