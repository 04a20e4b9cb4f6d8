"""Look-ups that are made directly find what Python finds."""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from itertools import islice
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from thunder_fsdp_sched import fsdp, private_lookups
from thunder_fsdp_sched.capture import input_reads

import thunder
import torch
from thunder.core import interpreter
from thunder.torch.experimental import dtensor_torch_and_prims
from torch import nn

SCALE = 2.0


class Plain:
    factor = 2.0

    def __init__(self) -> None:
        self.own = 3.0

    def method(self, value: float = 4.0) -> float:
        return self.own * value

    @property
    def doubled(self) -> float:
        return self.own * 2

    @classmethod
    def of_class(cls) -> float:
        return cls.factor

    @staticmethod
    def static(value: float) -> float:
        return value

    @functools.cached_property
    def cached(self) -> float:
        return self.own + 1


class Shadowed(Plain):
    factor = 5.0

    def __init__(self) -> None:
        super().__init__()
        vars(self).update(factor=6.0, method=lambda: 7.0, cached=9.0)


class Slots:
    __slots__ = ("empty", "filled")

    def __init__(self) -> None:
        self.filled = 2.0


class SlotsWithFallback(Slots):
    def __getattr__(self, name: str) -> float:
        return 5.0


class OwnSequence(Sequence):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        return [2.0, 3.0, 4.0][index]


class Fallback:
    def __getattr__(self, name: str) -> float:
        if name == "missing":
            raise AttributeError(name)
        return float(len(name))

    @property
    def failing(self) -> float:
        return self.missing


class Fixed:
    def __get__(self, instance: Any, kind: Any) -> float:
        return 2.0 if instance is None else 3.0


class Settable(Fixed):
    """A data descriptor."""

    def __set__(self, instance: Any, value: Any) -> None: ...


class Described:
    over, under = Settable(), Fixed()

    def __init__(self) -> None:
        vars(self).update(over=5.0, under=6.0)


class Meta(type):
    factor = 2.0

    @property
    def named(cls) -> float:
        return float(len(cls.__name__))


class Made(metaclass=Meta):
    own = 3.0


class Scaled(dict[str, float]):
    def __getitem__(self, key: str) -> float:
        return 4.0


class Counted(list[float]):
    def __len__(self) -> int:
        return 7


def lazy_module() -> ModuleType:
    module = ModuleType("lazy")
    vars(module).update(own=2.0, __getattr__=lambda name: float(len(name)))
    return module


def raised(read: Callable[[], Any]) -> str:
    try:
        read()
    except Exception as error:
        return type(error).__name__
    return ""


def raises(read: Callable[[Any], Any], kind: str) -> Callable[[Any], float]:
    return lambda item: 2.0 if raised(lambda: read(item)) == kind else 3.0


def total(*values: float, scale: float = 1.0, **others: float) -> float:
    found = 0.0
    for value in values:
        found = found + value
    for name in others:
        found = found + others[name]
    return found * scale


def assigned(item: Any) -> float:
    new = Plain()
    before = new.own
    new.own = 5.0
    return before + new.own + new.method()


def appended(item: Any) -> float:
    seen, values = 0.0, [1.0, 2.0]
    for value in values:
        seen = seen * 10 + value
        if len(values) < 4:
            values.append(value + 2)
    return seen


def unpacked(item: Any) -> float:
    (first, *rest), last = item
    return total(first, *rest, scale=last)


def unpacked_by_name(item: Any) -> float:
    (a, b), [c, d] = item
    return ((a * 10 + b) * 10 + c) * 10 + d


def unpacked_shape(item: Any) -> float:
    rows, columns = item.shape
    return rows * 10 + columns


def unpacked_iterators(item: Any) -> float:
    (a, b), (c, d), (e, _) = item.values(), iter([4.0, 5.0]), "xy"
    return ((a * 10 + b) * 10 + c) * 10 + d + len(e)


def unpacked_copy(item: Any) -> float:
    values = [*item, 4.0]
    values[0] = 5.0
    a, b, _ = values
    values[1] = 6.0
    return a * 10 + b + values[1]


def in_order(found: float, **factors: float) -> float:
    for number, factor in enumerate(factors.values(), 1):
        found = found * factor + number
    return found


def weighted(values: Any) -> float:
    found = 0.0
    for value in values:
        found = found * 10 + value
    return found


def took_by_partial(item: Any) -> float:
    take = functools.partial(next, iter(item))
    return take() * 10 + take()


def took(item: Any) -> float:
    iterator = iter(item)
    return next(iterator) + next(iterator, 5.0) + next(iterator, 7.0)


def took_after_the_end(item: Any) -> float:
    iterator = iter(item)
    found = weighted(iterator)
    item.append(4.0)
    return found + next(iterator, 7.0) + weighted(iterator)


def took_natively(item: Any) -> float:
    iterator, backwards = iter(item), reversed(tuple(item))
    found = iterator.__next__() * 10 + sum(islice(iterator, 1)) + next(backwards)
    return found * 10 + weighted(iterator) + sum(backwards) + len([*iterator, *backwards])


def took_backwards(item: Any) -> float:
    backwards = reversed(item)
    found = next(backwards)
    item.clear()
    return found + len([*backwards])


Point = namedtuple("Point", ("x", "y"))

ROWS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "own": (Plain, lambda item: item.own),
    "of the class": (Plain, lambda item: item.factor),
    "method": (Plain, lambda item: item.method()),
    "method with an argument": (Plain, lambda item: item.method(value=5.0)),
    "unbound method": (Plain, lambda item: Plain.method(item, 6.0)),
    "property": (Plain, lambda item: item.doubled),
    "class method": (Plain, lambda item: item.of_class()),
    "static method": (Plain, lambda item: item.static(2.5)),
    "cached property": (Plain, lambda item: item.cached),
    "missing": (Plain, raises(lambda item: item.anything, "AttributeError")),
    "default": (Plain, lambda item: getattr(item, "anything", 2.5)),
    "class shadowed": (Shadowed, lambda item: item.factor),
    "method shadowed": (Shadowed, lambda item: item.method()),
    "cached property shadowed": (Shadowed, lambda item: item.cached),
    "super": (Shadowed, lambda item: super(Shadowed, item).method(2.0)),
    "slot": (Slots, lambda item: item.filled),
    "empty slot with a fallback": (SlotsWithFallback, lambda item: item.empty),
    "empty slot": (Slots, raises(lambda item: item.empty, "AttributeError")),
    "__getattr__": (Fallback, lambda item: item.anything),
    "__getattr__ raises": (Fallback, raises(lambda item: item.missing, "AttributeError")),
    "data descriptor": (Described, lambda item: item.over),
    "other descriptor": (Described, lambda item: item.under),
    "descriptor of a class": (Described, lambda item: type(item).under),
    "metaclass": (Made, lambda item: type(item).factor),
    "item of an enum": (Plain, lambda item: float(HTTPStatus["OK"].value)),
    "property of a metaclass": (Made, lambda item: type(item).named),
    "class with a metaclass": (Made, lambda item: item.own),
    "not through the metaclass": (Made, raises(lambda item: item.factor, "AttributeError")),
    "module": (lazy_module, lambda item: item.own),
    "module missing": (lambda: ModuleType("empty"), raises(lambda item: item.own, "AttributeError")),
    "namespace": (lambda: SimpleNamespace(own=2.0), lambda item: item.own),
    "named tuple": (lambda: Point(2.0, 3.0), lambda item: item.x - item[1]),
    "__name__": (Plain, lambda item: float(len(type(item).__name__))),
    "assigned": (Plain, assigned),
    "dictionary": (lambda: {"a": 2.0}, lambda item: item["a"]),
    "dictionary missing": (lambda: {"a": 2.0}, raises(lambda item: item["b"], "KeyError")),
    "subclass of dict": (lambda: Scaled(a=2.0), lambda item: item["a"]),
    "ordered": (lambda: OrderedDict(a=2.0), lambda item: item["a"] + len(item)),
    "negative index": (lambda: [2.0, 3.0], lambda item: item[-2]),
    "index": (lambda: [2.0, 3.0], raises(lambda item: item[2], "IndexError")),
    "index of a tuple": (lambda: (2.0, 3.0), raises(lambda item: item[-3], "IndexError")),
    "index of another type": (lambda: [2.0], raises(lambda item: item["a"], "TypeError")),
    "slice": (lambda: (2.0, 3.0, 4.0), lambda item: item[1:][0] + len(item[:2])),
    "contains": (lambda: {"a": [2.0]}, lambda item: 2.0 if "a" in item and 3.0 not in item["a"] else 3.0),
    "length of a subclass": (Counted, lambda item: float(len(item))),
    "length of nothing": (Plain, raises(lambda item: len(item), "TypeError")),
    "arguments": (lambda: ([1.0, 2.0], {"scale": 3.0, "more": 4.0}), lambda item: total(5.0, *item[0], **item[1])),
    "merged": (lambda: ({"a": 1.0}, {"b": 2.0}), lambda item: total(**item[0], **item[1])),
    "partial": (lambda: functools.partial(total, 1.0, scale=2.0), lambda item: item(2.0) + item(scale=5.0)),
    "partial of a partial": (
        lambda: functools.partial(functools.partial(total, 1.0, a=2.0), a=3.0),
        lambda item: item.func(4.0) + item(),
    ),
    "keywords in their order": (lambda: {"a": 2.0, "b": 3.0}, lambda item: in_order(item["b"], **item)),
    "keywords of a partial": (lambda: functools.partial(in_order, a=2.0, b=3.0), lambda item: item(item.keywords["b"])),
    "unpacked": (lambda: ([1.0, 2.0], 3.0), unpacked),
    "unpacked by name": (lambda: [(1.0, 2.0), [3.0, 4.0]], unpacked_by_name),
    "unpacked shape": (lambda: torch.ones(2, 3), unpacked_shape),
    "unpacked iterators": (lambda: {"a": 2.0, "b": 3.0}, unpacked_iterators),
    "changed after it was unpacked": (lambda: [2.0, 3.0], unpacked_copy),
    "too few": (lambda: (1.0,), raises(lambda item: [a + b for a, b in [item]], "ValueError")),
    "too many": (lambda: (1.0, 2.0, 3.0), raises(lambda item: [a + b for a, b in [item]], "ValueError")),
    "reversed": (lambda: [1.0, 2.0], lambda item: next(reversed(item))),
    "reversed sequence of Python": (OwnSequence, lambda item: weighted(reversed(item))),
    "an iterator that only zip holds": (
        lambda: [2.0, 3.0, 4.0, 5.0],
        lambda item: weighted([one * 5 + other for one, other in zip(*[iter(item)] * 2, strict=False)]),
    ),
    "an iterator that only a partial holds": (lambda: [2.0, 3.0], took_by_partial),
    "next": (lambda: [1.0], took),
    "an iterator at its end": (lambda: [2.0, 3.0], lambda item: took_after_the_end([*item])),
    "an iterator of which native code takes items": (lambda: [2.0, 3.0, 4.0], took_natively),
    "an iterator whose list shrinks": (lambda: [2.0, 3.0], lambda item: took_backwards([*item])),
    "appended while iterating": (Plain, appended),
    "in place": (lambda: [1.0], lambda item: [item + [2.0] for _ in range(2)][1][1]),
    "global": (Plain, lambda item: SCALE),
    "missing global": (Plain, raises(lambda item: anything, "NameError")),  # type: ignore[name-defined]  # noqa: F821
}
"""By name: an object, and what forward reads from it."""


class Reading(nn.Module):
    """Multiplies its input by what each row reads, and a tensor by others."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.items, self.reads = [ROWS[name][0]() for name in names], [ROWS[name][1] for name in names]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.linear(x) + x.reshape(2, 3)
        x += 1
        return [2 - x * read(item) for item, read in zip(self.items, self.reads, strict=True)]


X = torch.arange(6.0).reshape(2, 3)


@torch.no_grad()
def test_each_row_finds_what_python_finds(one_rank: None) -> None:
    model, module = Reading(tuple(ROWS)), Reading(tuple(ROWS))  # objects with `__getattr__` cannot be copied
    module.linear.load_state_dict(model.linear.state_dict())
    jitted = thunder.jit(model, transforms=[fsdp(leaf_modules=())])
    for name, found, expected in zip(ROWS, jitted(X), module(X), strict=True):
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


def names_of(code: CodeType, outer: str = "") -> Iterator[str]:
    """Yield the names of functions in a function, as their ``__qualname__`` has them."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            name = f"{outer}{inner.co_name}"
            yield name
            is_function = inner.co_flags & inspect.CO_OPTIMIZED and not inner.co_name.endswith("comp>")
            yield from names_of(inner, name + (".<locals>." if is_function else "."))


NAMES = frozenset(
    name
    for module in (interpreter, dtensor_torch_and_prims)
    for name in names_of(compile(inspect.getsource(module), "", "exec"))
)


def test_all_of_thunders_functions_are_still_there() -> None:
    shorter = {re.sub(r"<\w+comp>\.", "", name) for name in NAMES}
    assert {re.sub(r"<\w+comp>\.", "", name) for _, name in private_lookups._HELPERS} <= shorter


def test_programs_that_are_not_sharded_look_up_nothing_directly(one_rank: None) -> None:
    """Neither nested in a compilation, nor in another thread meanwhile."""
    calls = 0

    def compile_other() -> None:
        thunder.jit(nn.Linear(3, 3))(X)

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            compile_other()
            (thread := threading.Thread(target=compile_other)).start()
            thread.join()
            assert calls == 1
        return private_lookups.direct(*args)

    with mock.patch.object(input_reads, "direct", counted):
        compile_other()
        assert calls == 0
        thunder.jit(nn.Linear(3, 3), transforms=[fsdp()])(X)
    assert calls > 1
