"""Gather with an all-reduce: each rank puts its shards into an otherwise zero buffer, and the sum completes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..plan.specs import BucketSpec
from .base import Traffic, TransportedBucket, Views, Work
from .flat import Flat


class AllReduce(Flat):
    """The transport that gathers at twice the bytes of an all-gather, but with shards in any order.

    DeepSpeed's pull request 5420 does the same for ZeRO-3. Here the bytes are summed as integers. All but one rank's
    are zero, so for any dtype the result is bit for bit what was sent. Gradients are reduced as by ``flat``, because an
    all-reduce would send twice as much and discard most of it.
    """

    name = "all_reduce"

    def refuses_encoded(self, device: torch.device) -> str:
        return "it sends twice the bytes of the other transports; use 'flat' or 'all_to_all'"

    def all_gather(self, bucket: TransportedBucket, shard: torch.Tensor, unsharded: Views) -> Sequence[Work]:
        unsharded.flat.zero_()
        for piece, target in bucket.local_slices:
            unsharded.flat[target].copy_(shard[piece])
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
