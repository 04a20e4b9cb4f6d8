"""Clocks that time bound symbols: that of the host, and events on a GPU's stream."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from ..runtime.memory import InFlight

__all__ = ["Clock", "CudaClock"]


class Clock:
    """A reader of the host's clock, for a CPU, where the host computes."""

    def __init__(self) -> None:
        self.reads: list[Any] = []

    def tick(self) -> None:
        """Read the clock between two bound symbols."""
        self.reads.append(time.perf_counter())

    def tick_at_once(self) -> None:
        """Read the clock after the issue of a collective that is running."""
        self.tick()

    def finish(self, flight: InFlight) -> None:
        flight.wait()

    def settle(self) -> None:
        """Wait until the device is idle."""

    def durations(self) -> list[tuple[float, float]]:
        """Return (host, device) seconds from each reading to the next; zero for the last."""
        return [*((0.0, after - before) for before, after in pairwise(self.reads)), (0.0, 0.0)]


class CudaClock(Clock):
    """A reader of the clocks of host and device. The device sleeps at each reading so that the host stays ahead of it,
    and its time for a bound symbol is that of the kernels only."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def tick(self) -> None:
        self._read(pause=True)

    def tick_at_once(self) -> None:
        self._read(pause=False)

    def _read(self, *, pause: bool) -> None:
        entered = time.perf_counter()
        end, start = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self.device)
        end.record(stream)
        if pause:
            with torch.cuda.stream(stream):  # the current device may be another
                torch.cuda._sleep(100_000)  # cycles, about 60 us
        start.record(stream)
        self.reads.append((entered, time.perf_counter(), end, start))

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def durations(self) -> list[tuple[float, float]]:
        self.settle()
        pairs = pairwise(self.reads)
        return [*((b[0] - a[1], a[3].elapsed_time(b[2]) / 1e3) for a, b in pairs), (0.0, 0.0)]
