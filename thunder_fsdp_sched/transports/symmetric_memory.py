"""Keep shards in symmetric memory, from which copy engines read peers' shards directly into the interleaved buffer.

No kernel runs for the transfer, so it takes no multiprocessors from compute (PyTorch's pull request 130583 calls that
low contention). It works within one node, on GPUs that can read each other's memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..layout import Layout
from .base import Traffic, TransportedBucket, Views, Work, behind
from .flat import Flat

if TYPE_CHECKING:
    from ..buckets import BucketSpec
    from ..groups import Group, Ranks

__all__ = ["SymmetricMemory"]

_BEFORE, _AFTER = 0, 1  # channels of a handle's barriers


class SymmetricMemory(Flat):
    """The transport over symmetric memory: gathers copy from each peer between two barriers.

    Reductions use torch's low-contention reduce-scatter.

    Args:
        memory: an object with ``empty`` and ``rendezvous``; the default is ``torch.distributed._symmetric_memory``.
        devices: the device types whose memory it can share.
    """

    name = "symmetric_memory"
    peers_read_shards = True

    def __init__(self, memory: ModuleType | Any = None, devices: Sequence[str] = ("cuda",)) -> None:
        self._memory = memory
        self._devices = devices
        # The shared memory by shard and process group. Keys are weak, so that all processes unmap a bucket's memory when
        # the bucket is freed.
        self._shared: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def memory(self) -> Any:
        if self._memory is None:
            import torch.distributed._symmetric_memory as symmetric_memory

            self._memory = symmetric_memory
        return self._memory

    def check(self, device: torch.device, dtypes: Sequence[torch.dtype], ranks: Ranks) -> None:
        if device.type not in self._devices:
            raise ValueError(
                f"transport={self.name!r} needs GPUs that can read each other's memory, but the parameters are on "
                f"{device.type!r}; use 'flat', or move the module to CUDA devices (device='cuda')"
            )
        if device.type == "cuda" and ranks.group.size > torch.cuda.device_count() and not _one_device_for_all():
            raise ValueError(
                f"transport={self.name!r} works within a node: the process group has {ranks.group.size} ranks, this node "
                f"shows {torch.cuda.device_count()} GPUs; shard inside nodes with a 2-D mesh, or use 'flat'"
            )
        super().check(device, dtypes, ranks)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> torch.Tensor:
        shard = self.memory.empty(numel, dtype=dtype, device=device).zero_()
        # A collective, at the same place on all ranks: memory of this transport is made in the order of the plan.
        self._rendezvous(shard, ranks.group)
        return shard

    def all_gather(self, bucket: TransportedBucket, shard: torch.Tensor, unsharded: Views) -> Sequence[Work]:
        shared = self._rendezvous(shard, bucket.ranks.group)
        pieces = shared.pieces(bucket.spec.layout)

        def pull() -> None:
            shared.handle.barrier(channel=_BEFORE)  # all ranks' optimizers have written their shards
            for offset, piece in pieces:
                unsharded.flat.narrow(0, offset, piece.numel()).copy_(piece)
            shared.handle.barrier(channel=_AFTER)  # now the shard may be written again

        return [behind(list, pull, (shard, unsharded.flat))]

    def reduce_scatter(self, bucket: TransportedBucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        layout = bucket.spec.layout
        name = bucket.ranks.reductions.process_group.group_name

        def reduce() -> None:
            for s in layout.segments:
                if s.shard_numel:
                    whole = unsharded.flat.narrow(0, s.unsharded_offset, layout.world_size * s.shard_numel)
                    own = torch.ops.symm_mem._low_contention_reduce_scatter(whole, "avg", name)
                    shard.narrow(0, s.shard_offset, s.shard_numel).copy_(torch.ops._c10d_functional.wait_tensor(own))

        return [behind(list, reduce, (shard, unsharded.flat))]

    def gather_traffic(self, spec: BucketSpec) -> Traffic:
        traffic = super().gather_traffic(spec)
        return traffic._replace(launches=traffic.launches * spec.layout.world_size)

    def reduce_traffic(self, spec: BucketSpec) -> Traffic:
        traffic = super().reduce_traffic(spec)
        own = 2 * spec.layout.shard_numel * spec.reduce_dtype.itemsize
        return traffic._replace(
            launches=traffic.launches * spec.layout.world_size, is_reduce_scatter=False, copied_after=own
        )

    def _rendezvous(self, shard: torch.Tensor, group: Group) -> _Shared:
        by_group = self._shared.get(shard)
        if by_group is None:
            by_group = self._shared[shard] = weakref.WeakKeyDictionary()
        process_group = group.process_group
        if process_group not in by_group:
            try:
                handle = self.memory.rendezvous(shard, group=process_group.group_name)
            except RuntimeError as error:
                raise ValueError(
                    f"transport={self.name!r}: rank {group.rank} cannot share memory with the other ranks of "
                    f"{group.description!r}: {error}"
                ) from error
            by_group[process_group] = _Shared(handle, shard, group)
        return by_group[process_group]


class _Shared:
    """A shard in memory that all ranks of a group can read."""

    def __init__(self, handle: Any, shard: torch.Tensor, group: Group) -> None:
        self.handle = handle
        self._dtype, self._rank, self._size = shard.dtype, group.rank, group.size
        self._layout: Layout | None = None
        self._pieces: list[tuple[int, torch.Tensor]] = []

    def pieces(self, layout: Layout) -> list[tuple[int, torch.Tensor]]:
        """Return the pieces of all ranks' shards, with their offsets in the unsharded buffer; the same list each time."""
        if self._layout is not layout:
            # At any time each rank reads from a different peer.
            peers = [(self._rank + distance) % self._size for distance in range(self._size)]
            self._pieces = [
                (
                    s.unsharded_offset + peer * s.shard_numel,
                    self.handle.get_buffer(peer, (s.shard_numel,), self._dtype, s.shard_offset),
                )
                for peer in peers
                for s in layout.segments
                if s.shard_numel
            ]
            self._layout = layout
        return self._pieces


def _one_device_for_all() -> bool:
    """Return whether several ranks may share a device, as in tests on one GPU."""
    import os

    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
