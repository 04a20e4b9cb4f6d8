"""The tensor that a gather sends for a shard on the CPU: its copy on the device.

[Note: Writes to offloaded shards]
A shard in pinned memory is copied to the GPU asynchronously, but the user may write it on the host at any time: an
optimizer step, loading a checkpoint, swapping in averaged parameters. Host writes do not wait for streams. So the host
waits for the copies before control returns to the user: at the end of each forward, for the last of all copies.
Backward has no such point that is always reached, so there the host waits whenever a gather is waited for.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..private_torch import NO_CONTEXT, labelled
from ..runtime.bucket import ShardSource
from ..transports.works import side_stream
from .low_precision.cast_source import fill_sent


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
                fill_sent(spec, copy, shard)
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
