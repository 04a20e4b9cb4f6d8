"""The gradients that a trace leaves under ``no_sync``. They stay in memory until a later backward returns them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from thunder.core.symbol import BoundSymbol

from ..runtime.bucket import Bucket
from .operands import bucket_of
from .symbols import ACCUMULATORS, fsdp_accumulate_reduced, fsdp_reduce_scatter

__all__ = ["NOTHING_LEFT", "LeftGradients", "gradients_left"]


class LeftGradients(NamedTuple):
    """The buckets for which backwards under ``no_sync`` have left gradients.

    Attributes:
        unsharded: those with unsharded gradients.
        reduced: those with this rank's rows of reduced gradients.
    """

    unsharded: frozenset[Bucket] = frozenset()
    reduced: frozenset[Bucket] = frozenset()

    def union(self, *others: LeftGradients) -> LeftGradients:
        """Return the gradients that these and the others have left together."""
        return LeftGradients(
            self.unsharded.union(*(other.unsharded for other in others)),
            self.reduced.union(*(other.reduced for other in others)),
        )


NOTHING_LEFT = LeftGradients()


def gradients_left(bsyms: Iterable[BoundSymbol]) -> LeftGradients:
    """Return the gradients that a backward leaves under ``no_sync``.

    Those that it reduces and returns count as unsharded: it would leave them so under ``no_sync``.
    """
    found = [(bucket_of(b), b.sym) for b in bsyms if b.sym in (fsdp_reduce_scatter, *ACCUMULATORS)]
    reduced = frozenset(bucket for bucket, symbol in found if symbol is fsdp_accumulate_reduced)
    return LeftGradients(frozenset(bucket for bucket, _ in found) - reduced, reduced)
