"""Copies of a state dict in host memory, from which it is written while training goes on.

[Note: Staging]
Host memory is allocated at the first save that needs it, and used again by later ones. It is a file in memory without a
name (on Linux), which the writer process maps, too, and is pinned if tensors are on a GPU. Each tensor is copied once,
without the rest of its storage.

Copies are issued in the calling thread and on the current stream. So on a GPU, every later write to a tensor runs after
its copy, be it by a step of an optimizer, a forward that updates buffers, or a kernel that this package does not see;
the host does not wait. On a CPU, a thread would compete with forward for the same cores and memory bandwidth. Either
way a step is delayed by one copy of the state. A side stream could hide it, but then each of these writers would have
to wait for it.

The stagers of torch.distributed.checkpoint copy whole storages, which for rows are those of buckets with their padding
(``DefaultStager``), or allocate memory in each save (``BlockingAsyncStager``, whose cache needs an accelerator).
"""

from __future__ import annotations

import copy
import itertools
import mmap
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ...plan.layout import round_up
from ...process_state import reset_after_fork
from ...runtime.row_dtensor import RowDTensor, local_rows
from .writer_process import WriterProcess, tensor_at

_ALIGNMENT = 64
"""Bytes to which the offsets of copies are rounded up."""


class HostMemory:
    """Host memory for the copies of one save at a time; see [Note: Staging]."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._file = -1
        self._is_pinned = False
        self._writer: WriterProcess | None = None

    def reserve(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return at least ``nbytes`` bytes: the memory of the last save if it suffices."""
        if nbytes <= self.memory.nbytes and pinned <= self._is_pinned:
            return self.memory
        if self._writer is not None:
            self._writer.stop()
        if self._is_pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr()))
        if self._file >= 0:
            os.close(self._file)
        HostMemory.__init__(self)  # free the memory before allocating more
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("thunder_fsdp_sched")
            os.ftruncate(self._file, nbytes)
        self.memory = torch.frombuffer(mmap.mmap(self._file, nbytes), dtype=torch.uint8)
        if pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), nbytes, 0))
            self._is_pinned = True
        return self.memory

    def writer(self) -> WriterProcess | None:
        """Return the process that writes from this memory (on Linux only); start it unless it is running."""
        if self._file < 0:
            return None
        if self._writer is None or self._writer.process.poll() is not None:
            self._writer = WriterProcess(self._file, self.memory)
        return self._writer

    def forget(self) -> None:
        """Start anew in a forked process: memory and writer belong to the parent, and hold its copies."""
        if self._writer is not None:
            self._writer.forget()
        if self._file >= 0:
            os.close(self._file)
        HostMemory.__init__(self)


host_memory = HostMemory()
"""The host memory of this process, which has at most one save in flight."""

reset_after_fork(host_memory.forget)


class Staging:
    """A state dict to be copied; creating it reserves :data:`host_memory` for its tensors.

    Raises:
        RuntimeError: there is not enough memory.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        leaves = (leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor) and _is_staged(leaf))
        self._tensors = [(leaf, local_rows(leaf)) for leaf in leaves]
        originals = {_key(local): local for _, local in self._tensors}  # tied parameters have several entries
        self._devices = {local.device for local in originals.values() if local.is_cuda}
        sizes = (round_up(local.nbytes, _ALIGNMENT) for local in originals.values())
        begins = list(itertools.accumulate(sizes, initial=0))
        memory = host_memory.reserve(max(begins[-1], 1), pinned=bool(self._devices))
        self._copies = {
            key: (tensor_at(memory, begin, local.dtype, local.shape), local)
            for begin, (key, local) in zip(begins, originals.items(), strict=False)
        }

    def copy(self) -> tuple[dict[str, Any], Callable[[], None]]:
        """Return the copy, and a function that waits until it is complete."""
        with torch.no_grad():
            for copied, local in self._copies.values():
                copied.copy_(local, non_blocking=True)
        events = [
            (device, torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True)))
            for device in self._devices
        ]

        def finish() -> None:
            for device, event in events:
                with torch.cuda.device(device):  # a new thread would use the first GPU
                    event.synchronize()

        staged: dict[int, Any] = {}
        for leaf, local in self._tensors:
            copied, _ = self._copies[_key(local)]
            staged[id(leaf)] = RowDTensor.entry(copied, leaf.rows) if isinstance(leaf, RowDTensor) else copied
        # Containers, numbers, arrays, and tensors of other classes are copied as well.
        return copy.deepcopy(self._state, staged), finish


def _is_staged(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return isinstance(tensor, RowDTensor) or (is_plain and not tensor.is_meta)


def _key(local: torch.Tensor) -> Any:
    return local.data_ptr(), local.shape, local.stride(), local.dtype
