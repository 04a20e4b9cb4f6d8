"""Memory from which other ranks read directly, allocated for several buckets together."""

from __future__ import annotations

import torch

from ...ranks.process_groups import BucketRanks
from ...transports.base import Transport


class PeerMemory:
    """The memory that peers read, from which buckets with the same transport, device and ranks send.

    Each allocation is a collective.
    The first bucket that takes its memory allocates that of all buckets announced so far. All ranks announce and take
    memory in the same order: that of the plan, later that of their traces.
    """

    def __init__(self, transport: Transport, device: torch.device, ranks: BucketRanks) -> None:
        self._transport, self._device, self._ranks = transport, device, ranks
        self._announced: dict[str, tuple[int, torch.dtype]] = {}
        self._workspace = 0
        self._allocated: dict[str, torch.Tensor] = {}

    def announce(self, bucket: str, numel: int, dtype: torch.dtype, workspace: int) -> None:
        """Announce that ``bucket`` will take memory for ``numel`` elements, and that its reductions need a workspace."""
        self._announced[bucket] = numel, dtype
        self._workspace = max(self._workspace, workspace)

    def take(self, bucket: str) -> torch.Tensor:
        """Return the memory of ``bucket``, filled with zeros; only once."""
        if bucket not in self._allocated:
            sizes, self._announced = self._announced, {}
            shards = self._transport.allocate_together(
                list(sizes.values()), self._device, self._ranks, workspace=self._workspace
            )
            self._allocated.update(zip(sizes, shards, strict=True))
        return self._allocated.pop(bucket)
