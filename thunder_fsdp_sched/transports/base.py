"""The interface of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..buffers import Bucket

__all__ = ["Transport"]


class Transport(ABC):
    """Moves a bucket between its sharded and its interleaved unsharded form.

    A transport owns no memory and keeps no state between calls. Every method issues its collectives at once and in an
    order that is the same on all ranks.
    """

    name: str

    @abstractmethod
    def all_gather(self, bucket: Bucket, unsharded: torch.Tensor) -> list[torch.distributed.Work]:
        """Issues what fills ``unsharded`` (flat, ``layout.unsharded_numel`` elements) from all ranks' shards."""

    @abstractmethod
    def reduce_scatter(
        self, bucket: Bucket, unsharded: torch.Tensor, shard: torch.Tensor
    ) -> list[torch.distributed.Work]:
        """Issues what fills ``shard`` (flat, ``layout.shard_numel``) with the mean over ranks of ``unsharded``.

        ``unsharded`` must stay untouched until the work is waited for; its contents are undefined afterwards.
        """

    @abstractmethod
    def wire_bytes(self, bucket: Bucket) -> int:
        """Bytes that one rank sends to gather the bucket once (a reduction sends as many in a ring)."""
