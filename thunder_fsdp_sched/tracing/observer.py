"""Observation of what an interpreted program reads, modifies and calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

from thunder.common import CompileData
from thunder.core.interpreter import (
    InterpreterCompileCtx,
    PseudoInst,
    WrappedValue,
    get_interpreterruntimectx,
    interpretercompilectx,
    is_opaque,
)
from thunder.core.proxies import Proxy

from ..private_interpreter import observed_by, uses_grad_mode
from .paths import ATTRIBUTE, COMPUTED, ITEM, Path, Paths, is_hashable

__all__ = ["Observer", "Unrepeatable"]


class Unrepeatable(Exception):
    """A module call cannot be repeated; the message says why."""


class Observer:
    """A log of the paths that an interpreted program reads, in order, and of what it modifies and calls.

    Args:
        context: the interpreter's context, whose instructions, calls and values are observed within :meth:`observe`.

    Attributes:
        paths: those of all interpreted values.
        reads: paths of all values that the program has read, with repetitions.
        aliases: the paths that values have which were read elsewhere before, by the paths under which they were read.
        effects: what the program has done besides reading. A modification has the length of ``reads`` when the program
            made the modified object; -1 if it was there before.
        uses_of_grad_mode: how often the program has read or changed the grad mode.
    """

    def __init__(self, context: InterpreterCompileCtx) -> None:
        self.paths = Paths()
        self.reads: list[Path] = []
        self.aliases: dict[Path, Path] = {}
        self.effects: list[tuple[str, int | None]] = []
        self.uses_of_grad_mode = 0
        # By the identity of a value, which is kept alive: the value, and the length of `reads` when the program made it.
        self._made: dict[int, tuple[Any, int]] = {}
        self._context = observed_by(context, self)

    def observe(self) -> Any:
        """Return a context manager within which the interpreter is observed."""
        return interpretercompilectx(self._context)

    def check(self, reads: int, effects: int) -> None:
        """Check what the program has done since the logs had these lengths.

        Raises:
            Unrepeatable: it has modified something that it did not make, or called a function that may not be pure.
        """
        for effect, made in self.effects[effects:]:
            if made is None:
                raise Unrepeatable(effect)
            if made < reads:
                raise Unrepeatable(f"{effect} modifies an object that the call did not make")

    def wrap(self, wrap: Callable[[WrappedValue], object], value: WrappedValue) -> None:
        """Note a value that the program makes. The interpreter also wraps attributes that the program does not read."""
        wrap(value)
        plain = value.value
        is_display = value.provenance.inst is PseudoInst.CONSTANT and isinstance(plain, _CONTAINERS)
        if is_display or self.paths.of(value.provenance) is None:
            self._made.setdefault(id(plain), (plain, len(self.reads)))

    def interpret(self, interpret: Callable[..., Any], inst: Any, /, **state: Any) -> Any:
        """Log what an instruction modifies and what it leaves on the stack."""
        stack, name = state["stack"], inst.opname
        if name in _STORES:
            self._modify(name, stack.getitem_wrapped(_STORES[name]))
        elif name in _FOREIGN_STORES or (name in _CELL_STORES and inst.argval in state["co"].co_freevars):
            self.effects.append((f"{name} {inst.argval}", None))
        result = interpret(inst, **state)
        if len(stack):
            self._read(stack.getitem_wrapped(-1))
        return result

    def look_aside(self, look_aside: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Log a call, and what a function that is not interpreted returns."""
        if isinstance(function, FunctionType):
            for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                self._made.setdefault(id(default), (default, -1))
        lookaside = look_aside(function, *args, **kwargs)
        self._call(function, lookaside, args)
        if not callable(lookaside):
            return lookaside

        @functools.wraps(lookaside)
        def observed(*args: Any, **kwargs: Any) -> Any:
            result = lookaside(*args, **kwargs)
            self._read(result)
            if function in (getattr, hasattr):
                self._access(ATTRIBUTE, args[0], args[1], result)
            elif getattr(function, "__name__", None) == "__getitem__" and len(args) == 2:
                self._access(ITEM, args[0], args[1], result)
            return result

        return observed

    def _read(self, value: Any) -> None:
        if isinstance(value, WrappedValue):
            path = self.paths.of(value.provenance)
            if path is COMPUTED and not isinstance(value.value, Proxy):
                self.effects.append(("a read under a computed name", None))
            elif path is not None and path is not COMPUTED:
                self.reads.append(path)

    def _access(self, kind: str, source: Any, key: Any, result: Any) -> None:
        """Log an attribute or an item that was read; it may be known under another path, from where it was read first."""
        self.uses_of_grad_mode += isinstance(source.value, CompileData)  # Thunder's own functions read it there
        path = self.paths.of(source.provenance)
        if path is None or path is COMPUTED or (kind == ITEM and isinstance(source.value, Proxy)):
            return
        if not is_hashable(key.value) or isinstance(key.value, Proxy):
            self.effects.append(("a read under a computed name", None))
            return
        if kind == ATTRIBUTE and isinstance(inspect.getattr_static(type(source.value), str(key.value), None), property):
            return  # its function is interpreted
        path = (*path, (kind, key.value))
        own = self.paths.of(result.provenance) if isinstance(result, WrappedValue) else None
        if own is not None and own != path:
            self.aliases[path] = own
        self.reads.append(path)

    def _modify(self, effect: str, value: Any) -> None:
        plain = value.value if isinstance(value, WrappedValue) else value
        if not isinstance(plain, Proxy):  # an assignment to elements of a tensor is an operator of the trace
            self.effects.append((effect, self._made.get(id(plain), (None, -1))[1]))

    def _call(self, function: Any, lookaside: Any, args: tuple[Any, ...]) -> None:
        name = getattr(function, "__name__", "")
        owner = getattr(function, "__objclass__", None)
        if isinstance(function, BuiltinFunctionType) and uses_grad_mode(function):
            self.uses_of_grad_mode += 1
        elif isinstance(function, _SETTERS) and function in (setattr, delattr, object.__setattr__, object.__delattr__):
            self._modify(name, args[0])
        elif isinstance(function, _SETTERS) and isinstance(owner, type) and issubclass(owner, _CONTAINERS):
            if name not in _READING_METHODS:
                self._modify(f"{owner.__name__}.{name}", args[0])
        elif lookaside is None and is_opaque(function) and not _is_pure(function, name, owner, args):
            self.effects.append((f"a call of {getattr(function, '__qualname__', function)}", None))


_SETTERS = (MethodDescriptorType, WrapperDescriptorType, BuiltinFunctionType)
_STORES = {"STORE_ATTR": -1, "DELETE_ATTR": -1, "STORE_SUBSCR": -2, "DELETE_SUBSCR": -2}
"""Where on the stack the object is that an instruction modifies."""

_FOREIGN_STORES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "DELETE_NAME", "IMPORT_STAR"})
_CELL_STORES = frozenset({"STORE_DEREF", "DELETE_DEREF"})
_CONTAINERS = (list, dict, set)
_VALUES = (bool, int, float, complex, str, bytes, tuple, frozenset, range, slice, type(None))
_PURE_MODULES = frozenset({"_operator", "operator", "math", "optree"})
_PURE_BUILTINS = frozenset(
    (
        abs,
        all,
        any,
        ascii,
        bin,
        bool,
        callable,
        chr,
        complex,
        dict,
        divmod,
        enumerate,
        float,
        format,
        frozenset,
        getattr,
    )
    + (hasattr, hash, hex, int, isinstance, issubclass, iter, len, list, max, min, oct, ord, pow, range, repr, reversed)
    + (round, set, slice, sorted, str, sum, super, tuple, type, zip)
)
_READING_METHODS = frozenset(
    ("get", "keys", "values", "items", "copy", "index", "count", "union", "intersection", "difference", "issubset")
    + ("issuperset", "isdisjoint", "__len__", "__contains__", "__iter__", "__getitem__", "__eq__", "__ne__", "__get__")
    + ("__reversed__", "__or__", "__add__", "__mul__", "__str__", "__repr__", "__hash__", "__length_hint__")
    + ("__class_getitem__",)
)


def _is_pure(function: Any, name: str, owner: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a function that is not interpreted gives the same result for equal arguments, and has no effect."""
    if _is_called_by_thunder():
        return True
    if function in _PURE_BUILTINS:
        return function in (callable, isinstance, issubclass, super, type) or all(map(_runs_no_code, args))
    if str(getattr(function, "__module__", None)).partition(".")[0] in _PURE_MODULES:
        return True
    if name in ("__new__", "__init__"):
        made = getattr(function, "__self__", owner)
        kinds = (*_VALUES, *_CONTAINERS, BaseException)
        return made is object or made is type or (isinstance(made, type) and issubclass(made, kinds))
    return isinstance(owner, type) and (issubclass(owner, _VALUES) or name in _READING_METHODS)


def _runs_no_code(wrapped: Any) -> bool:
    """Return whether a builtin that is called with the value, such as ``str``, runs no Python code of its class."""
    value = wrapped.value if isinstance(wrapped, WrappedValue) else wrapped
    items = (
        value if isinstance(value, list | tuple | set | frozenset) else value.values() if type(value) is dict else ()
    )
    return all(
        isinstance(each, Proxy | type)
        or type(each).__module__.partition(".")[0] in ("builtins", "collections", "thunder", "torch")
        for each in (value, *items)
    )


def _is_called_by_thunder() -> bool:
    """Return whether the innermost function that is not the interpreter's own belongs to Thunder's operators."""
    for frame in reversed(get_interpreterruntimectx().frame_stack):
        if frame.module not in ("thunder.core.interpreter", "thunder.core.jit_ext"):
            return str(frame.module).startswith("thunder.")
    return False
