"""Allocate memory that peers read for all buckets at once, because each allocation is a collective."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..plan.specs import BucketSpec
from ..ranks.process_groups import Ranks
from . import TRANSPORTS, Transport


class PeerMemory:
    """The memory from which buckets with the same transport, device and ranks send.

    The first bucket that takes its memory allocates that of all buckets announced so far. All ranks announce and take
    memory in the same order: that of the plan, later that of their traces.
    """

    def __init__(self, transport: Transport, device: torch.device, ranks: Ranks) -> None:
        self._transport, self._device, self._ranks = transport, device, ranks
        self._announced: dict[str, tuple[int, torch.dtype]] = {}
        self._allocated: dict[str, torch.Tensor] = {}

    def announce(self, bucket: str, numel: int, dtype: torch.dtype) -> None:
        """Announce that ``bucket`` will take memory for ``numel`` elements of ``dtype``."""
        self._announced[bucket] = numel, dtype

    def take(self, bucket: str) -> torch.Tensor:
        """Return the memory of ``bucket``, filled with zeros; only once."""
        if bucket not in self._allocated:
            sizes, self._announced = self._announced, {}
            shards = self._transport.allocate_together(list(sizes.values()), self._device, self._ranks)
            self._allocated.update(zip(sizes, shards, strict=True))
        return self._allocated.pop(bucket)


def announce_all(buckets: Iterable[tuple[BucketSpec, Ranks]]) -> dict[str, PeerMemory]:
    """Announce the buckets of a plan whose shards peers read; return the memory of each, keyed by name."""
    shared: dict[tuple[str, torch.device, Ranks], PeerMemory] = {}
    by_bucket = {}
    for spec, ranks in buckets:
        transport = TRANSPORTS[spec.comm.transport]
        if transport.peers_read_shards:
            key = spec.comm.transport, spec.device, ranks
            if key not in shared:
                shared[key] = PeerMemory(transport, spec.device, ranks)
            shared[key].announce(spec.name, spec.layout.shard_numel, spec.param_dtype)
            by_bucket[spec.name] = shared[key]
    return by_bucket
