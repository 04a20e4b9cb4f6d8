"""A trace that would not reproduce its program is refused; the error gives the line and the fix."""

from __future__ import annotations

import collections
import datetime
import functools
import io
import itertools
import logging
import operator
import os
import random
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import thunder_fsdp_sched  # before thunder  # noqa: F401

import numpy as np
import pytest
import thunder
import torch
import torch.nn.functional as F
from beside import Applied, AppliedEach, Beside
from coded import coded
from models import Calling
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")

HERE = f"{__file__}:"


def beside(function: Callable[[torch.Tensor], Any]) -> Beside:
    return Beside(Applied(function), leaf_modules=())


X = torch.ones(2, 2)


def item(y: torch.Tensor) -> float:
    return y.mean().item()


TOTAL = 0


def _assign_global(y: torch.Tensor) -> torch.Tensor:
    global TOTAL
    TOTAL = y
    return y


def _assigns_nonlocal() -> Callable[[torch.Tensor], torch.Tensor]:
    last = None

    def assign(y: torch.Tensor) -> torch.Tensor:
        nonlocal last
        last = y
        return last

    return assign


def _swallowed(y: torch.Tensor) -> torch.Tensor:
    try:
        return y if item(y) > 0 else -y
    except Exception:
        return y


READ: dict[str, Callable[[torch.Tensor], Any]] = {
    "lt, called": lambda y: y if operator.lt(item(y), 0) else -y,
    ">": lambda y: y if item(y) > 0 else -y,
    "truth": lambda y: y if item(y) else -y,
    "is True": lambda y: y if (y > 0).any().item() is True else -y,
    "all of a list": lambda y: y if all([item(y), 1]) else -y,
    "index": lambda y: (y, -y)[int(item(y) > 0)],
    "key": lambda y: {1.0: -y}.get(item(y), y),
    "range": lambda y: y * len(range(y.long().sum().item())),
    "size": lambda y: y.sum() + torch.arange(y.long().sum().item()).sum(),
    "math": lambda y: y * __import__("math").sqrt(item(y)),
    "sorted": lambda y: y * sorted([0.5, item(y)])[0],
    "text": lambda y: y if f"{item(y):.1f}" == "1.0" else -y,
    "compared by an operator of Thunder": lambda y: torch.add(y, y, alpha=item(y)),
    "the error is caught": _swallowed,
}


@pytest.mark.parametrize("name", READ)
def test_a_number_of_a_tensor_is_not_read_while_tracing(name: str) -> None:
    expected = coded("module.not-reproduced-by-trace", HERE, "uses a number", f"at {HERE}", "(.item())")
    with pytest.raises(NotImplementedError, check=expected):
        beside(READ[name]).model(X)


def _counts_inside(y: torch.Tensor) -> torch.Tensor:
    count = 0

    def increase() -> None:
        nonlocal count
        count += 1

    increase()
    increase()
    return y * count


COMPUTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda y: y * ((item(y) + 1) ** 2 - 3) / item(y),
    "limit": lambda y: y.clamp(max=item(y)),
    "filled": lambda y: y + torch.full((2,), item(y)),
    "compared with a tensor": lambda y: torch.where(y > item(y), y, -y),
    "is None": lambda y: -y if item(y) is None else y,
    "isinstance": lambda y: y if isinstance(item(y), float) else -y,
    "type": lambda y: y if type(item(y)) is float else -y,
    "variables of a function that forward makes": _counts_inside,
}


@torch.no_grad()
def test_operators_compute_with_a_number_of_a_tensor() -> None:
    both = Beside(AppliedEach(COMPUTED.values(), 2), leaf_modules=())
    for x in (X, -X):
        both.check(x)
    assert thunder.cache_misses(both.model) == 1


class _Generator(random.Random):
    pass


_GENERATOR = _Generator(0)
_GENERATORS = collections.deque([_GENERATOR])

_COUNTER, _ITEMS = itertools.count(), (i for i in range(9))

CHANGES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "random": (lambda y: y * random.random(), "(random.random)"),
    "of a generator": (lambda y: y * _GENERATOR.random(), "random.random"),
    "of a generator in a deque": (lambda y: y * _GENERATORS[0].random(), "random.random"),
    "of a generator by a getter": (
        lambda y: y * operator.itemgetter(0)(_GENERATORS).random(),
        "random.random",
    ),
    "state": (lambda y: y * len(random.getstate()), "random.getstate"),
    "seed": (lambda y: random.seed(0) or y, "random.seed"),
    "without a seed": (lambda y: y * random.Random().random(), "random.seed"),
    "numpy": (lambda y: y * float(np.random.rand()), "numpy.random.rand"),
    "numpy's generator without a seed": (lambda y: y * np.random.default_rng().random(), "numpy.random.default_rng"),
    "urandom": (lambda y: y * os.urandom(1)[0], "os.urandom"),
    "time": (lambda y: y * time.time(), "time.time"),
    "now": (lambda y: y * datetime.datetime.now().timestamp(), "datetime.now"),
    "counter": (lambda y: y * next(_COUNTER), "(count)"),
    "generator": (lambda y: next(y * i for i in _ITEMS), "(generator)"),
    "in a key": (lambda y: y * sorted([1, 2], key=lambda _: random.random())[0], "random.random"),
    "in native code": (lambda y: y * float(re.sub("a", lambda _: str(time.time()), "a")), "time.time"),
    "in an iterator": (lambda y: y * max(itertools.accumulate([1, 2], lambda *_: random.random())), "random.random"),
    "initial_seed": (lambda y: y * torch.initial_seed(), "(initial_seed)"),
    "manual_seed": (lambda y: torch.manual_seed(0) and y, "(manual_seed)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_that_changes_between_calls_is_not_traced(name: str) -> None:
    function, called = CHANGES[name]
    with pytest.raises(NotImplementedError, check=coded("module.not-reproduced-by-trace", HERE, called)):
        beside(function).model(X)


@torch.no_grad()
def test_seeded_generators_of_forward_and_clocks_of_logging_are_traced() -> None:
    logger = logging.Logger("forward")
    logger.addHandler(logging.StreamHandler(text := io.StringIO()))

    def logged(y: torch.Tensor) -> torch.Tensor:
        functools.lru_cache(logger.warning)("called")  # which native code calls
        generators = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)
        return y * generators[0].random() * float(generators[1].random()) * float(generators[2].rand())

    beside(logged).check(X)
    assert text.getvalue() == "called\n" * 2


@torch.no_grad()
def test_builtin_functions_that_call_back_are_traced() -> None:
    def computed(y: torch.Tensor) -> torch.Tensor:
        items = sorted(["aa", "b"], key=len, reverse=True)
        numbers = [1.0, 2.0, 3.0]
        numbers.sort(key=lambda v: (v - 2) ** 2)
        best = max(numbers, key=lambda v: -v) + min(4.0, 5.0, key=lambda v: v % 5) + max([], key=len, default=7.0)
        parts = list(filter(lambda part: part is not None, map(torch.add, [y, y * 2], [y, 1])))
        return parts[0] * best + parts[1] * numbers[-1] * len(items[0]) * sum(filter(None, [0, 3])) * int(
            "".join(map(str, [1, 2]))
        )

    beside(computed).check(X)


@torch.no_grad()
def test_environment_variables_are_compared_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(os.environ.get("FACTOR", "1")) + len([name for name in os.environ if name == "FACTOR"])

    for name in os.environ:  # the fewer, the less is traced
        monkeypatch.delenv(name)
    both = beside(nn.Sequential(Block(), Block()))
    for factor in (None, "2", "2", "3", None):
        if factor is None:
            monkeypatch.delenv("FACTOR", raising=False)
        else:
            monkeypatch.setenv("FACTOR", factor)
        both.check(X)
    assert thunder.cache_misses(both.model) == 3


def test_a_frozen_embedding_may_be_sparse() -> None:
    frozen = nn.Embedding(3, 2, sparse=True).requires_grad_(False)  # gets no gradient
    beside(Calling(lambda self, y: y + self.embedding(TOKENS), embedding=frozen)).check(X)


@torch.no_grad()
def test_forward_sets_a_variable_and_calls_a_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    double = torch.compile(lambda y: y * 2)

    def function(y: torch.Tensor) -> torch.Tensor:
        return double(y) * float(os.environ.setdefault("FACTOR", "2"))

    both = beside(function)
    for factor in (None, "3", "2"):
        monkeypatch.delenv("FACTOR", raising=False)
        if factor is not None:
            monkeypatch.setenv("FACTOR", factor)
        torch.testing.assert_close(both.model(X), both.module.linear(X) * 2 * float(factor or 2))
    assert thunder.cache_misses(both.model) == 2


def test_modules_that_forward_makes_are_traced() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        y = nn.Sequential(nn.Tanh(), nn.Dropout(0.0))(y)
        target = torch.zeros(2, dtype=torch.long)
        weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
        return nn.CrossEntropyLoss()(y, target) + weighted(y * y, target)

    beside(loss).check(torch.linspace(-1, 1, 4).view(2, 2))


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2


class _NeedsInputGrad(_Function):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 2 if ctx.needs_input_grad[0] else None


class _ListFirst(_Function):
    @staticmethod
    def forward(ctx: Any, factors: list[int], x: torch.Tensor) -> torch.Tensor:
        return x * factors[0]


def _assign_part(y: torch.Tensor) -> torch.Tensor:
    z = torch.complex(y, y)
    z.real = y * 2
    return z.abs()


class _KeepsInput(_Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x * 2


class _TwoResults(_Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first * 2 + second * 3


class _MaterializesGrads(_Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x * 2


class _SetupContext(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)


def _unpack_number(y: torch.Tensor) -> torch.Tensor:
    try:
        a, b = 5  # type: ignore[misc]
    except TypeError:
        return y
    return y * a * b


class _Tripling:
    """Returns another value of an attribute than it stores."""

    def __init__(self) -> None:
        self.scale = 2.0

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value * 3 if name == "scale" else value


class _Doubled(list[float]):
    def __iter__(self) -> Any:
        return (value * 2 for value in list.__iter__(self))


class _Reversed(list):
    __iter__ = list.__reversed__


def _leaves_generator(y: torch.Tensor) -> torch.Tensor:
    ended: list[float] = []

    def numbers() -> Any:
        try:
            yield from (2.0, 3.0)
        finally:
            ended.append(5.0)

    for number in numbers():
        y = y * number
        break
    return y * sum(ended)


def _with_hooks_of_saved(y: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor):
        return y.exp()


class _Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class _Summed(_Pair):
    def total(self) -> torch.Tensor:
        return self.first + self.second


def _writes_a_view(y: torch.Tensor) -> torch.Tensor:
    written = torch.zeros(2, 2)
    written.t()[0].add_(y[0])
    return y if written.requires_grad else -y


TOKENS, WEIGHT = torch.zeros(2, 2, dtype=torch.long), torch.ones(3, 2)
UNSUPPORTED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "own look-up": (lambda y: y * _Tripling().scale, r"'scale' of a _Tripling.*Define a property"),
    "iterator of another method": (lambda y: y * max(*_Reversed([2.0, 3.0])), r"a _Reversed.*own __iter__.*plain list"),
    "own iterator": (lambda y: y * max(*_Doubled([2.0, 3.0])), r"a _Doubled.*own __iter__.*plain list"),
    "requires_grad of a written tensor": (_writes_a_view, r"asks for requires_grad.*torch\.is_grad_enabled"),
    "left generator": (_leaves_generator, r"leaves a generator in a try.*call close\(\)"),
    "hooks of saved tensors": (_with_hooks_of_saved, r"hooks of saved tensors.*max_memory"),
    "derived named tuple": (lambda y: _Summed(y, y).total(), r"subclassed named tuple.*Add methods to a dataclass"),
    "sparse": (lambda y: F.embedding(TOKENS, WEIGHT * y[0], sparse=True), r"sparse=True.*Pass sparse=False"),
    "max_norm": (lambda y: F.embedding(TOKENS, WEIGHT * y[0], max_norm=1.0), r"max_norm.*Leave max_norm out"),
    "needs_input_grad": (lambda y: _NeedsInputGrad.apply(y), r"attribute of ctx\. Save what backward needs"),
    "tensor as an attribute of ctx": (
        lambda y: _KeepsInput.apply(y),
        r"attribute of ctx \('x'\).*ctx\.save_for_backward",
    ),
    "several results": (lambda y: _TwoResults.apply(y)[0], r"several results \(_TwoResults\)\. Save"),
    "set_materialize_grads": (lambda y: _MaterializesGrads.apply(y), r"attribute of ctx\. Save what backward needs"),
    "list first": (lambda y: _ListFirst.apply([1, 2], y), r"first argument is no tensor.*Pass a tensor first"),
    "unpacked number": (_unpack_number, r"interpreter fails here \(AssertionError.*module of its own"),
    "assigned list": (
        Calling(lambda self, y: self.__setattr__("kept", [y]) or y),
        r"assigns a list to the attribute 'kept' of a Calling.*Assign tensors",
    ),
    "deleted attribute": (
        Calling(lambda self, y: delattr(self, "function") or y),
        r"deletes the attribute 'function' of a Calling.*Assign None",
    ),
    "assigned part": (_assign_part, r"assigns real of a tensor.*torch\.complex"),
    "index of bools": (lambda y: y[[True, False]], r"bools in an index.*positions"),
    "setup_context": (lambda y: _SetupContext.apply(y), r"setup_context \(_SetupContext\)\. Let forward take ctx"),
    "vmap": (lambda y: torch.func.vmap(torch.sin)(y), r"cannot trace torch\.func.*outside of the module"),
    "functional_call": (lambda y: torch.func.functional_call(nn.Tanh(), {}, (y,)), r"cannot trace torch\.func"),
    "lstm": (nn.LSTM(2, 2), r"cannot trace nn\.LSTM.*nn\.GRUCell"),
    "branch on a tensor": (lambda y: y if y.sum() > 0 else -y, r"depend on a tensor's value.*torch\.where"),
    "tolist": (lambda y: y * y[0].tolist()[0], r"known only when the trace runs.*torch\.where"),
    "index": (lambda y: [y, -y][y.long().sum().item()], r"known only when the trace runs.*as an argument"),
    "is_contiguous": (
        lambda y: y if y.t().is_contiguous() else -y,
        r"memory layout .*is_contiguous.*Call \.contiguous\(\)",
    ),
    "data_ptr": (lambda y: y * (y.data_ptr() != 0), r"memory layout .*data_ptr"),
    "grad_fn": (lambda y: y if getattr(y, "grad_fn", None) else -y, r"attribute grad_fn of a tensor"),
    "is": (lambda y: y if y.to(y.dtype) is y else -y, r"two tensors are one object.*Compare dtypes"),
    "is, in place": (lambda y: y if y.mul_(2) is y else -y, r"two tensors are one object.*works in place"),
    "is, inplace=True": (lambda y: y if F.relu(y, inplace=True) is y else -y, r"two tensors are one object"),
    "is, atleast_2d": (lambda y: y if torch.atleast_2d(y) is y else -y, r"two tensors are one object"),
    "global": (_assign_global, r"forward assigns 'TOTAL', a variable outside of it.*Return the value"),
    "nonlocal": (_assigns_nonlocal(), r"forward assigns 'last', a variable outside of it.*Return the value"),
    "contiguous is": (lambda y: y if y is y.float().contiguous() else -y, r"two tensors are one object"),
    "tensor of a number": (lambda y: y * torch.tensor(item(y)), r"uses a number that it reads.*torch\.where"),
    "generator": (lambda y: y * torch.rand(2, generator=torch.Generator().manual_seed(3)), r"Leave generator out"),
    "mask": (lambda y: y[y > 0], r"known only when the trace runs"),
    "parameters": (lambda y: nn.Linear(2, 2)(y), "Create parameters.*outside of forward"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore:fsdp. .*_flat_weights")
def test_errors_of_what_thunder_cannot_trace_say_what_to_do(name: str) -> None:
    function, text = UNSUPPORTED[name]
    with pytest.raises(Exception) as raised:
        beside(function).model(torch.ones(2, 2, requires_grad=True)).sum().backward()
    notes = [str(raised.value), *getattr(raised.value, "__notes__", ())]
    assert re.search(text, " ".join(notes)) and re.search(r"(beside|test_untraceable)\.py:\d", " ".join(notes)), notes


class _Keeps(nn.Module):
    """Passes a list of its own, or of its arguments, to torch, and changes it."""

    def __init__(self, change: Callable[[list[torch.Tensor]], object]) -> None:
        super().__init__()
        self.layer, self.change, self.kept = nn.Linear(2, 2), change, [torch.ones(2, 2)]

    def forward(self, x: torch.Tensor, given: list[torch.Tensor] | None = None) -> torch.Tensor:
        values = self.kept if given is None else given
        y = self.layer(torch.stack(values).sum(0) * x)
        self.change(values)
        return y


BY_BOOLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tuple": lambda y: (y, -y)[y.dim() == 2],
    "list": lambda y: [y, -y][y.dim() == 2],
    "dictionary": lambda y: {True: y * 2, False: y}[y.dim() == 2],
}


@pytest.mark.parametrize("name", BY_BOOLS)
def test_bools_are_indices_and_keys_of_containers(name: str) -> None:
    beside(BY_BOOLS[name]).check(X)


def _set_first(values: list[torch.Tensor]) -> None:
    values[0] = values[0] + 1


LIST_CHANGES: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "set": _set_first,
    "append": lambda values: values.append(values[0]),
    "clear": lambda values: values.clear(),
    "reverse": lambda values: values.reverse(),
}


@pytest.mark.parametrize("is_given", [False, True], ids=["attribute", "argument"])
@pytest.mark.parametrize("name", LIST_CHANGES)
def test_lists_from_outside_that_torch_has_read_are_not_changed(name: str, is_given: bool) -> None:
    args = (X, [X]) if is_given else (X,)
    with pytest.raises(NotImplementedError, check=coded("module.not-reproduced-by-trace", "changes a list", "a copy")):
        Beside(_Keeps(LIST_CHANGES[name]), leaf_modules=()).model(*args)


CPU = torch.device("cpu")

TRUE_OF_A_FLOAT_MATRIX: dict[str, Callable[[torch.Tensor], bool]] = {
    "dtype ==": lambda y: y.dtype == torch.float32 and torch.float32 == y.dtype,
    "dtype is": lambda y: y.dtype is torch.float32,
    "dtype !=": lambda y: y.dtype != torch.int64,
    "dtype in": lambda y: y.dtype in (torch.float16, torch.float32) and y.dtype in {torch.float32},
    "dtype as a key": lambda y: {torch.float32: True}.get(y.dtype, False),
    "its text": lambda y: str(y.dtype) == "torch.float32" and str(y.device) == "cpu",
    "its attributes": lambda y: y.dtype.is_floating_point and torch.finfo(y.dtype).bits == 32,
    "isinstance": lambda y: isinstance(y.dtype, torch.dtype) and isinstance(y.device, torch.device),
    "the default": lambda y: y.dtype == torch.get_default_dtype(),
    "device ==": lambda y: y.device == torch.device("cpu") and y.device == torch.device(type="cpu"),
    "device from outside": lambda y: y.device == CPU and y.device.type == "cpu",
    "type": lambda y: type(y) is torch.Tensor and y.__class__ is torch.Tensor and issubclass(type(y), torch.Tensor),
    "type of the shape": lambda y: isinstance(y.shape, torch.Size) and type(y.shape) is torch.Size,
    "hasattr": lambda y: hasattr(y, "grad_fn") and hasattr(y, "stride") and not hasattr(y, "nothing"),
    "layout": lambda y: y.layout is torch.strided and not y.is_sparse,
    "requires_grad": lambda y: y.requires_grad and not y.detach().requires_grad and not y.long().requires_grad,
    "requires_grad of views": lambda y: y.t()[0].requires_grad and not torch.zeros_like(y).requires_grad,
    "requires_grad of a new tensor": lambda y: not y.new_zeros(2).requires_grad,
    "requires_grad of a written constant": lambda y: not y.new_zeros(2).add_(y.detach()[0]).requires_grad,
    "requires_grad beside a write": lambda y: (y * 2).add_(1).requires_grad and not torch.ones(2).requires_grad,
    "is": lambda y: y is y and y.t() is not y and y * 1 is not y,
    "made on it": lambda y: torch.zeros(2, dtype=y.dtype, device=y.device).dtype == y.to(torch.device("cpu")).dtype,
}


def test_properties_of_tensors_are_those_of_torch() -> None:
    """A condition that is not true has a negative number."""
    signs = [lambda y, is_so=is_so: y * y if is_so(y) else -y * y for is_so in TRUE_OF_A_FLOAT_MATRIX.values()]
    both = Beside(AppliedEach(signs, 2), leaf_modules=())
    both.check_each(TRUE_OF_A_FLOAT_MATRIX, X)
    assert (both.module(X) > 0).all()
