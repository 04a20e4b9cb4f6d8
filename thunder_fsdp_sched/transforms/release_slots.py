"""Free the memory of slots in the trace, instead of keeping it from step to step.

[Note: Release of slots]
``fsdp_release`` frees the memory of the arenas of some slots. Collectives that used it were waited for by the current
stream, so the allocator may hand it out on that stream at once. The next issue allocates it again and makes the views of
the slot anew, which is the cost.

With ``Sharding(release=True)`` this happens at the end of backward, so the optimizer or another model can use the memory. A
forward without backward frees everything at its end, and gathers kept buckets into shared slots: the private slots may
hold the buckets of another forward whose backward is still to come.

A forward that is never followed by its backward frees nothing; the next backward does. After an exception, the next step
uses the memory again and frees it.

[Note: Memory that only backward needs]
Backward needs more slots than forward, because some hold gradients that are being reduced, and some transports receive
these into buffers of their own. In an arena that is kept from step to step, all of this is also allocated at the end of
forward, where memory peaks, because the activations of all blocks are in memory and nothing is reduced yet. By the time
backward reduces gradients, it has freed some activations.

So with ``max_memory`` the search also tries an *extension*: slots of backward use the memory that forward needs, and
only those that do not fit use the arena's extension, which is allocated at its first use in backward. At the end of
backward ``fsdp_release`` frees it, and the receive buffers. Forward begins with the same release, because the
step before may have been compiled without an extension, and then has left its receive buffers.

Nothing in the extension survives a backward, and buckets that forward leaves for backward are never there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.analysis import Analysis
from ..ir.effects import Effects
from ..ir.inspection import has_backward, with_bound_symbols
from ..ir.registry import register
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena, Slot


def _release(*slots: Slot) -> None:
    for arena in dict.fromkeys(slot.arena for slot in slots):
        arena.free()


def _release_effects(bsym: BoundSymbol) -> Effects:
    return Effects(frees=tuple(dict.fromkeys(slot.arena for slot in bsym.args)))


fsdp_release = register("fsdp_release", _release, _release_effects)


def release_slots(trace: TraceCtx, *, forward: TraceCtx | None = None, trains: bool = True) -> TraceCtx:
    """Insert ``fsdp_release`` for the arenas of the slots of forward and backward.

    Runs after ``reuse_from_forward`` and before ``verify``. Does nothing in a forward trace that has a backward. After, at
    the end of backward::

        (t144,) = fsdp_wait_grads(bucket_blocks_0, ft155)
        fsdp_release(slot_0, own_blocks_2)
        return ...

    See [Note: Release of slots].

    Args:
        forward: for a backward trace, its forward trace with slots.
        trains: whether the step has a backward.
    """
    if trains and forward is None:
        return trace
    before = list(forward.bound_symbols) if forward is not None else []
    bsyms = list(trace.bound_symbols)
    slots = [live.slot for live in Analysis(before, bsyms).slots.values() if live.slot is not None]
    if one_of_each_arena := {slot.arena: slot for slot in slots}:
        bsyms.insert(len(bsyms) - 1, fsdp_release.bind(*one_of_each_arena.values(), output=None))
    return with_bound_symbols(trace, bsyms, "fsdp: release slots")


def release_extension(
    trace: TraceCtx, *, buckets: Sequence[Bucket], arena_of: Callable[[Bucket], Arena] = lambda bucket: bucket.arena
) -> TraceCtx:
    """Insert ``fsdp_release`` for the extensions of arenas: in backward at its end, in forward at its beginning.

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
    extensions = [arena.extension.all_of_it for arena in dict.fromkeys(map(arena_of, buckets))]
    bsyms.insert(at, fsdp_release.bind(*extensions, output=None))
    return with_bound_symbols(trace, bsyms, "fsdp: release the extension")
