"""The peak of memory that tensors allocate within a context."""

from __future__ import annotations

import weakref
from typing import Any

from thunder_fsdp_sched.runtime.row_dtensor import local_rows

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["PeakBytes"]


class PeakBytes(TorchDispatchMode):
    """Measures the peak of bytes in storages made within the context; storages may be slices of others.

    Args:
        known: memory that was there before, slices of which do not count.
    """

    def __init__(self, known: torch.Tensor | None = None) -> None:
        super().__init__()
        self.known = (0, 0) if known is None else (known.data_ptr(), known.data_ptr() + known.nbytes)
        self.spans: dict[int, tuple[int, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and not func.is_view:
                storage = local_rows(tensor).untyped_storage()
                if storage._cdata not in self.spans:
                    self.spans[storage._cdata] = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
                    weakref.finalize(storage, self.spans.pop, storage._cdata, None)
                    self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        """Return the bytes that are in use now."""
        live = end = 0
        for first, last in sorted(self.spans.values()):
            if self.known[0] <= first < self.known[1]:
                continue
            live += max(last - max(first, end), 0)
            end = max(last, end)
        return live
