"""Files as torch's profiler writes them, of what a log's streams run, with invented durations.

The host takes 3 us for each request. A kernel takes 20 us, a copy 30 us, a collective 90 us; streams wait as the log says.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from internals import private_torch

from .log import HOST, Log
from .world import Rank

_HOST = 3
_DURATIONS = {"kernel": 20, "copy": 30, "collective": 90, "barrier": 5}
_CATEGORIES = {"kernel": "kernel", "copy": "gpu_memcpy", "collective": "kernel", "barrier": "kernel"}


@dataclass
class Recorder:
    """The ranges of one rank: name, first entry, and the entry after the last."""

    log: Log
    ranges: list[tuple[str, int, int]] = field(default_factory=list)

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        first = len(self.log.entries)
        yield
        self.ranges.append((name, first, len(self.log.entries)))

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Record the ranges of a step, as if a profiler ran."""
        profiling = mock.patch.object(private_torch, "_profiler_enabled", lambda: True)
        with profiling, mock.patch.object(torch.profiler, "record_function", self.range), self.range(name):
            yield

    def trace(self) -> tuple[dict[str, Any], set[int], set[int]]:
        """Return the file's content, and the microseconds in which communication and compute ran."""
        events: list[dict[str, Any]] = []
        ready: dict[Any, int] = defaultdict(int)
        done: dict[int, int] = {}
        communicating: set[int] = set()
        computing: set[int] = set()
        for number, entry in enumerate(self.log.entries):
            now = number * _HOST
            if entry.kind == "record":
                done[entry.event] = ready[entry.stream]
            elif entry.kind == "wait_event":
                ready[entry.stream] = max(ready[entry.stream], done.get(entry.event, 0))
            elif entry.kind in _DURATIONS and entry.stream != HOST:
                start = max(now + 1, ready[entry.stream])
                end = ready[entry.stream] = start + _DURATIONS[entry.kind]
                is_nccl = entry.kind == "collective"
                name = f"ncclDevKernel_{entry.name}" if is_nccl else entry.name
                args = {"stream": entry.stream.number, "correlation": number}
                events.append(_event(name, _CATEGORIES[entry.kind], start, end, args))
                events.append(_event("cudaLaunchKernel", "cuda_runtime", now, now + 1, {"correlation": number}))
                on_side = entry.stream.number != 0 and any(
                    first <= number < last and label.startswith("fsdp_") for label, first, last in self.ranges
                )
                (communicating if is_nccl or on_side else computing).update(range(start, end))
        events += [
            _event(name, "user_annotation", first * _HOST, last * _HOST, {}) for name, first, last in self.ranges
        ]
        content = {"traceEvents": events, "distributedInfo": {"rank": self.log.rank, "world_size": 2}}
        return content, communicating, computing


def _event(name: str, category: str, start: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
    tid = args.get("stream", 1) if category in ("kernel", "gpu_memcpy") else 1
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": end - start,
        "pid": 0,
        "tid": tid,
        "args": args,
    }


def recorded_step(rank: Rank, model: Any, *inputs: torch.Tensor) -> tuple[dict[str, Any], set[int], set[int]]:
    """Run a step of a model as if a profiler recorded it, and return what :meth:`Recorder.trace` does."""
    recorder = Recorder(rank.log)
    rank.log.entries.clear()
    with recorder.step("ProfilerStep#1"):
        loss = model(*inputs).sum()
        with recorder.range("autograd::engine::evaluate_function: ThunderFunctionBackward"):
            loss.backward()
    return recorder.trace()
