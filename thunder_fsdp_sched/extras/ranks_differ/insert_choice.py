"""Insert the statements with which ranks find out in what they differ, and run the trace that serves all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ...ir.effects import effects
from ...ir.inspection import AGREEMENT, with_bound_symbols
from ...ir.registry import register
from ...transforms.insert_agreement import describe, fsdp_agree, fsdp_audit_agreed
from .start import DifferingStart


def insert_choice(trace: TraceCtx, *, start: DifferingStart, audit: bool = True) -> TraceCtx:
    """Insert ``fsdp_agree`` and ``fsdp_agreed_or_merged`` after the arguments.

    Runs after ``verify`` and before ``end_backward``, on both traces, with ``ranks_may_differ`` and several ranks. After::

        fsdp_agree(forward_0)
        if (merged := fsdp_agreed_or_merged(forward_0)) is not None: return merged(x, t_blocks_0_weight)

    The rest of the trace runs if all ranks run the same program. Otherwise the merged trace does, whose arguments are the
    same. The round is settled before the first collective on every backend, because it decides which that is.

    With ``audit``, the trace ends with ``fsdp_audit_agreed(forward_0)`` before what ``end_backward`` inserts.
    """
    bsyms = list(trace.bound_symbols)
    head = next(at for at, bsym in enumerate(bsyms) if bsym.sym.id not in (PrimIDs.UNPACK_TRIVIAL, PrimIDs.COMMENT))
    arguments = [bsym.output for bsym in bsyms[:head] if bsym.sym.id is PrimIDs.UNPACK_TRIVIAL]
    assert [proxy.name for proxy in arguments] == [name for name, _ in trace.siginfo().args]
    describe(start, list(map(effects, bsyms)))
    if audit:
        bsyms.insert(len(bsyms) - 1, fsdp_audit_agreed.bind(start, output=None))
    bsyms[head:head] = [
        fsdp_agree.bind(start, output=None),
        fsdp_agreed_or_merged.bind(start, *arguments, output=None),
    ]
    return with_bound_symbols(trace, bsyms, "fsdp: choose between the trace and a merged one")


def _print(bsym: BoundSymbol, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    start, *arguments = bsym.args
    given = ", ".join(proxy.name for proxy in arguments)
    return f"if (merged := {bsym.sym.name}({start})) is not None: return merged({given})"


fsdp_agreed_or_merged = register(
    "fsdp_agreed_or_merged",
    DifferingStart.settled_or_merged,
    printer=_print,
    kinds=[AGREEMENT],
)
