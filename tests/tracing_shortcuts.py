"""Shortcuts through Thunder's compilation, which dominates the time of the tests. They take away more than half of it.

Each shortcut replaces a function of Thunder or torch, does the same in fewer steps, and makes Thunder record the same
accesses and insert the same guards:

- Thunder interprets ``nn.Module.__getattr__`` line by line, which takes up to ten dictionary operations for each attribute.
  The shortcut interprets only those that matter.
- Thunder looks up each global, and each item of a dictionary, list or tuple, by interpreting a lambda that calls
  ``__getitem__``. The shortcut calls the method directly.
- For each exception, and every ``for`` loop ends with one, the interpreter starts a thread that creates a frame for the
  traceback, and busy-waits for it. The shortcut caches one frame for each line.
- Thunder disassembles a function whenever it interprets it. The shortcut caches the instructions.
- At each compilation Thunder reads the source lines of all frames of the stack but uses only the caller's. The shortcut
  reads only these.
- Thunder flattens arguments and results twice, to find dataclasses, and checks each time whether their types can be
  flattened. The shortcut flattens once and caches the types that can be flattened.

Others were tried, and save 9 % together in 120 lines: caching signatures, and cheaper ways to eliminate dead code, to copy
bound symbols and to print arguments.

``test_freeze.py`` compares traces that were compiled with shortcuts with ``freeze.json``, which was written without. Set
``TRACING_SHORTCUTS=none`` in the environment to run all tests without them, as CI does once a week.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import inspect
import os
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import thunder_fsdp_sched  # noqa: F401  before thunder

import optree
from thunder.core import codeutils, interpreter, jit_ext, pytree, symbol, transform_common, utils
from thunder.core.interpreter import _interpret_call, check_and_append, unwrap, wrap_const
from torch.nn.modules import module as torch_module

# The interpreter calls these with wrapped values, which they pass on to the functions that it is to interpret.


def _getattr(module: Any, name: Any) -> Any:
    """Stand in for ``nn.Module.__getattr__``."""
    attributes = _interpret_call(getattr, module, wrap_const("__dict__"))
    for kind in ("_parameters", "_buffers", "_modules"):
        key = wrap_const(kind)
        if unwrap(_interpret_call(dict.__contains__, attributes, key)):
            members = _interpret_call(dict.__getitem__, attributes, key)
            type_of_members = type(unwrap(members))
            if unwrap(_interpret_call(type_of_members.__contains__, members, name)):
                return _interpret_call(type_of_members.__getitem__, members, name)
    return _interpret_call(_has_no, module, name)


def _has_no(module: Any, name: str) -> NoReturn:
    raise AttributeError(f"'{type(module).__name__}' object has no attribute '{name}'")


_globals_lookup = interpreter.globals_lookup


def _global(namespace: Any, name: Any) -> Any:
    """Stand in for ``globals_lookup``."""
    known = unwrap(namespace)
    if type(known) is dict:
        if unwrap(name) in known:
            return _interpret_call(dict.__getitem__, namespace, name)
        builtins = _interpret_call(dict.__getitem__, namespace, wrap_const("__builtins__"))
        if type(unwrap(builtins)) is dict and unwrap(name) in unwrap(builtins):
            return _interpret_call(dict.__getitem__, builtins, name)
    return _globals_lookup(namespace, name)


_binary_subscr = getattr(interpreter, "_binary_subscr", None)  # from Thunder 0.2.7 on
_GETITEM = {container: container.__getitem__ for container in (dict, list, tuple)}


def _item(stack: Any, container: Any, key: Any) -> Any:
    """Stand in for ``_binary_subscr``."""
    getitem = _GETITEM.get(type(unwrap(container)))
    if getitem is None:
        assert _binary_subscr is not None
        return _binary_subscr(stack, container, key)
    return check_and_append(stack, _interpret_call(getitem, container, key))


_get_or_make_python_frame = interpreter.InterpreterFrame.get_or_make_python_frame
_frames: dict[tuple[Any, ...], types.FrameType] = {}


def _python_frame(frame: Any) -> types.FrameType:
    """Stand in for ``InterpreterFrame.get_or_make_python_frame``."""
    key = frame.code, frame.code.co_filename, frame.positions.lineno, frame.qualname
    if key not in _frames:
        _frames[key] = _get_or_make_python_frame(frame)
    return _frames[key]


_disassembled: dict[int, tuple[types.CodeType, tuple[dis.Instruction, ...]]] = {}


def _get_instructions(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """Stand in for ``dis.get_instructions``."""
    # Hashing code objects is slow. Their ids are safe, because the entry keeps the object alive.
    if id(code) not in _disassembled:
        _disassembled[id(code)] = code, tuple(dis.get_instructions(code))
    return _disassembled[id(code)][1]


def _stack() -> list[Any]:
    """Stand in for ``inspect.stack``, of which Thunder uses the third frame."""
    return [None, None, inspect.getframeinfo(sys._getframe(3))]


_tree_flatten = pytree.tree_flatten
_flattened: set[type] = set()


def _flatten(tree: Any, namespace: str = pytree.OPTREE_NAMESPACE) -> tuple[list[Any], Any]:
    """Stand in for ``tree_flatten``."""
    if type(tree) in _flattened:
        return optree.tree_flatten(tree, none_is_leaf=True, namespace=namespace)
    result = _tree_flatten(tree, namespace)
    if not isinstance(tree, type):  # types are not cached: Thunder checks whether they are dataclasses
        _flattened.add(type(tree))
    return result


_tree_flatten_with_dataclass = pytree.tree_flatten_with_dataclass
_no_dataclasses: set[type] = set()


def _flatten_with_dataclass(tree: Any) -> tuple[list[Any], Any]:
    """Stand in for ``tree_flatten_with_dataclass``."""
    leaves, spec = _flatten(tree)
    for kind in {*map(type, leaves)} - _no_dataclasses:
        if dataclasses.is_dataclass(kind) or issubclass(kind, type):  # Thunder may have to register it
            return _tree_flatten_with_dataclass(tree)
        _no_dataclasses.add(kind)
    return leaves, spec


_REPLACEMENTS: dict[tuple[Any, str], Any] = {
    (interpreter, "globals_lookup"): _global,
    (interpreter, "_binary_subscr"): _item,
    (interpreter.InterpreterFrame, "get_or_make_python_frame"): _python_frame,
    (interpreter, "dis"): types.SimpleNamespace(**{**vars(dis), "get_instructions": _get_instructions}),
    (interpreter, "inspect"): types.SimpleNamespace(**{**vars(inspect), "stack": _stack}),
    (symbol, "tree_flatten_with_dataclass"): _flatten_with_dataclass,
    **{(user, "tree_flatten"): _flatten for user in (symbol, codeutils, transform_common, utils)},
}


@contextlib.contextmanager
def tracing_shortcuts() -> Iterator[None]:
    """Enable the shortcuts within the context, unless the environment says that there are none."""
    with contextlib.ExitStack() as stack:
        if os.environ.get("TRACING_SHORTCUTS") != "none":
            lookasides = jit_ext._general_jit_lookaside_map  # to which thunder.jit adds one for the rest of the process
            lookasides[torch_module.Module.__getattr__] = _getattr
            stack.callback(lookasides.pop, torch_module.Module.__getattr__)
            for (owner, name), shortcut in _REPLACEMENTS.items():
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, shortcut))
        yield
