"""Traces run only for calls on which the program would do the same; state that forward makes or counts is kept.

Thunder alone checks neither ``None``, lengths, keys, types nor enums, and drops attributes of the outermost module.
"""

from __future__ import annotations

import copy
import enum
from collections import Counter, defaultdict, deque, namedtuple
from collections.abc import Callable
from operator import attrgetter, itemgetter, methodcaller
from types import SimpleNamespace
from typing import Any, ClassVar

from thunder_fsdp_sched import fsdp
from thunder_fsdp_sched.private_interpreter import observed_by

import numpy as np
import pytest
import thunder
import torch
import torch.nn.functional as F
from beside import Applied, Beside
from coded import coded
from scenario import whole_of
from thunder.core.interpreter import INTERPRETER_CALLBACKS, InterpreterCompileCtx
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_rank")


class Kind(enum.Enum):
    PLAIN, DOUBLED = 1, 2


Pair = namedtuple("Pair", "a b")
ONES, ZEROS = torch.ones(2), torch.zeros(2)


def _add_all(x: torch.Tensor, values: Any = ()) -> torch.Tensor:
    for value in values:
        x = x + value
    return x


def _add_by_index(x: torch.Tensor, values: Any) -> torch.Tensor:
    for index in range(len(values)):
        x = x + values[index]
    return x


def _add_nested(x: torch.Tensor, nested: dict[str, Any]) -> torch.Tensor:
    return _add_all(x, nested["inner"][0])


def _flagged(x: torch.Tensor, config: Any) -> torch.Tensor:
    return x if config.scale is None else x * config.scale


class Scaled(SimpleNamespace):
    def times(self, by: int) -> int:
        return self.scale * by

    __getitem__ = times


CALLS: dict[str, tuple[Callable[..., torch.Tensor], list[Any]]] = {
    "tuple": (_add_all, [(1,), (1, 2), (), (1,)]),
    "tensors": (lambda x, values: x * len(values), [(ONES,), (ONES, ONES), ()]),
    "items by a computed index": (_add_by_index, [(1, 2), (1, 3), (1,)]),
    "nested": (_add_nested, [{"inner": [(1,)]}, {"inner": [(1, 2)]}, {"inner": [(2, 1)]}]),
    "sign of zero": (lambda x, value: x / value, [0.0, -0.0]),
    "keys": (lambda x, values: x * 2 if "k" in values else x, [{}, {"k": 1}]),
    "order of keys": (lambda x, values: x * 2 if next(iter(values)) == "a" else x, [dict(a=1, b=2), dict(b=2, a=1)]),
    "None": (lambda x, mask: x if mask is None else x * mask, [None, 3, ONES * 2, None]),
    "dtype": (lambda x, dtype: (x / 3).to(dtype).double(), [torch.float64, torch.float16]),
    "enum": (lambda x, kind: x if kind is Kind.PLAIN else x * 2, [Kind.PLAIN, Kind.DOUBLED]),
    "function": (lambda x, function: function(x), [F.relu, torch.neg]),
    "set": (lambda x, values: x if 1 in values else x * 2, [{1}, {2}]),
    "nested lists": (lambda x, values: x * max(values)[1], [[[1, 2], [0, 3]], [[1, 5], [0, 3]]]),
    "a tuple that is compared": (lambda x, size: x if size == (1, 2) else -x, [(1, 2), (2, 1)]),
    "text": (lambda x, values: x * len(f"{values}"), [[1, 2], [1, 11], {1: 2}, {1: 11}]),
    "deque": (lambda x, values: x * next(iter(values)) * len(values), [deque([1, 2]), deque([2, 1]), deque([2])]),
    "in a key": (
        lambda x, given: x * max([1, 2], key=lambda v: v * given.sign),
        [SimpleNamespace(sign=s) for s in (1, -1)],
    ),
    "attributes by a getter": (
        lambda x, given: x * attrgetter("inner.scale")(given) + attrgetter("inner", "sign")(given)[1],
        [SimpleNamespace(inner=SimpleNamespace(scale=s), sign=t) for s, t in ((1, 1), (2, 1), (2, 3))],
    ),
    "methods by a caller": (
        lambda x, given: (
            x * methodcaller("times", 3)(given) + methodcaller("times", by=2)(given) + itemgetter(1)(given)
        ),
        [Scaled(scale=1), Scaled(scale=2)],
    ),
    "the getter": (lambda x, getter: x * len(getter(F).__name__), [attrgetter("relu"), attrgetter("dropout")]),
    "attribute": (_flagged, [SimpleNamespace(scale=None), SimpleNamespace(scale=3)]),
}


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()  # compiles forward alone
def test_a_call_that_differs_is_compiled_again(name: str) -> None:
    function, arguments = CALLS[name]
    both = Beside(Applied(function))
    for argument in (*arguments, *arguments):
        both.check(torch.linspace(-1, 1, 4).view(2, 2), argument, rtol=0, atol=0)
    assert thunder.cache_misses(both.model) == len({repr(argument) for argument in arguments})


@torch.no_grad()
def test_keyword_arguments_and_attributes_are_compared() -> None:
    both, x = Beside(Applied(_add_all)), torch.ones(2, 2)
    for kwargs in ({"values": (1,)}, {"values": (1, 2)}, {}):
        both.check(x, **kwargs, rtol=0, atol=0)
    both.own.function = both.module.function = torch.neg
    both.check(x, rtol=0, atol=0)
    is_called = Beside(Applied(lambda y, method, function: y * function if method == "twice" else y))
    is_called.check(x, method="twice", function=2.0)  # names of arguments of the package's own functions
    both = Beside(Stateful(lambda self, y: y / self.divisor, divisor=0.0))
    for both.own.divisor in (0.0, -0.0, 0.0, 2.0):
        both.module.divisor = both.own.divisor
        both.check(x, rtol=0, atol=0)
    assert thunder.cache_misses(both.model) == 3


class Stateful(nn.Module):
    """A module whose forward makes, counts or replaces state by ``change``, with the result of a linear layer."""

    def __init__(self, change: Callable[[Any, torch.Tensor], Any], **state: Any) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(2, 2), change
        self.register_buffer("buffer", state.pop("buffer", None))
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, self.linear(x))


def _draw_buffer(self: Any, y: torch.Tensor) -> torch.Tensor:
    if self.buffer is None:
        self.buffer = torch.randn(2, 2)
    return y @ self.buffer


def _draw_attribute(self: Any, y: torch.Tensor) -> torch.Tensor:
    if getattr(self, "noise", None) is None:
        self.noise = torch.randn(2, 2)
    return y @ self.noise


def _draw_named(self: Any, y: torch.Tensor) -> torch.Tensor:
    if getattr(self, self.name, None) is None:
        setattr(self, self.name, torch.randn(2, 2))
    return y @ getattr(self, self.name)


def _count(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.count += 1
    return y * self.count


def _register(self: Any, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "late"):
        self.register_buffer("late", torch.randn(2, 2))
    return y @ self.late


def _first(self: Any, y: torch.Tensor) -> torch.Tensor:
    if self.is_first:
        self.is_first = False
        return y * 3
    return y


def _grow(self: Any, y: torch.Tensor) -> torch.Tensor:
    if y.shape[0] > self.count:
        self.count, self.buffer = y.shape[0], torch.arange(y.shape[0])[:, None] / 3
    return y * self.buffer[: y.shape[0]]


def _keep_loss(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.loss = y.pow(2).mean()
    return y


def _keep_several(self: Any, y: torch.Tensor) -> torch.Tensor:
    y = y * self.a + self.b + self.c
    self.a, self.b = torch.full((2, 2), 3.0), self.a + self.b
    for name in ("b", "c"):
        setattr(self, name, getattr(self, name) + self.a)
    return y


def _keep_constants(self: Any, y: torch.Tensor) -> torch.Tensor:
    output = y * self.ones + self.previous + self.rounded + self.recomputed
    self.previous, self.ones, self.rounded = y.detach(), y.new_ones(2, 2), y.long().to(y.dtype)
    self.recomputed = checkpoint(lambda y: torch.sin(y.detach()), y, use_reentrant=False)
    return output


class _Config:
    def __init__(self) -> None:
        self.kind: str | None = None
        self.flag, self.scale = True, 1.5


class _OwnConfig(_Config):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


def _decide(self: Any, y: torch.Tensor) -> torch.Tensor:
    if self.config.kind is None:
        self.config.kind = "single" if y.shape[0] == 2 else "several"
        self.mode, self.config.dtype = "decided", y.dtype
    y = y * {"single": 3, "several": 5}[self.config.kind]
    return y * self.config.scale if self.config.flag else y


def _decide_and_count(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.config.steps = 1 if self.config.kind is None else self.config.steps + 1
    return _decide(self, y) * self.config.steps


STATE: dict[str, Callable[[], nn.Module]] = {
    "constants of an object": lambda: Stateful(_decide, config=_Config(), mode=None),
    "constants and a counter of an object": lambda: Stateful(_decide_and_count, config=_OwnConfig(), mode=None),
    "a buffer that is made": lambda: Stateful(_draw_buffer),
    "an attribute that is made": lambda: Stateful(_draw_attribute, noise=None),
    "a missing attribute that is made": lambda: Stateful(_draw_attribute),
    "an attribute under a computed name": lambda: Stateful(_draw_named, name="noise", noise=None),
    "a buffer that is registered": lambda: Stateful(_register),
    "a counter": lambda: Stateful(_count, count=0),
    "a buffer that counts": lambda: Stateful(_count, count=torch.zeros(())),
    "a flag": lambda: Stateful(_first, is_first=True),
    "a cache that grows": lambda: Stateful(_grow, count=0),
    "a loss beside the output": lambda: Stateful(_keep_loss, loss=None),
    "several attributes": lambda: Stateful(_keep_several, a=ONES, b=ZEROS, c=ONES + 1),
    "values without gradient": lambda: Stateful(
        _keep_constants, previous=ZEROS, ones=ONES, rounded=ZEROS, recomputed=ZEROS
    ),
}


IN_SUBMODULES = ("constants of an object", "a buffer that is made", "a counter", "a loss beside the output")


@pytest.mark.parametrize(
    ("name", "place"), [*((name, "outermost") for name in STATE), *((name, "submodule") for name in IN_SUBMODULES)]
)
def test_state_of_forward_is_kept_as_in_eager_mode(name: str, place: str) -> None:
    torch.manual_seed(0)
    module = STATE[name]() if place == "outermost" else nn.Sequential(STATE[name]())
    original = copy.deepcopy(module)
    jitted = thunder.jit(original, transforms=[fsdp()])
    torch.manual_seed(1)
    expected = [_step(module, module) for _ in range(3)]
    torch.manual_seed(1)
    torch.testing.assert_close([_step(jitted, original) for _ in range(3)], expected)
    entries = {key: value for key, value in jitted.state_dict().items() if "linear" not in key}
    torch.testing.assert_close(entries, {k: v for k, v in module.state_dict().items() if "linear" not in k})


def _step(module: nn.Module, original: nn.Module) -> tuple[Any, ...]:
    """Return the output of a training step and the gradients, with losses that submodules have left."""
    output = module(torch.linspace(-1, 1, 4).view(2, 2))
    losses = [part.loss for part in original.modules() if getattr(part, "loss", None) is not None]
    (output.sum() + sum(losses)).backward()
    params = list(module.parameters())
    grads = [whole_of(p.grad) for p in params]
    result = output.detach(), *[grad.clone() for grad in grads]
    module.zero_grad()
    return result


def _append(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.history.append(1)
    return y * len(self.history)


def _rotate(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.history.rotate(1)
    return y * self.history[0]


def _update(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.history.update("a")
    return y * self.history["a"]


def _store(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.history[0] = 5.0
    return y


CHANGED_IN_PLACE: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[], Any]]] = {
    "list": (_append, list),
    "deque": (_rotate, lambda: deque([1, 2])),
    "counter": (_update, lambda: Counter("ab")),
    "array": (_store, lambda: np.ones(2)),
    "item": (_store, lambda: [1.0]),
}


@pytest.mark.parametrize("kind", CHANGED_IN_PLACE)
def test_state_in_a_container_is_refused_by_name(kind: str) -> None:
    change, make = CHANGED_IN_PLACE[kind]
    jitted = thunder.jit(Stateful(change, history=make()), transforms=[fsdp()])
    with pytest.raises(RuntimeError, check=coded("module.input-changed-while-traced", "self.history")):
        jitted(torch.ones(2, 2))


def test_a_list_in_the_closure_of_forward_is_refused_by_name() -> None:
    seen: list[int] = []
    jitted = thunder.jit(Applied(lambda x: seen.append(1) or x), transforms=[fsdp()])
    with pytest.raises(RuntimeError, check=coded("module.input-changed-while-traced", "cell_contents")):
        jitted(torch.ones(2, 2))


COLLECTED: Any = {
    **{"list": [], "dictionary": {}, "set": set(), "nested": {"a": [1]}, "numbers": [1.0, 2.0]},
    **{"default dictionary": defaultdict(list), "deque": deque([1, 2])},
}
COUNTER = Counter("a")


class Registry:
    """A class with a container."""

    seen: ClassVar[list[Any]] = []


def _collect(y: torch.Tensor) -> None:
    COLLECTED["list"].append(y)


CHANGES_OF_GLOBALS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda y: COLLECTED["list"].append(1),
    "list, in a function": _collect,
    "dictionary": lambda y: COLLECTED["dictionary"].update(a=COLLECTED["dictionary"].get("a", 0) + 1),
    "tensor in a dictionary": lambda y: COLLECTED["dictionary"].__setitem__("y", y),
    "set": lambda y: COLLECTED["set"].add(len(COLLECTED["set"])),
    "default dictionary": lambda y: COLLECTED["default dictionary"]["a"].append(y),
    "nested": lambda y: COLLECTED["nested"]["a"].append(1),
    "deque": lambda y: COLLECTED["deque"].rotate(1),
    "counter": lambda y: COUNTER.update("a"),
    "of a class": lambda y: Registry.seen.append(y),
}


@pytest.mark.parametrize("name", CHANGES_OF_GLOBALS)
def test_a_global_container_that_forward_changes_is_refused_by_name(name: str) -> None:
    change, former = CHANGES_OF_GLOBALS[name], copy.deepcopy((COLLECTED, COUNTER))

    def forward(y: torch.Tensor) -> torch.Tensor:
        change(y)
        return y

    try:
        jitted = thunder.jit(Applied(forward), transforms=[fsdp(leaf_modules=())])
        with pytest.raises(RuntimeError, check=coded("module.input-changed-while-traced")):
            jitted(torch.ones(2, 2))
    finally:
        COLLECTED.update(former[0])
        COUNTER.clear()
        COUNTER.update(former[1])
        Registry.seen.clear()


def test_a_block_that_changes_a_global_container_runs_as_it_is() -> None:
    def forward(y: torch.Tensor) -> torch.Tensor:
        COLLECTED["list"].append(1)
        return y * len(COLLECTED["list"])

    jitted, x = thunder.jit(nn.Sequential(nn.Linear(2, 2), Applied(forward)), transforms=[fsdp()]), torch.ones(2, 2)
    try:
        with pytest.warns(UserWarning, match="changes a dict"):
            first = jitted(x)
        number = len(COLLECTED["list"])  # to find out what it returns, it has run more than once
        torch.testing.assert_close(jitted(x), first / number * (number + 1))
        assert COLLECTED["list"] == [1] * (number + 1)
    finally:
        COLLECTED["list"].clear()


def test_contents_of_global_containers_that_native_code_reads_are_compared() -> None:
    jitted = thunder.jit(Applied(lambda y: y * sum(COLLECTED["numbers"])), transforms=[fsdp(leaf_modules=())])
    first = jitted(torch.ones(2, 2))
    COLLECTED["numbers"][0] = 4.0
    torch.testing.assert_close(jitted(torch.ones(2, 2)), first * 2)
    COLLECTED["numbers"][0] = 1.0
    torch.testing.assert_close(jitted(torch.ones(2, 2)), first)


def _halve(y: torch.Tensor) -> torch.Tensor:
    return y / 2


SCALES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"halve": _halve, "relu": torch.Tensor.relu}
METHOD, LIBRARY, KIND, LIMIT, DTYPE = torch.Tensor.relu, F, Kind.PLAIN, None, torch.float32
OBJECT = SimpleNamespace(factor=lambda: 2)
FACTORS, ROUNDS, CHOSEN, TOKEN = (2.0, 3.0), range(2), frozenset({1}), b"plain"
DOUBLES, NAME = False, "plain"


def _triple(y: torch.Tensor) -> torch.Tensor:
    return y * 3


REPLACED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any], str, Any]] = {
    "a function": (lambda y: _halve(y), globals(), "_halve", _triple),
    "a builtin": (lambda y: abs(y), globals(), "abs", _triple),
    "a function in a dictionary": (lambda y: SCALES["halve"](y), SCALES, "halve", _triple),
    "a method in a dictionary": (lambda y: SCALES["relu"](y), SCALES, "relu", torch.Tensor.tanh),
    "a method of a class": (lambda y: METHOD(y), globals(), "METHOD", torch.Tensor.tanh),
    "a module of Python": (lambda y: LIBRARY.relu(y), globals(), "LIBRARY", SimpleNamespace(relu=torch.tanh)),
    "an object": (lambda y: y * OBJECT.factor(), globals(), "OBJECT", SimpleNamespace(factor=lambda: 3)),
    "a member of an enum": (lambda y: y if KIND is Kind.PLAIN else y * 2, globals(), "KIND", Kind.DOUBLED),
    "None": (lambda y: y if LIMIT is None else y * 2, globals(), "LIMIT", 1),
    "a dtype": (lambda y: y if DTYPE is torch.float32 else y * 2, globals(), "DTYPE", torch.float64),
    "a tuple": (lambda y: sum(y * factor for factor in FACTORS), globals(), "FACTORS", (2.0, 3.0, 4.0)),
    "a range": (lambda y: sum(y for _ in ROUNDS), globals(), "ROUNDS", range(3)),
    "a frozen set": (lambda y: y * 2 if 2 in CHOSEN else y, globals(), "CHOSEN", frozenset({1, 2})),
    "a bool": (lambda y: y * 2 if DOUBLES else y, globals(), "DOUBLES", True),
    "a string": (lambda y: y if NAME == "plain" else y * 2, globals(), "NAME", "other"),
    "bytes": (lambda y: y if TOKEN == b"plain" else y * 2, globals(), "TOKEN", b"other"),
}


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        *((name, "constant values") for name in REPLACED),
        *((name, "symbolic values") for name in ("a bool", "a string", "a tuple")),
    ],
)
def test_globals_that_are_replaced_are_read(name: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, variables, key, other = REPLACED[name]
    module = Applied(function)
    jitted = thunder.jit(copy.deepcopy(module), transforms=[fsdp(leaf_modules=())], cache=cache)
    x = torch.ones(2, 2)
    torch.testing.assert_close(jitted(x), before := module(x))
    with monkeypatch.context() as context:
        context.setitem(variables, key, other)
        assert not torch.equal(module(x), before)
        torch.testing.assert_close(jitted(x), module(x))
    torch.testing.assert_close(jitted(x), before)


class Scaled(nn.Module):
    """Reads attributes that a program gives to a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("offset", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight * (3.0 if hasattr(self.weight, "doubled") else 1.0)
        return x + self.offset * (5.0 if hasattr(self.offset, "doubled") else 1.0)


@pytest.mark.parametrize("name", ["weight", "offset"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_attributes_that_a_program_gives_to_tensors_are_seen(name: str, when: str) -> None:
    module, x = Scaled(), torch.ones(2, 2)
    expected = copy.deepcopy(module)
    if when == "before":
        getattr(module, name).doubled = True
    jitted = thunder.jit(module, transforms=[fsdp(leaf_modules=())])
    first = jitted(x)
    if when == "after":
        torch.testing.assert_close(first, expected(x))
        getattr(module, name).doubled = True
    getattr(expected, name).doubled = True
    torch.testing.assert_close(jitted(x), expected(x))


def test_reading_an_attribute_that_a_program_gives_to_a_parameter_is_refused_by_name() -> None:
    class Reads(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * getattr(self.weight, "factor", 1.0)

    module, x = Reads(), torch.ones(2, 2)
    jitted = thunder.jit(module, transforms=[fsdp(leaf_modules=())])
    torch.testing.assert_close(jitted(x), x)
    module.weight.factor = 3.0
    refusal = coded("module.not-reproduced-by-trace", "reads the attribute factor of a tensor")
    with pytest.raises(NotImplementedError, check=refusal):
        jitted(x)


def test_observed_contexts_cache_no_values_that_the_observed_one_does_not_cache() -> None:
    class Uncacheable: ...

    def nothing(*args: object) -> None: ...

    context = InterpreterCompileCtx(
        opcode_interpreter=nothing,
        fn_lookaside=nothing,
        callbacks={INTERPRETER_CALLBACKS.WRAP_CALLBACK: nothing},
        with_provenance_tracking=True,
        uncacheable_classes=[Uncacheable],
    )
    observer = SimpleNamespace(interpret=nothing, look_aside=nothing, wrap=nothing)
    assert {Uncacheable, enum.Enum} <= {*observed_by(context, observer, (enum.Enum,))._uncacheable_classes}
