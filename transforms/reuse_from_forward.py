"""ZeRO-3: backward takes what lies in the arena still from the end of forward instead of gathering it again.

[Note: What forward leaves]
Backward reads first what forward gathered last, and that lies in its slot until another collective gets the memory. So
``plan_slots`` lets as many of forward's last gathers lie until its end as fit into the memory that it needs anyway, and
gives them the same slots in backward as far as parameters take no more memory there, and all slots together no more (or a
thirty-second). Here their gathers are marked: nothing travels if backward runs right behind its forward, the usual step.
Backward's first gather, which no compute could hide, is gone with it. (FSDP2's users spend memory on the same: they do
not reshard the last block.)

Each gather says how many issues on its arena come between it and the end of its forward, or the begin of its backward.
At run time the arena counts issues: is there one more (another forward in between, an exception, a second backward), the
bucket travels as ever. Nor is it taken by the backward of another forward, which may have had other parameters: see
[Note: The backward of the most recent forward] in ``runs``. Both depend on the order of calls alone, so all ranks
decide alike.
"""

from __future__ import annotations

import time
from collections import defaultdict

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..buffers import Arena, Slot
from ..operands import Issue, bucket_of
from ..symbols import fsdp_all_gather, fsdp_reduce_scatter
from ..traces import has_backward, with_bound_symbols
from .plan_slots import left_by_forward, live_ranges

__all__ = ["mark_left_by_forward", "reuse_from_forward"]


def mark_left_by_forward(trace: TraceCtx) -> TraceCtx:
    """Marks the gathers of a forward trace with slots in whose memory nothing is written after them.

    A trace without a backward stays as it is.
    """
    started = time.perf_counter()
    bsyms = list(trace.bound_symbols)
    behind: dict[Arena, list[Slot]] = defaultdict(list)
    if has_backward(trace):
        for position, bsym in reversed(list(enumerate(bsyms))):
            if bsym.sym is fsdp_all_gather:
                bucket, slot = bucket_of(bsym), Issue(bsym).slot
                later = behind[slot.arena]
                if bucket.private_slot is not slot and not any(map(slot.overlaps, later)):
                    bsyms[position] = _marked(bsym, followed_by=len(later))
                later.append(slot)
    return with_bound_symbols(trace, bsyms, "fsdp: mark what is left for backward", started)


def reuse_from_forward(trace: TraceCtx, *, forward: TraceCtx) -> TraceCtx:
    """Marks the gathers of a backward trace with slots that find their bucket where ``forward``, marked, left it."""
    started = time.perf_counter()
    bsyms = list(trace.bound_symbols)
    left = left_by_forward(forward)
    before: dict[Arena, int] = defaultdict(int)
    ranges = live_ranges(trace) if left else {}
    for position, bsym in enumerate(trace.bound_symbols):
        if bsym.sym not in (fsdp_all_gather, fsdp_reduce_scatter):
            continue
        bucket, slot = bucket_of(bsym), Issue(bsym).slot
        if bsym.sym is fsdp_all_gather and left.pop(bucket, None) == slot:
            others = (Issue(bsyms[i]).slot for i, live in ranges.items() if i != position and live.start < position)
            if not any(map(slot.overlaps, others)):
                bsyms[position] = _marked(bsym, preceded_by=before[slot.arena])
        before[slot.arena] += 1
    return with_bound_symbols(trace, bsyms, "fsdp: reuse what forward left", started)


def _marked(bsym: BoundSymbol, **issues: int) -> BoundSymbol:
    return bsym.from_bsym(kwargs=bsym.kwargs | issues)
