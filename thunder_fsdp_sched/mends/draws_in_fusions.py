"""Draw random numbers once although fusion executors move and merge operators: see [Note: One sample] in ``draw_once``."""

from __future__ import annotations

from thunder.core.prims import OpTags
from thunder.core.trace import TraceCtx

from ..errors import coded_error
from ..ir.inspection import outs_of
from ..ir.operator_facts import facts_of
from .reject_resampled_random_grads import described, parts_of


def mark_draws(trace: TraceCtx) -> TraceCtx:
    """Tag operators that draw random numbers, so that fusion executors do not run them again in backward.

    Runs last before the fusion executors, and adds nothing but tags.
    """
    for bsym in trace.bound_symbols:
        if facts_of(bsym).draws:
            bsym.tags.add(OpTags.RANDOM_OP)
    return trace


def refuse_merged_draws(trace: TraceCtx, *, joint: TraceCtx) -> TraceCtx:
    """Raise an error if a fusion executor has dropped an operator that draws random numbers, as equal to another one.

    Runs first after the fusion executors, and changes nothing.

    Args:
        joint: the joint trace before fusion.

    Raises:
        NotImplementedError: names the operator.
    """
    left = frozenset(out for part in parts_of(trace) for out in outs_of(part))
    for bsym in joint.bound_symbols:
        if facts_of(bsym).draws and left.isdisjoint(outs_of(bsym)):
            raise coded_error(NotImplementedError, "trace.random-operators-fused", operator=described(bsym))
    return trace
