"""Reuse buckets that are still resident, from the end of forward or from an earlier micro-batch, instead of gathering again.

[Note: Buckets left by forward]
Backward first reads the buckets that forward gathered last. They stay in their slots until another collective uses the
memory. ``assign_slots`` keeps as many of forward's last gathers resident as fit into the memory that forward needs
anyway. In backward it assigns them the same slots, if parameters then need no more memory there and all slots together
need at most 1/32 more. The first pass here marks these gathers: nothing is sent if backward runs right after its
forward, as in a usual step. That saves backward's first gather, which no compute could hide. (Users of FSDP2 spend
memory for the same effect: they do not reshard the last block.)

The verifier proves that the two traces leave the bucket in its slot. What happens between them is known only at run
time: another forward, an exception, a second backward. So the arena knows what each slot contains, and since when: see
[Note: Contents of slots] in ``runtime.memory``. A bucket that a later forward has gathered is not reused, because its
parameters may have been others: see [Note: The backward of the most recent forward] in ``runtime.autograd``. Each rank
offers the buckets that it has. If some rank has lost one, all ranks gather it again before the trace sends anything
else; a rank that still has it gathers into temporary memory. See [Note: Decisions of one rank] in ``ranks.control``.
"""

from __future__ import annotations

from typing import Any

from thunder.core.trace import TraceCtx

from ..ir.analysis import Analysis
from ..ir.effects import effects
from ..ir.inspection import has_backward, with_marks
from ..ir.slots import is_used_before, retained_by_forward
from ..runtime.bucket import WINDOW_LAST, WINDOW_OPEN


def reuse_from_forward(trace: TraceCtx, *, forward: TraceCtx) -> TraceCtx:
    """Mark the gathers of a backward trace whose buckets are still resident from ``forward``.

    Runs on the backward trace after ``assign_slots`` and before ``verify``. Does nothing if forward leaves no bucket in a
    shared slot. Before::

        ft157 = fsdp_all_gather(bucket_blocks_2, slot_0, t_blocks_2_weight, reuse_cast=False)  # 16,384 bytes float32
        ft158 = fsdp_all_gather(bucket_blocks_1, slot_1, t_blocks_1_weight, reuse_cast=False)  # 16,384 bytes float32

    After::

        ft157 = fsdp_all_gather(bucket_blocks_2, slot_0, ..., resident=True)  # 16,384 bytes float32, already resident
        ft158 = fsdp_all_gather(bucket_blocks_1, slot_1, ..., resident=True)  # 16,384 bytes float32, already resident

    See [Note: Buckets left by forward].

    Args:
        forward: the forward trace with slots.
    """
    marks: dict[int, dict[str, Any]] = {}
    retained = retained_by_forward(forward)
    slots = Analysis(trace).slots if retained else {}
    for position, live in slots.items():
        is_left = live.is_gather and retained.pop(live.bucket.primary, None) == live.slot
        if is_left and not is_used_before(slots, position):
            marks[position] = {"resident": True}
    return with_marks(trace, marks, "fsdp: reuse what forward left")


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
    issues = [effects(bsym).issues for bsym in trace.bound_symbols] if has_backward(trace) else []
    private = [
        i for i, issue in enumerate(issues) if issue and issue.gathers and issue.region and issue.region.is_private
    ]
    return with_marks(trace, dict.fromkeys(private, mark), "fsdp: reuse in an accumulation window")
