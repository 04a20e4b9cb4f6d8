"""Symmetric memory on a CPU, as files that all ranks of a machine map, to test the transport's waits and buffers."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from thunder_fsdp_sched.transports import find_transport, register_transport

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines its operators


class SharedFiles:
    """Stand-ins for ``empty`` and ``rendezvous`` of ``torch.distributed._symmetric_memory``."""

    def __init__(self) -> None:
        self.paths: dict[int, str] = {}
        self.folder = tempfile.TemporaryDirectory()
        self.barriers = 0

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        path = f"{self.folder.name}/{len(self.paths)}"
        tensor = torch.from_file(path, shared=True, size=max(numel, 1), dtype=dtype)[:numel]
        self.paths[tensor.data_ptr()] = path
        return tensor

    def get_symm_mem_workspace(self, group_name: str, min_size: int) -> None:
        """Its reductions need none."""

    def rendezvous(self, tensor: torch.Tensor, group: str) -> Handle:
        group = dist.distributed_c10d._resolve_process_group(group)
        paths: list[str] = [""] * group.size()
        dist.all_gather_object(paths, self.paths[tensor.data_ptr()], group=group)
        buffers = [torch.from_file(p, shared=True, size=_size(p), dtype=torch.uint8) for p in paths]
        return Handle(self, group.group_name, buffers)


def _size(path: str) -> int:
    with open(path, "rb") as file:
        return file.seek(0, 2)


class Handle:
    def __init__(self, memory: SharedFiles, group: str, buffers: list[torch.Tensor]) -> None:
        self.memory, self.group, self.buffers = memory, group, buffers

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        (numel,) = sizes
        return self.buffers[rank].view(dtype)[storage_offset : storage_offset + numel]

    def barrier(self, channel: int = 0) -> None:
        self.memory.barriers += 1
        dist.barrier(dist.distributed_c10d._resolve_process_group(self.group))


_library = torch.library.Library("symm_mem", "IMPL")


def _reduce_scatter(tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
    assert op == "avg"
    group = dist.distributed_c10d._resolve_process_group(group)
    own = tensor.new_empty(tensor.numel() // group.size())
    dist.reduce_scatter_tensor(own, tensor, op=dist.ReduceOp.AVG, group=group)
    return own


def register() -> Any:
    """Make ``transport="shared_files"`` available in this process."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("symm_mem::_low_contention_reduce_scatter", "CPU"):
        _library.impl("_low_contention_reduce_scatter", _reduce_scatter, "CPU")
    kind: Any = type(find_transport("symmetric_memory"))
    transport = kind(SharedFiles(), devices=("cpu",))
    transport.name = "shared_files"
    register_transport(transport)
    return transport
