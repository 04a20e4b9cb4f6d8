"""The symbol that checks the memory of arguments before a forward that changes some of them in place."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import coded_error
from ..private_torch import memory_of
from .registry import register


def check_memory(written: tuple[str, ...], contiguous: tuple[str, ...], names: tuple[str, ...], *tensors: Any) -> None:
    """Raise an error if a tensor that forward changes in place shares memory with another one, or strides do not fit.

    Args:
        written: names of tensors that are changed in place.
        contiguous: names of tensors that must be contiguous.
        names: the names of ``tensors``.
    """
    storages: dict[tuple[torch.device, int], str] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not tensor.numel():
            continue
        if name in contiguous and not tensor.is_contiguous():
            raise coded_error(RuntimeError, "module.changes-view-or-copy-in-place", name=name)
        other = storages.setdefault(memory_of(tensor), name)
        if other != name and not {name, other}.isdisjoint(written):
            raise coded_error(RuntimeError, "module.changes-arguments-sharing-memory", other=other, name=name)


fsdp_check_memory = register("fsdp_check_memory", check_memory)
