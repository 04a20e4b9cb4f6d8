"""The tensor that a gather sends: the bucket's shard, a cast or an encoding of it, or a copy of it on the device.

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
from collections.abc import Callable
from typing import Any

import torch

from ..plan.specs import BucketSpec
from ..private_torch import NO_CONTEXT, labelled
from ..transports.base import side_stream
from .autograd import is_of_running_backward, moment


class ShardSource:
    """The source that sends the shard itself."""

    def __init__(self, spec: BucketSpec, shard: torch.Tensor) -> None:
        self._spec = spec
        self._shard = shard

    def shard(self, *, reuse_cast: bool) -> torch.Tensor:
        """Return the flat shard on the device and in the dtype in which it is sent; valid until the gather finishes.

        Args:
            reuse_cast: return the tensor that forward sent if it is known to be up to date.
        """
        return self._shard

    def send_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which to issue the gather of what :meth:`shard` has just returned."""
        return NO_CONTEXT

    def finish_copy(self) -> None:
        """Wait until the host may write the shard again; see [Note: Writes to offloaded shards]."""

    def free(self) -> None:
        """Free what :meth:`shard` has returned, after its gather."""


class CastShardSource(ShardSource):
    """The source that sends a cast of the shard in lower precision, or an encoding of it, made in each forward.

    Args:
        allocate: allocates memory for the cast.
        version: returns numbers that differ after each detectable write to the shard.
    """

    _cast: torch.Tensor | None = None
    _of: tuple[int, ...] = ()
    _cast_at = 0

    def __init__(
        self,
        spec: BucketSpec,
        shard: torch.Tensor,
        allocate: Callable[[], torch.Tensor],
        version: Callable[[], tuple[int, ...]],
    ) -> None:
        super().__init__(spec, shard)
        self._allocate = allocate
        self._version = version

    def shard(self, *, reuse_cast: bool) -> torch.Tensor:
        of = self._version()
        if self._cast is None:
            with torch.inference_mode(False):
                self._cast = self._allocate()
        elif reuse_cast and of == self._of and is_of_running_backward(self._cast_at):
            return self._cast
        self._of = ()  # invalid until the cast is complete
        with torch.no_grad(), labelled("cast", self._spec.name):
            _fill(self._spec, self._cast, self._shard)
        self._of, self._cast_at = of, moment()
        return self._cast

    def free(self) -> None:
        self._cast = None


def _fill(spec: BucketSpec, sent: torch.Tensor, shard: torch.Tensor) -> None:
    """Fill what a rank sends with a cast or an encoding of its shard."""
    if (wire := spec.gather_wire) is None:
        sent.copy_(shard)
    else:
        wire.encode([segment[None] for segment in spec.layout.shard_segments(shard)], sent[None])


class OffloadedShardSource(ShardSource):
    """The source that sends a copy of an offloaded shard on the device; each gather makes a new copy.

    On a GPU a separate stream copies and sends it. That stream waits once for the compute so far: the user may write
    pinned memory from the device, and the gather writes where that compute may still read.
    """

    _copied: torch.cuda.Event | None = None

    def shard(self, *, reuse_cast: bool) -> torch.Tensor:
        spec, device = self._spec, self._spec.device
        if device.type == "cuda":
            side_stream(device).wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad(), self.send_context(), labelled("load", spec.name):
            encodes = spec.gather_wire is not None
            copy = torch.empty_like(self._shard, dtype=spec.dtype if encodes else spec.param_dtype, device=device)
            copy.copy_(self._shard, non_blocking=True)
            if device.type == "cuda":
                self._copied = _last_copies[device] = torch.cuda.current_stream(device).record_event()
            if encodes:
                shard, copy = copy, torch.empty(spec.sent_shard[0], dtype=torch.uint8, device=device)
                _fill(spec, copy, shard)
            return copy

    def finish_copy(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def send_context(self) -> contextlib.AbstractContextManager[Any]:
        device = self._spec.device
        return torch.cuda.stream(side_stream(device)) if device.type == "cuda" else NO_CONTEXT


_last_copies: dict[torch.device, torch.cuda.Event] = {}
"""The event after the latest copy of an offloaded shard to each device. All copies share one stream, so they finish in
order."""


def finish_copies() -> None:
    """Wait until the host may write all offloaded shards again; see [Note: Writes to offloaded shards]."""
    while _last_copies:
        _, copied = _last_copies.popitem()
        copied.synchronize()
