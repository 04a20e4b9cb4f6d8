"""Split every parameter evenly by rows, like FSDP2, and launch one collective per parameter as a group.

[Note: Coalesced all-gathers of gloo]
Two threads run the collectives of a gloo group. After each collective, a thread stores the name of its type in a string of
the group, without a lock (``ProcessGroupGloo::runLoop`` in torch 2.13). Short names stay inside of the string, but
``ALLGATHER_COALESCED`` needs memory from the heap. Two threads that finish at the same time free that memory twice, and the
process dies later, wherever it next allocates memory ("malloc(): unaligned tcache chunk detected"). So these all-gathers
are never issued with gloo. Its coalesced reduce-scatter is a number of all-reduces, whose name is short.
"""

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

    NCCL runs the whole group as one kernel. gloo cannot: it runs one collective after the other, and receives a call for
    each all-gather. Planning assumes NCCL.
    """

    name = "coalesced"
    per_param = True

    def all_gather(self, bucket: TransportedBucket, shard: torch.Tensor, unsharded: Views) -> Sequence[Work]:
        if not unsharded.segments:
            return []
        group = bucket.ranks.group
        if group.backend_for(bucket.spec.device) == "gloo":  # see [Note: Coalesced all-gathers of gloo]
            return super().all_gather(bucket, shard, unsharded)
        return [all_gather_coalesced(unsharded.segments, bucket.spec.layout.shard_segments(shard), group.process_group)]

    def reduce_scatter(self, bucket: TransportedBucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        if not unsharded.segments:
            return []
        owns, group = bucket.spec.layout.shard_segments(shard), bucket.ranks.reductions.process_group
        return [reduce_scatter_coalesced(owns, unsharded.segments, dist.ReduceOp.AVG, group)]

    def gather_traffic(self, spec: BucketSpec) -> Traffic:
        return super().gather_traffic(spec).in_one_launch()

    def reduce_traffic(self, spec: BucketSpec) -> Traffic:
        return super().reduce_traffic(spec).in_one_launch()
