"""Mark the gathers that a later micro-batch of an accumulation window need not repeat."""

from __future__ import annotations

from thunder.core.trace import TraceCtx

from ..ir.effects import effects
from ..ir.inspection import has_backward, with_bound_symbols
from ..runtime.bucket import WINDOW_LAST, WINDOW_OPEN


def reuse_in_window(trace: TraceCtx, *, no_sync: bool) -> TraceCtx:
    """Mark the gathers of a forward trace into private slots, which an earlier micro-batch may have filled.

    Runs on the forward trace after ``assign_slots`` and before ``verify``. Does nothing if there is no backward, or no
    bucket is kept (ZeRO-3). Before::

        ft146 = ...(bucket_blocks_0, own_blocks_0, t_blocks_0_weight)  # 16,384 bytes float32

    After, under ``no_sync``; otherwise with ``window='last'``::

        ft146 = ...(bucket_blocks_0, own_blocks_0, t_blocks_0_weight, window='open')  # 16,384 bytes float32

    See [Note: Gathered once in a window] in ``runtime.bucket``.

    Args:
        no_sync: whether the trace is compiled for ``no_sync``.
    """
    bsyms = list(trace.bound_symbols)
    mark = WINDOW_OPEN if no_sync else WINDOW_LAST
    if has_backward(trace):
        for position, bsym in enumerate(bsyms):
            issue = effects(bsym).issues
            if issue is not None and issue.gathers and issue.place is not None and issue.place.is_private:
                bsyms[position] = bsym.from_bsym(kwargs=bsym.kwargs | {"window": mark})
    return with_bound_symbols(trace, bsyms, "fsdp: reuse in an accumulation window")
