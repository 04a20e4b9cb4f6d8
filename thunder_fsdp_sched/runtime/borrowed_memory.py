"""The memory of slots for use between traces, such as to gather whole parameters for a state dict."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .memory import Arena


@contextlib.contextmanager
def borrow_memory(arena: Arena, nbytes: int) -> Iterator[Arena]:
    """Yield another arena of ``nbytes`` that has the memory of ``arena``, for use between two traces.

    If it is too small, it is freed, and the other arena allocates its own. A trace that runs in the meantime
    allocates new memory, and nothing that forward left is resident any more.
    """
    arena.follow_stream()
    arena.finish_all()
    memory = arena._memory
    arena.release()
    other = Arena(arena.device, arena)
    other.nbytes = nbytes
    if memory is not None and memory.numel() >= nbytes:
        other._memory = memory
    del memory
    try:
        yield other
    finally:
        for flight in other.in_flight:  # of a caller that stopped early: nobody will read it
            with contextlib.suppress(RuntimeError):
                other.finish(flight)
        memory = other._memory
        other.release()
        if memory is not None and memory.numel() == arena.nbytes and arena._memory is None and not other.in_flight:
            arena._memory = memory
