"""Leaf modules: what Thunder cannot trace runs as it is, with the numbers of the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import thunder_fsdp_sched as tfs
from thunder_fsdp_sched import CommPolicy
from thunder_fsdp_sched.extras.planning.dry_run import fake_rank

import pytest
import thunder
import torch
from coded import coded
from memory_count import compare, count_on_fake_ranks
from models import Calling
from ranks import on_ranks
from scenario import Scenario, do, each, fsdp2
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

SIZE = 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Each row goes through one of three experts, of which some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(SIZE, 3), nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, SIZE)
        scores = self.gate(rows).softmax(-1)
        best, out = scores.argmax(-1), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            chosen = (best == number).nonzero().flatten()
            if chosen.tolist():
                out.index_add_(0, chosen, expert(rows[chosen]) * scores[chosen, number, None])
        return out.view_as(x)


class Branch(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out * 2 if out.sum().item() > 0 else out - 1


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1))


class _StraightThrough(_Scaled):
    """Returns its parameter as the gradient of its input."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return weight.expand_as(x), (grad * x).sum((0, 1))


def custom(function: type[torch.autograd.Function]) -> nn.Module:
    return Calling(lambda self, x: function.apply(x, self.weight), weight=nn.Parameter(torch.rand(SIZE)))


def recurrent() -> nn.Module:
    return Calling(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(SIZE, SIZE, batch_first=True))


class Counting(nn.Module):
    """Buffers and attributes change; hooks within the leaf run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.calls = nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE), 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.linear.register_forward_hook(lambda module, args, output: output * 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += x.shape[0]
        return self.linear(self.norm(x.flatten(0, 1))).view_as(x)


def checkpointed(reentrant: bool) -> nn.Module:
    return Calling(lambda self, x: checkpoint(self.mlp, x, use_reentrant=reentrant), mlp=Mlp())


class Structured(Mlp):
    """Takes a dictionary and a constant, and returns a parameter, its input and a dictionary."""

    def forward(self, x: torch.Tensor, *, more: dict[str, Any], scale: float) -> dict[str, Any]:
        return {"out": super().forward(x) * scale + more["bias"], "same": x, "bias": self.down.bias, "kind": "mlp"}


def _call_structured(self: Any, x: torch.Tensor) -> torch.Tensor:
    got = self.mlp(x, more={"bias": x.mean(-1, keepdim=True), "none": None}, scale=0.5)
    return got["out"] + got["same"] * got["bias"]


class Block(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part = nn.LayerNorm(SIZE), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(self.norm(x))


class Model(nn.Module):
    def __init__(self, *parts: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.blocks = nn.Sequential(*(Block(part()) for part in parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x)))

    @staticmethod
    def inputs(generator: torch.Generator, rows: int = 4) -> tuple[torch.Tensor, ...]:
        return (torch.randn(rows, 3, SIZE, generator=generator, dtype=torch.float64),)


def mixture() -> nn.Module:
    """Return a block whose experts are its own children, so that each would be a block, and a bucket, of its own."""
    experts = nn.ModuleList(Mlp() for _ in range(3))
    return Calling(lambda self, x: sum(expert(x) for expert in self.experts), experts=experts)


def _call_twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Call one module twice, and its weight once more outside of it."""
    return self.mlp(self.mlp(x)) + nn.functional.linear(torch.tanh(self.mlp.up(x)), self.mlp.down.weight)


def in_checkpoint(kind: type[nn.Module]) -> nn.Module:
    def region(self: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: torch.tanh(self.mlp(torch.sin(x))), x, use_reentrant=False)

    return Calling(region, mlp=kind())


def nested() -> nn.Module:
    """Return a module of which only the inner one cannot be traced."""
    return Calling(lambda self, x: self.second(self.first(x)), first=Mlp(), second=Experts())


class RandomScale(Calling):
    """The innermost module that can be a leaf is the one around that which returns a Python number."""

    def __init__(self) -> None:
        members = {"weight": nn.Parameter(torch.ones(SIZE)), "largest": Largest()}
        super().__init__(lambda self, x: x * self.weight * self.largest(x), **members)


class Largest(nn.Module):
    def forward(self, x: torch.Tensor) -> float:
        return float(x.abs().max().item() > 1) + 1.0


class Chain(nn.Sequential):
    inputs = staticmethod(Model.inputs)

    def __init__(self) -> None:
        super().__init__(Mlp(), custom(_StraightThrough), Mlp())
        self.double()


def _scenario(*parts: Callable[[], nn.Module], others: Sequence[Any] = (), **options: Any) -> Scenario:
    """Return a scenario whose blocks have leaves; with ``others``, these are what it must equal."""
    options = {"leaf_modules": ("blocks.*.part",), **options}
    oracle = None if others else "unsharded"
    make = lambda: Model(*parts).double()  # noqa: E731
    return Scenario(make, [do.train()], options, others, oracle, others_tolerance=1e-6)


PARTS = (
    *(Mlp, Experts, Branch, recurrent, Counting, mixture, partial(custom, _Scaled)),
    *(partial(checkpointed, reentrant=False), partial(checkpointed, reentrant=True)),
)
WITHIN = (
    lambda: Calling(_call_structured, mlp=Structured()),
    lambda: Calling(_call_twice, mlp=Mlp()),
    lambda: in_checkpoint(Branch),
)
"""Modules that have a leaf, each of which the pattern ``blocks.*.part.mlp`` finds."""

SCENARIOS = {
    "all kinds": _scenario(*PARTS),
    "within others": _scenario(*WITHIN, leaf_modules=("blocks.*.part.mlp",)),
    "whole blocks, zero2": _scenario(Experts, Branch, leaf_modules=(Block,), sharding_strategy="zero2"),
    # The numbers of FSDP2, and those of the same modules traced.
    "mixed precision": _scenario(
        Mlp,
        mp_policy=MixedPrecisionPolicy(torch.float32, torch.float64),
        others=[partial(fsdp2, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float64)), {"leaf_modules": ()}],
    ),
    # The gradient is read after another bucket has been gathered into the slot of the parameter.
    "gradient in a parameter": Scenario(Chain, [do.train()], {"leaf_modules": ("1",)}),
    "encoded": _scenario(
        Mlp,
        comm_policy=CommPolicy(gather="int8", reduce="bfloat16"),
        others=[{"leaf_modules": ()}],
        sharding_strategy="zero2",
    ),
}


@each(SCENARIOS)
def test_trains_like_the_unsharded_model(name: str) -> None:
    SCENARIOS[name].run()


@torch.library.custom_op("leaf_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: grad * 2)


class Operators(Mlp):
    """Calls an operator, an overload and an autograd function, which alone run as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = doubled(super().forward(x)) + torch.ops.leaf_tests.doubled(x) + torch.ops.leaf_tests.doubled.default(x)
        return _Scaled.apply(x, self.down.bias)


class Tables(Mlp):
    """Fills a dictionary in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10
        return super().forward(x + self.tables[x.shape[1]])


def normed() -> nn.Module:
    """Return a module whose weight another one computes, which Thunder cannot trace."""
    return Calling(lambda self, x: self.linear(x), linear=weight_norm(nn.Linear(SIZE, SIZE)))


AUTOMATIC = {
    Experts: "part",
    Branch: "part",
    recurrent: "part.lstm",
    nested: "part.second",
    RandomScale: "part",
    Tables: "part",
    normed: "part.linear.parametrizations.weight.0",
    Operators: None,
}
"""Modules that cannot be traced, each with the part of it that becomes a leaf."""


@on_ranks()
def test_what_cannot_be_traced_runs_as_it_is() -> None:
    with pytest.warns(UserWarning, match="runs as it is") as caught:
        run = _scenario(*AUTOMATIC, leaf_modules="auto").run()
    texts = [str(w.message).partition(",")[0] for w in caught if "runs as it is" in str(w.message)]
    weight = ".linear.parametrizations.weight.*"
    kinds = {
        "Tables": "",
        "_WeightNorm": weight,
        "Experts": "",
        "Branch": "",
        "LSTM": ".lstm",
        "RandomScale": "",
    }  # nested() has Experts, too
    expected = {f"fsdp: blocks.*.part{path} ({kind}" for kind, path in kinds.items()}
    functions = ("leaf_tests.doubled", "leaf_tests.doubled.default", "_Scaled")
    assert set(texts) == expected | {f"fsdp: {name} is not traced" for name in functions}, texts
    leaves = sorted(run.transform.sharded.leaves.values())
    assert leaves == [f"blocks.{number}.{path}" for number, path in enumerate(AUTOMATIC.values()) if path]


def _compiled() -> nn.Module:
    part = Branch()
    part.compile(backend="aot_eager")
    return part


COMPILED = Scenario(lambda: Model(_compiled, lambda: torch.compile(Mlp(), backend="eager")).double())


@on_ranks()
def test_compiled_submodules_run_as_they_are_compiled() -> None:
    run = COMPILED.run()
    assert sorted(run.transform.sharded.leaves.values()) == ["blocks.0.part", "blocks.1.part"]
    x = torch.randn(2, 3, SIZE, dtype=torch.float64)
    with torch.no_grad(), tfs.eager(run.model) as module:
        output = module(x)
    torch.testing.assert_close(output, run.model(x))


def test_without_leaves_what_cannot_be_traced_is_an_error_that_names_the_option(one_rank: None) -> None:
    model = thunder.jit(Model(Branch), transforms=[tfs.fsdp(leaf_modules=())])
    with pytest.raises(NotImplementedError, check=coded("module.not-reproduced-by-trace", "(.item())")) as raised:
        model(torch.ones(4, 3, SIZE))
    assert "fsdp(leaf_modules=('blocks.*.part',))" in raised.value.__notes__[0]


def test_a_second_backward_needs_a_graph_that_is_kept(one_rank: None) -> None:
    model = thunder.jit(Model(Branch), transforms=[tfs.fsdp(leaf_modules=[Branch], sharding_strategy="zero3")])
    loss = model(torch.ones(4, 3, SIZE)).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    twice = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(twice, [2 * grad for grad in once])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


class _OwnError(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 5:
            raise ValueError("five rows are too many")
        return super().forward(x) @ x.new_ones(SIZE + (x.shape[0] == 6), SIZE)


@pytest.mark.parametrize(("rows", "error"), [(5, "five rows"), (6, "shape|size|dimension")])
def test_the_errors_of_the_program_stay_its_own(rows: int, error: str, one_rank: None) -> None:
    transform = tfs.fsdp()
    model = thunder.jit(Model(_OwnError), transforms=[transform])
    with pytest.raises((ValueError, RuntimeError), match=error):
        model(torch.ones(rows, 3, SIZE))
    assert not transform.sharded.leaves
    model(torch.ones(4, 3, SIZE)).sum().backward()


class Shift(nn.Module):
    """Does not save its input for backward, but a hook may hold it."""

    def __init__(self, *, holds: bool = False) -> None:
        super().__init__()
        self.bias, self.holds = nn.Parameter(torch.ones(SIZE)), holds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(x + self.bias)
        if self.holds:
            out.register_hook(lambda grad: grad.view_as(x))
        return out


class Wide(Shift):
    """Takes more memory in forward than in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x.expand(8, *x.shape) + 1).sum(0))


@pytest.mark.parametrize(
    ("part", "pattern"),
    [
        (Mlp, "blocks.*.part"),
        (lambda: in_checkpoint(Mlp), "blocks.*.part.mlp"),
        (Shift, "blocks.*.part"),
        (partial(Shift, holds=True), "blocks.*.part"),
        (lambda: in_checkpoint(Shift), "blocks.*.part.mlp"),
        (lambda: in_checkpoint(Wide), "blocks.*.part.mlp"),
    ],
)
def test_predicted_memory_contains_what_a_leaf_saves_and_takes(part: Callable[[], nn.Module], pattern: str) -> None:
    """What a leaf takes in backward is an upper bound; everything else is exact."""
    found = count_on_fake_ranks(Model(part, part).double(), lambda: tfs.fsdp(leaf_modules=(pattern,)))
    compiled, memory, tracker = found["step"]
    count = compare(memory, compiled, tracker)
    assert all(wrong >= actual and "fsdp_leaf_backward" in text for wrong, actual, text in count.wrong), str(count)
    assert count.counted <= count.predicted <= 1.05 * count.counted


def test_leaves_that_are_alike_are_observed_once() -> None:
    calls = []
    for count in (1, 3):
        with (
            fake_rank(0, 2),
            mock.patch.object(Experts, "forward", autospec=True, side_effect=Experts.forward) as called,
        ):
            transform = tfs.fsdp(leaf_modules=("blocks.*.part",))
            model = thunder.jit(Model(*[Experts] * count, Branch).double(), transforms=[transform])
            transform.sharded.compile(model, Model.inputs(torch.Generator()), {})
        calls.append(called.call_count)
    assert calls[0] == calls[1] > 0
    assert transform.sharded.leaves.summary() == ["blocks.*.part (Experts, 3 times)", "blocks.*.part (Branch, 1 times)"]
    assert sorted(transform.sharded.leaves.calls, key=str) == sorted(transform.sharded.leaves, key=str)
