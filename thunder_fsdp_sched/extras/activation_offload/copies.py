"""Copies of saved activations to host memory and back: what the symbols of ``extras.activation_offload.host_copies`` run.

[Note: Host copies]
A value that forward saves for backward can wait in host memory. Forward copies it there after its last use, and backward
copies it back before its first use. On a GPU each direction has a stream of its own per device, so both overlap compute
and communication:

- A copy starts after all work that was issued to the current stream earlier, because that computes the value, or may
  still use the memory that is written. The wait lets the current stream wait for the copy's event; the host never waits.
- The memory that is copied from is referenced until the wait. So it is freed, and allocated again by the current stream,
  only after the copy. If an exception prevents the wait, the host waits for the copy before it drops the references.
- The copy back reads what the copy to host memory has written: backward runs after forward, which has waited for it.

Pinned memory comes from PyTorch's caching host allocator, which is the pool: it hands out a freed block again only after
the copies that use it, and a block is freed with the last reference to the saved tensor. So a dropped backward, a
backward that runs twice, and several forwards before their backwards need no bookkeeping here.

The elements between the first and the last in memory are copied as one range. So any strides are preserved, which
kernels may depend on, and each copy is one transfer. On a CPU both directions are real copies, too.
"""

from __future__ import annotations

import sys

import torch

from ...private_torch import has_saved_tensor_hooks, labelled
from ...transports.base import side_stream


class HostCopy:
    """A copy in flight, in either direction.

    Attributes:
        result: the copy; its content is undefined until the wait.
    """

    __slots__ = ("_device", "_done", "_source", "result")

    def __init__(self, source: torch.Tensor, result: torch.Tensor, done: torch.cuda.Event | None = None) -> None:
        self.result = result
        self._source: torch.Tensor | None = source  # keeps the memory until the copy has read it
        self._device = source.device if source.is_cuda else result.device
        self._done = done

    def wait(self, *, on_host: bool = False) -> torch.Tensor:
        """Let the current stream, or the host, wait for the copy, drop the source, and return the copy."""
        done, self._done = self._done, None
        if done is not None and on_host:
            done.synchronize()
        elif done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)
        self._source = None
        return self.result

    def __del__(self) -> None:
        if self._done is not None and not sys.is_finalizing():  # an exception prevented the wait
            self._done.synchronize()


def copy_to_host(source: torch.Tensor) -> HostCopy:
    """Issue the copy of a value to host memory, pinned if the value is on a GPU."""
    with torch.no_grad(), labelled("copy_to_host"):
        return _issue(source, "cpu", "to host")


def wait_host_copy(copy: HostCopy, source: torch.Tensor, token: object = None) -> torch.Tensor:
    """Wait until ``source`` may be freed, and return its copy in host memory.

    Saved-tensor hooks read the copy on the host, so with such hooks the host waits, too.
    """
    return copy.wait(on_host=has_saved_tensor_hooks())


def copy_to_device(host: torch.Tensor, device: str) -> HostCopy:
    """Issue the copy of a value from host memory to new memory of a device."""
    with torch.no_grad(), labelled("copy_to_device"):
        return _issue(host, device, "to device")


def wait_device_copy(copy: HostCopy) -> torch.Tensor:
    """Let the current stream wait for the copy, and return it."""
    return copy.wait()


def _issue(source: torch.Tensor, device: str, direction: str) -> HostCopy:
    """Issue the copy of ``source`` to new memory of ``device``, on a stream of its own if one of both is a GPU."""
    span = _span(source)
    result = torch.empty(span.shape, dtype=span.dtype, device=device, pin_memory=source.is_cuda)
    if not (source.is_cuda or result.is_cuda):
        return HostCopy(source, _like(result.copy_(span), source))
    gpu = source.device if source.is_cuda else result.device
    stream = side_stream(gpu, direction)
    stream.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(stream):
        result.copy_(span, non_blocking=True)
        done = stream.record_event()
    return HostCopy(source, _like(result, source), done)


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from the first to the last element of ``tensor`` as a one-dimensional view."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,))


def _like(span: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``span`` with the sizes and strides of ``tensor``."""
    return span.as_strided(tensor.shape, tensor.stride())
