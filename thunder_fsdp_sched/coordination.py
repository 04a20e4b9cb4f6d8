"""What buckets know of the coordination of ranks: the count of collectives, and whom to tell of what fails.

How ranks agree is up to ``Control``, which knows buckets; buckets do not know it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from .transports.base import TransportedBucket

__all__ = ["Coordinator", "Tally"]


class Coordinator(Protocol):
    """The part of ``Control`` that is used through a bucket."""

    def concerns_all(self, bucket: TransportedBucket) -> bool:
        """Return whether all ranks have ``bucket``."""

    def meet(self, what: str, *details: str) -> None:
        """Wait until all ranks have come to the same call."""

    def doing(self, what: str) -> AbstractContextManager[Any]:
        """Return what to run a collective in, so that its failure is explained."""

    def explain(self, text: str) -> str:
        """Tell the other ranks what failed here and return what they tell."""


class Tally:
    """The number of collectives that one model has issued on this rank; see [Note: When ranks agree] in ``control``.

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
