"""Sort communication under ``max_unsharded_bytes``: gathers are delayed only where the budget requires it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from thunder.core.trace import TraceCtx

from ..ir.effects import Place, effects
from ..ir.slots import filling_bytes, grads_over_kept_params
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, slot_bytes
from .assign_slots import assign_slots
from .sort_communication import MAX_REDUCTIONS_IN_FLIGHT, bytes_in_flight, sort_communication


def sort_within_budget(
    trace: TraceCtx,
    *,
    prefetch: int,
    max_unsharded_bytes: int,
    max_gathers_in_flight: int | None = None,
    max_reductions_in_flight: int = MAX_REDUCTIONS_IN_FLIGHT,
    kept: Collection[Bucket] = (),
    forward: TraceCtx | None = None,
) -> TraceCtx:
    """Reorder the communication of an execution trace such that its slots fit a budget, if they can.

    Runs in place of ``sort_communication``, whose result without a limit it returns if all slots then fit the budget.
    Otherwise it limits gathered buckets to the bytes that the budget leaves beside kept buckets and unsharded
    gradients. That bound is cautious, so it may delay gathers that would fit.

    Args:
        prefetch, max_gathers_in_flight, max_reductions_in_flight: those of ``sort_communication``.
        max_unsharded_bytes: the budget (bytes) for all slots together.
        kept: buckets that stay unsharded from forward to backward.
        forward: for a backward trace, its forward trace with slots.
    """
    sort = partial(
        sort_communication,
        trace,
        prefetch=prefetch,
        max_gathers_in_flight=max_gathers_in_flight,
        max_reductions_in_flight=max_reductions_in_flight,
    )
    unlimited = sort()
    if _bytes_of_slots(unlimited, max_unsharded_bytes, kept, forward) <= max_unsharded_bytes:
        return unlimited
    reductions = max_reductions_in_flight
    limit = _gather_budget(unlimited, budget=max_unsharded_bytes, reductions=reductions, kept=kept, forward=forward)
    return sort(max_unsharded_bytes=limit)


def shared_budget(trace: TraceCtx, *, budget: int | None, kept: Collection[Bucket]) -> int | None:
    """Return the bytes left for shared slots: the budget minus kept buckets."""
    return None if budget is None else budget - private_bytes(trace, kept)


def private_bytes(trace: TraceCtx, kept: Collection[Bucket]) -> int:
    """Return the bytes of the slots of kept buckets; for those that this trace does not gather, the planned bytes."""
    gathered = [place for _, place in _slots_used(trace, by_gathers=True) if place.bucket.base in kept]
    elsewhere = set(kept) - {place.bucket.base for place in gathered}
    return sum(place.nbytes for place in gathered) + sum(slot_bytes(b.spec, b.spec.param_dtype) for b in elsewhere)


def _slots_used(trace: TraceCtx, *, by_gathers: bool) -> Iterator[tuple[int, Place]]:
    """Yield the slots of gathers, or of reductions, with the positions of their issues."""
    for position, bsym in enumerate(trace.bound_symbols):
        issue = effects(bsym).issues
        if issue is not None and issue.place is not None and issue.gathers is by_gathers:
            yield position, issue.place


def _bytes_of_slots(trace: TraceCtx, budget: int, kept: Collection[Bucket], forward: TraceCtx | None) -> int:
    """Return the bytes of all slots of a sorted trace, kept buckets included, without assigning them."""
    scratch: dict[Arena, Arena] = {}

    def arena_of(bucket: Bucket) -> Arena:
        return scratch.setdefault(bucket.arena, Arena(bucket.arena.device))

    left = shared_budget(trace, budget=budget, kept=kept)
    assign_slots(trace, kept=kept, arena_of=arena_of, forward=forward, max_bytes=left)
    return private_bytes(trace, kept) + sum(arena.nbytes for arena in scratch.values())


def _gather_budget(
    trace: TraceCtx, *, budget: int, reductions: int, kept: Collection[Bucket], forward: TraceCtx | None
) -> int:
    """Return the bytes left for gathered buckets in one trace: the budget minus kept buckets and unsharded gradients.

    Unsharded gradients are the reductions that may be in flight, and the slots that gradients are written to meanwhile,
    without the gradients that replace their parameters in a private slot.
    """
    private = grads_over_kept_params(forward, trace) if kept and forward is not None else set()
    reduced = [place for position, place in _slots_used(trace, by_gathers=False) if position not in private]
    in_flight = sum(bytes_in_flight(((p.bucket.ranks.reductions, p.nbytes) for p in reduced), reductions).values())
    return max(budget - private_bytes(trace, kept) - in_flight - filling_bytes(trace, without=private), 0)
