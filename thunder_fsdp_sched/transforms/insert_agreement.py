"""Insert the statements with which ranks agree on a trace: see [Note: Agreement of ranks] in ``ranks.control``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from thunder.core.prims import PrimIDs
from thunder.core.trace import TraceCtx

from ..ir.effects import Effects, effects, sends
from ..ir.inspection import AGREEMENT, with_bound_symbols
from ..ir.registry import register
from ..runtime.trace_start import SlotOfBucket, TraceStart

_FIRST = frozenset({PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE, PrimIDs.COMMENT})


def insert_agreement(trace: TraceCtx, *, start: TraceStart, before_issue: bool, audit: bool = True) -> TraceCtx:
    """Insert ``fsdp_agree`` at the start, and ``fsdp_agreed`` before the first collective or before the first wait.

    Runs after ``verify`` and before ``end_backward``, on both traces, if the model has several ranks and at least one
    of them communicates in this trace. With ``before_issue``, these statements stand before its first gather::

        fsdp_agree(forward_0)
        fsdp_agreed(forward_0)

    A backward that expects resident buckets, which forward has kept or left, settles before it sends anything, because
    lost buckets are gathered again before that. A rank that has lost some settles at the start. The others compute in
    the meantime, because the gather of a resident bucket sends nothing.

    The two statements are one round, which takes each of W ranks ceil(log2 W) messages, one after the other.

    With ``audit``, the trace ends with ``fsdp_audit_agreed(forward_0)`` before what ``end_backward`` inserts.

    Args:
        before_issue: settle the round before the first issue (gloo), not just before the first wait (NCCL).
    """
    bsyms = list(trace.bound_symbols)
    issued: set[str] = set()
    head = next(position for position, bsym in enumerate(bsyms) if bsym.sym.id not in _FIRST)
    end = len(bsyms) - 1  # if other ranks communicate in this trace and this one does not
    of_all = list(map(effects, bsyms))
    describe(start, of_all)
    start.expected += sorted((g for g in start.reusable_gathers if not g.in_window), key=SlotOfBucket.name)
    start.reusable_gathers = [gather for gather in start.reusable_gathers if gather.in_window]
    for position, (bsym, e) in enumerate(zip(bsyms, of_all, strict=True)):
        if (issue := sends(bsym)) is not None:
            issued.add(issue.future)
        waits = e.waits is not None and e.issues is None and e.waits.future in issued
        if (issue is not None and (before_issue or start.expected)) or waits or e.runs is not None:
            end = position
            break
    if audit:
        bsyms.insert(len(bsyms) - 1, fsdp_audit_agreed.bind(start, output=None))
    bsyms.insert(end, fsdp_agreed.bind(start, output=None))
    bsyms.insert(head, fsdp_agree.bind(start, output=None))
    return with_bound_symbols(trace, bsyms, "fsdp: insert agreement")


def describe(start: TraceStart, of_all: Sequence[Effects]) -> None:
    """Tell the start of a trace the buckets on which ranks may have to agree, from the effects of its bound symbols."""
    start.pending_grad_buckets = [weakref.ref(e.bucket) for e in of_all if e.runs is not None and e.bucket is not None]
    accumulates = any(e.leaves for e in of_all)  # then it returns no gradients
    start.ending = [
        (weakref.ref(e.bucket), frozenset(e.missing_gradients))
        for e in of_all
        if e.bucket is not None and (e.collects or e.runs) and not accumulates
    ]
    kept = [e.ensures.bucket for e in of_all if e.ensures is not None]
    slots = [SlotOfBucket(weakref.ref(bucket), weakref.ref(bucket.private_slot)) for bucket in kept]
    start.expected = sorted(slots, key=SlotOfBucket.name)
    issues = [e.issues for e in of_all if e.issues is not None]
    start.reusable_gathers = [
        SlotOfBucket(weakref.ref(issue.bucket), weakref.ref(issue.region.slot), in_window=not issue.resident)
        for issue in issues
        if issue.bucket is not None and issue.region is not None and issue.region.slot is not None
        if issue.resident or issue.window is not None
    ]


fsdp_agree = register("fsdp_agree", TraceStart.post, kinds=[AGREEMENT])
fsdp_agreed = register("fsdp_agreed", TraceStart.settle, kinds=[AGREEMENT])
fsdp_audit_agreed = register("fsdp_audit_agreed", TraceStart.end_audit, kinds=[AGREEMENT])
