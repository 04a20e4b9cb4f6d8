"""Traces whose bound symbols print, and are compiled, faster."""

from __future__ import annotations

from types import NoneType
from typing import Any

from thunder.core.proxies import CollectionProxy, Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..private_api import printed_as_is
from .symbols import executor

__all__ = ["print_faster"]

_PLAIN = (NoneType, bool, int, float, str)


def print_faster(trace: TraceCtx) -> None:
    """Replace the bound symbols of a trace by copies that Thunder prints in less time; text and program stay the same."""
    trace.bound_symbols = [printed_as_is(bsym) if _prints_as_is(bsym) else bsym for bsym in trace.bound_symbols]


def _prints_as_is(bsym: BoundSymbol) -> bool:
    """Return whether Thunder replaces nothing in a bound symbol to print it. This package's symbols print themselves."""
    return bsym.sym.executor is executor or (_is_plain(bsym.args) and _is_plain(bsym.output) and _is_plain(bsym.kwargs))


def _is_plain(value: Any) -> bool:
    if isinstance(value, Proxy):
        return not isinstance(value, CollectionProxy)
    kind = type(value)
    if kind is tuple or kind is list:
        return all(map(_is_plain, value))
    if kind is dict:
        return all(map(_is_plain, value.values()))
    return kind in _PLAIN
