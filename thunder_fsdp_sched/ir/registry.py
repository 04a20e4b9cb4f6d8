"""Registration of this package's symbols: how they print, and where their effects are declared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder.core import codeutils, prims
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.extend import OperatorExecutor, register_executor

from ..runtime.bucket import Bucket
from ..runtime.memory import Slot
from ..runtime.module_hooks import TracedHooks
from ..runtime.trace_start import TraceStart
from .effects import Effects, Work, declare, effects

executor = OperatorExecutor("fsdp_sched", version="0.1")
register_executor(executor)

_NAMED = (Bucket, Slot, TracedHooks, TraceStart)
"""Arguments that print their names."""


def register(
    name: str,
    meta: Callable[..., Any],
    function: Callable[..., Any],
    declared: Callable[[BoundSymbol], Effects] = lambda bsym: Effects(work=Work()),
    *,
    keep: bool = False,
) -> Symbol:
    """Register a symbol.

    Args:
        meta: returns proxies for its results.
        function: runs it.
        declared: returns its effects.
        keep: whether it stays although nothing reads its results.
    """
    symbol = executor.register_operator(
        name,
        meta=meta,
        fn=function,
        tags=[prims.OpTags.DONT_DCE] if keep else None,
        bind_postprocess=_bind_handles,
        python_printer=_print,
    )
    executor.register_implementation(symbol, symbol)
    declare(symbol, declared)
    return symbol


def _bind_handles(bsym: BoundSymbol) -> None:
    bsym._call_ctx = {**(bsym._call_ctx or {}), **{str(a): a for a in bsym.args if isinstance(a, _NAMED)}}


def _print(
    bsym: BoundSymbol, out_printables: Any, arg_printables: Sequence[Any], kwarg_printables: dict[str, Any]
) -> str:
    """Print ``out = symbol(bucket, slot, tensors)  # bytes``, with bucket, slot and hooks by name."""

    def show(arg: Any) -> str:
        return str(arg) if isinstance(arg, _NAMED) else codeutils.prettyprint(arg)

    named = {key: value for key, value in bsym.kwargs.items() if value is not None}
    shown = [*map(show, bsym.args), *(f"{key}={codeutils.prettyprint(value)}" for key, value in named.items())]
    call = f"{bsym.sym.name}({', '.join(shown)})"
    if isinstance(bsym.output, Proxy):
        call = f"{bsym.output.name} = {call}"
    elif bsym.output:
        call = f"({', '.join(o.name for o in bsym.output)},) = {call}"
    issue = effects(bsym).issues
    if issue is not None and issue.dtype is not None:
        dtype = str(issue.dtype).removeprefix("torch.")
        call += f"  # {issue.nbytes:,} bytes {dtype}{', already resident' * issue.resident}"
    return call
