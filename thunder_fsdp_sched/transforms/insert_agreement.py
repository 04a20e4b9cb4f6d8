"""Insert the statements with which ranks agree on a trace: see [Note: Agreement of ranks] in ``ranks.control``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx

from ..ir.effects import NOTHING, declare, effects, sends
from ..ir.inspection import AGREEMENT, with_bound_symbols
from ..ir.registry import executor
from ..runtime.trace_start import TraceStart

_UNPACKING = frozenset({PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE, PrimIDs.COMMENT})


def insert_agreement(trace: TraceCtx, *, run: TraceStart, before_issue: bool) -> TraceCtx:
    """Insert ``fsdp_agree`` at the start, and ``fsdp_agreed`` before the first collective or before the first wait.

    Runs after ``verify`` and before ``end_backward``, on both traces, if the model has several ranks and at least one
    of them communicates in this trace. With ``before_issue``, the trace then begins so, before its first gather::

        fsdp_agree(forward_0)
        fsdp_agreed(forward_0)

    A gather that finds its bucket resident issues nothing, so it does not count as the first collective. If the bucket
    turns out not to be resident at run time, the gather settles the round itself.

    Args:
        before_issue: settle the round before the first issue (gloo), not just before the first wait (NCCL).
    """
    bsyms = list(trace.bound_symbols)
    issued: set[str] = set()
    head = end = None
    for position, bsym in enumerate(bsyms):
        if head is None and bsym.sym.id not in _UNPACKING:
            head = position
        e, sent = effects(bsym), sends(bsym)
        if sent is not None:
            issued.add(sent.future)
        waits = e.waits is not None and e.issues is None and e.waits.future in issued
        if (sent is not None and before_issue) or waits or e.runs is not None:
            end = position
            break
    if end is None:  # other ranks communicate in this trace, this one does not
        end = len(bsyms) - 1
    head = min(head if head is not None else end, end)
    of_all = list(map(effects, bsyms))
    run.left_over = [weakref.ref(e.bucket) for e in of_all if e.runs is not None and e.bucket is not None]
    run.guarded = [weakref.ref(e.ensures.bucket) for e in of_all if e.ensures is not None]
    issues = [e.issues for e in of_all if e.issues is not None]
    run.reusing = [weakref.ref(i.bucket) for i in issues if i.window is not None and i.bucket is not None]
    with tracectx(trace):
        posts, settles = (symbol.bind(run, output=None) for symbol in (fsdp_agree, fsdp_agreed))
    bsyms[end:end] = [settles]
    bsyms[head:head] = [posts]
    return with_bound_symbols(trace, bsyms, "fsdp: insert agreement")


def _print(bsym: BoundSymbol, out: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    return f"{bsym.sym.name}({bsym.args[0]})"


def _bind_run(bsym: BoundSymbol) -> None:
    bsym._call_ctx = {**(bsym._call_ctx or {}), str(bsym.args[0]): bsym.args[0]}


def _register(name: str, fn: Callable[[TraceStart], None]) -> Symbol:
    assert name in AGREEMENT
    symbol = executor.register_operator(
        name,
        meta=lambda run: None,
        fn=fn,
        tags=[prims.OpTags.DONT_DCE],
        bind_postprocess=_bind_run,
        python_printer=_print,
    )
    executor.register_implementation(symbol, symbol)
    declare(symbol, lambda bsym: NOTHING)
    return symbol


fsdp_agree = _register("fsdp_agree", TraceStart.post)
fsdp_agreed = _register("fsdp_agreed", TraceStart.settle)
