"""Containers that a program reads as a whole, changes in place, or returns.

[Note: Contents of containers]
Thunder checks each item of a list or dictionary that the interpreter sees the program read. It does not see what native
code reads: ``sum(self.weights)``, ``self.sizes == (2, 2)``, or anything of a deque or an array of NumPy. And a program that
changes a container in place changes it once, when it is traced. So the contents of each container are noted when the
program reads it from its module or its arguments. The prologue compares the contents of containers that native code has
read. It also compares those that have changed when the trace ends, so the call that was just compiled is refused.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from thunder.core.interpreter import ProvenanceRecord, WrappedValue, do_raise, interpreter_needs_wrap, is_opaque, unwrap
from torch.utils._pytree import tree_leaves, tree_map

from ..ir.value_keys import BUFFERS, ITEMS, is_numpy, key_of
from ..runtime.traced_inputs import CONTENT, Check
from . import torch_functions
from .paths import Path, Paths
from .refusals import refusal

CALL_NOTHING = frozenset({callable, isinstance, issubclass, super, type, getattr, hasattr})
"""Builtins that read no contents of their arguments."""

READ_ITEMS = frozenset({"__getitem__", "__len__", "__setitem__"})
"""Methods of containers that read at most the item under their argument."""

NATIVE_OPERANDS: dict[str, Callable[[int], Iterable[int]]] = {
    "COMPARE_OP": lambda arg: (-1, -2),
    "BUILD_MAP": lambda arg: range(-2 * arg, 0, 2),
    "BUILD_SET": lambda arg: range(-arg, 0),
    **dict.fromkeys(("SET_ADD", "SET_UPDATE", "DICT_UPDATE"), lambda arg: (-1,)),
    "MAP_ADD": lambda arg: (-2,),
}
"""Instructions that run natively, each with a function of its argument that returns the stack positions of the values that
it compares or hashes."""


_COPIED = (list, dict, set, deque, defaultdict, OrderedDict, Counter)


class ContainerContents:
    """The contents of a container, for comparison with other containers."""

    def __init__(self, container: Any) -> None:
        self._contents, self._text = _contents_of(container), f"{container!r:.100}"

    def __repr__(self) -> str:
        return self._text

    def fits(self, container: Any) -> bool:
        """Return whether a container has the same contents."""
        return bool(_contents_of(container) == self._contents)


class Containers:
    """The containers that one traced program has read."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._known: dict[Path, tuple[Any, ContainerContents]] = {}
        self._copies: dict[Path, Any] = {}  # shallow ones
        self._read: set[Path] = set()

    def note(self, path: Path, value: Any) -> None:
        """Note the contents of a value if it is a container."""
        if path not in self._known and (isinstance(value, (*ITEMS, dict, set, *BUFFERS)) or is_numpy(value)):
            self._known[path] = value, ContainerContents(value)
            if type(value) in _COPIED:
                self._copies[path] = value.copy()

    def note_call(self, function: Any, is_interpreted: bool, args: tuple[WrappedValue, ...]) -> None:
        """Note which of its arguments a function reads as a whole.

        Args:
            is_interpreted: whether it has a lookaside. Lookasides read item by item, except those of torch's functions.
        """
        name, owner = getattr(function, "__name__", ""), getattr(function, "__objclass__", None)
        if is_interpreted:
            is_whole = str(getattr(owner or function, "__module__", None)).startswith("torch")
        else:
            is_whole = is_opaque(function) and function not in _READ_NOTHING and name != "__get__"
            is_whole = is_whole and not (owner in (list, tuple, dict) and name in READ_ITEMS)
        if is_whole:
            for arg in args:
                if not isinstance(arg.value, str | int):
                    self._note_read(arg.provenance)

    def error_of_change(self, function: Any, args: tuple[WrappedValue, ...]) -> NotImplementedError | None:
        """Return the error for a method that changes a container of which Thunder traces a copy; ``None`` for others."""
        if getattr(function, "__objclass__", None) not in (list, dict) or function.__name__ not in _CHANGING_METHODS:
            return None
        container = args[0]
        if container.original_value is container.nothing or self._paths.of(container.provenance) not in self._known:
            return None
        return refusal(
            f"forward changes a {container.python_typ.__name__} of its arguments or attributes which torch has read, and "
            f"which each call would have to change again",
            "Change a copy of it",
        )

    def note_instruction(self, inst: Any, stack: Any) -> None:
        """Note which containers an instruction reads natively.

        Args:
            stack: the interpreter's, with the operands.
        """
        for index in NATIVE_OPERANDS[inst.opname](inst.arg) if inst.opname in NATIVE_OPERANDS else ():
            self._note_read(stack.getitem_wrapped(index).provenance)

    def _note_read(self, provenance: ProvenanceRecord) -> None:
        path = self._paths.of(provenance)
        if path in self._known:
            self._read.add(path)

    def changed(self) -> Path | None:
        """Return the path of a list, dictionary, set or deque that has changed since it was noted; ``None`` if none has."""
        return next((path for path in self._copies if not self._known[path][1].fits(self._known[path][0])), None)

    def restore(self) -> None:
        """Undo changes of lists, dictionaries, sets and deques."""
        for path, copy in self._copies.items():
            value, contents = self._known[path]
            if contents.fits(value):
                continue
            value.clear()
            value.extend(copy) if isinstance(value, (list, deque)) else value.update(copy)

    def checks(self) -> dict[Path, Check]:
        """Return the checks of containers that were read as a whole or have changed."""
        return {
            path: (CONTENT, contents)
            for path, (value, contents) in self._known.items()
            if path in self._read or not contents.fits(value)
        }


def with_plain_containers(output: WrappedValue) -> Any:
    """Convert torch's named tuples to tuples and ordered dictionaries to plain ones in the outermost forward's result.

    Other named tuples are refused: a trace cannot make them.
    """
    named = [type(value) for value in tree_leaves(unwrap(output), is_leaf=_is_named) if _is_named(value)]
    if foreign := [kind for kind in named if kind.__module__ not in (torch_functions.__name__, "torch.return_types")]:
        what = f"forward returns a named tuple ({foreign[0].__name__}), which a trace cannot make"
        return do_raise(refusal(what, "Return a dataclass, a dictionary or a plain tuple"))
    is_plain = not named and not any(map(_is_ordered, tree_leaves(unwrap(output), is_leaf=_is_ordered)))
    return output if is_plain else interpreter_needs_wrap(_plain)(output)


def _plain(output: Any) -> Any:
    def convert(value: Any) -> Any:
        if _is_ordered(value):
            return {key: _plain(item) for key, item in value.items()}
        return tuple(value) if _is_named(value) else value

    return tree_map(convert, output, is_leaf=lambda value: _is_named(value) or _is_ordered(value))


def _is_ordered(value: Any) -> bool:
    return type(value) is OrderedDict


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and type(value) is not tuple and type(value) is not torch.Size


_CHANGING_METHODS = frozenset(
    ("__delitem__", "__iadd__", "__imul__", "__ior__", "__setitem__", "append", "clear", "extend", "insert", "pop")
    + ("popitem", "remove", "reverse", "setdefault", "sort", "update")
)
_READ_NOTHING = frozenset({*CALL_NOTHING, object.__new__, object.__init__})


def _contents_of(value: Any) -> Any:
    # Parameters count as equal, because tracing replaces them. To read one by another name is an error.
    return key_of(value, of_parameter=lambda _: torch.nn.Parameter)
