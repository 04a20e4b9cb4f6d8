"""Gathers as ``flat``; reductions as one exchange of pieces, which every rank then adds up itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .base import Work, behind
from .flat import Flat, pieces

if TYPE_CHECKING:
    from ..buffers import Bucket, Views

__all__ = ["AllToAll"]


class AllToAll(Flat):
    """For backends whose reduce-scatter sends more than it has to.

    gloo does a reduce-scatter as an all-reduce, which sends every byte twice. Here each rank sends every other rank its
    piece, ``(W - 1) / W`` of the bucket, and adds up what it received: gloo's thread does, or on a GPU a side stream.
    Ranks are added in their order, so a result does not depend on where in the bucket a gradient lies. What is received
    needs as much memory as the bucket, which is used again: for as many buckets as are in flight at once.
    """

    name = "all_to_all"
    adds_up_itself = True

    def __init__(self) -> None:
        # Of no bucket at the moment, by process group, dtype and number of elements.
        self._free: dict[tuple[dist.ProcessGroup, torch.dtype, int], list[torch.Tensor]] = defaultdict(list)

    def reduce_scatter(self, bucket: Bucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        return [self._reduce(bucket, whole, own) for whole, own in pieces(bucket, unsharded.flat, shard)]

    def _reduce(self, bucket: Bucket, whole: torch.Tensor, own: torch.Tensor) -> Work:
        group = bucket.ranks.reductions.process_group
        free = self._free[group, whole.dtype, whole.numel()]
        received = free.pop() if free else torch.empty_like(whole)

        def add_up() -> None:
            first, second, *others = received.view(bucket.spec.layout.world_size, -1).unbind()
            torch.add(first, second, out=own)
            for other in others:
                own.add_(other)
            own.div_(bucket.spec.layout.world_size)
            free.append(received)

        exchange = partial(dist.all_to_all_single, received, whole, group=group, async_op=True)
        if whole.device.type == "cuda":
            return behind(lambda: [exchange()], add_up, whole.device)

        def when_done(exchanged: torch.futures.Future[Any]) -> None:
            exchanged.value()  # raises what went wrong
            add_up()

        return exchange().get_future().then(when_done)
