"""An all-gather of a few bytes of host memory in a logarithmic number of hops.

[Note: Hops of an all-gather]
gloo's all-gather is a ring: W ranks need W - 1 hops, one after the other. Here, each hop doubles what a rank has (Bruck's
algorithm). In hop k a rank sends what it has, the bytes of 2^k ranks beginning with its own, to the rank 2^k before it, and
receives as much from the rank 2^k after it; in the last hop only the rest. So it takes ceil(log2 W) hops for any W.
Each rank sends and receives one message a hop, and in all the bytes of W - 1 ranks. All receives are posted at the start,
because a message whose receiver is not ready yet takes another round trip.

The messages are gloo's point-to-point messages, with a tag. All-gathers with different tags never mix.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

_NEVER_SENT = 0
"""A tag that no message has."""


class Hop(NamedTuple):
    """The message that a rank sends in a hop, and the one that it receives, each with the other rank."""

    target: int
    sent: list[torch.Tensor]
    source: int
    received: list[torch.Tensor]


class HostAllGather:
    """An all-gather of some bytes from each rank, which can be repeated; see [Note: Hops of an all-gather].

    It keeps the bytes of all ranks: 40 KB for the tokens of 1,024.

    Args:
        sizes: the number of bytes of each rank, the same on all ranks; none is 0.
    """

    def __init__(self, rank: int, sizes: Sequence[int]) -> None:
        self._rank, self._size, self._is_even = rank, (size := len(sizes)), len(set(sizes)) == 1
        # It begins with this rank's bytes. Tensors share it, so comparing needs no tensor operation.
        self._starts = [0, *itertools.accumulate((*sizes[rank:], *sizes[:rank]))]
        self._memory = bytearray(self._starts[-1])
        memory = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.hops: list[Hop] = []
        while (distance := 1 << len(self.hops)) < size:
            number = min(distance, size - distance)
            sent = memory[: self._starts[number]]
            received = memory[self._starts[distance] : self._starts[distance + number]]
            self.hops.append(Hop((rank - distance) % size, [sent], (rank + distance) % size, [received]))
        self._sends: list[Any] = []
        self._receives: list[Any] = []
        self._received: int  # the number of hops whose message has arrived

    def start(self, own: bytes, backend: Any, tag: int) -> None:
        """Post all receives and the first send.

        Args:
            backend: a process group's backend for host memory.
            tag: distinguishes the all-gather from others of the group; the same on all ranks, and positive.
        """
        self._backend, self._tag = backend, tag
        self._sends, self._receives, self._received = [], [], 0
        assert len(own) == self._starts[1], "memory that tensors share keeps its size"
        self._memory[: len(own)] = own
        self._post()

    def finish(self, timeout: timedelta) -> None:
        """Wait for all messages. If that is interrupted, a further call continues.

        Raises:
            RuntimeError: one did not arrive in time, or a connection was closed.
        """
        end = time.monotonic() + timeout.total_seconds()
        while self._received < len(self.hops):
            self._post()
            _wait(self._receives[self._received], end)
            self._received += 1
        for work in self._sends:  # their memory must not change before
            _wait(work, end)
        self._release()

    def gathered(self) -> list[bytes]:
        """Return the bytes of each rank, in the order of ranks."""
        memory = bytes(self._memory)
        own = memory[: self._starts[1]]
        if self._is_even and memory == own * self._size:
            return [own] * self._size
        from_own = [memory[start:end] for start, end in itertools.pairwise(self._starts)]
        return from_own[self._size - self._rank :] + from_own[: self._size - self._rank]

    def close(self) -> None:
        """Close the connections, so that no other rank waits for this one until its timeout."""
        for hop in self.hops:
            with contextlib.suppress(RuntimeError):  # gloo closes all connections when a message does not come in time
                self._backend.recv(hop.received, hop.source, _NEVER_SENT).wait(timedelta(milliseconds=1))
        self._release()

    def _release(self) -> None:
        """Drop references that would keep the group's threads and connections alive after ``destroy_process_group``."""
        self._backend, self._sends, self._receives = None, [], []

    def _post(self) -> None:
        """Post all receives that are not posted yet, and each send whose bytes have arrived."""
        for hop in self.hops[len(self._receives) :]:
            self._receives.append(self._backend.recv(hop.received, hop.source, self._tag))
        for hop in self.hops[len(self._sends) : self._received + 1]:
            self._sends.append(self._backend.send(hop.sent, hop.target, self._tag))


def _wait(work: Any, end: float) -> None:
    if not work.is_completed():  # gloo's would wait for a second message
        work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
