"""One plain all-gather (reduce-scatter) per segment, straight into the interleaved buffer: no copy on either side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .base import Transport

if TYPE_CHECKING:
    from ..buffers import Bucket

__all__ = ["AllGatherTransport"]

# torch 2.13 renamed the two collectives and warns about the old names; before, only the old ones exist.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGatherTransport(Transport):
    """See [Note: Interleaved layout with row-aligned cuts]: usually a bucket is one segment, so one collective."""

    name = "all_gather"

    def all_gather(self, bucket: Bucket, unsharded: torch.Tensor) -> list[dist.Work]:
        world_size = bucket.spec.layout.world_size
        return [
            _all_gather(
                unsharded.narrow(0, s.unsharded_offset, world_size * s.shard_numel),
                bucket.shard.narrow(0, s.shard_offset, s.shard_numel),
                group=bucket.group.process_group,
                async_op=True,
            )
            for s in bucket.spec.layout.segments
            if s.shard_numel
        ]

    def reduce_scatter(self, bucket: Bucket, unsharded: torch.Tensor, shard: torch.Tensor) -> list[dist.Work]:
        world_size = bucket.spec.layout.world_size
        return [
            _reduce_scatter(
                shard.narrow(0, s.shard_offset, s.shard_numel),
                unsharded.narrow(0, s.unsharded_offset, world_size * s.shard_numel),
                op=dist.ReduceOp.AVG,  # the division by the world size is part of the collective
                group=bucket.group.process_group,
                async_op=True,
            )
            for s in bucket.spec.layout.segments
            if s.shard_numel
        ]

    def wire_bytes(self, bucket: Bucket) -> int:
        spec = bucket.spec
        return sum(s.shard_numel for s in spec.layout.segments) * (spec.layout.world_size - 1) * spec.dtype.itemsize
