"""Registration of this package's symbols, and bound symbols that cache derived facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any

from thunder.core import codeutils, prims
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from thunder.extend import OperatorExecutor, register_executor

from ..private_thunder import CachingBoundSymbol
from .effects import DECLARED, NOTHING, Effects, effects
from .operator_facts import DECLARED_FACTS, Facts

executor = OperatorExecutor("fsdp_sched", version="0.1")
register_executor(executor)


def _returns_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def register(
    name: str,
    function: Callable[..., Any],
    declared: Callable[[BoundSymbol], Effects] = lambda bsym: NOTHING,
    meta: Callable[..., Any] = _returns_nothing,
    printer: Callable[..., Any] | None = None,
    tags: Sequence[prims.OpTags] = (),
    facts: Callable[[BoundSymbol], Facts] | None = None,
    kinds: Iterable[set[str]] = (),
) -> Symbol:
    """Register a symbol.

    Args:
        function: runs it.
        declared: returns its effects.
        meta: returns proxies for its results. A symbol without results is never eliminated as dead code.
        printer: prints it; by default as a call.
        tags: Thunder's tags.
        facts: returns the facts about an operator that only computes; its effects follow from them.
        kinds: the sets of names that get this one, such as ``schedule.ISSUES`` or ``inspection.AGREEMENT``.
    """
    for names in kinds:
        names.add(name)
    symbol = executor.register_operator(
        name,
        meta=meta,
        fn=function,
        tags=[prims.OpTags.DONT_DCE] if meta is _returns_nothing else list(tags) or None,
        bind_postprocess=_bind_handles,
        python_printer=printer or print_call,
    )
    executor.register_implementation(symbol, symbol)
    if facts is not None:
        DECLARED_FACTS[symbol] = facts
    else:
        DECLARED[symbol], DECLARED_FACTS[symbol] = declared, _declared_facts
    return symbol


def _declared_facts(bsym: BoundSymbol) -> Facts:
    known = effects(bsym)
    return Facts(dict(known.aliases), pure=not known.copies_slot, writes=known.writes)


def _is_handle(arg: Any) -> bool:
    """Return whether an argument is an object that a trace knows by name, such as a bucket or a slot."""
    return not isinstance(arg, (Proxy, str, int, tuple, list, NoneType))


def handles_of(bsym: BoundSymbol) -> list[Any]:
    """Return the arguments of a symbol of this package that a trace knows by name."""
    return list(filter(_is_handle, bsym.args))


def _bind_handles(bsym: BoundSymbol) -> None:
    bsym._call_ctx = {**(bsym._call_ctx or {}), **{str(arg): arg for arg in handles_of(bsym)}}


def print_call(
    bsym: BoundSymbol, out_printables: Any, arg_printables: Sequence[Any], kwarg_printables: dict[str, Any]
) -> str:
    """Print ``out = symbol(bucket, slot, tensors)  # bytes``, with handles by name."""
    shown = [str(arg) if _is_handle(arg) else codeutils.prettyprint(arg) for arg in bsym.args]
    shown += [f"{key}={codeutils.prettyprint(value)}" for key, value in bsym.kwargs.items() if value is not None]
    call = f"{bsym.sym.name}({', '.join(shown)})"
    if isinstance(bsym.output, Proxy):
        call = f"{bsym.output.name} = {call}"
    elif bsym.output:
        call = f"({', '.join(o.name for o in bsym.output)},) = {call}"
    issue = effects(bsym).issues
    if issue is not None and issue.dtype is not None:
        dtype = str(issue.dtype).removeprefix("torch.")
        encoded = f" as {issue.encoding}" if issue.encoding else ""
        call += f"  # {issue.nbytes:,} bytes {dtype}{encoded}{', already resident' * issue.resident}"
    return call


def caching(bsym: BoundSymbol) -> CachingBoundSymbol:
    """Return a bound symbol that caches derived facts, also for its copies; the same if it is one."""
    return CachingBoundSymbol.of(bsym, prints_itself=bsym.sym.executor is executor)


def with_caches(trace: TraceCtx) -> TraceCtx:
    """Replace the bound symbols of a trace by equal ones that cache derived facts, also for their copies; return it."""
    trace.bound_symbols = list(map(caching, trace.bound_symbols))
    return trace
