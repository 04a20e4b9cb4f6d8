"""Leaf modules return outputs that have no gradient or that nothing reads, share memory, and change state."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from thunder_fsdp_sched import Init

import pytest
import torch
import torch.nn.functional as F
from beside import Beside
from coded import coded, says
from models import Calling
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_rank")

SIZE = 4


class Part(Calling):
    """Applies a function of itself and its input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, linear=nn.Linear(SIZE, SIZE), other=nn.Linear(SIZE, SIZE), scale=1.0, aux=None)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.ones(SIZE))
        self.register_buffer("mask", torch.eye(SIZE).to_sparse(), persistent=False)


class Model(nn.Module):
    def __init__(self, part: Callable[..., Any], whole: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(SIZE, SIZE), Part(part), nn.Linear(SIZE, SIZE)
        self.whole = whole

    def forward(self, x: torch.Tensor) -> Any:
        return self.whole(self, self.first(x))


Case = tuple[Callable[..., Any], Callable[[Any, torch.Tensor], Any]]


def _beside(case: Case, **options: Any) -> Beside:
    torch.manual_seed(0)
    return Beside(Model(*case).double(), leaf_modules=(Part,), **options)


X = torch.ones(2, SIZE, dtype=torch.float64)


def _two(part: Any, x: torch.Tensor) -> Any:
    return part.linear(x), part.other(x)


def _counting(part: Any, x: torch.Tensor) -> torch.Tensor:
    part.calls += 1
    return F.dropout(part.linear(x), 0.5)


def _rounding(part: Any, x: torch.Tensor) -> torch.Tensor:
    weight = part.linear.weight.data
    part.linear.weight.data = (weight * 4).round() / 4
    y = part.linear(x)
    part.linear.weight.data = weight
    return y


def _counting_data(part: Any, x: torch.Tensor) -> torch.Tensor:
    part.calls.data.add_(1)
    part.calls.data = part.calls.data * 2
    return part.linear(x) * part.calls


def _shift(part: Any, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
    return part.linear(x) + shift


def _checkpointed(part: Any, x: torch.Tensor) -> torch.Tensor:
    bias = part.linear.bias + part.other.bias
    return part.other(checkpoint(lambda x: torch.tanh(part.linear(x)) * bias, x, use_reentrant=True)) + bias


RIGHT: dict[str, Case] = {
    "an index besides": (
        lambda part, x: (part.linear(x), x.argmax(-1)),
        lambda model, x: (lambda y, index: model.last(y) * index[:, None])(*model.part(x)),
    ),
    "a detached output": (
        lambda part, x: (part.linear(x), part.other(x).detach()),
        lambda model, x: (lambda y, metric: model.last(y) + metric)(*model.part(x)),
    ),
    "a buffer besides, and a write to the other output": (
        lambda part, x: {"y": part.linear(x), "calls": part.calls},
        lambda model, x: model.last(model.part(x)["y"].add_(x)),
    ),
    "only constants": (lambda part, x: (x > 0).to(x.dtype), lambda model, x: model.last(model.part(x) * x)),
    "one of two is read": (_two, lambda model, x: model.last(model.part(x)[0])),
    "one of two is in the loss": (_two, lambda model, x: model.part(x)),
    "nothing is read": (_counting, lambda model, x: (model.part(x), F.dropout(model.last(x), 0.5))[1]),
    "data that is put back": (_rounding, lambda model, x: model.last(model.part(x))),
    "data of a buffer": (_counting_data, lambda model, x: model.last(model.part(x))),
    "a sparse buffer": (
        lambda part, x: part.other(torch.sparse.mm(part.mask, part.linear(x).t()).t()) @ part.mask.to_dense(),
        lambda model, x: model.last(model.part(x)),
    ),
    "a returned buffer besides one that is written later": (
        lambda part, x: (part.linear(x), part.mask.to_dense(), part.shift),
        lambda model, x: (lambda y, _, shift: (model.part.calls.add_(1), model.last(y) + shift)[1])(*model.part(x)),
    ),
    "a reentrant checkpoint of what parameters have computed": (
        _checkpointed,
        lambda model, x: model.last(model.part(x)),
    ),
    "calls that differ": (
        _shift,
        lambda model, x: model.part(x.detach()) + model.part(x) + model.part(x, 2.0) + model.part(x[:1]),
    ),
}


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("name", RIGHT)
def test_trains_like_the_unsharded_model(name: str, strategy: str) -> None:
    both = _beside(RIGHT[name], sharding_strategy=strategy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in both.both]
    for m in both.both:
        m(X)  # compiles, so that random numbers are alike afterwards
    for step in range(3):
        losses = []
        for m in both.both:
            torch.manual_seed(step)
            output = m(torch.randn(2, SIZE, dtype=torch.float64))
            losses.append((output[0] if isinstance(output, tuple) else output).pow(2).sum())
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        both.compare_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (key, ours), theirs in zip(both.model.named_parameters(), both.module.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, msg=key)
    torch.testing.assert_close(both.model.state_dict()["part.calls"], both.module.part.calls)


def _set(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.part.scale = 3.0
    return model.part(x)


def _count(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.part.calls.add_(1)
    return model.part(x)


def _assign_aux(part: Any, x: torch.Tensor) -> torch.Tensor:
    part.aux = x.sum()
    return part.linear(x)


def _assign_scale(part: Any, x: torch.Tensor) -> Any:
    part.scale = [x.detach().mean(0)]
    return part.linear(x), part.scale[0]


def _through(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.part(x)


def _keep(part: Any, x: torch.Tensor, get: Callable[[torch.Tensor], Any] = lambda weight: weight) -> torch.Tensor:
    part.kept = [get(part.linear.weight)]
    return part.linear(x)


class _Reversible(torch.autograd.Function):
    """Reads parameters in a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linear: nn.Module) -> torch.Tensor:
        ctx.linear = linear
        ctx.save_for_backward(x)
        return linear(x).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.linear(x), grad)
        return x.grad, None


@torch.no_grad()
def _scale(weight: torch.Tensor) -> None:
    weight.mul_(0.5)


def _assign(weight: torch.Tensor) -> None:
    weight.data = weight.data * 0.5


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "without gradients": _scale,
    "through detach": lambda weight: weight.detach().mul_(0.5),
    "through data": lambda weight: weight.data.mul_(0.5),
    "through data of a part": lambda weight: weight.data[0].index_add_(0, torch.tensor([1]), weight.data[1, :1]),
    "to data": _assign,
}


def _communicate(part: Any, x: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(y := part.linear(x))
    return y


def _raise(part: Any, x: torch.Tensor) -> torch.Tensor:
    raise KeyError("mine")


def _depends(part: Any, x: torch.Tensor) -> torch.Tensor:
    y = part.linear(x)
    return y if y.abs().max().item() > 1e3 else y.detach()


_UNKNOWN_VIEW = coded("module.in-place-change-of-unknown-view", "'fsdp_leaf'")
_INPUT, _OF_PART = coded("leaf.changes-input-in-place", "input 0"), "the leaf module 'part'"
_NOT_TRACED = coded("module.not-reproduced-by-trace")

ERRORS: dict[type[Exception], dict[str, tuple[Any, Any, coded | says]]] = {
    NotImplementedError: {
        "writes a result": (
            lambda part, x: x,
            lambda model, x: (lambda y: y.mul_(2) + x)(model.part(x)),
            _UNKNOWN_VIEW,
        ),
        "writes one of two results that share memory": (
            lambda part, x: (y := part.linear(x), y.t()),
            lambda model, x: (lambda y, z: y.mul_(2) + z.sum())(*model.part(x)),
            _UNKNOWN_VIEW,
        ),
        "sets an attribute before": (
            lambda part, x: part.linear(x) * part.scale,
            _set,
            _NOT_TRACED.naming(f"changes 'scale' of {_OF_PART}"),
        ),
        "changes a buffer before": (
            lambda part, x: part.linear(x) * part.calls,
            _count,
            _NOT_TRACED.naming(f"changes 'calls' of {_OF_PART}"),
        ),
        "reads an attribute after": (
            _assign_aux,
            lambda model, x: model.part(x) + model.part.aux,
            _NOT_TRACED.naming(f"reads 'aux', which {_OF_PART} changes"),
        ),
        "writes a view of a parameter through data": (
            lambda part, x: (part.linear.weight.t()[1:].data.clamp_(0), part.linear(x))[1],
            _through,
            coded("leaf.parameter-changed-in-place", "linear.weight"),
        ),
        "writes a buffer that it returns": (
            lambda part, x: (part.linear(x), part.calls),
            lambda model, x: (lambda y, calls: (calls.add_(1), y)[1])(*model.part(x)),
            _UNKNOWN_VIEW,
        ),
        "writes by its name a buffer that it returns": (
            lambda part, x: (part.linear(x), part.calls),
            lambda model, x: (lambda y, calls: y * (calls + model.part.calls.add_(1)))(*model.part(x)),
            _NOT_TRACED.naming(f"changes 'calls' of {_OF_PART}, which may have returned its memory"),
        ),
        "writes an attribute that it returns": (
            _assign_scale,
            lambda model, x: (lambda y, scale: y * scale.mul_(2))(*model.part(x)),
            _UNKNOWN_VIEW,
        ),
        "writes a parameter through NumPy": (
            lambda part, x: (part.linear.weight.detach().numpy().fill(0.5), part.linear(x))[1],
            _through,
            coded("leaf.parameter-changed-in-place", "linear.weight"),
        ),
        "writes its input through NumPy": (
            lambda part, x: (x.detach().numpy().fill(0.5), part.linear(x))[1],
            _through,
            _INPUT,
        ),
        "writes its input": (lambda part, x: part.linear(x.mul_(2)), _through, _INPUT),
        "writes its input through data": (lambda part, x: part.linear(x) + x.data.mul_(2), _through, _INPUT),
        "communicates": (_communicate, _through, says(r"'part' \(Part\) communicates \(c10d::allreduce_\)")),
    },
    RuntimeError: {
        "a hook of a parameter": (
            lambda part, x: (part.linear.weight.register_hook(torch.neg), part.linear(x))[1],
            _through,
            coded("leaf.hook-of-parameter-in-forward", "linear.weight"),
        ),
        "keeps a parameter": (_keep, _through, coded("leaf.parameter-kept", "'part' (Part)", "'linear.weight'")),
        "keeps the storage of a parameter": (
            lambda part, x: _keep(part, x, torch.Tensor.untyped_storage),
            _through,
            coded("leaf.parameter-kept", "'part' (Part)", "'linear.weight'"),
        ),
        "a gradient without a path": (
            lambda part, x: _Reversible.apply(x, part.linear),
            _through,
            coded("leaf.gradient-without-path", "'part' (Part)", "'linear.weight'"),
        ),
        "a sparse gradient": (
            lambda part, x: F.embedding((x > 0).long(), part.linear.weight, sparse=True),
            _through,
            coded("leaf.sparse-gradient", "'part' (Part)"),
        ),
    },
    KeyError: {"an exception of the program": (_raise, _through, says("mine"))},
    TypeError: {
        "an object": (
            lambda part, box: part.linear(box.x),
            lambda model, x: model.part(SimpleNamespace(x=x)),
            coded("leaf.argument-of-other-type", "SimpleNamespace"),
        )
    },
}

PATTERNS: dict[str, tuple[Any, type[Exception], coded]] = {
    "matches nothing": ("*.mlps", ValueError, coded("leaf.pattern-matches-nothing", "*.mlps", "Model")),
    "the model": (Model, ValueError, coded("leaf.model-itself-as-leaf")),
    "another shape": (("part", lambda x: x[:1]), RuntimeError, coded("leaf.returns-another-shape", "(2, 4)", "(1, 4)")),
}


@pytest.mark.parametrize(
    ("kind", "part", "whole", "expected"),
    [pytest.param(kind, *row, id=name) for kind, errors in ERRORS.items() for name, row in errors.items()],
)
def test_what_would_be_wrong_is_an_error(kind: type[Exception], part: Any, whole: Any, expected: coded | says) -> None:
    with pytest.raises(kind, check=expected):
        _beside((part, whole)).model(X).sum().backward()


def test_a_parameter_that_is_kept_is_an_error_in_each_call() -> None:
    model = _beside((_keep, _through)).model
    for _ in range(3):  # each call replaces what the one before has kept
        with pytest.raises(RuntimeError, check=coded("leaf.parameter-kept", "linear.weight")):
            model(X)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_that_is_not_that_of_a_leaf_is_an_error(name: str) -> None:
    pattern, error, expected = PATTERNS[name]
    with pytest.raises(error, check=expected):
        Beside(Model(lambda part, x: part.linear(x), _through), leaf_modules=[pattern]).model(torch.ones(2, SIZE))


@pytest.mark.parametrize("output", ["trained", "frozen", "detached"])
@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_a_parameter_is_an_error_in_each_call_that_makes_one(name: str, later: bool, output: str) -> None:
    def part(part: Any, x: torch.Tensor) -> torch.Tensor:
        if part.scale or not later:
            WRITES[name](part.linear.weight)
        return part.linear(x).detach() if output == "detached" else part.linear(x)

    model = _beside((part, lambda model, x: model.last(model.part(x)))).model
    model._model.part.linear.weight.requires_grad_(output != "frozen")
    for enabled in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with enabled():
            model._model.part.scale = 0.0
            if later:
                model(X)
                model._model.part.scale = 1.0
            with pytest.raises(RuntimeError, check=coded("leaf.parameter-changed-in-place", "linear.weight")):
                model(X)


@pytest.mark.parametrize("name", [name for name in WRITES if name != "to data"])
def test_an_ignored_parameter_may_be_written(name: str) -> None:
    def part(part: Any, x: torch.Tensor) -> torch.Tensor:
        WRITES[name](part.other.weight)
        return part.linear(x) + part.other(x).detach()

    both = _beside((part, _through), init=Init(ignored_params=["part.other.weight"]))
    for _ in range(2):
        torch.testing.assert_close(both.model(X), both.module(X))
        torch.testing.assert_close(both.model.get_parameter("part.other.weight"), both.module.part.other.weight)


def test_an_ignored_parameter_has_a_gradient() -> None:
    both = _beside(
        (lambda part, x: part.other(part.linear(x)), _through), init=Init(ignored_params=["part.other.weight"])
    )
    both.check(X)


def test_an_ignored_parameter_keeps_its_memory() -> None:
    def part(part: Any, x: torch.Tensor) -> torch.Tensor:
        _assign(part.other.weight)
        return part.linear(x) + part.other(x).detach()

    both = _beside((part, _through), init=Init(ignored_params=["part.other.weight"]))
    with pytest.raises(RuntimeError, check=coded("leaf.ignored-parameter-replaced", "other.weight", "copy_")):
        both.model(X)


def test_a_leaf_trains_after_a_first_call_in_inference_mode() -> None:
    both = _beside((lambda part, x: part.other(part.linear(x)), lambda model, x: model.last(model.part(x))))
    with torch.inference_mode():
        both.check(X)
    both.check(X)


def test_a_module_that_writes_a_parameter_does_not_become_a_leaf() -> None:
    case = lambda part, x: part.linear(x) + WRITES["through data"](part.linear.weight).sum(), _through
    with pytest.raises(NotImplementedError, check=coded("module.not-reproduced-by-trace", "data")) as raised:
        Beside(Model(*case).double()).model(X)
    assert any("changes parameter 'linear.weight' in place" in note for note in raised.value.__notes__)


def test_a_gradient_that_was_not_there_when_a_leaf_was_observed_is_an_error() -> None:
    model = _beside((_depends, lambda model, x: model.last(model.part(x)))).model
    model(X)
    with pytest.raises(RuntimeError, check=coded("leaf.returns-unexpected-gradient", "'part'", "output 0")):
        model(torch.full((2, SIZE), 1e6, dtype=torch.float64))


def test_gradients_of_a_tensor_that_a_leaf_has_kept_are_not_lost_silently() -> None:
    model = _beside((_assign_aux, lambda model, x: model.last(model.part(x)))).model
    for _ in range(2):
        with pytest.raises(RuntimeError, check=coded("leaf.gradients-outside-backward")):
            (model(X).sum() + model._model.part.aux).backward()
            model(X)
        model(X).sum().backward()  # training goes on
    model(X.clone().requires_grad_()).sum().backward(retain_graph=True)
    before = [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, check=coded("leaf.gradients-outside-backward")):
        model._model.part.aux.backward()  # at once
    for param, grad in zip(model.parameters(), before, strict=True):
        assert (param.grad is None) == (grad is None) and (grad is None or torch.equal(param.grad.to_local(), grad))


def _forces(part: Any, x: torch.Tensor) -> torch.Tensor:
    z = x.clone().requires_grad_()
    [force] = torch.autograd.grad(torch.tanh(part.linear(z)).sum(), z, create_graph=True)
    return part.other(force) if force.sum().item() > 1e9 else force


def _scaled_by_a_gradient(part: Any, x: torch.Tensor) -> torch.Tensor:
    [grad] = torch.autograd.grad(part.linear(x).square().sum(), part.linear.weight, create_graph=True)
    return part.other(x) @ grad


@pytest.mark.parametrize("part", [_forces, _scaled_by_a_gradient])
def test_a_leaf_may_differentiate(part: Callable[..., Any]) -> None:
    _beside((part, lambda model, x: model.last(model.part(x)))).check(X)


def test_buffers_are_those_that_the_latest_call_has_assigned() -> None:
    def part(part: Any, x: torch.Tensor) -> torch.Tensor:
        part.calls = part.calls + 1
        return part.linear(x)

    model = _beside((part, lambda model, x: model.part(x))).model
    for calls in (1, 2, 3):
        model(X)
        assert dict(model.named_buffers())["part.calls"] == model.get_buffer("part.calls") == calls


def test_what_autograd_has_saved_is_freed_without_a_backward() -> None:
    saved: list[StorageWeakRef] = []

    def part(part: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(part.linear(x))  # autograd saves this result for its own backward
        saved.append(StorageWeakRef(y.untyped_storage()))
        return part.other(y)

    model = _beside((part, lambda model, x: model.last(model.part(x)))).model
    for _ in range(3):
        model(X)
    gc.collect()
    assert [each.expired() for each in saved] == [True] * len(saved)
