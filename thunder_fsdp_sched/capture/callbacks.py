"""Builtin functions that call a function of the program, or that the interpreter does not know, in Python.

[Note: Callbacks]
The interpreter does not interpret what builtin functions call: the ``key`` of ``sorted``, the function of ``map``, or the
property that an ``attrgetter`` reads. It would not see the attributes that a key reads or the random numbers that it draws,
and the trace would keep their values for all calls. A program that Thunder traces therefore gets the functions of
``builtin_functions`` in their place, which the interpreter interprets.

Other native functions may call back, too: ``itertools.accumulate``, ``re.sub``, or a lookup that calls ``__eq__``. They
run as they are, but a profile function watches whether they call functions whose results change. The garbage collector is
disabled meanwhile, because functions in ``gc.callbacks`` and finalizers do not belong to forward. The next item of a
generator of the program is not watched: the interpreter interprets the generator, and watching all that the interpreter
does would double the time.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import FrameType, FunctionType, GeneratorType
from typing import Any

from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    do_raise,
    unwrap,
    wrap,
    wrap_args,
    wrap_kwargs,
)

from ..ir.inspection import is_library
from ..private_interpreter import call_interpreted, is_interpreted_generator
from ..private_torch import compiled_function
from . import builtin_functions
from .changing_values import READ_CLOCKS, changing_value
from .refusals import is_in_thunder, is_own


def look_aside(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what to call in place of a builtin function, or of a function that ``torch.compile`` has made; or ``None``.

    Args:
        args, kwargs: the wrapped arguments of the call.
    """
    if isinstance(function, FunctionType):
        instead = None if is_in_thunder() else compiled_function(function)
    elif _is_replaced(function, args, kwargs):
        instead = _IN_PYTHON.get(id(function), builtin_functions.mapping_fromkeys)  # which is another object each time
    else:
        return None
    return None if instead is None else functools.partial(call_interpreted, instead)


class Watched:
    """A native function that runs as it is, but must not call back to draw random numbers or read a clock."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        plain, named = tuple(map(unwrap, args)), {name: unwrap(arg) for name, arg in kwargs.items()}
        owner = getattr(self._function, "__objclass__", self._function)
        is_seeded = str(getattr(owner, "__module__", None)).startswith("numpy.random")  # otherwise it was refused
        is_interpreted = owner is GeneratorType and any(map(is_interpreted_generator, plain[:1]))
        is_free = sys.getprofile() is None and not is_seeded and not is_interpreted
        collects = is_free and gc.isenabled() and self._function is not gc.disable
        if collects:
            gc.disable()
        if is_free:
            sys.setprofile(_refuse_changing_values)
        try:
            result = self._function(*plain, **named)
        except Exception as error:
            return do_raise(error)
        finally:
            if is_free:
                sys.setprofile(None)
            if collects:
                gc.enable()
        called = plain[0] if getattr(self._function, "__name__", None) == "__call__" else self._function
        constant = ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value=called)
        inputs = [constant, wrap_args(args).provenance, wrap_kwargs(kwargs).provenance]
        return wrap(result, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=inputs))


def _refuse_changing_values(frame: FrameType, event: str, function: Any) -> None:
    if event != "c_call" or is_library(file := frame.f_code.co_filename) or is_own(file):
        return
    if str(frame.f_globals.get("__name__")).partition(".")[0] in READ_CLOCKS:
        return
    kinds = type(getattr(function, "__self__", None)).__mro__
    unbound = (vars(kind)[function.__name__] for kind in kinds if function.__name__ in vars(kind))
    changing_value(next(unbound, function), ())  # the refusal is collected


def _is_replaced(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call has to be replaced, because the interpreter does not know it in this form."""
    name = getattr(function, "__name__", "")
    if id(function) not in _IN_PYTHON:
        return name == "fromkeys" and getattr(function, "__self__", None) is dict
    if id(function) in _CALLING:
        key = unwrap(kwargs.get("key"))
        has_function = isinstance(function, type) or not (key is None or isinstance(key, _COMPARED))
        return has_function and not is_in_thunder()
    if name == "get":
        kind = type(args[0].value)
        return hasattr(kind, "__missing__") or isinstance(kind.__getitem__, FunctionType)
    if function is reversed:
        return not isinstance(args[0].value, tuple) and not hasattr(type(args[0].value), "__reversed__")
    if function is sum:
        return bool(args) and isinstance(getattr(type(args[0].value), "__iter__", None), FunctionType)
    return len(args) == 2 if function is iter else function is not zip or not args


_COMPARED = type(functools.cmp_to_key(max))
_CALLING = frozenset(map(id, (filter, map, max, min, sorted)))
_CALL = (operator.call,) if sys.version_info >= (3, 11) else ()
_METHODS = {
    "sequence": ((tuple, list), ("__contains__", "count", "index")),
    "list": ((list,), ("__iadd__", "__imul__", "clear", "insert", "remove", "sort")),
    "mapping": ((dict, OrderedDict), ("clear", "get", "popitem", "setdefault")),
    "ordered": ((OrderedDict,), ("move_to_end",)),
    "attrgetter": ((operator.attrgetter,), ("__call__",)),
    "itemgetter": ((operator.itemgetter,), ("__call__",)),
    "methodcaller": ((operator.methodcaller,), ("__call__",)),
}
_IN_PYTHON = {
    **{
        id(function): getattr(builtin_functions, f"builtin_{function.__name__}")
        for function in (filter, iter, map, max, min, reversed, sorted, sum, sys.exc_info, zip, *_CALL)
    },
    **{
        id(getattr(kind, name)): getattr(builtin_functions, f"{group}_{name.strip('_')}")
        for group, (kinds, names) in _METHODS.items()
        for kind in kinds
        for name in names
    },
}
"""The functions that may replace others, by the identity of the replaced function."""
