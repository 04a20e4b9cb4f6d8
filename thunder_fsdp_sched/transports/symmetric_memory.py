"""Shards in symmetric memory, from which copy engines pull peers' pieces straight into the interleaved buffer.

The pieces travel without a kernel that takes multiprocessors from compute (PyTorch's pull request 130583 names it low
contention). Within one node, on GPUs that can read each other's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .base import Work, behind
from .flat import Flat

if TYPE_CHECKING:
    from ..buckets import BucketSpec
    from ..buffers import Bucket, Views
    from ..groups import Group, Ranks

__all__ = ["SymmetricMemory"]

_BEFORE, _AFTER = 0, 1  # channels of a handle's barriers


class SymmetricMemory(Flat):
    """All-gather: a barrier, one copy from each peer, a barrier. Reduce-scatter: torch's low-contention operation.

    Args:
        memory: has ``empty`` and ``rendezvous``; default is ``torch.distributed._symmetric_memory``.
        devices: types of device whose memory it can share.
    """

    name = "symmetric_memory"
    peers_read_shards = True

    def __init__(self, memory: ModuleType | Any = None, devices: Sequence[str] = ("cuda",)) -> None:
        self._memory = memory
        self._devices = devices
        # Of each tensor for as long as it lives, by the name of the group.
        self._handles: WeakIdKeyDictionary = WeakIdKeyDictionary()

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

    def all_gather(self, bucket: Bucket, shard: torch.Tensor, unsharded: Views) -> Sequence[Work]:
        layout, group = bucket.spec.layout, bucket.ranks.group
        handle = self._rendezvous(shard, group)
        segments = [s for s in layout.segments if s.shard_numel]

        def pull() -> None:
            handle.barrier(channel=_BEFORE)  # everybody's optimizer has written its shard
            for distance in range(group.size):  # each rank reads another peer at a time
                peer = (group.rank + distance) % group.size
                for s in segments:
                    place = unsharded.flat.narrow(0, s.unsharded_offset + peer * s.shard_numel, s.shard_numel)
                    place.copy_(handle.get_buffer(peer, (s.shard_numel,), shard.dtype, s.shard_offset))
            handle.barrier(channel=_AFTER)  # from here on the shard may be written again

        return [behind(list, pull, shard.device)]

    def reduce_scatter(self, bucket: Bucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        layout = bucket.spec.layout
        name = bucket.ranks.reductions.process_group.group_name

        def reduce() -> None:
            for s in layout.segments:
                if s.shard_numel:
                    whole = unsharded.flat.narrow(0, s.unsharded_offset, layout.world_size * s.shard_numel)
                    own = torch.ops.symm_mem._low_contention_reduce_scatter(whole, "avg", name)
                    shard.narrow(0, s.shard_offset, s.shard_numel).copy_(torch.ops._c10d_functional.wait_tensor(own))

        return [behind(list, reduce, shard.device)]

    def launches(self, spec: BucketSpec) -> int:
        return super().launches(spec) * spec.layout.world_size

    def _rendezvous(self, shard: torch.Tensor, group: Group) -> Any:
        handles = self._handles.setdefault(shard, {})
        name = group.process_group.group_name
        if name not in handles:
            try:
                handles[name] = self.memory.rendezvous(shard, group=name)
            except RuntimeError as error:
                raise ValueError(
                    f"transport={self.name!r}: rank {group.rank} cannot share memory with the other ranks of "
                    f"{group.description!r}: {error}"
                ) from error
        return handles[name]


def _one_device_for_all() -> bool:
    """Whether several ranks may share a device, as tests on one GPU do."""
    import os

    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
