"""A module that the program reads differently after a change is traced again, whatever has changed.

Each row is a block, and a change after which its forward returns something else. All blocks are traced in one model, the
model is compiled again without a change, which repeats every record, and once more after all changes.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import thunder
import torch
from internals import Repetition, trace_module_calls
from profiles import LONG_ONLY
from torch import nn

Change = Callable[[], object]


class Reading(nn.Module):
    """A block whose forward multiplies its input by what ``read`` returns for the block."""

    def __init__(self, read: Any, **attributes: Any) -> None:
        super().__init__()
        self.read = read
        vars(self).update(attributes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read(self)


def two(*_: Any, factor: float = 2.0) -> float:
    return factor


def five(*_: Any) -> float:
    return 5.0


def copy(function: Any) -> Any:
    """Return a copy of a function, with defaults of its own."""
    new = FunctionType(function.__code__, function.__globals__, "copy", function.__defaults__, function.__closure__)
    new.__kwdefaults__ = dict(function.__kwdefaults__ or {})
    return new


def with_default(x: Any = None, factor: float = 2.0) -> float:
    return factor


def set_default(function: Any) -> Change:
    return lambda: setattr(function, "__defaults__", (None, 5.0))


def set_code(function: Any) -> Change:
    return lambda: setattr(function, "__code__", five.__code__)


def changed_function(how: str) -> Callable[[], tuple[nn.Module, Change]]:
    """Return a row: a block that calls a function whose state changes."""

    def make() -> tuple[nn.Module, Change]:
        function = copy(two if "keyword" in how or how == "code" else with_default)
        change: Change = set_default(function)
        if how == "keyword defaults":
            change = lambda: setattr(function, "__kwdefaults__", {"factor": 5.0})  # noqa: E731
        elif how == "a keyword default":
            change = lambda: function.__kwdefaults__.update(factor=5.0)  # noqa: E731
        elif how == "code":
            change = set_code(function)
        read: Callable[[Any], Any] = {
            "of a partial": lambda self: self.partial(),
            "in a dictionary": lambda self: self.table["f"](),
            "as a default": lambda self, f=function: f(),
            "in reduce": lambda self: functools.reduce(self.two_arguments, [1, None]),
        }.get(how, lambda self: self.f())
        given = {"partial": functools.partial(function), "table": {"f": function}}
        return Reading(read, f=function, two_arguments=lambda a, b: function(), **given), change

    return make


def new_class(*bases: type, **members: Any) -> Any:
    return type("New", bases, members)


def changed_class(
    read: Callable[[Any], Any], name: str, before: Any, after: Any, base: Any = None
) -> Callable[[], tuple[nn.Module, Change]]:
    """Return a row: a block with ``item``, an object of a new class, one member of which changes."""

    def make() -> tuple[nn.Module, Change]:
        changed = new_class(*(base or ()), **({} if before is None else {name: before}))
        cls = new_class(changed)
        return Reading(read, item=cls(), cls=cls), lambda: setattr(changed, name, after)

    return make


def changed_block(name: str, before: Any, after: Any, **members: Any) -> Callable[[], tuple[nn.Module, Change]]:
    """Return a row: a block of a new class, one member of whose base class changes."""

    def make() -> tuple[nn.Module, Change]:
        base = new_class(Reading, **{name: before})
        return new_class(base, **members)(members["uses"]), lambda: setattr(base, name, after)

    return make


class Item:
    factor = 2.0


class Other(Item):
    factor = 5.0


class Described:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __get__(self, block: Any, cls: Any) -> Any:
        return block.weight * self.factor


class Weighted(Reading):
    """A block that multiplies by a computed tensor, with ``described`` of a subclass."""

    def __init__(self, read: Any) -> None:
        super().__init__(read)
        self.weight = nn.Parameter(torch.ones(2))


def weighted(before: Any, after: Any) -> Callable[[], tuple[nn.Module, Change]]:
    def make() -> tuple[nn.Module, Change]:
        cls = new_class(Weighted, described=before)
        return cls(lambda self: self.described), lambda: setattr(cls, "described", after)

    return make


def new_forward(change: str) -> Callable[[], tuple[nn.Module, Change]]:
    """Return a row: a block, or a block in a block, whose forward changes."""

    def make() -> tuple[nn.Module, Change]:
        def forward(self: Any, x: Any, factor: float = 2.0) -> Any:
            return x * factor

        def other(self: Any, x: Any) -> Any:
            return x * 5.0

        base = new_class(nn.Module, forward=forward)
        if change == "of the base":
            cls = new_class(base)
            cls.forward = lambda self, x: super(cls, self).forward(x)
            return cls(), lambda: setattr(base, "forward", other)
        if change == "code":
            return base(), lambda: setattr(forward, "__code__", other.__code__)
        block = base() if change == "default" else nn.Sequential(base())
        return block, lambda: setattr(forward, "__defaults__", (5.0,))

    return make


def changed_item(read: Callable[[Any], Any], item: Callable[[], Any], change: Callable[[Any], object]) -> Any:
    """Return a row: a block with an object that changes in place."""

    def make() -> tuple[nn.Module, Change]:
        block = Reading(read, item=item())
        return block, lambda: change(block.item)

    return make


def loop(self: Any) -> float:
    total = 0.0
    for value in self.item:
        total = total + value
    return total


def registered(check: Callable[..., bool]) -> Callable[[], tuple[nn.Module, Change]]:
    def make() -> tuple[nn.Module, Change]:
        base = abc.ABCMeta("Base", (), {})
        read = lambda self: 5.0 if check(self.item, base) else 2.0  # noqa: E731
        item = new_class()
        return Reading(read, item=item if check is issubclass else item()), lambda: base.register(item)

    return make


def new_global(text: str) -> Callable[[], tuple[nn.Module, Change]]:
    def make() -> tuple[nn.Module, Change]:
        namespace: dict[str, Any] = {"__name__": "program"}
        exec(f"def read(self): return {text}", namespace)
        return Reading(namespace["read"]), lambda: namespace.update(len=five)

    return make


def changed_cell() -> tuple[nn.Module, Change]:
    value = 2.0

    def change() -> None:
        nonlocal value
        value = 5.0

    return Reading(lambda self: value), change


RECORDED: dict[str, Callable[[], tuple[nn.Module, Change]]] = {
    **{
        f"function: {how}": changed_function(how)
        for how in ("defaults", "keyword defaults", "a keyword default", "code", "of a partial", "in a dictionary")
        + ("as a default", "in reduce")
    },
    **{f"forward: {how}": new_forward(how) for how in ("code", "default", "default in a submodule", "of the base")},
    "forward of type(self)": changed_block("factor", 2.0, 5.0, uses=lambda self: type(self).factor),
    "super()": changed_block("method", two, five, uses=lambda self: super(type(self), self).method()),
    "property in super()": changed_block(
        "factor", property(two), property(five), uses=lambda self: super(type(self), self).factor
    ),
    "property": weighted(property(lambda self: self.weight * 2), property(lambda self: self.weight * 5)),
    "descriptor": weighted(Described(2.0), Described(5.0)),
    "type(item)": changed_class(lambda self: type(self.item).factor, "factor", 2.0, 5.0),
    "types in a list": changed_class(lambda self: [type(self.item)][-1].factor, "factor", 2.0, 5.0),
    "__name__": changed_class(lambda self: len(type(self.item).__mro__[1].__name__), "__name__", None, "Longer"),
    "__add__": changed_class(lambda self: self.item + 1, "__add__", two, five),
    "__bool__": changed_class(lambda self: 2.0 if self.item else 5.0, "__bool__", None, lambda self: False),
    "__call__": changed_class(lambda self: self.item(), "__call__", two, five),
    "__getattr__": changed_class(lambda self: self.item.anything, "__getattr__", two, five),
    "new object": changed_class(lambda self: self.cls().factor, "factor", 2.0, 5.0),
    "method of a new object": changed_class(lambda self: self.cls().method(), "method", two, five),
    "property of a new object": changed_class(lambda self: self.cls().factor, "factor", property(two), property(five)),
    "operator of a new object": changed_class(lambda self: self.cls() + 1, "__add__", two, five),
    "__init__": changed_class(
        lambda self: self.cls().factor,
        "__init__",
        lambda self: setattr(self, "factor", 2.0),
        lambda self: setattr(self, "factor", 5.0),
    ),
    "integer": changed_class(lambda self: self.item + 1, "__add__", two, five, base=(int,)),
    "metaclass": lambda: (
        (meta := new_class(type, __call__=two))
        and (Reading(lambda self: self.item(), item=meta("Made", (), {})), lambda: setattr(meta, "__call__", five))
    ),
    "class of an object": changed_item(
        lambda self: type(self.item).factor, Item, lambda item: setattr(item, "__class__", Other)
    ),
    "isinstance": changed_item(
        lambda self: 5.0 if isinstance(self.item, Other) else 2.0,
        Item,
        lambda item: setattr(item, "__class__", Other),
    ),
    "isinstance of a registered class": registered(isinstance),
    "issubclass of a registered class": registered(issubclass),
    "length of a long list": changed_item(
        lambda self: len(self.item), lambda: [1.0] * 600, lambda item: item.append(5.0)
    ),
    "item of a long list": changed_item(
        lambda self: self.item[3], lambda: [1.0] * 600, lambda item: item.__setitem__(3, 5.0)
    ),
    "key of a long dictionary": changed_item(
        lambda self: 5.0 if 1000 in self.item else 2.0,
        lambda: dict.fromkeys(range(600)),
        lambda item: item.update({1000: item.pop(0)}),
    ),
    "kind in a frozen set": changed_item(
        lambda self: 5.0 if frozenset([1]) == self.item.value else 2.0,
        lambda: SimpleNamespace(value=frozenset([2])),
        lambda item: setattr(item, "value", frozenset([1])),
    ),
    "attribute": changed_item(lambda self: self.item.factor, Item, lambda item: setattr(item, "factor", 5.0)),
    "global in place of a builtin": new_global("len([1, 2]) * 1.0"),
    "name of a global": new_global("5.0 if 'len' in globals() else 2.0"),
    "cell": changed_cell,
}

REFUSED: dict[str, Callable[[], tuple[nn.Module, Change]]] = {
    "sum of a long list": changed_item(
        lambda self: sum(self.item), lambda: [1.0] * 600, lambda item: item.__setitem__(3, 5.0)
    ),
    "loop over a long list": changed_item(loop, lambda: [1.0] * 520, lambda item: item.append(5.0)),
    "deep list": changed_item(
        lambda self: 5.0 if self.item == [[[[[[7]]]]]] else 2.0,
        lambda: [[[[[[1]]]]]],
        lambda item: item[0][0][0][0][0].__setitem__(0, 7),
    ),
    "value in a long set": changed_item(
        lambda self: 5.0 if 1000 in self.item else 2.0,
        lambda: set(range(600)),
        lambda item: (item.discard(0), item.add(1000)),
    ),
}
"""Rows whose forward reads a container as a whole that records are not compared with."""


class All(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.compiles = nn.ModuleList(blocks), 0

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.compiles, [block(x) for block in self.blocks]


SOME_REFUSED = dict(list(REFUSED.items())[::4])
ALIKE = (
    *("function: keyword defaults", "function: in a dictionary", "forward: default in a submodule", "descriptor"),
    *("property in super()", "types in a list", "__bool__", "__getattr__", "method of a new object", "integer"),
    *("operator of a new object", "issubclass of a registered class", "item of a long list"),
)
"""Rows that are noticed as others are."""
SOME_RECORDED = {name: row for name, row in RECORDED.items() if name not in ALIKE}


@pytest.mark.parametrize(
    "table",
    [SOME_RECORDED, SOME_REFUSED, *(pytest.param(table, marks=LONG_ONLY) for table in (RECORDED, REFUSED))],
    ids=["some recorded", "some refused", "recorded", "refused"],
)
def test_a_change_of_the_program_is_noticed(table: dict[str, Callable[[], tuple[nn.Module, Change]]]) -> None:
    blocks, changes = zip(*(make() for make in table.values()), strict=True)
    for block in blocks:
        block.__class__ = new_class(type(block))  # because few records are kept for blocks of one class
    model, repetition, x = All(list(blocks)), Repetition(), torch.ones(2)
    jitted = thunder.jit(model)
    trace_module_calls(thunder.compile_data(jitted), repetition)

    @torch.no_grad()
    def outputs(call: Any) -> dict[str, float]:
        return {name: float(out.sum()) for name, out in zip(table, call(x)[1], strict=True)}

    before, is_recorded = outputs(jitted), table.items() <= RECORDED.items()
    refused = {list(table)[int(path[4][1])]: why for path, why in repetition.refused.items() if len(path) > 4}
    assert set(refused) == (set() if is_recorded else set(table)), refused
    model.compiles = 1
    assert outputs(jitted) == before
    assert repetition.repeated == (len(table) if is_recorded else 0)
    for change in changes:
        change()
    model.compiles = 2
    after = outputs(model)
    assert [name for name in table if after[name] == before[name]] == []
    assert outputs(jitted) == after


def test_inputs_are_compared_by_what_the_program_reads() -> None:
    """Attributes of an argument are not compared, so a call that reads one is refused."""

    class Block(nn.Module):
        def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
            return x * (given.factor if isinstance(given, Item) else 5.0 if 1 in given else 2.0)

    class Model(All):
        def forward(self, x: torch.Tensor, *given: Any) -> Any:
            return x + self.compiles, [block(x, each) for block, each in zip(self.blocks, given, strict=True)]

    model, repetition, given = Model([Block(), Block()]), Repetition(), (Item(), {0})
    jitted = thunder.jit(model)
    trace_module_calls(thunder.compile_data(jitted), repetition)
    jitted(torch.ones(2), *given)
    given[0].factor, model.compiles = 5.0, 1
    given[1].add(1)
    assert [float(out[0]) for out in jitted(torch.ones(2), *given)[1]] == [5.0, 5.0]
