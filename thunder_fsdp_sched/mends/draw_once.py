"""Draw random numbers once: backward gets forward's sample.

[Note: One sample]
A gradient belongs to the sample that forward has drawn. There are four ways in which another one could take part:

1. ``torch.utils.checkpoint`` and ``max_memory`` recompute values of forward. ``draw_once`` takes every operator that is not
   known to be pure out of a region of ``checkpoint``: what it returns is saved, and what follows is recomputed from it.
   ``max_memory`` chooses among pure operators only.
2. Fusion executors rematerialize: they move operators of forward into regions of backward, except those that Thunder
   has tagged as random. ``mark_draws`` tags the others.
3. nvFuser merges operators that have the same arguments, also two that draw. ``refuse_merged_draws`` finds that.
4. Thunder computes the gradient of an operator that it registered automatically by running the operator again, and other
   grad rules could. ``reject_resampled_random_grads`` looks for all operators that draw in the backward trace that runs.

Thunder's tags would not do, because many random operators have none. These passes go by facts about operators.
"""

from __future__ import annotations

from thunder.core.proxies import ProxyTag
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx

from ..ir.inspection import with_bound_symbols
from ..ir.operator_facts import is_pure


def draw_once(trace: TraceCtx) -> TraceCtx:
    """Keep operators that may draw random numbers, or are not pure otherwise, out of recomputation.

    Runs first on the computation that Thunder has traced, before ``insert_unshard`` and before it is differentiated. Does
    nothing outside of ``torch.utils.checkpoint``. It changes the tags by which Thunder knows what to recompute, so the
    sample that forward has drawn is saved for backward; see [Note: One sample].
    """
    found = [bsym for bsym in trace.bound_symbols if _is_recomputed(bsym) and not is_pure(bsym)]
    if not found:
        return trace
    for bsym in found:
        bsym.tags.discard(BoundSymbolTag.RECOMPUTE_IN_BACKWARD)
        for out in bsym.flat_proxy_outs:
            out.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)
    return with_bound_symbols(trace, trace.bound_symbols, "fsdp: draw once")


def _is_recomputed(bsym: BoundSymbol) -> bool:
    return BoundSymbolTag.RECOMPUTE_IN_BACKWARD in bsym.tags or any(
        ProxyTag.RECOMPUTE_IN_BACKWARD in out.tags for out in bsym.flat_proxy_outs
    )
