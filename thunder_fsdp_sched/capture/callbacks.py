"""Builtin functions that call a function of the program, or that the interpreter does not know, in Python.

[Note: Callbacks]
The interpreter does not interpret what builtin functions call: the ``key`` of ``sorted``, or the function of ``map``. It
would not see the attributes that a key reads or the random numbers that it draws, and the trace would keep their values for
all calls. A program that Thunder traces therefore gets the functions below in their place, which the interpreter interprets.

Other native functions may call back, too: ``itertools.accumulate``, ``re.sub``, or a lookup that calls ``__eq__``. They
run as they are, but a profile function watches whether the program calls functions whose results change meanwhile. Python's
garbage collector waits until it has ended: the functions in ``gc.callbacks`` and finalizers are not the program's.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, FunctionType
from typing import Any

from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    do_raise,
    make_opaque,
    unwrap,
    wrap,
    wrap_args,
    wrap_const,
    wrap_kwargs,
)

from ..ir.inspection import is_library
from ..private_interpreter import call_interpreted
from ..private_torch import compiled_function
from .changing_values import READ_CLOCKS, changing_value
from .refusals import is_in_thunder, is_own


def look_aside(function: Any, kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what to call in place of a builtin function of these kinds, or one that ``torch.compile`` has made.

    Args:
        kwargs: the wrapped keyword arguments of the call.
    """
    if isinstance(function, FunctionType):
        instead = compiled_function(function)
    elif isinstance(function, type):
        instead = _LAZY.get(function)
    else:
        has_key = "key" in kwargs and kwargs["key"].value is not None
        instead = (_KEYED if has_key else _CHANGING_CONTAINERS).get(id(function))
    if instead is None or is_in_thunder() or isinstance(unwrap(kwargs.get("key")), _COMPARED):
        return None
    return functools.partial(call_interpreted, instead)


class Watched:
    """A native function that runs as the interpreter would run it; what it calls back may not draw or read a clock."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        plain, named = tuple(map(unwrap, args)), {name: unwrap(arg) for name, arg in kwargs.items()}
        owner = getattr(self._function, "__objclass__", self._function)
        is_seeded = str(getattr(owner, "__module__", None)).startswith("numpy.random")  # the seed follows what it draws
        is_free = sys.getprofile() is None and not is_seeded
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
        inputs = [wrap_const(self._function).provenance, wrap_args(args).provenance, wrap_kwargs(kwargs).provenance]
        return wrap(result, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=inputs))


def _refuse_changing_values(frame: FrameType, event: str, function: Any) -> None:
    if event != "c_call" or is_library(file := frame.f_code.co_filename) or is_own(file):
        return
    if str(frame.f_globals.get("__name__")).partition(".")[0] in READ_CLOCKS:
        return
    kinds = type(getattr(function, "__self__", None)).__mro__
    unbound = (vars(kind)[function.__name__] for kind in kinds if function.__name__ in vars(kind))
    changing_value(next(unbound, function), ())  # the refusal is collected


def _map(function: Callable[..., Any], /, *iterables: Iterable[Any]) -> Iterator[Any]:
    return (function(*values) for values in zip(*iterables, strict=False))


def _filter(function: Callable[[Any], Any] | None, iterable: Iterable[Any], /) -> Iterator[Any]:
    return (value for value in iterable if (value if function is None else function(value)))


def _sorted(iterable: Iterable[Any], /, *, key: Callable[[Any], Any], reverse: bool = False) -> list[Any]:
    values = list(iterable)
    return [values[index] for index in _order([key(value) for value in values], reverse)]


def _sort(values: list[Any], /, *, key: Callable[[Any], Any], reverse: bool = False) -> None:
    values[:] = _sorted(values, key=key, reverse=reverse)


def _extreme(choose: Callable[..., Any], *values: Any, key: Callable[[Any], Any], **default: Any) -> Any:
    if len(values) == 1:
        values = tuple(values[0])
    if not values:
        return choose((), **default)
    return values[_position(choose, [key(value) for value in values])]


def _insert(values: list[Any], index: int, value: Any, /) -> None:
    values[index:index] = [value]


def _clear(values: list[Any], /) -> None:
    values[:] = []


def _clear_mapping(mapping: dict[Any, Any], /) -> None:
    for key in list(mapping):
        del mapping[key]


def _pop_item(mapping: dict[Any, Any], last: bool = True) -> tuple[Any, Any]:
    if not mapping:
        raise KeyError("popitem(): dictionary is empty")
    key = list(mapping)[-1 if last else 0]
    return key, mapping.pop(key)


@make_opaque
def _order(keys: list[Any], reverse: bool) -> list[int]:
    return sorted(range(len(keys)), key=keys.__getitem__, reverse=reverse)


@make_opaque
def _position(choose: Callable[..., int], keys: list[Any]) -> int:
    return choose(range(len(keys)), key=keys.__getitem__)


_COMPARED = type(functools.cmp_to_key(max))
_LAZY: dict[type, Callable[..., Any]] = {map: _map, filter: _filter}
_KEYED: dict[int, Callable[..., Any]] = {
    id(sorted): _sorted,
    id(list.sort): _sort,
    id(max): functools.partial(_extreme, max),
    id(min): functools.partial(_extreme, min),
}
"""The functions that call a ``key`` if they get one, by their identity."""

_CHANGING_CONTAINERS: dict[int, Callable[..., Any]] = {
    id(list.insert): _insert,
    id(list.clear): _clear,
    id(dict.clear): _clear_mapping,
    id(dict.popitem): _pop_item,
    id(OrderedDict.clear): _clear_mapping,
    id(OrderedDict.popitem): _pop_item,
}
"""Methods of containers that the interpreter does not know, by their identity."""
