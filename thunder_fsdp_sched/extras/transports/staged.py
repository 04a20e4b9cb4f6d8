"""The baseline for measurements: a plain all-gather in rank order, then one fused copy to the interleaved order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...plan.specs import BucketSpec
from ...transports.base import Traffic, Transport, TransportedBucket, Views, Work, issue_then
from ...transports.flat import all_gather_flat, reduce_scatter_flat


class Staged(Transport):
    """The transport that works like FSDP2: one collective per bucket, and one more copy of every byte.

    On a GPU the copy after a gather runs on a side stream; the copy before a reduction must follow the last gradient.
    """

    name = "staged"
    per_param = True
    staging = True

    def all_gather(self, bucket: TransportedBucket, shard: torch.Tensor, unsharded: Views) -> Sequence[Work]:
        staging = unsharded.staging
        assert staging is not None
        sizes, pieces = self._pieces(bucket, unsharded)
        if not sizes:
            return []

        def issue() -> Sequence[Work]:
            return [all_gather_flat(staging, shard, group=bucket.ranks.group.process_group, async_op=True)]

        def interleave() -> None:
            by_rank = staging.view(bucket.spec.layout.world_size, -1)
            torch.split_with_sizes_copy(by_rank, sizes, dim=1, out=pieces)

        return [issue_then(issue, interleave, (shard, staging, unsharded.flat))]

    def reduce_scatter(self, bucket: TransportedBucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        assert unsharded.staging is not None
        sizes, pieces = self._pieces(bucket, unsharded)
        if not sizes:
            return []
        torch.cat(pieces, dim=1, out=unsharded.staging.view(bucket.spec.layout.world_size, -1))
        return [
            reduce_scatter_flat(
                shard,
                unsharded.staging,
                op=dist.ReduceOp.AVG,
                group=bucket.ranks.reductions.process_group,
                async_op=True,
            )
        ]

    @staticmethod
    def _pieces(bucket: TransportedBucket, unsharded: Views) -> tuple[list[int], list[torch.Tensor]]:
        """Return the number of elements of each parameter that a rank sends, and the parameter as one row per rank."""
        pieces = [segment.view(bucket.spec.layout.world_size, -1) for segment in unsharded.segments]
        return [place.shape[1] for place in pieces], pieces

    def gather_traffic(self, spec: BucketSpec) -> Traffic:
        return super().gather_traffic(spec).in_one_launch()._replace(copied_after=2 * spec.unsharded_bytes)

    def reduce_traffic(self, spec: BucketSpec) -> Traffic:
        return super().reduce_traffic(spec).in_one_launch()._replace(copied_before=2 * spec.grad_bytes)
