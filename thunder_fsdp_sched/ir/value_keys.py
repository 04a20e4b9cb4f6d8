"""Keys of values: values with equal keys are alike for a trace."""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Callable
from types import MethodType, NoneType
from typing import Any

import torch

_BY_VALUE = (
    *(NoneType, bool, int, str, bytes, range, slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

ITEMS = (list, tuple, deque)
BUFFERS = (bytearray, array)

DEPTH = 4
"""How deep containers are compared; anything deeper must be the same object."""


def key_of(value: Any, depth: int = DEPTH, of_parameter: Callable[[Any], Any] | None = None) -> Any:
    """Return an object that is equal for values that are alike.

    Numbers, strings and the like count by value, containers by their contents, any other object by its identity and class.

    Args:
        of_parameter: returns the key of a parameter, by default one for its identity.
    """
    kind = type(value)
    if of_parameter is not None and isinstance(value, torch.nn.Parameter):
        return of_parameter(value)
    if kind is float or kind is complex:
        return kind, repr(value)  # 0.0 is not -0.0
    if kind in _BY_VALUE:
        return kind, (value.start, value.stop, value.step) if kind is slice else value
    if kind is torch.Size:
        return kind, tuple(value)
    if kind is MethodType:
        return kind, value.__func__, IdentityKey(value.__self__)
    if depth and isinstance(value, ITEMS):
        return kind, tuple(key_of(item, depth - 1, of_parameter) for item in value)
    if depth and isinstance(value, dict):
        return kind, tuple((key, key_of(item, depth - 1, of_parameter)) for key, item in value.items())
    if depth and isinstance(value, set | frozenset):
        return kind, frozenset(value)
    if depth and (isinstance(value, BUFFERS) or is_numpy(value)):
        return kind, getattr(value, "shape", None), str(getattr(value, "dtype", None)), bytes(value)
    return kind, IdentityKey(value)


def is_numpy(value: Any) -> bool:
    """Return whether a value is an array of NumPy; NumPy need not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


class IdentityKey:
    """A key that equals only those of the same object, and keeps the object alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
