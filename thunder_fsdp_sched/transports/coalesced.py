"""Split every parameter evenly by rows, like FSDP2, and launch one collective per parameter as a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..plan.specs import BucketSpec
from ..private_distributed import all_gather_coalesced, reduce_scatter_coalesced
from .base import Traffic, TransportedBucket, Views, Work
from .flat import Flat


class Coalesced(Flat):
    """The transport that gathers each parameter directly into its contiguous range, without copies on either side.

    NCCL runs the whole group as one kernel. gloo cannot: it receives one call, and runs one collective after the other.
    """

    name = "coalesced"
    per_param = True

    def all_gather(self, bucket: TransportedBucket, shard: torch.Tensor, unsharded: Views) -> Sequence[Work]:
        if not unsharded.segments:
            return []
        owns, group = bucket.spec.layout.shard_segments(shard), bucket.ranks.group.process_group
        return [all_gather_coalesced(unsharded.segments, owns, group)]

    def reduce_scatter(self, bucket: TransportedBucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        if not unsharded.segments:
            return []
        owns, group = bucket.spec.layout.shard_segments(shard), bucket.ranks.reductions.process_group
        return [reduce_scatter_coalesced(owns, unsharded.segments, dist.ReduceOp.AVG, group)]

    def gather_traffic(self, spec: BucketSpec) -> Traffic:
        return super().gather_traffic(spec).in_one_launch()

    def reduce_traffic(self, spec: BucketSpec) -> Traffic:
        return super().reduce_traffic(spec).in_one_launch()
