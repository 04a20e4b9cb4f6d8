"""Keys of values that tracing can observe: a trace cannot tell values with equal keys apart."""

from __future__ import annotations

from types import CellType, MethodType, NoneType
from typing import Any

import torch

from ..private_torch import is_hooked

_BY_VALUE = (
    *(NoneType, bool, int, str, bytes, range, slice, type(Ellipsis), frozenset),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

_DEPTH = 4
"""How deep containers are compared; anything deeper must be the same object."""

_LONG = 512
"""The length above which a container must be the same object, because comparing it takes too long."""


def key_of(value: Any, depth: int = _DEPTH) -> Any:
    """Return an object that is equal for values which a trace cannot tell apart.

    Numbers, strings and the like count by value, containers by their contents, tensors by their metadata, because a
    trace has proxies in their place, and modules by their class and whether they have hooks, because the attributes that
    a program reads are compared one by one. Any other object counts by its identity.
    """
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)  # 0.0 is not -0.0
    if kind in _BY_VALUE:
        return kind, (value.start, value.stop, value.step) if kind is slice else value
    if depth < _DEPTH and isinstance(value, torch.nn.Module | torch.Tensor):
        return "object", Same(value)  # in a container, from which it may be read unnoticed
    if isinstance(value, torch.nn.Module):
        return "module", kind, is_hooked(value)
    if isinstance(value, torch.Tensor):
        return kind, tuple(value.shape), value.dtype, value.device, value.layout, value.requires_grad
    if kind is MethodType:
        return "method", value.__func__, Same(value.__self__)
    if kind is CellType:
        return "cell"  # its contents are read separately
    if kind is torch.Size:
        return kind, tuple(value)
    if depth and isinstance(value, tuple | list | set | dict) and len(value) <= _LONG:
        if isinstance(value, dict):
            return "dict", kind, tuple((key_of(k, 0), key_of(v, depth - 1)) for k, v in value.items())
        return "items", kind, tuple(key_of(item, depth - 1) for item in value)
    return "object", Same(value)


class Same:
    """Equal for one object only, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
