"""Gathers as ``flat``; reductions as one exchange of pieces, which every rank then adds up itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .base import Traffic, TransportedBucket, Views, Work, behind, issue_each, segment_bytes
from .flat import Flat, pairs

if TYPE_CHECKING:
    from ..buckets import BucketSpec

__all__ = ["AllToAll"]


class AllToAll(Flat):
    """For backends whose reduce-scatter sends more than it has to.

    gloo does a reduce-scatter as an all-reduce, which sends every byte twice. Here each rank sends every other rank its
    piece, ``(W - 1) / W`` of the bucket, and adds up what it received: at the wait, or on a GPU on a side stream. (A
    callback that gloo's thread runs, and has to destroy, may need the interpreter after that has begun to shut down, which
    aborts the process.) Ranks are added in their order, so a result does not depend on where in the bucket a gradient lies.
    What is received needs as much memory as the bucket, which is used again: for as many buckets as are in flight at once.
    It belongs to the model's arena and is freed with it.
    """

    name = "all_to_all"

    def reduce_scatter(self, bucket: TransportedBucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        return issue_each(partial(self._reduce, bucket, whole, own) for whole, own in pairs(bucket, unsharded, shard))

    def reduce_traffic(self, spec: BucketSpec) -> Traffic:
        messages = segment_bytes(spec, spec.reduce_dtype)
        added = spec.grad_bytes + spec.layout.shard_numel * spec.reduce_dtype.itemsize
        return Traffic(messages, len(messages), copied_after=added)

    def _reduce(self, bucket: TransportedBucket, whole: torch.Tensor, own: torch.Tensor) -> Work:
        world_size = bucket.spec.layout.world_size
        group = bucket.ranks.reductions.process_group
        free = bucket.scratch[whole.dtype, whole.numel()]
        received = free.pop() if free else torch.empty_like(whole)

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
            return [dist.all_to_all_single(received, whole, group=group, async_op=True)]

        work = behind(exchange, add_up, (whole, received, own))
        return _Returning(work, received, free)


class _Returning:
    """Hands its buffer back once it is dropped after a wait; never while the exchange may still write it."""

    def __init__(self, work: Work, buffer: torch.Tensor, free: list[torch.Tensor]) -> None:
        self._work, self._buffer, self._free = work, buffer, free
        self._done = False

    def wait(self) -> None:
        self._work.wait()
        self._done = True

    def __del__(self) -> None:
        if self._done:
            self._free.append(self._buffer)
