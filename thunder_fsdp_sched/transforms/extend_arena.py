"""Let backward allocate the memory of slots that only backward needs, instead of keeping it from step to step.

[Note: Memory that only backward needs]
Backward needs more slots than forward, because some hold gradients that are being reduced, and some transports receive
these into buffers of their own. In an arena that is kept from step to step, all of this is allocated at the end of
forward, too, where the activations of all blocks are in memory and nothing is reduced yet: that is where memory peaks.
By the time backward reduces gradients, it has freed some activations.

So with ``max_memory`` the search also tries an *extension*: slots of backward get the memory that forward needs, and only
those that do not fit get memory of the arena's extension, which their first use in backward allocates. At the end of
backward ``fsdp_release`` frees it, and the receive buffers. Forward begins with the same release, because the
step before may have been compiled without an extension, and then has left its receive buffers.

Nothing in the extension survives a backward, and buckets that forward leaves for backward are never there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from thunder.core.prims import PrimIDs
from thunder.core.trace import TraceCtx, tracectx

from ..ir.effects import effects
from ..ir.inspection import has_backward, with_bound_symbols
from ..ir.symbols import fsdp_release
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, Slot


def bytes_of_forward(forward: TraceCtx, arena_of: Callable[[Bucket], Arena]) -> int:
    """Return the bytes of arena that the shared slots of a forward trace occupy."""
    used = ((e.bucket, e.uses) for e in map(effects, forward.bound_symbols))
    return max((slot.end for bucket, slot in used if bucket and slot and slot.arena is arena_of(bucket)), default=0)


def slot_at(arena: Arena, offset: int, nbytes: int, border: int | None) -> Slot:
    """Return the slot at an offset of an arena, or of its extension, which begins at ``border``."""
    if border is None or offset < border:
        return arena.slot(offset, nbytes)
    return arena.extension.slot(offset - border, nbytes)


def release_extension(trace: TraceCtx, *, arenas: Collection[Arena]) -> TraceCtx:
    """Insert ``fsdp_release`` for the extensions of some arenas: in backward at its end, in forward at its beginning.

    Runs after ``reuse_from_forward`` and before ``verify``. After, at the end of backward::

        (t144,) = fsdp_wait_grads(bucket_blocks_0, ft155)
        fsdp_release(more_slots)
        return ...

    See [Note: Memory that only backward needs].
    """
    bsyms = list(trace.bound_symbols)
    at = len(bsyms) - 1
    if has_backward(trace):
        at = next(i for i, b in enumerate(bsyms) if b.sym.id is not PrimIDs.UNPACK_TRIVIAL)
    with tracectx(trace):
        bsyms.insert(at, fsdp_release.bind(*(arena.extension.all_of_it for arena in arenas), output=None))
    return with_bound_symbols(trace, bsyms, "fsdp: release the extension")
