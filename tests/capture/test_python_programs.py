"""Traced programs compute what Python computes: attributes, views, methods of containers, patterns, generators."""

from __future__ import annotations

import enum
import math
import sys
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import thunder_fsdp_sched  # before thunder  # noqa: F401

import torch
from beside import AppliedEach, Beside
from models import Calling
from ranks import on_ranks
from torch import nn

Point = namedtuple("Point", ("x", "y"))


def mixed(values: Any) -> float:
    """Return a number that each value changes, also as 32 bits."""
    found = 0.0
    for value in values:
        found = (found * 31 + value) % 9973
    return found


class Changing:
    """An object whose attributes are what methods of its class make of them."""

    def __init__(self, number: float = 1.0) -> None:
        self.number = number

    @property
    def more(self) -> float:
        return self.number * 2

    @more.setter
    def more(self, value: float) -> None:
        self.number = value + 1

    @more.deleter
    def more(self) -> None:
        self.number = 7.0


class Doubling:
    def __setattr__(self, name: str, value: float) -> None:
        object.__setattr__(self, name, value * 2)


def changed_attributes() -> float:
    one = Changing()
    found = [one.more, one.number]
    one.number = 3.0
    found += [one.more]
    one.more = 5.0
    found += [one.more, one.number]
    vars(one)["number"] = 4.0
    found += [one.number]
    object.__setattr__(one, "number", 8.0)
    found += [one.number]
    del one.more
    found += [one.number]
    del one.number
    return mixed([*found, getattr(one, "number", 9.0)])


def own_attribute_methods() -> float:
    one = Doubling()
    one.number = 2.0
    return one.number  # type: ignore[no-any-return]


class Hidden(dict[str, float]):
    """Stores other items than it gives."""

    def __getitem__(self, key: str) -> float:
        return 7.0


def stored_items() -> float:
    one, copied = Hidden(a=2.0), Hidden()
    copied.update({"b": 3.0})
    copied |= one
    copied["c"] = 4.0
    named, read = dict(**copied), {**copied}
    named.update(one)
    return mixed([one["a"], *named.values(), *({"d": 5.0} | one).values(), *read.values()])


def class_attributes() -> float:
    class Inner:
        number = 2.0

    one = Inner()
    found = one.number
    Inner.number = 3.0
    return found * 10 + one.number


def views(item: Any) -> float:
    keys, values, items = item.keys(), item.values(), item.items()
    equal = keys == {"a", "b"} and items == dict(item).items() and keys != {"a"} and "a" in keys and ("b", 3.0) in items
    found = [equal, len(keys), len(values), len(items), 3.0 in values, len(keys & {"b"}), len(keys - {"b"})]
    return mixed(
        [*found, *reversed(values), len(sorted(keys)), next(reversed(items))[1], next(iter(reversed(keys))) == "b"]
    )


def methods_of_lists(item: Any) -> float:
    values = [*item, 1.0, math.nan]
    found = [math.nan in values, values.count(1.0), values.index(1.0, 1), values.index(math.nan)]
    found += [(1.0, 2.0, 1.0).index(1.0, 1)]
    values.remove(math.nan)
    values *= 2
    values.sort()
    found += [len(values), values[-1]]
    values.sort(reverse=True)
    try:
        values += 5  # type: ignore[arg-type]
    except TypeError:
        found += [values[0]]
    return mixed(found)


def methods_of_dictionaries() -> float:
    counted = defaultdict(lambda: 3.0)
    found = [counted.get("a", 2.0), len(counted), counted["a"], counted.setdefault("b") is None]
    ordered = OrderedDict(dict.fromkeys("abc", 2.0))
    ordered.move_to_end("a")
    ordered.move_to_end("b", last=False)
    return mixed([*found, *("abc".index(key) for key in ordered)])


class Kind(enum.Enum):
    ONE = 1.0


def patterns(item: Any) -> float:
    found = []
    for value in (*item, Point(1.0, 2.0), Point(3.0, 4.0), "text", True, Kind["ONE"], None):
        match value:
            case Point(x=1.0, y=y):
                found += [y]
            case Point(x):
                found += [x]
            case str(text):
                found += [len(text)]
            case bool() | Kind():
                found += [5.0]
            case int(number):
                found += [number]
            case _:
                found += [6.0]
    return mixed(found)


def other_builtins(item: Any) -> float:
    left = [*item, 0.0, 5.0]
    found = [*iter(lambda: left.pop(0), 0.0), len(left), len([*zip(strict=False)]), *reversed(nn.ParameterList(item))]
    try:
        raise ValueError
    except ValueError:
        return mixed([*found, sys.exc_info()[0] is ValueError])


def returns(item: Any) -> Any:
    yield item[0]
    return item[1]


def catches(found: list[float]) -> Any:
    try:
        found.append((yield from returns([1.0, 2.0])))
    except ValueError:
        yield 3.0
    finally:
        found.append(4.0)


def stops() -> Any:
    yield from ()
    yield next(iter(()))


def generators() -> float:
    found: list[float] = []
    suppresses, closed, thrown = contextmanager(catches)(found), catches(found), catches(found)
    with suppresses:
        found += [5.0]
    found += [*catches(found), next(closed), next(thrown), thrown.throw(ValueError)]
    closed.close()
    thrown.close()
    try:
        found += [*stops()]
    except RuntimeError:
        found += [6.0]
    try:
        next(catches(found).throw(KeyError))
    except KeyError:
        found += [7.0]
    return mixed(found)


def left_generators() -> float:
    def passes() -> Any:
        try:
            yield from (2.0, 3.0)
        except (ValueError, KeyError) as error:
            raise RuntimeError from error

    def handles() -> Any:
        try:
            yield {}["missing"]
        except IndexError:
            yield 4.0
        except KeyError as error:
            yield 5.0 if error.args else 6.0

    return mixed([next(passes()), 3.0 in passes(), next(handles())])


def arguments_of_iterables() -> float:
    def collect(*values: float, **named: float) -> float:
        return mixed([*values, *named.values()])

    last = {"last": 6.0}
    found = [collect(*(v for v in (2.0, 3.0))), collect(*map(float, "45"), **last), max(*{7.0: "a", 8.0: "b"})]
    return mixed([*found, collect(*range(3))])


class Reflected:
    """Takes the operators that tensors leave to it."""

    def __radd__(self, other: torch.Tensor) -> torch.Tensor:
        return other + 3

    def __rmatmul__(self, other: torch.Tensor) -> torch.Tensor:
        return other * 5

    def __rsub__(self, other: torch.Tensor) -> Any:
        return NotImplemented


class ReflectedNumber(float):
    __radd__ = Reflected.__radd__


def reflected_operators(y: torch.Tensor) -> Any:
    changed = y * 2
    changed += Reflected()
    try:
        changed = changed - Reflected()
    except TypeError:
        changed = changed + ReflectedNumber(2.0)
    return (y + Reflected()) * (y @ Reflected()) + changed


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "generators that run nothing when they are left": lambda y: left_generators(),
    "arguments of iterables": lambda y: arguments_of_iterables(),
    "operators of the other operand": reflected_operators,
    "a class that is made": lambda y: (
        type("Made", (Changing,), {"extra": 3.0})(4.0).more * type("Made", (), {"a": 2.0}).a
    ),
    "attributes that change": lambda y: changed_attributes(),
    "own methods for attributes": lambda y: own_attribute_methods(),
    "items that a dictionary stores": lambda y: stored_items(),
    "attributes of a class that change": lambda y: class_attributes(),
    "patterns": lambda y: patterns([7, 8.0]),
    "elements of a shape": lambda y: y.shape.numel() + y.shape[1:].numel(),
    "views": lambda y: views({"a": 2.0, "b": 3.0}),
    "methods of lists": lambda y: methods_of_lists([1.0, 3.0, 2.0]),
    "methods of dictionaries": lambda y: methods_of_dictionaries(),
    "other builtins": lambda y: other_builtins([1.0, 3.0]),
    "generators": lambda y: generators(),
}


@on_ranks(2)
def test_programs_compute_what_python_computes() -> None:
    """A number of each program scales what two blocks and the outermost module compute, in three calls."""
    torch.manual_seed(0)
    functions = [lambda y, program=program: y * program(y) for program in PROGRAMS.values()]
    both = Beside(AppliedEach(functions, 2).double(), leaf_modules=())
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2)
    both.check_each(PROGRAMS, x)
    both.check_each(PROGRAMS, x * 2)
    with both.model.no_sync():
        torch.testing.assert_close(both.model(-x), both.module(-x))


def test_sums_take_the_items_of_modules(one_rank: None) -> None:
    scales = nn.ParameterList([torch.full((2,), value) for value in (2.0, 3.0)])
    Beside(
        Calling(lambda self, x: self.linear(x) * sum(self.scales, 1.0), linear=nn.Linear(2, 2), scales=scales),
        leaf_modules=(),
    ).check(torch.ones(3, 2))
