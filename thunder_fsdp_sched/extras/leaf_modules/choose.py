"""Choose what runs as it is: leaf modules, named by the user or not traceable, and calls of single functions.

[Note: Functions as leaves]
A call of a function is the same operator as a call of a leaf module, without parameters. It runs as it is if it is

- an operator of ``torch.library``, or an autograd function, that Thunder does not know;
- a function of torch that Thunder cannot trace with these arguments, such as ``F.pad(mode="reflect")``. Thunder's error
  stays if the function cannot be a leaf, because the shape of its result depends on data, or torch refuses the arguments;
- a function of torch for which Thunder has no gradient, or a wrong one.
"""

from __future__ import annotations

import fnmatch
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from thunder.core import dtypes
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    get_interpreterruntimectx,
    unwrap,
)
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.torch import _torch_to_thunder_function_map
from torch.utils._pytree import tree_leaves

from ...capture.leaves import AUTO, Leaves, pattern_of
from ...capture.torch_functions import name_of
from ...errors import coded_error
from ...ir.bound_symbols import ModuleCall
from ...ir.symbols import LEAF
from ...private_interpreter import call_recording
from .capture import examples_of, proxy_contents, record_call
from .observe import run_once

Matcher = str | type | Callable[[str, torch.nn.Module], bool]


def find_leaves(model: torch.nn.Module, matchers: Sequence[Any]) -> Leaves:
    """Return the leaf modules of a model.

    Raises:
        ValueError: nothing matches, or the model itself does.
    """
    leaves = Leaves(model, automatic=AUTO in [m for m in matchers if isinstance(m, str)])
    for matcher in matchers:
        if not (isinstance(matcher, str) and matcher == AUTO):
            _add_matching(leaves, *(matcher if isinstance(matcher, tuple) else (matcher, None)))
    _remove_inner(leaves)
    return leaves


def _add_matching(leaves: Leaves, match: Matcher, output_like: Callable[..., Any] | None) -> None:
    paths = [(path, module) for path, module in leaves.model.named_modules() if _matches(match, path, module)]
    if not paths:
        raise coded_error(ValueError, "leaf.pattern-matches-nothing", pattern=match, model=type(leaves.model).__name__)
    for path, module in paths:
        if not path:
            raise coded_error(ValueError, "leaf.model-itself-as-leaf")
        leaves.setdefault(module, path)
        if output_like is not None:
            leaves.output_like[path] = output_like


def _matches(match: Matcher, path: str, module: torch.nn.Module) -> bool:
    if isinstance(match, str):
        return fnmatch.fnmatchcase(path, match) or match == type(module).__name__
    if isinstance(match, type):
        return isinstance(module, match)
    return bool(match(path, module))


def _remove_inner(leaves: Leaves) -> None:
    """Remove leaves within other leaves, because they run as parts of those."""
    parts = {part for leaf in leaves for part in leaf.modules() if part is not leaf}
    for module in [module for module in leaves if module in parts]:
        del leaves[module]


def note_operator(leaves: Leaves, bsym: BoundSymbol, error: BaseException) -> None:
    """Note the innermost module that has called an operator which a pass refuses."""
    paths = {part: path for path, part in leaves.model.named_modules()}
    called = (tag.module for tag in bsym.tags if isinstance(tag, ModuleCall))
    modules = [module for module in called if module is not None and paths.get(module)]
    if modules:
        leaves.obstacle = max(modules, key=lambda module: len(paths[module])), error


def add_obstacle(leaves: Leaves) -> bool:
    """Make a leaf of the module at which the last trace failed, and of those like it in other blocks.

    Return whether there is such a module: then the model can be traced again.
    """
    obstacle, leaves.obstacle = leaves.obstacle, None
    if obstacle is None:
        return False
    module, error = obstacle
    paths = {part: path for path, part in leaves.model.named_modules()}
    pattern = pattern_of(paths[module])
    alike = [part for part, path in paths.items() if type(part) is type(module) and pattern_of(path) == pattern]
    leaves.update((part, paths[part]) for part in alike)
    _remove_inner(leaves)
    announce(
        leaves,
        type(module),
        f"{pattern} ({type(module).__name__}, {_source(module)}) is not traced, but runs as it is: {type(error).__name__}: "
        f"{error}. To confirm it, pass fsdp(leaf_modules=({pattern!r},))",
    )
    return True


def announce(leaves: Leaves, what: Any, text: str) -> None:
    """Warn once that a class of modules, or a function, runs as it is."""
    if what not in leaves.announced:
        leaves.announced.add(what)
        warnings.warn(f"fsdp: {text}; to get an error instead, pass leaf_modules=()", stacklevel=2)


def _source(module: torch.nn.Module) -> str:
    try:
        line = inspect.getsourcelines(type(module).forward)[1]
        return f"{inspect.getsourcefile(type(module))}:{line}"
    except (OSError, TypeError):
        return type(module).__module__


def function_to_call(function: Any, args: Sequence[WrappedValue]) -> tuple[str, Callable[..., Any]] | None:
    """Return the name and the function of a call that Thunder does not know and that can run as it is, or ``None``.

    Args:
        function: one of ``CALLS``, which calls an operator or an autograd function.
        args: the wrapped arguments; the first is the operator, or the autograd function's class.
    """
    called = unwrap(args[0])
    if function is _APPLY:
        has_context = called.setup_context is torch.autograd.Function.setup_context
        return None if has_context else (called.__qualname__, called.apply)
    packet = getattr(called, "overloadpacket", called)
    is_known = packet in _torch_to_thunder_function_map or str(packet).partition(".")[0] in _OF_TORCH
    return None if is_known else (str(called), called)


def call_function(
    leaves: Leaves, name: str, function: Callable[..., Any], *args: WrappedValue, **kwargs: WrappedValue
) -> Any:
    """Trace a call of a function as a single operator, with wrapped values; return the wrapped result, or a signal.

    Args:
        args: the operator or the autograd function's class, and then its arguments.
    """
    announce(leaves, function, _AS_IT_IS.format(name))
    return _call(leaves, name, function, args[1:], kwargs)


def run_as_it_is(
    leaves: Leaves, function: Any, error: BaseException | None, *args: WrappedValue, **kwargs: WrappedValue
) -> WrappedValue | None:
    """Trace a call of a function of torch, or of a method of a tensor, as a single operator.

    Args:
        error: the error of Thunder's function; ``None`` if it was not called, because its result or gradient is wrong.

    Returns:
        The wrapped result; ``None`` if the function cannot be a leaf.
    """
    instead = _torch_function_of(function)
    values = [unwrap(value) for value in (*args, *kwargs.values())]
    tensors = [value for value in tree_leaves(values) if isinstance(value, TensorProxy)]
    has_gradient = any(dtypes.is_inexact_dtype(tensor.dtype) for tensor in tensors)
    if instead is None or not tensors or (error is None and not has_gradient):
        return None
    name, runtime = f"torch's {instead.__name__}", get_interpreterruntimectx()
    result = _call(leaves, name, instead, args, kwargs)
    runtime.curexc = None
    if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED or not _runs(
        get_jit_ctx().computation_trace.peek_scope(), examples_of(leaves, values, {})
    ):
        return None
    announce(leaves, instead, _AS_IT_IS.format(name) + ("" if error is None else f": {type(error).__name__}: {error}"))
    return result


def _runs(scope: Sequence[BoundSymbol], examples: Mapping[int, torch.Tensor]) -> bool:
    """Return whether the leaf at the end of a trace runs on real tensors; fake ones do not show all mistakes."""
    leaf = next(bsym.args[0] for bsym in reversed(scope) if bsym.sym.name == LEAF)
    try:
        run_once(leaf, examples)
    except Exception:  # an error of the program
        return False
    return True


def _call(
    leaves: Leaves,
    name: str,
    function: Callable[..., Any],
    args: Sequence[WrappedValue],
    kwargs: Mapping[str, WrappedValue],
) -> Any:
    for value in (*args, *kwargs.values()):
        proxy_contents(value)

    def record(*args: Any, **kwargs: Any) -> Any:
        return record_call(leaves, name, function, args, kwargs, [])

    return call_recording(record, *args, **kwargs)


def _torch_function_of(function: Any) -> Callable[..., Any] | None:
    """Return the function of torch, or method of a tensor, in place of which Thunder calls ``function``."""
    if not isinstance(function, Symbol) and not function.__module__.startswith("thunder."):
        return function
    name = name_of(function)
    found = getattr(torch.Tensor, name, None)
    return found if callable(found) else getattr(torch, name, None)  # `real` is an attribute of tensors


_AS_IT_IS = "{} is not traced, but runs as it is, as one operator with its own gradient"
_APPLY = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
_OF_TORCH = frozenset({"aten", "prim", "prims"})
