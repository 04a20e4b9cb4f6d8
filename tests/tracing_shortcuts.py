"""Shortcuts through Thunder's compilation, which dominates the time of the tests. They halve its time.

Each shortcut replaces a function of Thunder or torch, does the same in fewer steps, and makes Thunder record the same
accesses and insert the same guards:

- Thunder interprets ``nn.Module.__call__`` and ``nn.Module.__getattr__`` line by line. This includes a search for hooks and
  up to ten dictionary operations for each attribute. The shortcuts interpret only the dictionary operations that matter.
- Thunder looks up each global, and each item of a dictionary, list or tuple, by interpreting a lambda that calls
  ``__getitem__``. The shortcut calls the method directly.
- Thunder disassembles a function whenever it interprets it. The shortcut caches the instructions.
- For each exception, and every ``for`` loop ends with one, the interpreter starts a thread that creates a frame for the
  traceback, and busy-waits for it. The shortcut caches one frame for each line.
- At each compilation Thunder reads the source lines of all frames of the stack but uses only the caller's. The shortcut
  reads only these.
- At each call of a symbol Thunder inspects the signature of its meta function and binds the arguments one by one. The
  shortcut caches signatures, and passes positional arguments through.
- After each call of a symbol Thunder eliminates dead code among its subsymbols. The shortcut skips symbols without any.
- Thunder flattens arguments and results twice, to find dataclasses, and checks each time whether their types can be
  flattened. The shortcut flattens once and caches the types that can be flattened.

``test_tracing_shortcuts.py`` checks that traces and errors are identical with and without shortcuts. Set
``TRACING_SHORTCUTS=none`` in the environment to run all tests without them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import inspect
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import thunder_fsdp_sched  # noqa: F401  before thunder

import optree
from thunder.core import codeutils, interpreter, jit_ext, pytree, symbol, transform_common, utils
from thunder.core.interpreter import _interpret_call, check_and_append, unwrap, wrap_const
from torch.nn.modules import module as torch_module

__all__ = ["LOOKASIDES", "REPLACEMENTS", "shortcuts_at_start", "tracing_shortcuts"]

_CHOSEN = os.environ.get("TRACING_SHORTCUTS", "all")

_OF_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")
_OF_ALL = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


# The interpreter calls these with wrapped values, which they pass on to the functions that it is to interpret.


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for ``nn.Module.__call__``."""
    hooked = any(getattr(unwrap(module), name) for name in _OF_MODULE)
    hooked |= any(getattr(torch_module, name) for name in _OF_ALL)
    return _interpret_call(_call_with_hooks if hooked else _call_forward, module, *args, **kwargs)


def _call_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _call_with_hooks(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


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


_disassembled: dict[int, tuple[types.CodeType, tuple[dis.Instruction, ...]]] = {}


def _get_instructions(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """Stand in for ``dis.get_instructions``."""
    if (
        id(code) not in _disassembled
    ):  # hashing code objects is slow; ids are safe because the entry keeps the object alive
        _disassembled[id(code)] = code, tuple(dis.get_instructions(code))
    return _disassembled[id(code)][1]


_get_or_make_python_frame = interpreter.InterpreterFrame.get_or_make_python_frame
_frames: dict[tuple[Any, ...], types.FrameType] = {}


def _python_frame(frame: Any) -> types.FrameType:
    """Stand in for ``InterpreterFrame.get_or_make_python_frame``."""
    key = frame.code, frame.code.co_filename, frame.positions.lineno, frame.qualname
    if key not in _frames:
        _frames[key] = _get_or_make_python_frame(frame)
    return _frames[key]


def _stack() -> list[Any]:
    """Stand in for ``inspect.stack``, of which Thunder uses the third frame."""
    return [None, None, inspect.getframeinfo(sys._getframe(3))]


_Signature = tuple[inspect.Signature, int, tuple[Any, ...]]
_signatures: weakref.WeakKeyDictionary[Callable[..., Any], _Signature] = weakref.WeakKeyDictionary()


def _signature_of(function: Callable[..., Any]) -> _Signature:
    """Return a signature, the number of positional arguments (-1 if it takes other kinds as well), and the defaults."""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    by_position = len(parameters) if all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) else -1
    return signature, by_position, tuple(p.default for p in parameters)


def _normalize(called: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Stand in for ``Symbol.normalize``."""
    meta = called.meta
    known = _signatures.get(meta) if type(meta) is types.FunctionType else _signature_of(meta)
    if known is None:
        known = _signatures[meta] = _signature_of(meta)
    signature, by_position, defaults = known
    if not kwargs and len(args) <= by_position and inspect.Parameter.empty not in defaults[len(args) :]:
        return args + defaults[len(args) :], {}
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


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


_dce_bsyms = getattr(transform_common, "dce_bsyms", None)  # from Thunder 0.2.7 on


def _eliminate_dead_code(bsyms: list[Any], output: Any, needed_proxies: set[Any] | None = None) -> list[Any]:
    """Stand in for ``dce_bsyms``."""
    if bsyms or needed_proxies is not None:
        assert _dce_bsyms is not None
        return _dce_bsyms(bsyms, output, needed_proxies)
    _flatten(output)  # raises for the same outputs as the original
    return []


LOOKASIDES = {torch_module.Module._wrapped_call_impl: _call, torch_module.Module.__getattr__: _getattr}

_replacements: dict[tuple[Any, str], Any] = {
    (interpreter, "globals_lookup"): _global,
    (interpreter, "_binary_subscr"): _item,
    (interpreter, "dis"): types.SimpleNamespace(**{**vars(dis), "get_instructions": _get_instructions}),
    (interpreter, "inspect"): types.SimpleNamespace(**{**vars(inspect), "stack": _stack}),
    (interpreter.InterpreterFrame, "get_or_make_python_frame"): _python_frame,
    (symbol.Symbol, "normalize"): _normalize,
    (transform_common, "dce_bsyms"): _eliminate_dead_code,
    (symbol, "tree_flatten_with_dataclass"): _flatten_with_dataclass,
    **{(user, "tree_flatten"): _flatten for user in (symbol, codeutils, transform_common, utils)},
}
REPLACEMENTS = {(owner, name): shortcut for (owner, name), shortcut in _replacements.items() if hasattr(owner, name)}
_ORIGINALS = {(owner, name): getattr(owner, name) for owner, name in REPLACEMENTS}


@contextlib.contextmanager
def tracing_shortcuts(which: str = _CHOSEN) -> Iterator[None]:
    """Enable ``"all"`` shortcuts or ``"none"`` within the context."""
    taken = {"all": (REPLACEMENTS, LOOKASIDES), "none": (_ORIGINALS, {})}
    attributes, lookasides = taken[which]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(jit_ext._general_jit_lookaside_map))
        for function in LOOKASIDES:
            jit_ext._general_jit_lookaside_map.pop(function, None)
        jit_ext._general_jit_lookaside_map.update(lookasides)
        for (owner, name), attribute in attributes.items():
            stack.enter_context(mock.patch.object(owner, name, attribute))
        yield


def shortcuts_at_start() -> dict[str, str]:
    """Return an environment for Python subprocesses that enables the shortcuts and uses this work tree's package."""
    here = Path(__file__).resolve().parent
    path = [str(here / "shortcuts_at_start"), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
