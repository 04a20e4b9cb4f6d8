"""Observation of what an interpreted program reads, modifies and calls."""

from __future__ import annotations

import builtins
import functools
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any, NamedTuple

import torch
from thunder.common import CompileData
from thunder.core.interpreter import (
    PseudoInst,
    WrappedValue,
    get_interpretercompilectx,
    get_interpreterruntimectx,
    interpretercompilectx,
    is_opaque,
    unwrap,
    wrap_const,
)
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy

from ..private_interpreter import checks_of, has_been_modified, observed_by, renames_of, uses_grad_mode
from .callbacks import Watched
from .keys import LONG, IdentityKey, has_state
from .native_code import (
    CELL_STORES,
    CONTAINERS,
    GLOBAL_STORES,
    NATIVE_OPERANDS,
    READ_ITEMS,
    READING_METHODS,
    checks_natively,
    has_registry,
    is_plain,
    is_pure,
    is_value,
)
from .paths import (
    ATTRIBUTE,
    BUILTINS,
    COMPUTED,
    FUNCTION,
    INPUTS,
    IS_SUBCLASS,
    ITEM,
    NAMES,
    NAMESPACES,
    STATE,
    Path,
    Paths,
    is_hashable,
)


class Unrepeatable(Exception):
    """A module call cannot be repeated; the message says why."""


class Mark(NamedTuple):
    """The lengths of what Thunder has traced and of an observer's logs, at one moment."""

    bsyms: int
    checks: int
    renames: int
    operators: int
    reads: int
    effects: int
    uses_of_grad_mode: int


class Observer:
    """A log of the paths that a program reads while Thunder traces it, in order, and of what it modifies and calls.

    Instructions, calls and values are observed within :meth:`observe`.

    Args:
        module: the outermost module.
    """

    def __init__(self, module: WrappedValue) -> None:
        self.context = get_jit_ctx()  # Thunder's, of the compilation
        self.root = module.provenance  # of what Thunder compiles
        self.paths = Paths()
        self.roots: dict[Path, Any] = {(BUILTINS,): vars(builtins)}
        if self.paths.of(self.root) == (FUNCTION,):
            self.roots[FUNCTION,] = module.value
        self.reads: list[Path] = []  # of all values that the program has read, with repetitions
        # The paths of values that were read elsewhere before, by the paths under which they were read now.
        self.aliases: dict[Path, Path] = {}
        # What the program has done besides reading. A modification has the length of `reads` when the program made the
        # modified object; -1 if it was there before.
        self.effects: list[tuple[str, int | None]] = []
        self.uses_of_grad_mode = 0
        self.written: set[Any] = set()  # the paths that the prologue checks, each with the check
        self.checked: set[Path] = set()  # all beginnings of these paths
        self.checked_names: set[str] = set()  # of the proxies that the prologue checks
        self._noted_checks = 0
        # By the identity of a value, which is kept alive: the value, and the length of `reads` when the program made it.
        self._made: dict[int, tuple[Any, int]] = {}
        # By the identity of a function or class, the length of `reads` when its state was read last.
        self._states: dict[int, float] = {}
        self._marked = 0  # the length of `reads` at the last mark
        self._observed = observed_by(get_interpretercompilectx(), self)

    def observe(self) -> Any:
        """Return a context manager within which the interpreter is observed."""
        return interpretercompilectx(self._observed)

    def mark(self) -> Mark:
        """Return a checkpoint: the current length of each recorded list."""
        context, trace = self.context, self.context.computation_trace
        traced = len(trace.peek_scope()), len(checks_of(context)), len(renames_of(context))
        self._marked = len(self.reads)
        return Mark(
            *traced, len(context.ad_hoc_executor.opmap), len(self.reads), len(self.effects), self.uses_of_grad_mode
        )

    def check(self, since: Mark) -> None:
        """Check what the program has done since a mark.

        Raises:
            Unrepeatable: it has modified something that it did not make, or called a function that may not be pure.
        """
        for effect, made in self.effects[since.effects :]:
            if made is None:
                raise Unrepeatable(effect)
            if made < since.reads:
                raise Unrepeatable(f"{effect} modifies an object that the call did not make")
        if has_been_modified(self.context):
            raise Unrepeatable("the program has modified a module")
        if len(self.context.ad_hoc_executor.opmap) != since.operators:
            raise Unrepeatable("the program defines an operator")

    def note_checks(self) -> None:
        """Note which values the prologue checks by now."""
        checks = checks_of(self.context)
        for check, proxy, *_ in checks[self._noted_checks :]:
            self.checked_names.add(proxy.name)
            path = self.paths.of(proxy.history) if getattr(proxy, "history", None) is not None else None
            if path is not None:
                self.written.add((path, check))
                self.checked.update(path[:length] for length in range(1, len(path)))
        self._noted_checks = len(checks)

    def wrap(self, wrap: Callable[[WrappedValue], object], value: WrappedValue) -> None:
        """Note a value that the program makes. The interpreter also wraps attributes that the program does not read."""
        wrap(value)
        plain, inst = value.value, value.provenance.inst
        if (
            isinstance(plain, _SHARED)
            and getattr(inst, "opname", None) not in _MAKING
            and self.paths.of(value.provenance) is None
        ):
            self.paths.define(
                value.provenance, (IdentityKey(plain),)
            )  # type(x) and the like find it, but do not make it
        is_display = inst is PseudoInst.CONSTANT and isinstance(plain, CONTAINERS)
        if is_display or self.paths.of(value.provenance) is None:
            self._made.setdefault(id(plain), (plain, len(self.reads)))

    def interpret(self, interpret: Callable[..., Any], inst: Any, /, **state: Any) -> Any:
        """Log what an instruction modifies and what it leaves on the stack."""
        stack, name = state["stack"], inst.opname
        if name in _STORES:
            self._modify(name, stack.getitem_wrapped(_STORES[name]))
        elif name in _FOREIGN_STORES or (name in CELL_STORES and inst.argval in state["co"].co_freevars):
            self.effects.append((f"{name} {inst.argval}", None))
        if name in NATIVE_OPERANDS:
            self._operands(inst, stack)
        if name == "LOAD_GLOBAL" and inst.argval not in unwrap(state["globals_dict"]):  # a builtin, which it would hide
            self._access(ITEM, state["globals_dict"], wrap_const(inst.argval), None)
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
        if lookaside is None and isinstance(function, FunctionType):  # which the interpreter runs
            self._read_state(function)
        is_native = isinstance(lookaside, Watched)
        self._call(function, None if is_native else lookaside, args, kwargs)
        if is_native or not callable(lookaside):
            return lookaside

        @functools.wraps(lookaside)
        def observed(*args: Any, **kwargs: Any) -> Any:
            result = lookaside(*args, **kwargs)
            self._read(result)
            if function in (getattr, hasattr):
                self._access(ATTRIBUTE, args[0], args[1], result, is_seen=function is getattr)
            elif getattr(function, "__name__", None) == "__getitem__" and len(args) == 2:
                self._access(ITEM, args[0], args[1], result)
            return result

        return observed

    def _read_state(self, value: Any) -> None:
        """Log that the interpreter uses the state of a function or class; once between two marks."""
        last = self._states.get(id(value), -1)
        if last < self._marked:
            is_thunder = str(getattr(value, "__module__", None)).startswith("thunder.")
            is_known = is_thunder or not has_state(value) or self._when_made(value) >= 0
            self._states[id(value)] = math.inf if is_known else len(self.reads)
            if not is_known:
                self.reads.append((IdentityKey(value), STATE))

    def _read(self, value: Any) -> None:
        if isinstance(value, WrappedValue):
            self._read_state(type(value.value))
            if isinstance(value.value, type):
                self._read_state(value.value)
            path = self.paths.of(value.provenance)
            if path is COMPUTED and not isinstance(value.value, Proxy):
                self.effects.append(("a read under a computed name", None))
            elif path is not None and path is not COMPUTED:
                self.reads.append(path)

    def _access(self, kind: str, source: Any, key: Any, result: Any, is_seen: bool = False) -> None:
        """Log an attribute or an item that was read; it may be known under another path, from where it was read first.

        Args:
            is_seen: whether the function of a property was interpreted.
        """
        self.uses_of_grad_mode += isinstance(source.value, CompileData)  # Thunder's own functions read it there
        path = self.paths.of(source.provenance)
        is_attribute = kind == ATTRIBUTE and isinstance(source.value, TensorProxy)
        if is_attribute and path is None and key.value == "requires_grad":
            self.effects.append(("a read of requires_grad, which depends on other modules,", None))
        if is_attribute and not (hasattr(torch.Tensor, str(key.value)) or _is_called_by_thunder()):
            self.effects.append(("a read of an attribute that programs give to tensors", None))
        if path is None or path is COMPUTED or (kind == ITEM and isinstance(source.value, Proxy)):
            return
        if not is_hashable(key.value) or isinstance(key.value, Proxy):
            self.effects.append(("a read under a computed name", None))
            return
        if is_seen and isinstance(inspect.getattr_static(type(source.value), str(key.value), None), property):
            return
        if path[0] in INPUTS and not is_value(source.value):
            self.effects.append((f"a read from an argument, a {type(source.value).__name__},", None))
        path = (*path, (kind, key.value))
        own = self.paths.of(result.provenance) if isinstance(result, WrappedValue) else None
        if own is not None and own != path:
            self.aliases[path] = own
        self.reads.append(path)

    def _modify(self, effect: str, value: Any) -> None:
        plain = unwrap(value)
        if not isinstance(plain, Proxy):  # an assignment to elements of a tensor is an operator of the trace
            self.effects.append((effect, self._when_made(plain)))

    def _when_made(self, value: Any) -> int:
        """Return the length of ``reads`` when the program made a value; -1 if it was there before."""
        return self._made.get(id(value), (None, -1))[1]

    def _call(self, function: Any, lookaside: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = getattr(function, "__name__", "")
        owner = getattr(function, "__objclass__", None)
        is_seen = True
        if isinstance(function, BuiltinFunctionType) and uses_grad_mode(function):
            self.uses_of_grad_mode += 1
        elif function is bool and args and isinstance(args[0].value, (TensorProxy, NumberProxy)):
            self.effects.append(("a branch on the value of a tensor", None))
        elif isinstance(function, _SETTERS) and function in (setattr, delattr, object.__setattr__, object.__delattr__):
            self._modify(name, args[0])
        elif isinstance(function, BuiltinFunctionType) and function in (isinstance, issubclass):
            classes, kind = unwrap(args[1]), unwrap(args[0]) if function is issubclass else type(unwrap(args[0]))
            is_seen = checks_natively(classes)
            if has_registry(classes):
                self.reads.append((IdentityKey(classes), (IS_SUBCLASS, IdentityKey(kind))))
        elif isinstance(owner, type) and issubclass(owner, CONTAINERS) and name not in READING_METHODS:
            self._modify(f"{owner.__name__}.{name}", args[0])
            is_seen = lookaside is not None or all(is_plain(unwrap(arg)) for arg in args[1:])
        elif lookaside is None and is_opaque(function):
            is_seen = is_pure(function, tuple(map(unwrap, args)), {k: unwrap(v) for k, v in kwargs.items()})
        if is_seen and isinstance(owner, type) and issubclass(owner, CONTAINERS) and name not in READ_ITEMS:
            is_seen = self._is_compared(args[0])
            if not is_seen and name == "__contains__" and issubclass(owner, dict):
                self._access(ITEM, args[0], args[1], None)
                is_seen = True
        if is_seen and name in _KEYED and isinstance(owner, type) and len(args) > 1:
            is_seen = is_plain(unwrap(args[1]), identities=issubclass(owner, dict))
        if not (is_seen or _is_called_by_thunder()):
            self.effects.append((f"a call of {getattr(function, '__qualname__', function)}", None))

    def _is_compared(self, container: Any) -> bool:
        """Return whether a record is compared with the contents of a container."""
        value, path = unwrap(container), self.paths.of(container.provenance)
        if path is None or self._when_made(value) >= 0:
            return True
        return path[-1] in NAMES or (len(value) <= LONG and path[-1] not in NAMESPACES)

    def _operands(self, inst: Any, stack: Any) -> None:
        """Log an instruction whose operands may run Python code that the interpreter does not see."""
        name = inst.opname
        values = [unwrap(stack.getitem_wrapped(i)) for i in NATIVE_OPERANDS[name](inst.arg)]
        identities = name in ("BUILD_MAP", "MAP_ADD", "DICT_UPDATE") or "==" in inst.argrepr or "!=" in inst.argrepr
        if name == "DICT_UPDATE" and type(values[0]) in (dict, OrderedDict):
            values = list(values[0])
        if not all(is_plain(value, identities) for value in values) and not _is_called_by_thunder():
            self.effects.append((f"{name} of objects that may run code", None))


_SHARED = (type, ModuleType, FunctionType)
_MAKING = frozenset({"MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE"})
_SETTERS = (MethodDescriptorType, WrapperDescriptorType, BuiltinFunctionType)
_STORES = {"STORE_ATTR": -1, "DELETE_ATTR": -1, "STORE_SUBSCR": -2, "DELETE_SUBSCR": -2}
"""Where on the stack the object is that an instruction modifies."""

_FOREIGN_STORES = GLOBAL_STORES | {"STORE_NAME", "DELETE_NAME", "IMPORT_STAR"}
_KEYED = frozenset({"__getitem__", "__setitem__", "__delitem__", "__contains__"})
"""Methods of dictionaries and sequences that look up their first argument."""


def _is_called_by_thunder() -> bool:
    """Return whether the innermost function that is not the interpreter's own belongs to Thunder's operators.

    These flatten their arguments with ``optree``.
    """
    for frame in reversed(get_interpreterruntimectx().frame_stack):
        module = str(frame.module)
        if module not in ("thunder.core.interpreter", "thunder.core.jit_ext") and not module.startswith("optree."):
            return module.startswith("thunder.")
    return False
