"""The gradients that only other ranks have; see [Note: Gradients of ranks that differ] in ``programs``."""

from __future__ import annotations

from ...runtime.accumulation import Accumulation


class AccumulationOfAll(Accumulation):
    """The sums of a bucket's gradients on a rank that may differ from others."""

    expected: frozenset[int] = frozenset()
    """The parameters of which some rank's running backward has a gradient, or some rank's window; empty if all ranks run the
    same program. The round at the start of each backward sets it."""

    def from_others(self) -> frozenset[int]:
        return self.expected
