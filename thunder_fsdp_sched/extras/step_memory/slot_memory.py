"""How many bytes of slots a step uses and allocates, for predictions of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from thunder.core.trace import TraceCtx

from ...ir.analysis import Analysis, bytes_at
from ...ir.effects import Effects, effects
from ...ir.slots import peak_live_bytes, spans_of
from ...runtime.memory import Arena


def slots_in_use(analysis: Analysis) -> list[int]:
    """Return the bytes of arenas that hold unsharded parameters or gradients at each position, each byte counted once.

    Args:
        analysis: that of traces with slots.
    """
    return bytes_at(spans_of([live for live in analysis.slots.values() if live.slot is not None]), len(analysis.bsyms))


def shared_slots(trace: TraceCtx) -> tuple[int, int]:
    """Return the bytes of arena that the shared slots of a trace occupy, and a lower bound for any allocation."""
    ends: dict[Arena, int] = defaultdict(int)
    for e in map(effects, trace.bound_symbols):
        region = e.issues.region if e.issues is not None else None
        if region is not None and region.slot is not None and not region.is_private:
            ends[region.slot.arena] = max(ends[region.slot.arena], region.slot.end)
    return sum(ends.values()), peak_live_bytes(trace)


def arena_allocations(step: Sequence[Effects]) -> dict[Arena, list[tuple[int, int]]]:
    """Return for each arena the positions, first and last included, between which its memory is allocated.

    An arena that is freed is allocated from its next use on; one that nothing frees, all the time.

    Args:
        step: the effects of the traces of a step, with slots.
    """
    begins: dict[Arena, int] = {}
    found: dict[Arena, list[tuple[int, int]]] = defaultdict(list)
    for position, e in enumerate(step):
        for arena in e.frees:
            if arena in begins:
                found[arena].append((begins.pop(arena), position))
        if e.uses is not None:
            begins.setdefault(e.uses.arena, position)
    for arena, begin in begins.items():
        since = begin if arena in found else 0
        found[arena].append((since, len(step) - 1))
    return dict(found)
