"""Send the bucket as one flat vector: one plain all-gather or reduce-scatter, directly on the interleaved buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ..private_distributed import all_gather, reduce_scatter
from .base import Transport, TransportedBucket, Views, Work, issue_each


class Flat(Transport):
    """The transport with one collective per segment; see [Note: Interleaved layout with row-aligned cuts]."""

    name = "flat"

    def all_gather(self, bucket: TransportedBucket, shard: torch.Tensor, unsharded: Views) -> Sequence[Work]:
        group = bucket.ranks.group.process_group
        return issue_each(partial(all_gather, whole, own, group) for whole, own in pairs(bucket, unsharded, shard))

    def reduce_scatter(self, bucket: TransportedBucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        group = bucket.ranks.reductions.process_group
        # The division by the world size is part of the collective.
        return issue_each(
            partial(reduce_scatter, own, whole, dist.ReduceOp.AVG, group)
            for whole, own in pairs(bucket, unsharded, shard)
        )


def pairs(
    bucket: TransportedBucket, unsharded: Views, shard: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return each non-empty segment, whole, and the rank's own range of it."""
    return zip(unsharded.segments, bucket.spec.layout.shard_segments(shard), strict=True)
