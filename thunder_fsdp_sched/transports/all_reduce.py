"""Each rank's shards at their place in an otherwise zero buffer, which one all-reduce completes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .base import Traffic, TransportedBucket, Views, Work
from .flat import Flat

if TYPE_CHECKING:
    from ..buckets import BucketSpec

__all__ = ["AllReduce"]


class AllReduce(Flat):
    """Gathers at twice the wire bytes of an all-gather; no order of pieces is asked of the collective.

    DeepSpeed's pull request 5420 has it for ZeRO-3. Here the sum is that of the bytes as integers, of which all but one
    rank's are zero, so whatever the dtype the result is bit for bit what was sent. Gradients are reduced as ``flat`` does:
    an all-reduce of them would send twice as much to throw most of it away.
    """

    name = "all_reduce"

    def all_gather(self, bucket: TransportedBucket, shard: torch.Tensor, unsharded: Views) -> Sequence[Work]:
        unsharded.flat.zero_()
        for piece, place in bucket.own_pieces:
            unsharded.flat[place].copy_(shard[piece])
        return [
            dist.all_reduce(
                unsharded.flat.view(torch.uint8).view(torch.int32),
                group=bucket.ranks.group.process_group,
                async_op=True,
            )
        ]

    def gather_traffic(self, spec: BucketSpec) -> Traffic:
        placed = spec.unsharded_bytes + 2 * spec.layout.shard_numel * spec.param_dtype.itemsize  # zeros, then the shard
        return Traffic((spec.unsharded_bytes,), 1, passes=2.0, copied_before=placed)
