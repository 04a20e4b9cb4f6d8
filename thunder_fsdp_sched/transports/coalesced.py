"""Every parameter cut evenly by rows, as FSDP2 does: one launch of a group of collectives, one for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from .base import Work
from .flat import Flat, all_gather_flat, pieces, reduce_scatter_flat

if TYPE_CHECKING:
    from ..buckets import BucketSpec
    from ..buffers import Bucket, Views

__all__ = ["Coalesced"]


class Coalesced(Flat):
    """Gathers each parameter straight into its contiguous place, so nothing is copied on either side.

    NCCL runs the whole group as one kernel. gloo has no such thing on the wire: it gets one call and runs one collective
    after the other.
    """

    name = "coalesced"
    per_param = True

    def all_gather(self, bucket: Bucket, shard: torch.Tensor, unsharded: Views) -> Sequence[Work]:
        group = bucket.ranks.group.process_group
        return _as_one(
            group,
            [partial(all_gather_flat, whole, own, group=group) for whole, own in pieces(bucket, unsharded.flat, shard)],
        )

    def reduce_scatter(self, bucket: Bucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        group = bucket.ranks.reductions.process_group
        return _as_one(
            group,
            [
                partial(reduce_scatter_flat, own, whole, op=dist.ReduceOp.AVG, group=group)
                for whole, own in pieces(bucket, unsharded.flat, shard)
            ],
        )

    def launches(self, spec: BucketSpec) -> int:
        return min(1, super().launches(spec))


def _as_one(group: dist.ProcessGroup, calls: Sequence[Callable[[], object]]) -> Sequence[Work]:
    if not calls:
        return []
    with _coalescing_manager(group, async_ops=True) as manager:
        for call in calls:
            call()
    return [manager]
