"""The interface between buckets and the coordination of ranks: counting collectives, and reporting failures.

``Control`` implements it. It imports buckets, but buckets do not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..transports.base import TransportedBucket

__all__ = ["Coordinator", "IssueCounts"]


class Coordinator(Protocol):
    """The part of ``Control`` that buckets use."""

    def is_on_all_ranks(self, bucket: TransportedBucket) -> bool:
        """Return whether all ranks have ``bucket``."""

    def rendezvous(self, what: str, *details: str) -> None:
        """Wait until all ranks have reached the same call."""

    def reduce(self, what: str, values: Sequence[float], op: Any) -> list[float]:
        """Meet the other ranks and reduce numbers over all ranks, on the host."""

    def doing(self, what: str) -> AbstractContextManager[Any]:
        """Return a context for a collective that explains its failure."""

    def explain(self, text: str) -> str:
        """Report a failure to the other ranks and return their reports."""


class IssueCounts:
    """The number of collectives that one model has issued on this rank; see [Note: Agreement of ranks] in ``control``.

    Each collective counts twice, before and after it is issued, so an issue that failed halfway is recognized.

    Attributes:
        issued: the count of issued collectives.
        expected: the count of the collectives of all traces that have started.
        settle: ends a round of agreement that is still open.
    """

    __slots__ = ("expected", "issued", "settle")

    def __init__(self) -> None:
        self.issued = self.expected = 0
        self.settle: Callable[[], None] = _nothing


def _nothing() -> None:
    pass
