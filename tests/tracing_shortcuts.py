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
  shortcut caches signatures, and binds arguments with dictionaries of names.
- After each call of a symbol Thunder eliminates dead code among its subsymbols, and wraps each proxy in a new object to look
  it up. The shortcut looks up names.
- Passes copy each bound symbol several times, and each copy flattens its arguments and outputs again. The shortcut shares
  the flat ones between copies, and does not rebuild arguments and outputs in which no proxy is swapped.
- To print or compile a trace Thunder makes every argument printable, several times, through a flattened tree. The shortcut
  returns proxies and plain constants as they are, and walks through tuples and lists.
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
from typing import Any, NoReturn
from unittest import mock

import thunder_fsdp_sched  # noqa: F401  before thunder
from thunder_fsdp_sched.capture import module_calls

import optree
from thunder.core import codeutils, interpreter, jit_ext, pytree, symbol, transform_common, utils
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import _interpret_call, check_and_append, unwrap, wrap_const
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import CollectionProxy, NumberProxy, Proxy, variableify
from torch.nn.modules import module as torch_module

__all__ = ["LOOKASIDES", "REPLACEMENTS", "tracing_shortcuts"]

module_calls.register()  # before the shortcuts that replace it

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
    """Stand in for ``nn.Module.__call__``, except in modules that ``fsdp`` shards."""
    if get_compile_data() in module_calls._callers:
        return module_calls._call(module, *args, **kwargs)
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


class _Signature:
    """The signature of a function, and the names of its parameters by the ways to give them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.whole = inspect.signature(function)
        parameters = self.whole.parameters.values()
        self.by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.not_by_name = {p.name for p in parameters if p.kind is p.POSITIONAL_ONLY}
        self.only_by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        kinds = {p.kind for p in parameters}
        self.most_by_position = sys.maxsize if inspect.Parameter.VAR_POSITIONAL in kinds else len(self.by_position)
        if inspect.Parameter.VAR_KEYWORD in kinds:
            self.most_by_position = -1


_signatures: weakref.WeakKeyDictionary[Callable[..., Any], _Signature] = weakref.WeakKeyDictionary()
_signatures_of_methods: weakref.WeakKeyDictionary[Callable[..., Any], _Signature] = weakref.WeakKeyDictionary()


def _signature(meta: Callable[..., Any]) -> _Signature:
    signatures, function = _signatures, meta
    if type(meta) is types.MethodType:  # a new object at each access
        signatures, function = _signatures_of_methods, meta.__func__
    if type(function) is not types.FunctionType:
        return _Signature(meta)
    known = signatures.get(function)
    if known is None:
        known = signatures[function] = _Signature(meta)
    return known


def _normalize(called: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Stand in for ``Symbol.normalize``."""
    known = _signature(called.meta)
    if len(args) <= known.most_by_position:
        left = known.by_position[len(args) :]
        names, given = {*left, *known.only_by_name}, {**known.defaults, **kwargs}
        if kwargs.keys() <= names <= given.keys() and known.not_by_name.isdisjoint(kwargs):
            return args + tuple(map(given.__getitem__, left)), {name: given[name] for name in known.only_by_name}
    bound = known.whole.bind(*args, **kwargs)
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


_to_printable = codeutils.to_printable
_PRINTABLE = frozenset({bool, float, int, str, type(None)})


def _printable(trace: Any, x: Any, *, import_ctx: Any = None, object_ctx: Any = None) -> Any:
    """Stand in for ``to_printable``."""
    kind = type(x)
    if kind in _PRINTABLE or isinstance(x, Proxy):
        return x
    if kind is tuple or kind is list:
        return kind(_printable(trace, each, import_ctx=import_ctx, object_ctx=object_ctx) for each in x)
    if kind is dict and not x:
        return {}
    return _to_printable(trace, x, import_ctx=import_ctx, object_ctx=object_ctx)


_NO_OUTPUTS = {PrimIDs.COMMENT, PrimIDs.PRINT, PrimIDs.RETURN}


def _eliminate_dead_code(bsyms: list[Any], output: Any, needed_proxies: set[Any] | None = None) -> list[Any]:
    """Stand in for ``dce_bsyms``."""
    needed = {x.name for x in _flatten(output)[0] if isinstance(x, Proxy)}  # flattening may raise
    if needed_proxies is not None:
        needed.update(variable.proxy.name for variable in needed_proxies)
    producers: dict[str, Any] = {}
    for bsym in bsyms:
        if bsym.flat_proxy_outs and bsym.sym.id not in _NO_OUTPUTS:
            read = {p.name for p in bsym.flat_proxy_args}
            for out in bsym.flat_proxy_outs:
                if out.name not in read:
                    producers.setdefault(out.name, bsym)
    kept = []
    for bsym in reversed(bsyms):
        live = [out for out in bsym.flat_proxy_outs if out.name in needed]
        if any(producers[out.name] == bsym for out in live) or _stays(bsym):
            _remove_noop_subsymbols(bsym)
            kept.append(bsym)
            needed.update(p.name for p in bsym.flat_proxy_args)
            live.extend(bsym.flat_proxy_args)
        if needed_proxies is not None:
            needed_proxies.update(map(variableify, live))
    if needed_proxies is not None:
        needed_proxies.update(variableify(x) for x in _flatten(output)[0] if isinstance(x, Proxy))
    return _remove_duplicate_number_proxies(kept[::-1])


def _stays(bsym: Any) -> bool:
    """Return whether the bound symbol or one of its subsymbols has the tag ``DONT_DCE``."""
    return OpTags.DONT_DCE in (bsym.sym.tags or ()) or OpTags.DONT_DCE in bsym.tags or any(map(_stays, bsym.subsymbols))


def _remove_noop_subsymbols(bsym: Any) -> None:
    left = [sub for sub in bsym.subsymbols if len(sub.subsymbols) > 0 or sub.sym.is_prim]
    bsym.subsymbols = [sub for sub in left if sub.flat_proxy_outs or _stays(bsym)]
    for sub in bsym.subsymbols:
        _remove_noop_subsymbols(sub)


def _remove_duplicate_number_proxies(bsyms: list[Any]) -> list[Any]:
    if any(isinstance(out, NumberProxy) for bsym in bsyms for out in bsym.flat_outs):
        return transform_common.remove_duplicate_number_proxies(bsyms)
    return [bsym.from_bsym() for bsym in bsyms if bsym.flat_outs]


_from_bsym = symbol.BoundSymbol.from_bsym
_OF_ARGS = (
    *("flat_args_and_spec", "flat_args", "flat_proxy_args", "flat_variableified_proxy_args"),
    *("_var_args", "_var_kwargs", "are_all_args_constant"),
)
_OF_OUTPUT = ("flat_outs_and_spec", "flat_outs", "flat_proxy_outs", "flat_variableified_proxy_outs", "_var_output")


def _copy(bsym: Any, **changes: Any) -> Any:
    """Stand in for ``BoundSymbol.from_bsym``."""
    new = _from_bsym(bsym, **changes)
    known, of_new = vars(bsym), vars(new)
    if new.args is bsym.args and new.kwargs is bsym.kwargs:
        of_new.update((name, known[name]) for name in _OF_ARGS if name in known)
    if new.output is bsym.output:
        of_new.update((name, known[name]) for name in _OF_OUTPUT if name in known)
    return new


_from_bsym_swap_proxies = symbol.BoundSymbol.from_bsym_swap_proxies


def _swap(
    bsym: Any,
    swap_map: dict[Any, Any],
    skip_inputs: bool = False,
    skip_output: bool = False,
    skip_subsymbols: bool = False,
) -> Any:
    """Stand in for ``BoundSymbol.from_bsym_swap_proxies``."""
    if not swap_map:
        return bsym
    skip = skip_inputs, skip_output, skip_subsymbols
    inputs = () if skip_inputs else bsym.flat_variableified_proxy_args
    outputs = () if skip_output else bsym.flat_variableified_proxy_outs
    if any(p in swap_map or isinstance(p.proxy, CollectionProxy) for p in (*inputs, *outputs)):
        return _from_bsym_swap_proxies(bsym, swap_map, *skip)
    subsymbols = bsym.subsymbols if skip_subsymbols else (_swap(sub, swap_map, *skip) for sub in bsym.subsymbols)
    return bsym.from_bsym(subsymbols=list(subsymbols))


LOOKASIDES = {torch_module.Module._wrapped_call_impl: _call, torch_module.Module.__getattr__: _getattr}

_replacements: dict[tuple[Any, str], Any] = {
    (interpreter, "globals_lookup"): _global,
    (interpreter, "_binary_subscr"): _item,
    (interpreter, "dis"): types.SimpleNamespace(**{**vars(dis), "get_instructions": _get_instructions}),
    (interpreter, "inspect"): types.SimpleNamespace(**{**vars(inspect), "stack": _stack}),
    (interpreter.InterpreterFrame, "get_or_make_python_frame"): _python_frame,
    (symbol.Symbol, "normalize"): _normalize,
    (transform_common, "dce_bsyms"): _eliminate_dead_code,
    (symbol.BoundSymbol, "from_bsym"): _copy,
    (symbol.BoundSymbol, "from_bsym_swap_proxies"): _swap,
    (symbol, "tree_flatten_with_dataclass"): _flatten_with_dataclass,
    (codeutils, "to_printable"): _printable,
    **{(user, "tree_flatten"): _flatten for user in (symbol, codeutils, transform_common, utils)},
}
REPLACEMENTS = {(owner, name): shortcut for (owner, name), shortcut in _replacements.items() if hasattr(owner, name)}
_LOOKASIDES_BEFORE = {
    f: jit_ext._general_jit_lookaside_map[f] for f in LOOKASIDES if f in jit_ext._general_jit_lookaside_map
}
_ORIGINALS = {(owner, name): getattr(owner, name) for owner, name in REPLACEMENTS}


@contextlib.contextmanager
def tracing_shortcuts(which: str = _CHOSEN) -> Iterator[None]:
    """Enable ``"all"`` shortcuts or ``"none"`` within the context."""
    taken = {"all": (REPLACEMENTS, LOOKASIDES), "none": (_ORIGINALS, _LOOKASIDES_BEFORE)}
    attributes, lookasides = taken[which]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(jit_ext._general_jit_lookaside_map))
        for function in LOOKASIDES:
            jit_ext._general_jit_lookaside_map.pop(function, None)
        jit_ext._general_jit_lookaside_map.update(lookasides)
        for (owner, name), attribute in attributes.items():
            stack.enter_context(mock.patch.object(owner, name, attribute))
        yield
