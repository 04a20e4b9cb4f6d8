"""Gather like ``flat``; reduce with one exchange of pieces, which every rank then sums locally."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..plan.specs import BucketSpec
from ..private_distributed import all_to_all
from .base import (
    Buffer,
    Traffic,
    TransportedBucket,
    Views,
    Work,
    issue_each,
    segment_bytes,
)
from .flat import Flat, pairs
from .works import issue_then, returning, take_idle


class AllToAll(Flat):
    """The transport for backends whose reduce-scatter sends more than necessary.

    gloo implements a reduce-scatter as an all-reduce, which sends every byte twice. Here each rank sends every other
    rank its piece, ``(W - 1) / W`` of the bucket in total, and sums the pieces that it received: at the wait, or on a
    GPU on a side stream. (A callback on gloo's thread is no option: destroying it may need the interpreter while that
    is shutting down, which aborts the process.) Pieces are summed in the order of ranks, so a result does not depend on
    a gradient's position in the bucket. The received pieces need as much memory as the bucket: one buffer for each
    bucket in flight. The buffers are reused, belong to the model's arena, and are freed with it.
    """

    name = "all_to_all"

    def reduce_scatter(self, bucket: TransportedBucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        return issue_each(partial(self._reduce, bucket, whole, own) for whole, own in pairs(bucket, unsharded, shard))

    def reduce_traffic(self, spec: BucketSpec) -> Traffic:
        added = spec.grad_bytes + spec.layout.shard_numel * spec.reduce_dtype.itemsize
        return super().reduce_traffic(spec)._replace(is_reduce_scatter=False, copied_after=added)

    def reduce_buffers(self, spec: BucketSpec) -> tuple[Buffer, ...]:
        return tuple(Buffer(spec.reduce_dtype, nbytes) for nbytes in segment_bytes(spec, spec.reduce_dtype))

    def _reduce(self, bucket: TransportedBucket, whole: torch.Tensor, own: torch.Tensor) -> Work:
        world_size = bucket.spec.layout.world_size
        group = bucket.ranks.reductions.process_group
        received = take_idle(bucket.scratch, whole.numel(), whole.dtype, whole.device)

        def add_up() -> None:
            first, *others = received.view(world_size, -1).unbind()
            if others:
                torch.add(first, others[0], out=own)
                for other in others[1:]:
                    own.add_(other)
                own.div_(world_size)
            else:
                own.copy_(first)

        def exchange() -> Sequence[Work]:
            return [all_to_all(received, whole, group)]

        work = issue_then(exchange, add_up, (whole, received, own))
        return returning(work, bucket.scratch, received)
