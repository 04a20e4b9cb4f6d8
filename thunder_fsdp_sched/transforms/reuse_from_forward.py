"""Reuse buckets that are still resident, from the end of forward or from an earlier micro-batch, instead of gathering again.

[Note: Buckets left by forward]
Backward first reads the buckets that forward gathered last. They stay in their slots until another collective uses the
memory. ``assign_slots`` keeps as many of forward's last gathers resident as fit into the memory that forward needs
anyway. In backward it assigns them the same slots, if parameters then need no more memory there and all slots together
need at most 1/32 more. The first two passes here mark these gathers: nothing is sent if backward runs right after its
forward, as in a usual step. That saves backward's first gather, which no compute could hide. (Users of FSDP2 spend
memory for the same effect: they do not reshard the last block.)

A marked gather states how many issues on its arena lie between it and the end of its forward (``issues_after``), or the
start of its backward (``issues_before``). The arena counts issues at run time. If there was one more (another forward in
between, an exception, a second backward), the bucket is gathered as usual. The backward of another forward, which may
have had other parameters, does not reuse it either: see [Note: The backward of the most recent forward] in
``runtime.autograd``. Each rank offers what it has. What some rank has
lost all gather again before the trace sends anything else, each that still has it into memory that it frees: see
[Note: Decisions of one rank] in ``ranks.control``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from thunder.core.trace import TraceCtx

from ..ir.analysis import Analysis
from ..ir.effects import SlotRegion, effects
from ..ir.inspection import has_backward, with_bound_symbols
from ..ir.slots import retained_by_forward
from ..runtime.bucket import WINDOW_LAST, WINDOW_OPEN
from ..runtime.memory import Arena, Slot


def mark_retained_by_forward(trace: TraceCtx) -> TraceCtx:
    """Mark the gathers of a forward trace whose slots nothing overwrites before the end of forward.

    Runs on the forward trace of a backward after ``assign_slots`` and before ``verify``. Before::

        ft148 = fsdp_all_gather(bucket_blocks_1, slot_1, t_blocks_1_weight, reuse_cast=False)  # 16,384 bytes float32
        ...
        ft150 = fsdp_all_gather(bucket_blocks_2, slot_0, t_blocks_2_weight, reuse_cast=False)  # 16,384 bytes float32

    After: one issue follows the first of them, none the second::

        ft148 = fsdp_all_gather(bucket_blocks_1, slot_1, t_blocks_1_weight, reuse_cast=False, issues_after=1)  # 16,384 bytes
        ...
        ft150 = fsdp_all_gather(bucket_blocks_2, slot_0, t_blocks_2_weight, reuse_cast=False, issues_after=0)  # 16,384 bytes

    See [Note: Buckets left by forward].
    """
    marks: dict[int, dict[str, Any]] = {}
    later_slots: dict[Arena, list[Slot]] = defaultdict(list)
    for position, region in reversed(_gathered(trace)):
        if region.slot is not None:
            slots = later_slots[region.slot.arena]
            if not region.is_private and not any(map(region.slot.overlaps, slots)):
                marks[position] = {"issues_after": len(slots)}
            slots.append(region.slot)
    return _with_marks(trace, marks, "fsdp: mark what is retained for backward")


def reuse_from_forward(trace: TraceCtx, *, forward: TraceCtx) -> TraceCtx:
    """Mark the gathers of a backward trace whose buckets are still resident from ``forward``.

    Runs on the backward trace after ``assign_slots`` and before ``verify``. Does nothing if forward left no bucket in a
    shared slot. Before::

        ft157 = fsdp_all_gather(bucket_blocks_2, slot_0, t_blocks_2_weight, reuse_cast=False)  # 16,384 bytes float32
        ft158 = fsdp_all_gather(bucket_blocks_1, slot_1, t_blocks_1_weight, reuse_cast=False)  # 16,384 bytes float32

    After::

        ft157 = fsdp_all_gather(bucket_blocks_2, slot_0, ..., issues_before=0)  # 16,384 bytes float32, already resident
        ft158 = fsdp_all_gather(bucket_blocks_1, slot_1, ..., issues_before=1)  # 16,384 bytes float32, already resident

    See [Note: Buckets left by forward].

    Args:
        forward: the forward trace after ``mark_retained_by_forward``.
    """
    marks: dict[int, dict[str, Any]] = {}
    retained = retained_by_forward(forward)
    before: dict[Arena, int] = defaultdict(int)
    slots = Analysis(trace).slots if retained else {}
    for position, live in slots.items():
        slot = live.slot
        assert slot is not None
        if live.is_gather and retained.pop(live.bucket.primary, None) == slot:
            others = (other.slot for i, other in slots.items() if i != position and other.first < position)
            if not any(other is not None and slot.overlaps(other) for other in others):
                marks[position] = {"issues_before": before[slot.arena]}
        before[slot.arena] += 1
    return _with_marks(trace, marks, "fsdp: reuse what forward left")


def reuse_in_window(trace: TraceCtx, *, no_sync: bool) -> TraceCtx:
    """Mark the gathers of a forward trace into private slots, which an earlier micro-batch may have filled.

    Runs on the forward trace of a backward after ``assign_slots`` and before ``verify``. Does nothing if no bucket is kept
    (ZeRO-3). Before::

        ft146 = ...(bucket_blocks_0, own_blocks_0, t_blocks_0_weight)  # 16,384 bytes float32

    After, under ``no_sync``; otherwise with ``window='last'``::

        ft146 = ...(bucket_blocks_0, own_blocks_0, t_blocks_0_weight, window='open')  # 16,384 bytes float32

    See [Note: Gathered once in a window] in ``runtime.bucket``.

    Args:
        no_sync: whether the trace is compiled for ``no_sync``.
    """
    mark = {"window": WINDOW_OPEN if no_sync else WINDOW_LAST}
    private = [position for position, region in _gathered(trace) if region.is_private]
    return _with_marks(trace, dict.fromkeys(private, mark), "fsdp: reuse in an accumulation window")


def _gathered(forward: TraceCtx) -> list[tuple[int, SlotRegion]]:
    """Return the positions and slots of the gathers of a forward trace; none if it has no backward."""
    issues = [effects(bsym).issues for bsym in forward.bound_symbols] if has_backward(forward) else []
    return [(i, issue.region) for i, issue in enumerate(issues) if issue and issue.gathers and issue.region]


def _with_marks(trace: TraceCtx, marks: Mapping[int, Mapping[str, Any]], pass_name: str) -> TraceCtx:
    """Return the trace with further keyword arguments of the bound symbols at these positions."""
    bsyms = list(trace.bound_symbols)
    for position, more in marks.items():
        bsyms[position] = bsyms[position].from_bsym(kwargs={**bsyms[position].kwargs, **more})
    return with_bound_symbols(trace, bsyms, pass_name)
