"""Checks that a compiled module's inputs are like the traced ones; see [Note: Guarded inputs] in ``capture``."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import coded_error

Path = tuple[Any, ...]
"""A root, and then steps from it: see ``capture.paths``."""

Check = tuple[str, Any]
"""The property of a value that is compared, and its expected result."""

IS, EQUAL, NOT, LENGTH, KEYS, TYPE, CONTENT = "is", "equal", "not", "length", "keys", "type", "content"

HAS = "has"
"""The last step of a path that asks whether an object has an attribute."""

ENVIRONMENT = "os.environ"
"""The root of the paths to environment variables."""

CONDITIONS = "a branch"
"""The root of the paths to conditions that a program computes from its arguments."""

MISSING = object()


Condition = Callable[[tuple[Any, ...], dict[str, Any]], bool]
"""A condition that a program computes from its arguments; it raises ``LookupError`` for arguments of other shapes."""


class _Conditions:
    """The conditions, by number, for the arguments of a call."""

    def __init__(self, conditions: Sequence[Condition], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._conditions, self._args, self._kwargs = conditions, args, kwargs

    def __getitem__(self, number: int) -> bool:
        return self._conditions[number](self._args, self._kwargs)


class Environment:
    """The environment variables: ``None`` for one that is not set, and all of them for the key ``None``."""

    def __getitem__(self, name: str | None) -> Any:
        return dict(os.environ) if name is None else os.environ.get(name)


class Links:
    """Entries of dictionaries that hold the objects with which a program was traced: globals, and attributes of modules.

    They are compared in one pass, which takes a fraction of the time of separate checks.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._same: dict[tuple[int, str], tuple[dict[str, Any], str, dict[str, Any], str]] = {}

    def __len__(self) -> int:
        return len(self._known) + len(self._same)

    def add(self, owner: dict[str, Any], key: str) -> None:
        """Expect the present object."""
        self._known.setdefault((id(owner), key), (owner, key, owner.get(key)))

    def add_same(self, owner: dict[str, Any], key: str, other: dict[str, Any], other_key: str) -> None:
        """Expect an object that another entry holds as well."""
        self._same.setdefault((id(owner), key), (owner, key, other, other_key))

    def settle(self) -> None:
        """Prepare for :meth:`changed`."""
        self._owners, self._keys, self._values = tuple(zip(*self._known.values(), strict=True)) or ((), (), ())
        self._pairs = tuple(zip(*self._same.values(), strict=True)) or ((), (), (), ())

    def changed(self) -> str | None:
        """Return the key of an entry that holds another object; ``None`` if none does."""
        owners, keys, others, other_keys = self._pairs
        is_known = list(map(operator.is_, map(dict.get, self._owners, self._keys), self._values))
        is_same = list(map(operator.is_, map(dict.get, owners, keys), map(dict.get, others, other_keys)))
        if all(is_known) and all(is_same):
            return None
        return (*self._keys, *keys)[[*is_known, *is_same].index(False)]


class TracedInputs:
    """The checks of the values that a program has read from its arguments and its module.

    Args:
        module: the module that was traced; ``None`` if nothing that is read from it is checked.
        checks: the check of each value, by its path.
        assigned: the constants that the program assigns to attributes: path of the object, name, value.
        conditions: the conditions that it computes from its arguments.
        links: the objects that it has read from globals, or that several modules share.
    """

    def __init__(
        self,
        module: Any,
        checks: Mapping[Path, Check],
        links: Links,
        assigned: Sequence[tuple[Path, str, Any]] = (),
        conditions: Sequence[Condition] = (),
    ) -> None:
        self._module, self.assigned, self._conditions = module, assigned, conditions
        self._links = links
        links.settle()
        self._steps: list[tuple[int, Any, Path, Check | None]] = []  # each after the step from which it reads
        roots = ("INPUT_FN", "INPUT_ARGS", "INPUT_KWARGS", ENVIRONMENT, CONDITIONS)
        numbers: dict[Path, int] = {(root,): number for number, root in enumerate(roots)}
        for whole in checks:
            if module is None and whole[0] == "INPUT_FN":
                continue
            for length in range(2, len(whole) + 1):
                path = whole[:length]
                if path not in numbers:
                    numbers[path] = len(numbers)
                    self._steps.append((numbers[path[:-1]], path[-1], path, checks.get(path)))

    def __str__(self) -> str:
        return "traced_inputs"  # in the prologue

    def __len__(self) -> int:
        return len(self._steps) + len(self._links)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise an error unless the inputs are like those that were traced."""
        if (changed := self._links.changed()) is not None:
            raise mismatch((changed,), "another object", None)
        conditions = _Conditions(self._conditions, args, kwargs)
        values: list[Any] = [self._module, args, kwargs, Environment(), conditions]
        for source, (kind, key), path, check in self._steps:
            try:
                if kind == "item":
                    value = values[source][key]
                elif kind == HAS:
                    value = hasattr(values[source], key)
                else:
                    value = getattr(values[source], key)
            except (AttributeError, LookupError, TypeError):
                value = MISSING
            if value is MISSING or not (check is None or _agrees(value, check)):
                raise mismatch(path, value, check)
            values.append(value)

    def assign(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Assign the attributes that the program assigns."""
        roots = {"INPUT_FN": self._module, "INPUT_ARGS": args, "INPUT_KWARGS": kwargs}
        for path, name, constant in self.assigned:
            setattr(value_at(roots, path), name, constant)


def value_at(roots: Mapping[Any, Any], path: Path) -> Any:
    """Return the value at a path, given that of each root."""
    value = roots[path[0]]
    for kind, key in path[1:]:
        value = value[key] if kind == "item" else getattr(value, key)
    return value


def _agrees(value: Any, check: Check) -> bool:
    kind, expected = check
    if kind == IS:
        return value is expected
    if kind == NOT:
        return bool(value != expected)
    if kind == LENGTH:
        return type(value) is expected[0] and len(value) == expected[1]
    if kind == KEYS:
        return type(value) is expected[0] and tuple(value) == expected[1]
    if kind == TYPE:
        return type(value) is expected
    if kind == CONTENT:
        return bool(expected.fits(value))
    return is_same(value, expected)


def is_same(value: Any, expected: Any) -> bool:
    """Return whether two plain values are of one type and equal; -0.0 is not 0.0, and a number that is nan equals nan."""
    if type(value) is not type(expected):
        return False
    return repr(value) == repr(expected) if isinstance(value, (float, complex)) else bool(value == expected)


def check_inputs(args: Any, kwargs: Any, inputs: TracedInputs) -> None:
    """Raise an error, which makes Thunder look for other traces, if inputs differ from ``inputs``."""
    inputs.check(args, kwargs)


def assign_attributes(args: Any, kwargs: Any, inputs: TracedInputs) -> None:
    """Assign the attributes that the traced program assigns."""
    inputs.assign(args, kwargs)


def check_number(value: Any, expected: Any) -> None:
    """Raise an error, which makes Thunder look for other traces, unless two numbers are the same, with their signs."""
    if not is_same(value, expected):
        raise RuntimeError(f"fsdp: a number is {value!r}, and was {expected!r} when the module was traced")


class MemoryOfInputs(NamedTuple):
    """The memory layout that traces expect of tensors among the arguments, by name.

    Attributes:
        written: the arguments that are changed in place, which may not share memory with others.
        contiguous: the arguments that must be contiguous.
    """

    written: frozenset[str] = frozenset()
    contiguous: frozenset[str] = frozenset()


def mismatch(path: Path, value: Any, check: Check | None) -> RuntimeError:
    """Return the error for an input that differs. Users see it only if forward has changed the input itself."""
    name, expected = _expression(path), "there" if check is None else f"{check[0]} {check[1]!r}"
    found = "it is missing" if value is MISSING else f"it is {type(value).__name__} {value!r:.100}"
    return coded_error(RuntimeError, "module.input-changed-while-traced", name=name, expected=expected, found=found)


def _expression(path: Path) -> str:
    root, *steps = path
    text = {"INPUT_FN": "self", "INPUT_ARGS": "args", "INPUT_KWARGS": "kwargs"}.get(root, str(root))
    for kind, key in steps:
        if kind == HAS:
            return f"hasattr({text}, {key!r})"
        text += f"[{key!r}]" if kind == "item" else f".{key}"
    return text
