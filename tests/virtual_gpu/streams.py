"""Stand-ins for ``torch.cuda``: streams, events, current device and stream."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from .guard import library
from .log import HOST, Log
from .log import Stream as Key

Device = torch.device | str | int | None


class Cuda:
    """Replacements of functions and classes of ``torch.cuda`` for one rank.

    The guard stores the current device and streams for each thread, so that autograd's engine can read and set them.
    """

    def __init__(self, log: Log, devices: int) -> None:
        self.log = log
        self.devices = devices
        self.guard = library()
        cuda = self

        class Stream(_Stream):
            owner = cuda

        class Event(_Event):
            owner = cuda

        self.Stream, self.Event = Stream, Event

    def index(self, device: Device) -> int:
        """Return the index of a device, or of the current device if it has none."""
        if isinstance(device, str):
            device = torch.device(device)
        index = device.index if isinstance(device, torch.device) else device
        return self.guard.virtual_gpu_device() if index is None or index < 0 else int(index)

    def key(self, device: Device = None) -> Key:
        """Return the current stream of a device."""
        index = self.index(device)
        return Key(index, self.guard.virtual_gpu_stream(index))

    def replacements(self) -> dict[str, Any]:
        """Return the replacements of attributes of ``torch.cuda`` by name."""
        properties = SimpleNamespace(
            name="Virtual GPU", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32
        )
        return {
            "Stream": self.Stream,
            "Event": self.Event,
            "current_stream": lambda device=None: self.Stream._of(self.key(device)),
            "default_stream": lambda device=None: self.Stream._of(Key(self.index(device), 0)),
            "set_stream": self._set_stream,
            "stream": self._stream,
            "device": self._device,
            "device_of": lambda tensor: self._device(tensor.device),
            "set_device": self._set_device,
            "current_device": lambda: self.index(None),
            "device_count": lambda: self.devices,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "synchronize": self._synchronize,
            "get_device_name": lambda device=None: properties.name,
            "get_device_properties": lambda device=None: properties,
            "get_device_capability": lambda device=None: (properties.major, properties.minor),
            "is_current_stream_capturing": lambda: False,
            "_lazy_init": lambda: None,
            "_sleep": self._sleep,
            "memory_allocated": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
        }

    def _set_device(self, device: Device) -> None:
        self.guard.virtual_gpu_set_device(self.index(device))

    @contextlib.contextmanager
    def _device(self, device: Device) -> Iterator[None]:
        before = self.index(None)
        self._set_device(device)
        try:
            yield
        finally:
            self._set_device(before)

    def _set_stream(self, stream: _Stream | None) -> None:
        if stream is not None:
            self._set_device(stream.device)
            self.guard.virtual_gpu_set_stream(stream.key.device, stream.key.number)

    @contextlib.contextmanager
    def _stream(self, stream: _Stream | None) -> Iterator[_Stream | None]:
        if stream is None:
            yield None
            return
        device, number = self.index(None), self.key(stream.device).number
        self._set_stream(stream)
        try:
            yield stream
        finally:
            self.guard.virtual_gpu_set_stream(stream.key.device, number)
            self._set_device(device)

    def _synchronize(self, device: Device = None) -> None:
        self.log.add("sync_device", "synchronize", self.key(device), blocks=True)

    def _sleep(self, cycles: int) -> None:
        self.log.add("kernel", "sleep", self.key())


class _Stream:
    """A stand-in for ``torch.cuda.Stream``."""

    owner: Cuda
    priority = 0

    def __init__(self, device: Device = None, priority: int = 0, **kwargs: Any) -> None:
        self.key = Key(self.owner.index(device), self.owner.guard.virtual_gpu_new_stream())
        self.priority = priority
        self._contexts: list[Any] = []

    @classmethod
    def _of(cls, key: Key) -> _Stream:
        stream = cls.__new__(cls)
        stream.key = key
        stream._contexts = []
        return stream

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.key.device)

    @property
    def cuda_stream(self) -> int:
        return self.key.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return str(self.key)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = self.owner.Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: _Event) -> None:
        self.owner.log.add("wait_event", "wait_event", self.key, event=event.number)

    def wait_stream(self, stream: _Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.owner.log.add("sync", "synchronize", self.key, blocks=True)

    def query(self) -> bool:
        return False

    def __enter__(self) -> _Stream:
        self._contexts.append(self.owner._stream(self))
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._contexts.pop().__exit__(*exception)


class _Event:
    """A stand-in for ``torch.cuda.Event``. As in CUDA, waiting for an event that was never recorded has no effect."""

    owner: Cuda

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **kwargs: Any) -> None:
        self.number = self.owner.guard.virtual_gpu_new_event()

    def record(self, stream: _Stream | None = None) -> None:
        key = self.owner.key() if stream is None else stream.key
        self.owner.log.add("record", "record", key, event=self.number)

    def wait(self, stream: _Stream | None = None) -> None:
        key = self.owner.key() if stream is None else stream.key
        self.owner.log.add("wait_event", "wait", key, event=self.number)

    def synchronize(self) -> None:
        self.owner.log.add("sync_event", "synchronize", HOST, event=self.number)

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: _Event) -> float:
        return 1.0


def engine_listeners(log: Log) -> tuple[Callable[[int, int, int], None], Callable[[int, int, int], None]]:
    """Return the callbacks for events of autograd's engine, which get negative numbers."""

    def record(event: int, device: int, stream: int) -> None:
        log.add("record", "autograd", Key(device, stream), event=-event)

    def block(event: int, device: int, stream: int) -> None:
        log.add("wait_event", "autograd", Key(device, stream), event=-event)

    return record, block
