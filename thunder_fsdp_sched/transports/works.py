"""Works followed by an action, on a side stream if there are streams, and the temporary memory that they borrow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from .base import Work

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


class _Followed:
    """Works, and an action that the wait runs after them. Both happen only in the first wait."""

    def __init__(self, works: Sequence[Work], action: Callable[[], None]) -> None:
        self._works, self._action = works, action

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._action()
        self._works, self._action = (), lambda: None


def returning(work: Work, scratch: dict[tuple[torch.dtype, int], list[torch.Tensor]], *buffers: torch.Tensor) -> Work:
    """Return ``work`` such that its wait also gives its buffers back to ``scratch``."""
    # A release drops these lists, and with them the buffers that are in use at that time.
    lent = [(scratch[buffer.dtype, buffer.numel()], buffer) for buffer in buffers]

    def give_back() -> None:
        for idle, buffer in lent:
            idle.append(buffer)

    return _Followed([work], give_back)


def take_idle(
    scratch: dict[tuple[torch.dtype, int], list[torch.Tensor]], numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return idle memory from ``scratch``, or new memory if there is none."""
    free = scratch[dtype, numel]
    return free.pop() if free else torch.empty(numel, dtype=dtype, device=device)


def issue_then(issue: Callable[[], Sequence[Work]], action: Callable[[], None], uses: Sequence[torch.Tensor]) -> Work:
    """Issue works, and run ``action`` after them: on a side stream, or on a CPU at the wait.

    Args:
        uses: all tensors that ``issue`` and ``action`` read or write, on one device.
    """
    device = uses[0].device
    if device.type != "cuda":
        return _Followed(issue(), action)
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
