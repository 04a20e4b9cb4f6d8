"""The limits that a search for the fastest step keeps."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Limits"]


class Limits(NamedTuple):
    """Limits of a search; ``None`` where there is none.

    Attributes:
        unsharded_bytes: bytes of all slots together.
        gathers_in_flight: how many gathers may be in flight.
        memory: bytes of all memory of the step, without optimizer state.
        slots: bytes of the slots that a planned step of the same module keeps from step to step anyway.
        may_extend: whether backward may allocate memory of its own for slots.
        largest_peak: bytes of all memory of the largest step of the module that was compiled before.
    """

    unsharded_bytes: int | None = None
    gathers_in_flight: int | None = None
    memory: int | None = None
    slots: int | None = None
    may_extend: bool = False
    largest_peak: int = 0

    @property
    def any_bytes(self) -> bool:
        """Whether bytes are limited."""
        return self.unsharded_bytes is not None or self.memory is not None
