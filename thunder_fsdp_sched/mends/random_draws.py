"""Draw random numbers once: backward gets forward's sample.

[Note: One sample]
A gradient belongs to the sample that forward has drawn. There are four ways in which another sample could enter it:

1. ``torch.utils.checkpoint`` and ``max_memory`` recompute values of forward. ``draw_once`` takes every operator that is not
   known to be pure out of a region of ``checkpoint``: its results are saved, and later values are recomputed from them.
   ``max_memory`` chooses only pure operators.
2. Fusion executors rematerialize: they move operators of forward into regions of backward, except those that Thunder
   has tagged as random. ``mark_draws`` tags the others.
3. nvFuser merges operators that have the same arguments, even two that draw. ``refuse_merged_draws`` finds that.
4. Thunder computes the gradient of an operator that it registered automatically by running the operator again, and other
   grad rules could. ``reject_resampled_random_grads`` looks for all operators that draw in the backward trace that runs.

Thunder's tags do not suffice, because many random operators have none. These passes use the facts about operators.
"""

from __future__ import annotations

from collections.abc import Iterator

from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import ProxyTag
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx
from thunder.extend import TemporaryExecutor

from ..errors import coded_error
from ..ir.inspection import UNPACKING, args_of, is_recomputed, nested, outs_of, source_of, with_bound_symbols
from ..ir.operator_facts import facts_of, is_pure
from ..ir.registry import executor


def draw_once(trace: TraceCtx) -> TraceCtx:
    """Keep operators that may draw random numbers, or are not pure otherwise, out of recomputation.

    Runs on the computation after ``insert_unshard``, and before it is differentiated. Does nothing outside of
    ``torch.utils.checkpoint``. It changes the tags by which Thunder knows what to recompute, so the sample that forward has
    drawn is saved for backward; see [Note: One sample].
    """
    found = [bsym for bsym in trace.bound_symbols if is_recomputed(bsym) and not is_pure(bsym)]
    if not found:
        return trace
    for bsym in found:
        bsym.tags.discard(BoundSymbolTag.RECOMPUTE_IN_BACKWARD)
        for out in bsym.flat_proxy_outs:
            out.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)
    return with_bound_symbols(trace, trace.bound_symbols, "fsdp: draw once")


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


def reject_resampled_random_grads(trace: TraceCtx, *, forward: TraceCtx, computation: TraceCtx) -> TraceCtx:
    """Raise an error if gradients depend on random numbers that backward draws in place of forward's.

    Runs first on the backward trace, before ``write_grads_in_place``, and changes nothing. It refuses an operator of
    forward that runs again and is not known to be pure, and one that draws without having run in forward, unless the
    model has a backward of its own (``torch.autograd.Function``) that may draw. For example::

        (t42,) = gumbel_softmax_vjp(((t31,), {}), t20)

    Args:
        forward: the forward trace that runs.
        computation: the program that was differentiated.

    Raises:
        NotImplementedError: names the operator.
    """
    has_own_backward = any(isinstance(b.sym.executor, TemporaryExecutor) for b in nested(computation.bound_symbols))
    needed: set[str] = set()  # by gradients that are returned
    in_forward = frozenset(out for part in parts_of(forward) for out in outs_of(part))
    for part in reversed(list(parts_of(trace))):
        outs = set(outs_of(part))
        if (outs and outs.isdisjoint(needed)) or part.sym.id in _NO_OPERATORS:
            continue
        needed.update(args_of(part))
        if is_pure(part) or part.sym.executor is executor:
            continue
        if part.sym.name.endswith("_vjp") or any(out.removeprefix("bw_") in in_forward for out in outs):
            _refuse(part, "again")
        if facts_of(part).draws and not has_own_backward:
            _refuse(part, "in backward")
    return trace


_NO_OPERATORS = UNPACKING | {PrimIDs.DEL}


def _refuse(bsym: BoundSymbol, reason: str) -> None:
    raise coded_error(
        NotImplementedError,
        "trace.random-operator-drawn-again",
        operator=described(bsym),
        when=reason,
        function=_name(bsym),
    )


def _name(bsym: BoundSymbol) -> str:
    return bsym.sym.name.removesuffix("_vjp")


def described(bsym: BoundSymbol) -> str:
    source = source_of(bsym)
    return f"{_name(bsym)!r} ({source})" if source else repr(_name(bsym))


def parts_of(trace: TraceCtx) -> Iterator[BoundSymbol]:
    """Yield the bound symbols of a trace; for a fusion, its subsymbols."""
    for bsym in trace.bound_symbols:
        yield from bsym.subsymbols if bsym.sym.is_fusion else (bsym,)
