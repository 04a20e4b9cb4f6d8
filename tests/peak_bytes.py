"""The peak of memory that tensors allocate within a context."""

from __future__ import annotations

import weakref
from typing import Any

from thunder_fsdp_sched.runtime.row_dtensor import local_rows

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["PeakBytes"]


class PeakBytes(TorchDispatchMode):
    """Measures the peak bytes of storages created within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = local_rows(tensor).untyped_storage()
                key = storage._cdata
                if key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
                    self.peak = max(self.peak, sum(self.alive.values()))
        return result
