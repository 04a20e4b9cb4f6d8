"""Keys of values that tracing can observe: a trace cannot tell values with equal keys apart."""

from __future__ import annotations

from types import CellType, MethodType, NoneType
from typing import Any

import torch

from ..private_torch import is_hooked

_BY_VALUE = (
    *(NoneType, bool, int, str, bytes, range, slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

_CONTAINERS = (tuple, list, set, frozenset, dict)

DEPTH = 4
"""How deep containers are compared; anything deeper must be the same object."""

LONG = 512
"""The length above which a container must be the same object of the same length; comparing it takes too long."""


def key_of(value: Any, depth: int = DEPTH) -> Any:
    """Return an object that is equal for values which a trace cannot tell apart.

    Numbers, strings and the like count by value, containers by their contents, tensors by their metadata, because a
    trace has proxies in their place, and modules by their class and whether they have hooks, because the attributes that
    a program reads are compared one by one. Any other object counts by its identity and its class.
    """
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)  # 0.0 is not -0.0
    if kind in _BY_VALUE:
        return kind, (value.start, value.stop, value.step) if kind is slice else value
    if depth < DEPTH and isinstance(value, torch.nn.Module | torch.Tensor):
        return "object", kind, IdentityKey(value)  # in a container, from which it may be read unnoticed
    if isinstance(value, torch.nn.Module):
        return "module", kind, is_hooked(value)
    if isinstance(value, torch.Tensor):
        return kind, tuple(value.shape), value.dtype, value.device, value.layout, value.requires_grad
    if kind is MethodType:
        return "method", value.__func__, IdentityKey(value.__self__)
    if kind is CellType:
        return "cell"  # its contents are read separately
    if kind is torch.Size:
        return kind, tuple(value)
    if isinstance(value, _CONTAINERS):
        if not depth or len(value) > LONG:
            return "container", kind, IdentityKey(value), len(value)
        if isinstance(value, dict):
            return "dict", kind, tuple((key_of(k, 0), key_of(v, depth - 1)) for k, v in value.items())
        return "items", kind, tuple(key_of(item, depth - 1) for item in value)
    return "object", kind, IdentityKey(value)


class IdentityKey:
    """Equal for one object only, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
