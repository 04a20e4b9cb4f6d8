"""Modules that differ only in what native code reads of them are not taken for alike."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from thunder_fsdp_sched.capture.native_code import is_plain, is_pure

import pytest
import thunder
import torch
from internals import Repetition, call_forward, trace_module_calls
from profiles import with_long
from torch import nn


class Part(nn.Module):
    """A module whose special methods depend on a number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def extra_repr(self) -> str:
        return "x" * self.number

    def __format__(self, spec: str) -> str:
        return "x" * self.number

    def __lt__(self, other: object) -> bool:
        return self.number == 1

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self.number == 1

    def __index__(self) -> int:
        return self.number


class Checking(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return bool(instance.number == 1)


class OnlyFirst(metaclass=Checking):
    pass


READS: dict[str, Callable[[Any], Any]] = {
    "sorted": lambda self: sorted(range(3), key=lambda j: self.order[j])[0],
    "str": lambda self: len(str(self.dropout)),
    "repr": lambda self: len(repr(self.part)),
    "f-string": lambda self: len(f"{self.part}"),
    "%": lambda self: len("%s" % self.part),  # noqa: UP031
    "format": lambda self: len("{0.number:{0.number}}".format(self.part)),
    "join": lambda self: len("".join([str(self.part)])),
    "==": lambda self: 1 if self.part == 0 else 2,
    "<": lambda self: 1 if [self.part] < [0] else 2,
    "in a set": lambda self: len({1, self.part}),
    "a key": lambda self: {1: 1.0, 2: 2.0}.get(self.part, 3.0),
    "slice": lambda self: len([1, 2, 3][: self.part]),
    "isinstance": lambda self: 1 if isinstance(self.part, OnlyFirst) else 2,
    "is": lambda self: 1 if self.part is self.other else 2,
}


class Block(nn.Module):
    def __init__(self, number: int, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.order = [1, 2, 3] if number == 1 else [3, 2, 1]
        self.dropout = nn.Dropout(0.1 if number == 1 else 0.25, inplace=False)
        self.part = Part(number)
        self.other = self.part if number == 1 else Part(1)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3 + self.read(self)


@pytest.mark.parametrize("name", with_long(READS, "repr", "f-string", "%", "join", "<", "a key"))
def test_what_native_code_reads_tells_modules_apart(name: str) -> None:
    x, outputs = torch.ones(2), []
    for call in (Repetition(), call_forward):
        jitted = thunder.jit(nn.Sequential(Block(1, READS[name]), Block(2, READS[name])))
        trace_module_calls(thunder.compile_data(jitted), call)
        outputs.append(jitted(x))
    eager = nn.Sequential(Block(1, READS[name]), Block(2, READS[name]))(x)
    torch.testing.assert_close(outputs, [eager, eager], rtol=0, atol=0)


class Mode(enum.Enum):
    FAST = 1


class Number(int):
    def __str__(self) -> str:
        return "?"


PART = Part(1)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (sorted, ([2, 1],), {"key": len}, True),
        (str.__new__, (str, 1), {}, True),
        (str.__new__, (str, Number(1)), {}, False),
        (repr, ({"a": [(1, torch.float32)]},), {}, True),
        (sum, ((i for i in range(3)),), {}, False),
        (math.sqrt, (2.0,), {}, True),
        (math.sqrt, (PART,), {}, False),
        (object.__new__, (Part,), {}, True),
        (hash, (Mode.FAST,), {}, False),
        (list.__eq__, ([1], [PART]), {}, False),
        (print, (1,), {}, False),
        (property.__get__, (property(lambda self: 1), 1), {}, False),
    ],
)
def test_a_native_function_is_pure_for_arguments_of_listed_types(
    function: Any, args: Any, kwargs: Any, expected: bool
) -> None:
    assert is_pure(function, args, kwargs) is expected


def test_objects_without_python_methods_can_be_keys() -> None:
    for value in (nn.Linear(1, 1), Mode.FAST, Part, (1, nn.Linear(1, 1)), len, call_forward):
        assert is_plain(value, identities=True)
    assert not is_plain(nn.Linear(1, 1))
    assert not is_plain(PART, identities=True)
    assert is_plain(OrderedDict(a=torch.Size([1])))
    assert not is_plain([0] * 5000)  # takes too long to look at
