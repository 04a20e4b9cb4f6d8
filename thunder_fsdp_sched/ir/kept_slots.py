"""The private slots of kept buckets, which stay unsharded until backward (ZeRO-2)."""

from __future__ import annotations

from thunder.core.trace import TraceCtx

from ..runtime.bucket import WINDOW_OPEN, Bucket
from .analysis import Analysis, Lifetime


def grads_over_kept_params(forward: TraceCtx, backward: TraceCtx) -> set[int]:
    """Return the positions of the reductions of a backward trace that can use the private slot of their bucket.

    Those under ``no_sync`` leave the parameters for the next micro-batch if forward's gather takes part in a window. See
    [Note: Gradients in the place of their parameters] in ``slots``.

    Args:
        forward: its forward trace with slots.
        backward: the sorted backward trace, with or without slots.
    """
    begin = len(forward.bound_symbols)
    analysis = Analysis(forward, backward)
    guards = {e.ensures.bucket: i for i, e in enumerate(analysis.effects) if e.ensures is not None and i >= begin}
    issues = [e.issues for e in analysis.effects[:begin] if e.issues is not None]
    left = {issue.bucket for issue in issues if issue.window == WINDOW_OPEN}
    gathers: dict[Bucket, Lifetime] = {}
    found = set()
    for live in analysis.slots.values():
        if live.issue < begin and live.is_gather and live.region is not None and live.region.is_private:
            if live.bucket not in left:
                gathers[live.bucket] = live
        elif live.issue >= begin and live.bucket in gathers:
            if not live.is_gather and not analysis.effects[live.issue].collects:
                continue  # it sends no gradient of this trace
            gather = gathers.pop(live.bucket)  # one reduction at most, and none after another gather
            # A gradient that backward receives may be reduced before the guard, which may gather the bucket again.
            if not live.is_gather and guards.get(live.bucket, -1) < live.first and gather.may_be_replaced_by(live):
                found.add(live.issue - begin)
    return found
