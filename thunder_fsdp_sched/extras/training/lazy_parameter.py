"""A parameter that is unsharded when an operator reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


class LazyParameter(nn.Parameter):
    """A parameter without memory. An operator that gets it, or ``detach()`` of it, computes with what ``read`` returns.

    Torch's own meta tensors do not do: on a CPU, ``F.linear`` and ``matmul`` accept one, and return memory that nobody has
    written. Metadata, also the device, are those of the unsharded parameter.

    Args:
        like: has its shape, strides and dtype.
    """

    read: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, device: torch.device, requires_grad: bool, read: Callable[[], torch.Tensor]
    ) -> LazyParameter:
        lazy = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        lazy.read = read
        return lazy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # also `.data`, and what state_dict() asks for: reads nothing yet
            return cls(args[0], args[0].device, False, args[0].read)
        args, kwargs = tree_map_only(cls, lambda lazy: lazy.read(), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # It reads nothing, because a debugger runs on one rank.
        return f"LazyParameter({tuple(self.shape)}, {self.dtype}, {self.device})"
