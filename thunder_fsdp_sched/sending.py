"""What a bucket sends to be gathered: its shard, a cast of it, or a copy of it on the device.

[Note: When a cast is used again]
Every forward casts anew: an optimizer with kernels of its own, or a write through ``.data`` such as swapping in averaged
parameters for an evaluation, changes a parameter without a trace. Backward sends the cast of its own forward again, as
long as no forward has cast since and neither a version of a parameter nor the number of optimizer steps in this process
has changed. So each micro-batch under ``no_sync`` costs one cast: it reads the shard and writes a shard in lower
precision, the same share of the work of a step as without ``no_sync``.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .runs import forward_number, is_backward_of
from .transports.base import NOWHERE, labelled, side_stream

if TYPE_CHECKING:
    from .buffers import Bucket

__all__ = ["Source", "source_of"]


class Source:
    """The shard itself is sent."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def shard(self, *, again: bool) -> torch.Tensor:
        """The flat shard on the device and in the dtype in which it travels. It lives until the gather is done.

        Args:
            again: backward asks for what its forward sent, as far as that is known to be still right.
        """
        return self._bucket.shard

    def sending(self) -> contextlib.AbstractContextManager[Any]:
        """Where to call :meth:`shard` and to issue the gather."""
        return NOWHERE


class Cast(Source):
    """A shard in the lower precision in which it travels, cast by one kernel for each forward."""

    _cast: torch.Tensor | None = None
    _of: tuple[int, ...] = ()
    _number = 0

    def shard(self, *, again: bool) -> torch.Tensor:
        bucket = self._bucket
        of = (_optimizer_steps, bucket.shard._version, *(p._version for p in bucket.params))
        if self._cast is None:
            with torch.inference_mode(False):
                self._cast = bucket.transport.allocate(
                    bucket.shard.numel(), bucket.spec.param_dtype, bucket.shard.device, bucket.ranks
                )
        elif again and of == self._of and is_backward_of(self._number):
            return self._cast
        self._of = ()  # until it is whole
        with torch.no_grad(), labelled(f"fsdp_cast({bucket.spec.name})"):
            self._cast.copy_(bucket.shard)
        self._of, self._number = of, forward_number()
        return self._cast


class Load(Source):
    """An offloaded shard: a copy on the device for each gather, as nothing of it is to stay there."""

    def shard(self, *, again: bool) -> torch.Tensor:
        bucket = self._bucket
        with torch.no_grad(), labelled(f"fsdp_load({bucket.spec.name})"):
            copy = torch.empty_like(bucket.shard, dtype=bucket.spec.param_dtype, device=bucket.spec.device)
            return copy.copy_(bucket.shard, non_blocking=True)

    def sending(self) -> contextlib.AbstractContextManager[Any]:
        """On a GPU a stream beside the computation, which waits for what was computed so far."""
        device = self._bucket.spec.device
        if device.type != "cuda":
            return NOWHERE
        stream = side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)


def source_of(bucket: Bucket) -> Source:
    """What ``bucket`` sends."""
    if bucket.spec.travel.offload:
        return Load(bucket)
    return Cast(bucket) if bucket.spec.param_dtype != bucket.spec.dtype else Source(bucket)


_optimizer_steps = 0


def _count_optimizer_step(*args: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)
