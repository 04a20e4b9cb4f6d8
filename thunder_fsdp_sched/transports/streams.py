"""The side stream of a GPU, on which what follows a collective runs; loaded on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of a device, for communication."""
    if device not in _side_streams:  # high priority, because communication waits for its short copies and sums
        _side_streams[device] = torch.cuda.Stream(device, priority=-1)
    return _side_streams[device]


class _OnStream:
    """Work on a side stream.

    It keeps the tensors alive that the stream uses, like a work of NCCL. If it is dropped without a wait, after an
    exception, it tells the allocator that the stream still uses them.
    """

    def __init__(self, stream: torch.cuda.Stream, device: torch.device, uses: Sequence[torch.Tensor]) -> None:
        self._stream, self._device, self._uses = stream, device, uses
        self._done = stream.record_event()

    def wait(self) -> None:
        # The current stream of this device, because the current device may be another.
        torch.cuda.current_stream(self._device).wait_event(self._done)
        self._uses = ()

    def __del__(self) -> None:
        with suppress(Exception):  # at interpreter exit
            for tensor in self._uses:
                tensor.record_stream(self._stream)


def issue_on_side_stream(
    issue: Callable[[], Sequence[Any]], action: Callable[[], None], uses: Sequence[torch.Tensor]
) -> _OnStream:
    """Issue works, and run ``action`` after them, on the side stream of the tensors that they use."""
    device = uses[0].device
    current, stream = torch.cuda.current_stream(device), side_stream(device)
    if stream != current:  # an offloaded shard was copied there
        stream.wait_stream(current)
    with torch.cuda.stream(stream):
        try:
            for work in issue():
                work.wait()
            action()
        except BaseException:
            current.wait_stream(stream)  # so that no issued work is in flight any more
            raise
        return _OnStream(stream, device, uses)
