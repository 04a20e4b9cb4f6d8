"""ZeRO-3: reuse buckets that are still resident from the end of forward, instead of gathering them again in backward.

[Note: Buckets left by forward]
Backward first reads the buckets that forward gathered last. They stay in their slots until another collective uses the
memory. ``assign_slots`` keeps as many of forward's last gathers resident as fit into the memory that forward needs
anyway. In backward it assigns them the same slots, if parameters then need no more memory there and all slots together
need at most 1/32 more. The passes of this file mark these gathers: nothing is sent if backward runs right after its
forward, as in a usual step. That saves backward's first gather, which no compute could hide. (Users of FSDP2 spend
memory for the same effect: they do not reshard the last block.)

A marked gather states how many issues on its arena lie between it and the end of its forward (``followed_by``), or the
start of its backward (``preceded_by``). The arena counts issues at run time. If there was one more (another forward in
between, an exception, a second backward), the bucket is gathered as usual. The backward of another forward, which may
have had other parameters, does not reuse it either: see [Note: The backward of the most recent forward] in
``forward_numbers``. Both rules depend only on the order of calls, so all ranks decide alike.
"""

from __future__ import annotations

import time
from collections import defaultdict

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.inspection import has_backward, with_bound_symbols
from ..ir.liveness import Liveness
from ..ir.operands import Issue, bucket_of
from ..ir.slots import retained_by_forward
from ..ir.symbols import fsdp_all_gather, fsdp_reduce_scatter
from ..runtime.memory import Arena, Slot

__all__ = ["mark_retained_by_forward", "reuse_from_forward"]


def mark_retained_by_forward(trace: TraceCtx) -> TraceCtx:
    """Mark the gathers of a forward trace whose slots nothing overwrites before the end of forward.

    Runs on the forward trace after ``assign_slots`` and before ``verify``. Does nothing if there is no backward. Before::

        ft148 = fsdp_all_gather(bucket_blocks_1, slot_1, t_blocks_1_weight, again=False)  # 16,384 bytes float32
        ...
        ft150 = fsdp_all_gather(bucket_blocks_2, slot_0, t_blocks_2_weight, again=False)  # 16,384 bytes float32

    After: one issue follows the first of them, none the second::

        ft148 = fsdp_all_gather(bucket_blocks_1, slot_1, t_blocks_1_weight, again=False, followed_by=1)  # 16,384 bytes
        ... ... ft150 = fsdp_all_gather(bucket_blocks_2, slot_0, t_blocks_2_weight, again=False, followed_by=0)  #
        16,384 bytes ...

    See [Note: Buckets left by forward].
    """
    started = time.perf_counter()
    bsyms = list(trace.bound_symbols)
    later_slots: dict[Arena, list[Slot]] = defaultdict(list)
    if has_backward(trace):
        for position, bsym in reversed(list(enumerate(bsyms))):
            if bsym.sym is fsdp_all_gather:
                bucket, slot = bucket_of(bsym), Issue(bsym).slot
                slots = later_slots[slot.arena]
                if bucket.private_slot is not slot and not any(map(slot.overlaps, slots)):
                    bsyms[position] = _marked(bsym, followed_by=len(slots))
                slots.append(slot)
    return with_bound_symbols(trace, bsyms, "fsdp: mark what is retained for backward", started)


def reuse_from_forward(trace: TraceCtx, *, forward: TraceCtx) -> TraceCtx:
    """Mark the gathers of a backward trace whose buckets are still resident from ``forward``.

    Runs on the backward trace after ``assign_slots`` and before ``verify``. Does nothing if forward left no bucket in a
    shared slot. Before::

        ft157 = fsdp_all_gather(bucket_blocks_2, slot_0, t_blocks_2_weight, again=False)  # 16,384 bytes float32
        ft158 = fsdp_all_gather(bucket_blocks_1, slot_1, t_blocks_1_weight, again=False)  # 16,384 bytes float32

    After::

        ft157 = fsdp_all_gather(bucket_blocks_2, slot_0, ..., preceded_by=0)  # 16,384 bytes float32, already resident
        ft158 = fsdp_all_gather(bucket_blocks_1, slot_1, ..., preceded_by=1)  # 16,384 bytes float32, already resident

    See [Note: Buckets left by forward].

    Args:
        forward: the forward trace after ``mark_retained_by_forward``.
    """
    started = time.perf_counter()
    bsyms = list(trace.bound_symbols)
    retained = retained_by_forward(forward)
    before: dict[Arena, int] = defaultdict(int)
    ranges = Liveness(trace.bound_symbols).slots if retained else {}
    for position, bsym in enumerate(trace.bound_symbols):
        if bsym.sym not in (fsdp_all_gather, fsdp_reduce_scatter):
            continue
        bucket, slot = bucket_of(bsym), Issue(bsym).slot
        if bsym.sym is fsdp_all_gather and retained.pop(bucket.primary, None) == slot:
            others = (Issue(bsyms[i]).slot for i, live in ranges.items() if i != position and live.start < position)
            if not any(map(slot.overlaps, others)):
                bsyms[position] = _marked(bsym, preceded_by=before[slot.arena])
        before[slot.arena] += 1
    return with_bound_symbols(trace, bsyms, "fsdp: reuse what forward left", started)


def _marked(bsym: BoundSymbol, **issues: int) -> BoundSymbol:
    return bsym.from_bsym(kwargs=bsym.kwargs | issues)
