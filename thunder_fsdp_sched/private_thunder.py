"""Private names of Thunder, each used in one function or class only.

``docs/private_api.md`` lists them, with what to do when one disappears.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType, NoneType
from typing import Any, TypeVar

import thunder
import thunder.torch as ltorch
import torch
from thunder.core import transforms
from thunder.core.codeutils import SigInfo
from thunder.core.compile_data import get_compile_data
from thunder.core.module import ThunderModule
from thunder.core.options import CACHE_OPTIONS
from thunder.core.prims import OpTags
from thunder.core.proxies import CollectionProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_unflatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import from_trace
from thunder.distributed import skip_data_parallel_grad_sync
from thunder.executors.passes import _transform_for_operator_executor_execution
from thunder.torch.default_torch_ops import torch_auto_registered_ops

T = TypeVar("T")


def claim(trace: Any, executors: Any) -> Any:
    """Return ``trace`` with its operators claimed by executors, in Thunder's way."""
    return _transform_for_operator_executor_execution(trace, executors)


def definition_of(program: Callable[..., Any]) -> ast.FunctionDef:
    """Return the definition of a program that Thunder has made of a trace."""
    text = "".join(linecache.getlines(inspect.unwrap(program).__code__.co_filename))
    return next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))


def take_over(program: Callable[..., Any], name: str, run: Callable[..., Any]) -> Callable[[], None]:
    """Let a program that Thunder has made of a trace call ``run`` instead, until the returned function is called.

    The program stays the same object, because Thunder already holds it, and its decorators also apply to ``run``.

    Args:
        name: the global name under which the program finds ``run``.
    """
    inner = inspect.unwrap(program)
    own, known = inner.__code__, inner.__globals__
    known[name], inner.__code__ = run, eval(f"lambda *args: {name}(*args)").__code__

    def give_back() -> None:
        inner.__code__ = own
        known.pop(name, None)

    return give_back


def new_trace(like: Any, name: str, args: Sequence[Any]) -> Any:
    """Return an empty trace whose arguments are proxies of another trace."""
    trace = from_trace(like)
    trace.args = tuple(args)
    trace._siginfo = SigInfo.from_name_and_args(name, trace.args)
    return trace


def gradient_rules_of(sym_id: Any) -> list[Callable[..., Any]]:
    """Return the functions that differentiate symbols with this id, except those of executors."""
    rules = (transforms._grad_fn_map, transforms.augmented_forward_impls, transforms.backward_impls)
    return [known[sym_id] for known in rules if sym_id in known]


def shape_of(proxy: Any) -> tuple[Any, ...]:
    """Return the shape of a tensor proxy. Under symbolic values ``proxy.shape`` records a bound symbol while tracing."""
    return proxy._shape


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """Let Thunder make proxies of tensors with numbers for sizes, also under symbolic values.

    Thunder 0.2.6 makes the sizes of parameters symbolic, and then cannot unpack them in the prologue.
    """
    data = get_compile_data()
    before, data.cache_option = data.cache_option, CACHE_OPTIONS.CONSTANT_VALUES
    try:
        yield
    finally:
        data.cache_option = before


def renamed(proxy: Any, trace: Any, tags: set[Any]) -> Any:
    """Return a copy of ``proxy`` with other tags and a new name of ``trace``, with the same prefix."""
    if type(proxy) is TensorProxy:  # what copy.copy does, in a fraction of the time
        new = object.__new__(TensorProxy)
        new.__dict__.update(vars(proxy))
    else:
        new = copy.copy(proxy)
    new._name, new._tags = trace.make_name(prefix=proxy.name.rstrip("0123456789") or proxy.prefix), tags
    return new


def requiring_gradient(proxy: Any) -> Any:
    """Return a copy of a tensor proxy, with its name, that requires a gradient."""
    new = copy.copy(proxy)
    new._requires_grad = True
    return new


def function_called_by(bsym: Any) -> Callable[..., Any] | None:
    """Return the function that an executor's bound symbol calls, if it belongs to torch or to Thunder itself."""
    called = (bsym._call_ctx or {}).get(bsym.sym.name)
    if called is not None:
        return called if _is_library_function(called) else None
    module = bsym.sym.module
    name = module.__name__ if isinstance(module, ModuleType) else getattr(module, "__module__", "")
    if name.partition(".")[0] != "torch":
        return None
    called = getattr(module, bsym.sym.name, None)
    return called if callable(called) else None


def functions_that_run_again() -> list[Symbol]:
    """Return the symbols of the torch functions that Thunder runs again, with autograd, for their gradient.

    Those that return views are left out.
    """
    known, views = ltorch._torch_to_thunder_function_map, ltorch._auto_registered_operators_returning_views
    functions = chain.from_iterable(torch_auto_registered_ops.values())
    found = [known[function] for function in functions if function not in views]
    return list({id(symbol): symbol for symbol in found if OpTags.AUTO_REGISTERED in symbol.tags}.values())


def torch_function_of(id: Any) -> Callable[..., Any] | None:
    """Return the torch function that a symbol's id names by path: ``torch.nn.functional.gelu``, ``Tensor.half``."""
    root, _, path = id.partition(".") if isinstance(id, str) else ("", "", "")
    if root not in ("torch", "Tensor"):
        return None
    found: Any = sys.modules["torch"]
    for name in path.split(".") if root == "torch" else ("Tensor", path):
        found = getattr(found, name, None)
    return found if callable(found) else None


def _is_library_function(function: Any) -> bool:
    """Return whether a callable is a torch function, an operator overload, or a Thunder function that calls torch."""
    if isinstance(function, functools.partial):
        return _is_library_function(function.func)
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return True
    if isinstance(function, FunctionType):
        module: Any = function.__module__ or ""
    elif isinstance(function, (BuiltinFunctionType, MethodDescriptorType)):
        owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
        # `torch.reshape` has no owner, but a module.
        module = str(getattr(owner or function, "__module__", None) or getattr(owner, "__name__", ""))
    else:
        return False
    return str(module).partition(".")[0] in ("torch", "thunder")


FACTS = ("_fsdp_facts", "_fsdp_like")
"""Attributes of a bound symbol for the facts about its operator."""

EFFECTS, COSTS, OBSERVED_COSTS = "_fsdp_effects", "_fsdp_costs", "_fsdp_observed_costs"
"""Attributes of a bound symbol for its effects, in general and on inputs of certain strides."""

NAMES_OF_ARGS, DEFINED = "_fsdp_args", "_fsdp_defined"
"""Attributes of a bound symbol for the names of its arguments, and for its results that are not arguments."""

_OF_ARGS = (
    *("flat_args_and_spec", "flat_args", "flat_proxy_args", "flat_variableified_proxy_args"),
    *("_var_args", "_var_kwargs", "are_all_args_constant", NAMES_OF_ARGS),
)

_OF_OUTPUT = ("flat_outs_and_spec", "flat_outs", "flat_proxy_outs", "flat_variableified_proxy_outs", "_var_output")

_PLAIN = (NoneType, bool, int, float, str)


class CachingBoundSymbol(BoundSymbol):
    """A bound symbol that caches derived facts, which its copies share.

    Most passes of Thunder copy every bound symbol, flatten the arguments and results of each copy anew, and print them
    seven times to compile a trace. A copy has the same arguments and results unless others are given, so it keeps the
    flat ones. It also keeps the facts about its operator, and whether Thunder replaces nothing in it to print it.
    """

    _prints_itself: bool

    @classmethod
    def of(cls, bsym: BoundSymbol, *, prints_itself: bool) -> CachingBoundSymbol:
        """Return a copy of a bound symbol.

        Args:
            prints_itself: whether its symbol prints named arguments without Thunder's help.
        """
        if isinstance(bsym, cls):
            return bsym
        new = object.__new__(cls)
        new.__dict__.update(vars(bsym), _prints_itself=prints_itself)
        return new

    def from_bsym(self, **changes: Any) -> CachingBoundSymbol:
        """Return a copy with some fields changed, as Thunder's method does."""
        new = object.__new__(type(self))
        state = new.__dict__
        state.update(vars(self))  # all that is cached, too; what does not hold for the copy is removed below
        state.update(changes, _line_no=None)
        state["tags"] = changes["tags"] if "tags" in changes else self.tags.copy()
        state["args"] = tuple(state["args"])
        is_same_symbol = state["sym"] is self.sym
        state["_prints_itself"] = self._prints_itself and is_same_symbol
        keeps_args = _is_same(state["args"], self.args) and state["kwargs"] is self.kwargs
        keeps_output = _is_same(state["output"], self.output)
        keeps_operands = keeps_args and keeps_output and is_same_symbol
        lost = ["_hash", "rhs"]
        if not keeps_args:
            lost += _OF_ARGS
        if not keeps_output:
            lost += _OF_OUTPUT
        if not keeps_operands:
            lost += ("_is_plain", DEFINED)
        if not (keeps_operands and self._is_same_operator(new)):
            lost += (*FACTS, EFFECTS, COSTS, OBSERVED_COSTS)
        for name in lost:
            state.pop(name, None)
        if new.sym._bind_postprocess:
            new.sym._bind_postprocess(new)
        return new

    def _is_same_operator(self, other: BoundSymbol) -> bool:
        return other._call_ctx is self._call_ctx and _is_same(tuple(other.subsymbols), tuple(self.subsymbols))

    def with_proxies(self, new: Mapping[str, Proxy], subsymbols: Sequence[BoundSymbol]) -> CachingBoundSymbol:
        """Return a copy with other proxies and subsymbols.

        Args:
            new: the new proxies, keyed by the names of those that they replace.
        """
        args, outs = _swapped(self.flat_args, new), _swapped(self.flat_outs, new)
        of_args, of_outs = self.flat_args_and_spec[1], self.flat_outs_and_spec[1]
        positional, named = tree_unflatten(args, of_args)
        copy = self.from_bsym(
            args=positional, kwargs=named, output=tree_unflatten(outs, of_outs), subsymbols=subsymbols
        )
        copy.__dict__.update(
            flat_args_and_spec=(args, of_args),
            flat_args=args,
            flat_proxy_args=tuple([leaf for leaf in args if isinstance(leaf, Proxy)]),
            flat_outs_and_spec=(outs, of_outs),
            flat_outs=outs,
            flat_proxy_outs=tuple([leaf for leaf in outs if isinstance(leaf, Proxy)]),
        )
        return copy

    @functools.cached_property
    def _is_plain(self) -> bool:
        return self._prints_itself or (_is_plain(self.args) and _is_plain(self.kwargs) and _is_plain(self.output))

    @property
    def _out_printables(self) -> Any:
        return self.output if self._is_plain else super()._out_printables

    @property
    def _arg_printables(self) -> Any:
        return self.args if self._is_plain else super()._arg_printables

    @property
    def _kwarg_printables(self) -> Any:
        return self.kwargs if self._is_plain else super()._kwarg_printables


def _swapped(flat: Sequence[Any], new: Mapping[str, Proxy]) -> list[Any]:
    return [new.get(leaf.name, leaf) if isinstance(leaf, Proxy) else leaf for leaf in flat]


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are the same object, or tuples of the same objects."""
    if one is other:
        return True
    return type(one) is tuple is type(other) and len(one) == len(other) and all(map(_is_same, one, other))


def _is_plain(value: Any) -> bool:
    """Return whether Thunder replaces nothing in a value to print it."""
    if isinstance(value, Proxy):
        return not isinstance(value, CollectionProxy)
    kind = type(value)
    if kind is tuple or kind is list:
        return all(map(_is_plain, value))
    if kind is dict:
        return all(map(_is_plain, value.values()))
    return kind in _PLAIN


def cache_info() -> dict[str, Any]:
    """Return the state of torch that the prologues of the compilation check: default dtype, autocast, and so on."""
    return dict(thunder._get_cache_info())


def saved_objects(node: Any) -> Sequence[Any]:
    """Return the objects, other than tensors, that a compiled forward has saved for its backward.

    Args:
        node: the autograd node that runs the compiled backward.
    """
    return tuple(node.saved_other)


def extend_calls(
    model: ThunderModule, before_call: Callable[[], object], is_worthwhile: Callable[[], bool], in_turn: Any
) -> None:
    """Call ``before_call`` before each call of a jitted module, and repeat failed calls while ``is_worthwhile()``.

    ``before_call`` runs after all forward pre-hooks of ``model``, which may change the module.

    Args:
        is_worthwhile: see :func:`repeated`.
        in_turn: the lock that a thread holds while it calls the module.
    """
    call = repeated(model._forward_fn, is_worthwhile)

    @functools.wraps(model._forward_fn)
    def extended(*args: Any, **kwargs: Any) -> Any:
        with in_turn:
            before_call()
            return call(*args, **kwargs)

    model._forward_fn = extended


def repeated(call: Callable[..., T], is_worthwhile: Callable[[], bool]) -> Callable[..., T]:
    """Return a function that repeats a call as long as it raises an exception and ``is_worthwhile()`` is then true."""

    def again(*args: Any, **kwargs: Any) -> T:
        while True:
            try:
                return call(*args, **kwargs)
            except Exception:
                if not is_worthwhile():
                    raise

    return again


def quiet_no_sync(model: ThunderModule) -> None:
    """Give a jitted module a ``no_sync`` that only sets Thunder's flag, without a warning at its end.

    Thunder's method reduces the gradients of Thunder's own ddp and fsdp when it ends, and warns if neither was applied.
    Here the next backward reduces gradients. This object's attribute hides the method; the class stays as it is.
    """
    model.no_sync = skip_data_parallel_grad_sync
