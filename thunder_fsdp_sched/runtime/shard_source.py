"""The tensor that a gather sends: the bucket's shard, a cast of it, or a copy of it on the device.

[Note: Reuse of casts]
Every gather of a forward casts again, because some writes to a parameter cannot be detected: those of optimizers with their
own kernels, and those through ``to_local().data``. Backward reuses the cast of its own forward, provided that no other
forward has cast since, and that neither a parameter's version nor the number of optimizer steps in this process has changed.
Within an accumulation window, a bucket that is not gathered again is not cast again either: see [Note: Gathered once in a
window] in ``bucket``.

[Note: Writes to offloaded shards]
A shard in pinned memory is copied to the GPU asynchronously, but the user may write it on the host at any time: an
optimizer step, loading a checkpoint, swapping in averaged parameters. Host writes do not wait for streams. So the host
waits for the copies before control returns to the user: at the end of each forward, for the last of all copies.
Backward has no such point that is always reached, so there the host waits whenever a gather is waited for.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..transports.base import NO_CONTEXT, labelled, side_stream
from .autograd import forward_number, is_backward_of

if TYPE_CHECKING:
    from .bucket import Bucket


class ShardSource:
    """The source that sends the shard itself."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def shard(self, *, again: bool) -> torch.Tensor:
        """Return the flat shard on the device and in the dtype in which it is sent; valid until the gather finishes.

        Args:
            again: reuse the tensor that forward sent if it is known to be up to date.
        """
        return self._bucket.shard

    def send_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which to issue the gather of what :meth:`shard` has just returned."""
        return NO_CONTEXT

    def finish_copy(self) -> None:
        """Wait until the host may write the shard again; see [Note: Writes to offloaded shards]."""

    def free(self) -> None:
        """Free what :meth:`shard` has returned, after its gather."""


class CastShardSource(ShardSource):
    """The source that sends a cast of the shard in lower precision, made by one kernel in each forward."""

    _cast: torch.Tensor | None = None
    _of: tuple[int, ...] = ()
    _number = 0

    def shard(self, *, again: bool) -> torch.Tensor:
        bucket = self._bucket
        of = version_of(bucket)
        if self._cast is None:
            with torch.inference_mode(False):
                self._cast = bucket.allocate_sent()
        elif again and of == self._of and is_backward_of(self._number):
            return self._cast
        self._of = ()  # invalid until the cast is complete
        with torch.no_grad(), labelled(f"fsdp_cast({bucket.spec.name})"):
            self._cast.copy_(bucket.shard)
        self._of, self._number = of, forward_number()
        return self._cast

    def free(self) -> None:
        self._cast = None


class OffloadedShardSource(ShardSource):
    """The source that sends a copy of an offloaded shard on the device; each gather makes a new copy.

    On a GPU a separate stream copies and sends it. That stream waits once for the compute so far: the user may write
    pinned memory from the device, and the gather writes where that compute may still read.
    """

    _copied: torch.cuda.Event | None = None

    def shard(self, *, again: bool) -> torch.Tensor:
        bucket = self._bucket
        device = bucket.spec.device
        if device.type == "cuda":
            side_stream(device).wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad(), self.send_context(), labelled(f"fsdp_load({bucket.spec.name})"):
            copy = torch.empty_like(bucket.shard, dtype=bucket.spec.param_dtype, device=device)
            copy.copy_(bucket.shard, non_blocking=True)
            if device.type == "cuda":
                self._copied = _last_copies[device] = torch.cuda.current_stream(device).record_event()
            return copy

    def finish_copy(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def send_context(self) -> contextlib.AbstractContextManager[Any]:
        device = self._bucket.spec.device
        return torch.cuda.stream(side_stream(device)) if device.type == "cuda" else NO_CONTEXT


_last_copies: dict[torch.device, torch.cuda.Event] = {}
"""The event after the latest copy of an offloaded shard to each device. All copies share one stream, so they finish in
order."""


def finish_copies() -> None:
    """Wait until the host may write all offloaded shards again; see [Note: Writes to offloaded shards]."""
    while _last_copies:
        _, copied = _last_copies.popitem()
        copied.synchronize()


def source_of(bucket: Bucket) -> ShardSource:
    """Return the source of the tensors that ``bucket`` sends."""
    if bucket.spec.comm.offload:
        return OffloadedShardSource(bucket)
    return CastShardSource(bucket) if bucket.spec.param_dtype != bucket.spec.dtype else ShardSource(bucket)


def version_of(bucket: Bucket) -> tuple[int, ...]:
    """Return numbers that differ after each detectable write to the shard; see [Note: Reuse of casts]."""
    return (_optimizer_steps, bucket.shard._version, *(p._version for p in bucket.params))


_optimizer_steps = 0


def _count_optimizer_step(*args: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)
