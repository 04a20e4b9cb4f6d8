"""Code that an interpreted program runs outside of the interpreter, in builtins and in instructions.

[Note: Code that is not seen]
The interpreter does not see what ``sorted``, ``str.format`` or ``a == b`` do. They may call the program back: a ``key``, the
``__repr__`` of a module, the ``__eq__`` of an object in a list. Such code reads values that the observer does not learn of,
so a record without them would fit modules that it must not fit. Therefore a native function counts as pure only if it is
in a list here, and only for arguments of types that are listed, too: their exact types, whose methods are native as well
(a subclass may override them), and containers of these. Anything else makes the call of the module unrepeatable.
"""

from __future__ import annotations

import enum
from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from thunder.core.proxies import Proxy

from .keys import DEPTH, LONG

GLOBAL_STORES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
CELL_STORES = frozenset({"STORE_DEREF", "DELETE_DEREF"})
"""The instructions that assign or delete a global, and a variable of a function that others share."""

CONTAINERS = (list, dict, set)

READING_METHODS = frozenset(
    ("get", "keys", "values", "items", "copy", "index", "count", "union", "intersection", "difference", "issubset")
    + ("issuperset", "isdisjoint", "__len__", "__contains__", "__iter__", "__getitem__", "__eq__", "__ne__", "__get__")
    + ("__reversed__", "__or__", "__add__", "__mul__", "__str__", "__repr__", "__hash__", "__length_hint__")
    + ("__class_getitem__",)
)
"""Methods of containers that modify nothing."""

_VALUES = (bool, int, float, complex, str, bytes, tuple, frozenset, range, slice, type(None))
_PURE_MODULES = frozenset({"_operator", "operator", "math"})
_PURE_BUILTINS = frozenset(
    (abs, all, any, ascii, bin, bool, chr, complex, dict, divmod, enumerate, float, format, frozenset, hash, hex, int)
    + (iter, len, list, max, min, oct, ord, pow, range, repr, reversed, round, set, slice, sorted, str, sum, tuple, zip)
)
CALL_NOTHING = frozenset({callable, isinstance, issubclass, super, type, getattr, hasattr})
"""Builtins that run no code of their arguments, or whose code the observer learns of in another way."""

READ_ITEMS = frozenset({"__getitem__", "__len__", "__setitem__"})
"""Methods of containers that read no other items than those under their arguments."""

NATIVE_OPERANDS: dict[str, Callable[[int], Iterable[int]]] = {
    "COMPARE_OP": lambda arg: (-1, -2),
    "BUILD_MAP": lambda arg: range(-2 * arg, 0, 2),
    "BUILD_SET": lambda arg: range(-arg, 0),
    **dict.fromkeys(("SET_ADD", "SET_UPDATE", "DICT_UPDATE"), lambda arg: (-1,)),
    "MAP_ADD": lambda arg: (-2,),
}
"""Instructions that the interpreter does not interpret further, and where on the stack the values are that they compare
or take hashes of, by their argument."""

_IDENTITIES = frozenset({object.__eq__, object.__ne__})

_BINDING = (FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType)
"""Descriptors whose ``__get__`` runs no Python code."""

_PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis), type(NotImplemented))
    + (torch.dtype, torch.device, torch.layout, torch.memory_format, type, ABCMeta)
)
_SEQUENCES = frozenset({tuple, list, set, frozenset, torch.Size})
_MAPPINGS = frozenset({dict, OrderedDict})

_MOST = 4096
"""The most values in containers that are looked at. None is deeper or longer than keys compare."""


def is_value(value: Any) -> bool:
    """Return whether a value of the program has no attributes that may change, except for items."""
    if isinstance(value, BuiltinFunctionType | MethodWrapperType):  # their methods
        value = value.__self__
    return isinstance(value, Proxy) or type(value) in (*_PLAIN, *_SEQUENCES, *_MAPPINGS)


def is_pure(function: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a native function returns equal values for equal arguments, has no effect, and runs no Python code.

    Args:
        args, kwargs: its arguments; the first is the object that a method belongs to.
    """
    name = getattr(function, "__name__", "")
    owner = getattr(function, "__objclass__", None)
    if isinstance(function, BuiltinFunctionType | type) and function in CALL_NOTHING:
        return True
    if name in ("__new__", "__init__"):
        made = getattr(function, "__self__", owner)
        if made is object or (isinstance(made, type) and issubclass(made, BaseException)):
            return True
        if not (isinstance(made, type) and issubclass(made, (*_VALUES, *CONTAINERS))):
            return False
    elif name == "__get__":
        return owner in _BINDING
    elif isinstance(owner, type):
        if function in _IDENTITIES:
            return True
        if not (issubclass(owner, _VALUES) or name in READING_METHODS):
            return False
    elif function not in _PURE_BUILTINS and str(getattr(function, "__module__", None)) not in _PURE_MODULES:
        return False
    key = kwargs.get("key")
    return (key is None or _is_builtin(key)) and all(map(is_plain, (*args, *kwargs.values())))


def is_plain(value: Any, identities: bool = False) -> bool:
    """Return whether native code that reads a value, or compares or prints it, runs no Python code.

    Args:
        identities: whether it only looks the value up as a key, or asks whether it is equal to another one. Then objects
            that equal only themselves are plain as well.
    """
    return _is_plain(value, identities, [_MOST], DEPTH)


def checks_natively(classes: Any) -> bool:
    """Return whether ``isinstance`` and ``issubclass`` run no Python code that could read attributes of an instance."""
    if isinstance(classes, tuple):
        return all(map(checks_natively, classes))
    if isinstance(classes, UnionType):
        return checks_natively(classes.__args__)
    if not isinstance(classes, type):
        return classes is None
    checks = (type(classes).__instancecheck__, type(classes).__subclasscheck__)
    return all(str(getattr(check, "__module__", None)).partition(".")[0] in _CHECKING for check in checks)


def has_registry(classes: Any) -> bool:
    """Return whether others may become subclasses of one of these classes without inheriting from it."""
    if isinstance(classes, UnionType):
        classes = classes.__args__
    if isinstance(classes, tuple):
        return any(map(has_registry, classes))
    return isinstance(classes, ABCMeta)


_CHECKING = frozenset({"None", "abc", "torch", "thunder", "enum"})
"""Modules of functions that check instances by their class, or a parameter by its mark; builtins have no module."""


def _is_plain(value: Any, identities: bool, budget: list[int], depth: int) -> bool:
    kind = type(value)
    if kind in _PLAIN or isinstance(value, Proxy):
        return True
    if kind in _SEQUENCES or kind in _MAPPINGS:
        budget[0] -= len(value)
        if budget[0] < 0 or len(value) > LONG or not depth:
            return False
        items = (*value, *value.values()) if kind in _MAPPINGS else value
        return all(_is_plain(each, identities, budget, depth - 1) for each in items)
    if kind is slice:
        return all(_is_plain(each, identities, budget, depth) for each in (value.start, value.stop, value.step))
    if kind.__module__.startswith("thunder.") or _is_builtin(value):
        return True
    return identities and _is_identity(value)


def _is_builtin(value: Any) -> bool:
    """Return whether a value is a builtin function or class that runs no code but that of its arguments."""
    return isinstance(value, type | BuiltinFunctionType) and value in _PURE_BUILTINS


def _is_identity(value: Any) -> bool:
    """Return whether a value equals only itself, or is a member of an enumeration, and no Python code finds that out."""
    kind = type(value)
    if kind is MethodType or isinstance(value, BuiltinFunctionType):
        return True
    if isinstance(value, enum.Enum):
        return not any(isinstance(getattr(kind, name), FunctionType) for name in ("__eq__", "__ne__")) and (
            not isinstance(kind.__hash__, FunctionType) or kind.__hash__ is enum.Enum.__hash__
        )
    return all(getattr(kind, name) is getattr(object, name) for name in ("__eq__", "__ne__", "__hash__"))
