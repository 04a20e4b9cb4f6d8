"""The paths by which an interpreted program reads values: the attributes and items from an input or a constant to them."""

from __future__ import annotations

from typing import Any

from thunder.core.interpreter import ProvenanceRecord, PseudoInst
from thunder.core.jit_ext import EXT_FLAG_IS_TENSOR_PROXY

from ..ir.value_keys import IdentityKey
from ..private_lookups import NATIVE_DESCRIPTORS

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
