"""The bytes of ``max_unsharded_bytes`` that remain for gathers ahead of their step."""

from __future__ import annotations

from collections.abc import Collection

from thunder.core.trace import TraceCtx

from ..ir.analysis import Analysis, peak_bytes
from ..ir.inspection import args_of
from ..ir.kept_slots import grads_over_kept_params, private_bytes
from ..ir.slots import bytes_in_flight
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena
from .assign_slots import assign_slots


def left_for_gathers(
    found: TraceCtx,
    *,
    kept_buckets: Collection[Bucket],
    forward: TraceCtx | None,
    max_unsharded_bytes: int,
    reductions_in_flight: int,
) -> int | None:
    """Return what kept buckets and unsharded gradients of a sorted trace leave of the budget; ``None`` if its slots fit."""
    budget = max_unsharded_bytes
    if _unsharded_bytes(found, kept_buckets=kept_buckets, forward=forward, max_unsharded_bytes=budget) <= budget:
        return None
    # Unsharded gradients are those of the reductions that may be in flight, and those in the slots that gradients are
    # written to meanwhile, without the gradients that replace their parameters in a private slot.
    private = grads_over_kept_params(forward, found) if kept_buckets and forward is not None else set()
    reduced = [r for issue, r in Analysis(found).slots.items() if not r.is_gather and issue not in private]
    held = bytes_in_flight(((r.bucket.ranks.reductions, r.nbytes) for r in reduced), reductions_in_flight)
    left = budget - private_bytes(found, kept_buckets) - sum(held.values()) - filling_bytes(found, without=private)
    return max(left, 0)


def _unsharded_bytes(
    trace: TraceCtx, *, kept_buckets: Collection[Bucket], forward: TraceCtx | None, max_unsharded_bytes: int
) -> int:
    """Return the bytes that all slots of a sorted trace would need, kept buckets included."""
    unused: dict[Arena, Arena] = {}

    def arena_of(bucket: Bucket) -> Arena:
        return unused.setdefault(bucket.arena, Arena(bucket.arena.device))

    assign_slots(
        trace, kept_buckets=kept_buckets, arena_of=arena_of, forward=forward, max_unsharded_bytes=max_unsharded_bytes
    )
    return private_bytes(trace, kept_buckets) + sum(arena.nbytes for arena in unused.values())


def filling_bytes(trace: TraceCtx, *, without: Collection[int] = ()) -> int:
    """Return the peak bytes of slots that hold gradients whose reductions have not been issued yet.

    A reduction counts as issued right after its last gradient, as in a sorted trace.

    Args:
        without: positions of reductions that do not count.
    """
    analysis = Analysis(trace)
    counted = [r for r in analysis.slots.values() if r.writes and r.issue not in without]
    filling = ((r, analysis.defined(args_of(trace.bound_symbols[r.issue]))) for r in counted)
    return peak_bytes((r.first, last_grad, r.nbytes) for r, last_grad in filling)
