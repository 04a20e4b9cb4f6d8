"""Describe functions by what they are, so that ranks can compare them: an address differs between processes.

[Note: Comparing functions]
Two functions are alike if their module, their qualified name and their code are. Two lambdas of one function have one name,
so the code counts: instructions, names and constants, without the file and the lines, which only messages show. Where
ranks compare the answers of a function (``mp_policy``, ``bucketing_strategy`` and others), nothing else counts: ranks may
know different things, such as their rank, and decide alike. Elsewhere (``all_reduce_hook``) what a function captures
counts, too: in its closure, its defaults, and the arguments of ``functools.partial``. Values that cannot change are
compared, others by their type.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import CodeType, MethodType
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.memory_format)


def describe(function: Callable[..., Any], *, captured: bool) -> str:
    """Return a text that is equal on all ranks that pass the same function; see [Note: Comparing functions].

    Args:
        captured: whether the values that it captures count.
    """
    return _describe(function, captured, ())


def place_of(function: Any) -> str:
    """Return the file and line of a function, or of the class of a callable object, for messages; empty if it has none."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"


def _describe(function: Any, captured: bool, inside: tuple[Any, ...]) -> str:
    if any(function is other for other in inside):  # it refers to itself
        return "..."
    inside = (*inside, function)
    values: dict[str, Any] = {}
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    plain = function
    if isinstance(function, partial):
        name = f"partial of {_describe(function.func, captured, inside)}"
        values = {**{str(i): value for i, value in enumerate(function.args)}, **function.keywords}
    elif isinstance(function, MethodType):
        plain = function.__func__
    elif not hasattr(function, "__code__"):
        plain = type(function).__call__
    if (code := getattr(plain, "__code__", None)) is not None and not isinstance(function, (partial, type)):
        name += f" with code {hashlib.sha256(_text_of(code).encode()).hexdigest()[:8]}"
        defaults = {f"default {i}": value for i, value in enumerate(plain.__defaults__ or ())}
        values = defaults | (plain.__kwdefaults__ or {})
        for variable, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
            try:
                values[variable] = cell.cell_contents
            except ValueError:  # not assigned yet
                values[variable] = None
    if not (captured and values):
        return name
    return f"{name} ({', '.join(f'{key}={_value(value, inside)}' for key, value in values.items())})"


def _text_of(code: CodeType) -> str:
    """Return what a code object does, in a text that is equal in all processes."""
    facts = (
        code.co_code,
        getattr(code, "co_exceptiontable", b""),  # from Python 3.11 on
        code.co_flags,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
    )
    return f"{facts} {_constant(code.co_consts)}"


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _text_of(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return f"{sorted(map(repr, value))}" if isinstance(value, frozenset) else repr(value)


def _value(value: Any, inside: tuple[Any, ...]) -> str:
    if isinstance(value, (*_PLAIN, Enum)):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(_value(item, inside) for item in value)})"
    if isinstance(value, frozenset):
        return f"{sorted(_value(item, inside) for item in value)}"
    if callable(value) and not isinstance(value, torch.nn.Module):
        return _describe(value, captured=True, inside=inside)
    return f"a {type(value).__module__}.{type(value).__qualname__}"
