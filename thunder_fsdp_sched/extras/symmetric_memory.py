"""Keep shards in symmetric memory, from which copy engines read peers' shards directly into the interleaved buffer.

No kernel runs for the transfer, so it takes no multiprocessors from compute (PyTorch's pull request 130583 calls that
low contention). It works within one node, on GPUs that can read each other's memory.

[Note: One symmetric allocation for many shards]
An allocation of symmetric memory costs a rendezvous of all ranks and at least 2 MiB; torch's pool takes 20 MiB for one
between 1 and 10 MiB, as it does not split its segments. So the shards of all buckets over the same ranks are views of one
allocation. Peers' pieces are read at offsets from its beginning, so it has to begin where torch's handle begins, which
is checked. Its two barriers share one signal pad: they are all issued on one side stream, where none overtakes another.

[Note: The workspace of reductions]
Reductions go through a workspace that torch keeps for each process group. For a larger reduction torch replaces it and
frees the old one at once, while other ranks may still read it. So the workspace of the largest bucket is reserved when
buckets are created, once all ranks have finished using an earlier one.

[Note: Processes that see one GPU each]
torch compares the devices of ranks by their index, which is 0 on each rank if ``CUDA_VISIBLE_DEVICES`` shows it one GPU. So
ranks that see fewer GPUs than there are ranks compare hosts and unique ids, and tell torch not to compare indices if all
are on one host and no two share a GPU.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import coded_error
from ..plan.layout import Layout, round_up
from ..plan.specs import BucketSpec
from ..private_distributed import timeout_of
from ..ranks.new_groups import ARRIVAL_TIMEOUT
from ..ranks.process_groups import BucketRanks, ProcessGroupRef
from ..ranks.store_texts import exchange_texts
from ..transports.base import Traffic, Transport, TransportedBucket, Views, Work, segment_bytes
from ..transports.flat import Flat, pairs
from ..transports.works import issue_then

_BEFORE, _AFTER = 0, 1  # channels of a handle's barriers

_SHARES_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""The environment variable with which torch does not compare the devices of ranks."""

_ALIGNMENT = 512  # bytes to which each shard's offset in an allocation is aligned


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
        # The location of each shard in shared memory. Keys are weak, so that all processes unmap an allocation when its
        # buckets are freed.
        self._shared: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def memory(self) -> Any:
        if self._memory is None:
            import torch.distributed._symmetric_memory as symmetric_memory

            self._memory = symmetric_memory
        return self._memory

    def check(self, device: torch.device, dtypes: Sequence[torch.dtype], ranks: BucketRanks) -> None:
        if device.type not in self._devices:
            raise coded_error(ValueError, "transport.needs-gpu-parameters", name=self.name, device=device.type)
        sees_all = device.type != "cuda" or ranks.group.size <= torch.cuda.device_count()
        if not sees_all and os.environ.get(_SHARES_DEVICES) != "1":  # as in tests on one GPU
            self._compare_devices(device, ranks.group)
            os.environ[_SHARES_DEVICES] = "1"
        super().check(device, dtypes, ranks)

    def _compare_devices(self, device: torch.device, group: ProcessGroupRef) -> None:
        """Compare the devices of ranks; a collective of O(1) messages a rank, at most once in a process.

        Raises:
            ValueError: ranks are on several hosts, or share a GPU.
        """
        if group.is_fake:
            raise coded_error(ValueError, "transport.node-cannot-be-checked", name=self.name)
        own = f"{socket.gethostname()} {getattr(torch.cuda.get_device_properties(device), 'uuid', device.index)}"
        store, patience = group.process_group.get_group_store(), timeout_of(group.process_group)
        prefix = f"thunder_fsdp_sched/devices/{group.name}"
        texts = exchange_texts(store, prefix, group.global_ranks, own, min(patience, ARRIVAL_TIMEOUT))
        if missing := [rank for rank in group.global_ranks if rank not in texts]:
            raise coded_error(ValueError, "transport.ranks-without-gpu-comparison", name=self.name, ranks=missing)
        if len(hosts := sorted({text.partition(" ")[0] for text in texts.values()})) > 1:
            raise coded_error(ValueError, "transport.ranks-on-several-hosts", name=self.name, hosts=", ".join(hosts))
        if shared := [rank for rank, text in texts.items() if list(texts.values()).count(text) > 1]:
            raise coded_error(
                ValueError, "transport.ranks-share-gpu", name=self.name, ranks=shared, variable=_SHARES_DEVICES
            )

    def allocate_together(
        self, sizes: Sequence[tuple[int, torch.dtype]], device: torch.device, ranks: BucketRanks, *, workspace: int
    ) -> list[torch.Tensor]:
        """Allocate shards together, a collective; see [Note: One symmetric allocation for many shards]."""
        if workspace:
            self._reserve_workspace(workspace, device, ranks.reductions.process_group)
        offsets = [0]
        for numel, dtype in sizes:
            offsets.append(offsets[-1] + round_up(numel * dtype.itemsize, _ALIGNMENT))
        memory = self.memory.empty(max(offsets[-1], _ALIGNMENT), dtype=torch.uint8, device=device).zero_()
        handle = self._rendezvous(memory, ranks.group)
        shards = []
        for offset, (numel, dtype) in zip(offsets, sizes, strict=False):
            # `.data` has a version of its own: a write to one shard is no change of the others.
            shard = memory[offset : offset + numel * dtype.itemsize].view(dtype).data
            self._shared[shard] = _ReadableShard(handle, ranks.group, offset // dtype.itemsize, dtype)
            shards.append(shard)
        return shards

    def _reserve_workspace(self, nbytes: int, device: torch.device, group: ProcessGroup) -> None:
        """Reserve the workspace of reductions; see [Note: The workspace of reductions]."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        group.barrier().wait()
        self.memory.get_symm_mem_workspace(group.group_name, nbytes)

    def _rendezvous(self, memory: torch.Tensor, group: ProcessGroupRef) -> Any:
        """Return the handle for barriers and peers' memory; a collective.

        Raises:
            ValueError: memory cannot be shared with the other ranks.
        """
        try:
            handle = self.memory.rendezvous(memory, group=group.process_group.group_name)
        except RuntimeError as error:
            raise coded_error(
                ValueError,
                "transport.memory-cannot-be-shared",
                name=self.name,
                rank=group.rank,
                group=group.description,
                error=error,
            ) from error
        if offset := getattr(handle, "offset", 0):
            raise coded_error(ValueError, "transport.shards-inside-torch-pool", name=self.name, offset=offset)
        return handle

    def all_gather(self, bucket: TransportedBucket, shard: torch.Tensor, unsharded: Views) -> Sequence[Work]:
        handle, pieces = self._shared[shard].read_by(bucket.ranks.group, bucket.spec.layout)

        def pull() -> None:
            handle.barrier(channel=_BEFORE)  # all ranks' optimizers have written their shards
            for offset, piece in pieces:
                unsharded.flat.narrow(0, offset, piece.numel()).copy_(piece)
            handle.barrier(channel=_AFTER)  # now the shard may be written again

        return [issue_then(list, pull, (shard, unsharded.flat))]

    def reduce_scatter(self, bucket: TransportedBucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        name = bucket.ranks.reductions.process_group.group_name

        def reduce() -> None:
            for whole, own in pairs(bucket, unsharded, shard):
                reduced = torch.ops.symm_mem._low_contention_reduce_scatter(whole, "avg", name)
                own.copy_(torch.ops._c10d_functional.wait_tensor(reduced))

        return [issue_then(list, reduce, (shard, unsharded.flat))]

    def gather_traffic(self, spec: BucketSpec) -> Traffic:
        traffic = super().gather_traffic(spec)
        return traffic._replace(launches=traffic.launches * spec.layout.world_size)

    def reduce_traffic(self, spec: BucketSpec) -> Traffic:
        traffic = super().reduce_traffic(spec)
        own = 2 * spec.layout.shard_numel * spec.reduce_dtype.itemsize
        return traffic._replace(
            launches=traffic.launches * spec.layout.world_size, is_reduce_scatter=False, copied_after=own
        )

    def reduce_workspace(self, spec: BucketSpec) -> int:
        """Return the bytes of gradients: torch's ``_low_contention_reduce_scatter`` copies them to symmetric memory."""
        return max(segment_bytes(spec, spec.reduce_dtype), default=0)

    def reduce_temporary(self, spec: BucketSpec) -> int:
        return max((s.shard_numel for s in spec.layout.segments), default=0) * spec.reduce_dtype.itemsize


class _ReadableShard:
    """A shard that all ranks of its bucket can read, as a part of an allocation. It does not keep their group alive."""

    def __init__(self, handle: Any, group: ProcessGroupRef, offset: int, dtype: torch.dtype) -> None:
        self._offset, self._dtype = offset, dtype
        self._read: weakref.WeakKeyDictionary[ProcessGroup, tuple[Any, list[tuple[int, torch.Tensor]]]]
        self._read = weakref.WeakKeyDictionary({group.process_group: (handle, [])})

    def read_by(self, group: ProcessGroupRef, layout: Layout) -> tuple[Any, list[tuple[int, torch.Tensor]]]:
        """Return the handle and the pieces of all ranks' shards, with their offsets in the unsharded buffer.

        Torch makes a tensor for each; they are made once.
        """
        handle, pieces = self._read[group.process_group]
        if not pieces:
            # At any time each rank reads from a different peer.
            peers = [(group.rank + distance) % group.size for distance in range(group.size)]
            pieces += [
                (
                    s.unsharded_offset + peer * s.shard_numel,
                    handle.get_buffer(peer, (s.shard_numel,), self._dtype, self._offset + s.shard_offset),
                )
                for peer in peers
                for s in layout.segments
                if s.shard_numel
            ]
        return handle, pieces


class PeerMemory:
    """The memory that peers read, from which buckets with the same transport, device and ranks send.

    Each allocation is a collective. The first bucket that takes its memory allocates that of all buckets announced so
    far, in the order of their names, because ranks that differ announce the buckets of their own traces first. All
    ranks have announced the same buckets by then: those of the plan, later those of their traces, merged ones included.
    """

    def __init__(self, transport: Transport, device: torch.device, ranks: BucketRanks) -> None:
        self._transport, self._device, self._ranks = transport, device, ranks
        self._announced: dict[str, tuple[int, torch.dtype]] = {}
        self._workspace = 0
        self._allocated: dict[str, torch.Tensor] = {}

    def announce(self, bucket: str, numel: int, dtype: torch.dtype, workspace: int) -> None:
        """Announce that ``bucket`` will take memory for ``numel`` elements, and that its reductions need a workspace."""
        self._announced[bucket] = numel, dtype
        self._workspace = max(self._workspace, workspace)

    def take(self, bucket: str) -> torch.Tensor:
        """Return the memory of ``bucket``, filled with zeros; only once."""
        if bucket not in self._allocated:
            sizes, self._announced = dict(sorted(self._announced.items())), {}
            shards = self._transport.allocate_together(
                list(sizes.values()), self._device, self._ranks, workspace=self._workspace
            )
            self._allocated.update(zip(sizes, shards, strict=True))
        return self._allocated.pop(bucket)
