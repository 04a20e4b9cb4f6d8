"""The memory that parameters had before they were sharded, to find views of it that forward still reads."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["FormerMemory"]


class FormerMemory:
    """What parameters were stored in. A view that outlives sharding keeps the values of that time.

    Storages are held weakly. As long as such a reference exists, no other storage gets its identity.
    """

    def __init__(self) -> None:
        self._names: dict[StorageWeakRef, str] = {}

    def add(self, name: str, param: torch.Tensor) -> None:
        """Take note of what ``param`` is stored in now."""
        if not param.is_meta and param.numel():
            self._names[StorageWeakRef(param.untyped_storage())] = name

    def owner_of(self, tensor: torch.Tensor) -> str | None:
        """The name of the parameter that was stored where ``tensor`` lies, if there is one."""
        if tensor.is_meta or tensor.layout is not torch.strided:
            return None
        return self._names.get(StorageWeakRef(tensor.untyped_storage()))
