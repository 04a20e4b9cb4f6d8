"""Keys of values, and the paths by which an interpreted program reads them.

Values with equal keys are alike for a trace. The path of a value is the attributes and items that lead to it from an input
or a constant.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Callable
from types import MethodType, NoneType
from typing import Any

import torch
from thunder.core.interpreter import ProvenanceRecord, PseudoInst
from thunder.core.jit_ext import EXT_FLAG_IS_TENSOR_PROXY

from ..private_lookups import NATIVE_DESCRIPTORS

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


ATTRIBUTE, ITEM = "attribute", "item"
GLOBALS = (ATTRIBUTE, "__globals__")

FUNCTION, INPUTS = "INPUT_FN", ("INPUT_ARGS", "INPUT_KWARGS")

Path = tuple[Any, ...]
"""A root, and then steps ``(ATTRIBUTE, name)`` or ``(ITEM, key)``. The root is ``FUNCTION``, what Thunder compiles, one of
its ``INPUTS``, or :class:`IdentityKey` of an object of the program's code: a function, a class, a module."""

COMPUTED: Path = ("computed",)
"""The path of a value that was read from an input, but under a name or key that the program computed."""


class Paths:
    """The paths of interpreted values, from their provenance."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ProvenanceRecord, Path | None]] = {}

    def of(self, provenance: ProvenanceRecord) -> Path | None:
        """Return the path of a value; ``None`` if the program has computed it, ``COMPUTED`` if it has computed the key."""
        known = self._known.get(id(provenance))
        if known is None:
            known = self._known[id(provenance)] = provenance, self._find(provenance)
        return known[1]

    def _find(self, provenance: ProvenanceRecord) -> Path | None:
        inst = provenance.inst
        name = inst.value if isinstance(inst, PseudoInst) else inst.opname
        if name in (FUNCTION, *INPUTS):
            return (name,)
        if name == "CONSTANT":
            return (IdentityKey(provenance.value),)
        if name in ("LOAD_ATTR", "BINARY_SUBSCR") and len(provenance.inputs) == 2:
            source, key = provenance.inputs
            return self._step(ATTRIBUTE if name == "LOAD_ATTR" else ITEM, source, key)
        if name == "OPAQUE" and provenance.inputs[0].inst is PseudoInst.CONSTANT:
            function, arguments = provenance.inputs[0].value, provenance.inputs[1].inputs
            if getattr(function, "__name__", None) == "__getitem__" and len(arguments) == 2:
                key, source = arguments
                return self._step(ITEM, source, key)
            if function in _GETTERS and len(arguments) in (2, 3):
                return self._step(ATTRIBUTE, *arguments[-2:])
        return None

    def _step(self, kind: str, source: ProvenanceRecord, key: ProvenanceRecord) -> Path | None:
        path = self.of(source)
        if path is None or path is COMPUTED:
            return path
        value = self.key_of(key)
        if value is COMPUTED:
            return COMPUTED
        return (*path, (kind, value.__name__ if isinstance(value, NATIVE_DESCRIPTORS) else value))

    def key_of(self, provenance: ProvenanceRecord) -> Any:
        """Return the key of this provenance; ``COMPUTED`` if it is not a constant of the program."""
        value = provenance.value
        return value if provenance.inst is PseudoInst.CONSTANT and is_hashable(value) else COMPUTED


class ConcretePaths(Paths):
    """Paths that contain the values of computed keys: everything that such a key is computed from is checked as well."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[int, tuple[ProvenanceRecord, Any]] = {}  # by the identity of their provenance

    def _find(self, provenance: ProvenanceRecord) -> Path | None:
        if provenance.ext_flag & EXT_FLAG_IS_TENSOR_PROXY:  # Thunder checks shapes and dtypes
            return None
        return super()._find(provenance)

    def of_tensor(self, provenance: ProvenanceRecord) -> Path | None:
        """Return the path of a tensor, whose attributes Thunder does not check."""
        return super()._find(provenance)

    def key_of(self, provenance: ProvenanceRecord) -> Any:
        if provenance.inst is PseudoInst.CONSTANT:
            return super().key_of(provenance)
        return self.keys.get(id(provenance), (None, COMPUTED))[1]


_GETTERS = tuple(kind.__get__ for kind in NATIVE_DESCRIPTORS)


def is_hashable(value: object) -> bool:
    """Return whether ``value`` has a hash, which for a tuple depends on its items."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
