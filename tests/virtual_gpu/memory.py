"""The storages of tensors, and when they are allocated and freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .log import HOST, Access, Log, Stream, region_of

_ADDRESSES = 1 << 40


@dataclass
class _Storage:
    number: int
    reference: StorageWeakRef
    address: int
    stream: Stream
    pinned: bool = False


class Memory:
    """The storages that are alive on one rank.

    A weak reference prevents the reuse of a storage's address, which therefore identifies the storage until it is freed.
    """

    def __init__(self, log: Log, stream_of: Any) -> None:
        self._log = log
        self._stream_of = stream_of
        self._storages: dict[int, _Storage] = {}
        self._numbers = 0
        self._end = _ADDRESSES * (1 + log.rank)

    def of(self, tensor: torch.Tensor) -> _Storage:
        """Return the storage of ``tensor``. A new one counts as allocated on the current stream."""
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        return known if known is not None else self._new(storage, tensor)

    def _new(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> _Storage:
        self._numbers += 1
        device = tensor.device
        stream = self._stream_of(device.index) if device.type == "cuda" else HOST
        known = _Storage(self._numbers, StorageWeakRef(storage), self._end, stream)
        self._end += -(-max(storage.nbytes(), 1) // 512) * 512
        self._storages[storage._cdata] = known
        if device.type != "meta":
            what = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            self._log.names[known.number] = f"{device} memory {self._numbers} ({what})"
            self._log.add("alloc", what, stream, storage=known.number)
        return known

    def access(self, tensor: torch.Tensor, write: bool) -> Access:
        """Return the bytes of ``tensor``."""
        region = region_of(tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()), tensor.element_size())
        return Access(self.of(tensor).number, region, write)

    def address_of(self, tensor: torch.Tensor) -> int:
        """Return an invented address, for ``data_ptr``."""
        if tensor.numel() == 0:
            return 0
        return self.of(tensor).address + tensor.storage_offset() * tensor.element_size()

    def address_of_storage(self, storage: torch.UntypedStorage) -> int:
        known = self._storages.get(storage._cdata)
        return known.address if known is not None else 0

    def pin(self, tensor: torch.Tensor) -> None:
        """Note that the memory of a CPU tensor is pinned."""
        self.of(tensor).pinned = True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and self.of(tensor).pinned

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Log that the allocator must not reuse the memory before the present work of ``stream`` has finished."""
        self._log.add("record_stream", "record_stream", stream, storage=self.of(tensor).number)

    def collect(self) -> None:
        """Log the storages that have been freed."""
        expired = torch.UntypedStorage._expired
        dead = [cdata for cdata in self._storages if expired(cdata)]
        for cdata in dead:
            known = self._storages.pop(cdata)
            self._log.add("free", "", known.stream, storage=known.number)


def is_fake(value: object) -> bool:
    """Return whether ``value`` is a tensor that the virtual GPU knows."""
    return isinstance(value, FakeTensor)
