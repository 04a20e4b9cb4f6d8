"""Symmetric memory: tensors that other ranks read and write directly, and barriers and signals between ranks."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from .mode import Recording


class SymmetricMemory:
    """A stand-in for ``torch.distributed._symmetric_memory`` and the class ``_SymmetricMemory`` in it."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._allocated: dict[int, str] = {}  # by storage: the group that was named in the allocation, or ""
        self._handles: dict[tuple[int, str], Handle] = {}
        self._numbers: defaultdict[str, int] = defaultdict(int)

    def empty(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        self._allocated[self.recording.memory.of(tensor).number] = ""
        return tensor

    def empty_strided_p2p(
        self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device, group_name: str = "", *rest: Any
    ) -> torch.Tensor:
        tensor = self.empty(tuple(size), dtype=dtype, device=device)
        self._allocated[self.recording.memory.of(tensor).number] = group_name or ""
        return tensor

    def rendezvous(self, tensor: torch.Tensor, group: Any = None, **named: Any) -> Handle | None:
        """Return the handle of memory that was allocated here, or ``None``. Each rank makes the same calls."""
        group = named.get("group_name", group)
        number = self.recording.memory.of(tensor).number
        if number not in self._allocated:
            return None
        name = group if isinstance(group, str) else getattr(group, "group_name", None)
        name = name or self._allocated[number] or dist.group.WORLD.group_name
        if (number, name) not in self._handles:
            process_group = dist.distributed_c10d._resolve_process_group(name)
            handle = Handle(self.recording, process_group, self._numbers[name], tensor)
            self._numbers[name] += 1
            self.recording.log.shared[handle.name, handle.number] = number
            self._handles[number, name] = handle
        return self._handles[number, name]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace torch's symmetric memory within the context."""
        recording, works = self.recording, self.recording.works

        def register(tensor: torch.Tensor, work: Any) -> None:
            works[recording.memory.of(tensor).number] = work

        with contextlib.ExitStack() as stack:
            for where, name, value in (
                (symmetric_memory, "empty", self.empty),
                (symmetric_memory, "rendezvous", self.rendezvous),
                (symmetric_memory, "_SymmetricMemory", self),
                (symmetric_memory, "_backend_streams", {}),
                (symmetric_memory, "_group_name_to_workspace_tensor", {}),
                (torch._C._distributed_c10d, "_register_work", register),
            ):
                stack.enter_context(mock.patch.object(where, name, value))
            yield


class Handle:
    """A stand-in for the handle that a rendezvous returns."""

    def __init__(self, recording: Recording, group: Any, number: int, tensor: torch.Tensor) -> None:
        self.recording = recording
        self.name = group._name
        self.number = number
        self.rank, self.world_size = group.rank(), group.size()
        self._members = recording.log.members[self.name]
        self._own = tensor
        self._buffers: dict[int, torch.Tensor] = {}

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """Return a tensor in the memory of a rank of the group. As in torch, it is on this rank's device."""
        if rank == self.rank:
            base = self._own
        else:
            if rank not in self._buffers:
                buffer = torch.empty_like(self._own)
                known = self.recording.memory.of(buffer)
                self.recording.log.remote[known.number] = (self.name, self.number, rank)
                self._buffers[rank] = buffer
            base = self._buffers[rank]
        typed = base.view(torch.uint8).view(dtype)
        strides = [1] * len(sizes)
        for i in range(len(sizes) - 2, -1, -1):
            strides[i] = strides[i + 1] * sizes[i + 1]
        return typed.as_strided(tuple(sizes), strides, storage_offset)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        meets = {"group": self.name, "signature": ("barrier", channel)}
        self.recording.log.add("barrier", f"barrier {channel}", self._stream(), **meets)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        self._signal("put", dst_rank, channel)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        self._signal("take", src_rank, channel)

    def _signal(self, kind: str, peer: int, channel: int) -> None:
        ends = {"group": self.name, "peer": self._members[peer], "signature": (self.number, channel)}
        self.recording.log.add(kind, f"signal {channel}", self._stream(), **ends)

    def _stream(self) -> Any:
        # Kernels of symmetric memory run on the current stream of the memory's device.
        return self.recording.cuda.key(self._own.device)
