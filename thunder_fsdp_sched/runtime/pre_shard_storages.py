"""The memory in which parameters were stored before sharding; the audit of a trace finds inputs that are still there."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class PreShardStorages:
    """The storages of parameters before sharding. A view that outlives sharding keeps the values of that time.

    The references are weak. While one exists, no other storage has the same identity.
    """

    def __init__(self) -> None:
        self._names: dict[StorageWeakRef, str] = {}

    def add(self, name: str, param: torch.Tensor) -> None:
        """Record the storage of ``param``."""
        if not param.is_meta and param.numel():
            self._names[StorageWeakRef(param.untyped_storage())] = name

    def owner_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the parameter that was stored in the memory of ``tensor``, if any."""
        if tensor.is_meta or tensor.layout is not torch.strided:
            return None
        return self._names.get(StorageWeakRef(tensor.untyped_storage()))
