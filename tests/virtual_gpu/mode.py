"""A dispatch mode that logs which bytes each operator reads and writes, and on which stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from .log import HOST, Access, Log, Stream
from .memory import Memory, is_fake
from .streams import Cuda

aten = torch.ops.aten

_NO_KERNEL = {
    *(aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default),
    *(aten.new_empty_strided.default, aten.resize_.default, aten.lift_fresh.default, torch.ops.prim.device.default),
    *(aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor),
}

_COPIES = {aten.copy_.default, aten._to_copy.default}

_SYNCHRONIZING = {
    *(aten.equal.default, aten.is_nonzero.default, aten.nonzero.default, aten.masked_select.default),
    *(aten.unique_dim.default, aten._unique2.default),
}


class Recording(TorchDispatchMode):
    """A mode above ``FakeTensorMode``, which runs the operators. This logs what a device would do for them."""

    def __init__(self, log: Log, memory: Memory, cuda: Cuda) -> None:
        super().__init__()
        self.log = log
        self.memory = memory
        self.cuda = cuda
        self.works: dict[int, Any] = {}  # of functional collectives, by the address of their output

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "full_tensor") for kind in types):  # it calls the same on this rank's rows
            return NotImplemented
        kwargs = dict(kwargs or {})
        self.memory.collect()
        inputs = list(_tensors((args, kwargs)))
        if inputs and not any(map(is_fake, inputs)) and all(t.device.type == "cpu" for t in inputs):
            with no_dispatch():  # real data of the host, such as a mesh or a generator's state
                return func(*args, **kwargs)
        if func is aten.is_pinned.default:
            return self.memory.is_pinned(args[0])
        if func is aten._pin_memory.default:
            return self._pin(args[0])
        if func is aten._local_scalar_dense.default and is_fake(args[0]):
            self._log(func, [self.memory.access(args[0], False)], args[0].device, blocks=True)
            if args[0].constant is not None:
                with no_dispatch():
                    return func(args[0].constant)
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is torch.ops.symm_mem._low_contention_reduce_scatter.default:
            with self:
                return symmetric_memory._low_contention_reduce_scatter(*args, **kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self.works.pop(self.memory.of(args[0]).number).wait()
            return args[0]
        pinned = bool(kwargs.pop("pin_memory", False))
        sources = [self.memory.access(t, False) for t in inputs if is_fake(t)]
        known = {access.storage for access in sources}
        result = func(*args, **kwargs)
        if result is NotImplemented:
            return result
        outputs = [t for t in _tensors(result) if is_fake(t)]
        if pinned:
            for tensor in outputs:
                self.memory.pin(tensor)
        written = list(self._written(func, args, kwargs))
        fresh = [access for t in outputs if (access := self.memory.access(t, True)).storage not in known]
        if func in _NO_KERNEL or (not written and not fresh):
            return result
        tensors = [t for t in _tensors((args, kwargs, result)) if is_fake(t)]
        if func in _COPIES:
            self._copy(func, args, kwargs, result)
        else:
            device = next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))
            if device.type == "cuda":  # scalars on the CPU are passed by value
                sources = [self.memory.access(t, False) for t in _tensors((args, kwargs)) if _on_gpu(t)]
            self._log(func, [*_reads(sources, written), *written, *fresh], device, blocks=func in _SYNCHRONIZING)
        return result

    def _written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Access]:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = kwargs.get(argument.name) if argument.kwarg_only else None
                if value is None:
                    value = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in _tensors(value):
                    yield self.memory.access(tensor, True)

    def _log(self, func: Any, accesses: Sequence[Access], device: torch.device, blocks: bool = False) -> None:
        kind, stream = ("kernel", self.cuda.key(device)) if device.type == "cuda" else ("host", HOST)
        self.log.add(kind, _name(func), stream, accesses, blocks=blocks and stream != HOST)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = torch.empty_like(tensor)
        self.memory.pin(pinned)
        pinned.copy_(tensor)
        return pinned

    def _copy(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        """Log a copy between any two devices.

        Between a GPU and the host it is asynchronous only with ``non_blocking`` and pinned memory.
        """
        source = args[1] if func is aten.copy_.default else args[0]
        non_blocking = bool(
            kwargs.get("non_blocking", args[2] if func is aten.copy_.default and len(args) > 2 else False)
        )
        if not result.numel():
            return
        accesses = [self.memory.access(source, False), self.memory.access(result, True)]
        devices = [t.device for t in (source, result)]
        gpus = [device for device in devices if device.type == "cuda"]
        if len(gpus) < 2:
            device = gpus[0] if gpus else torch.device("cpu")
            pinned = all(self.memory.is_pinned(t) for t in (source, result) if t.device.type == "cpu")
            stream = self.cuda.key(device) if gpus else HOST
            blocks = bool(gpus) and not (non_blocking and pinned)
            self.log.add("copy" if gpus else "host", _name(func), stream, accesses, blocks=blocks)
            return
        if devices[0] == devices[1]:
            self.log.add("copy", _name(func), self.cuda.key(devices[0]), accesses)
            return
        # Between GPUs the copy runs on the source's stream, ordered with the work of the destination's stream.
        own, other = self.cuda.key(devices[0]), self.cuda.key(devices[1])
        self._order(other, own)
        self.log.add("copy", _name(func), own, accesses)
        self._order(own, other)

    def _order(self, first: Stream, then: Stream) -> None:
        event = self.cuda.guard.virtual_gpu_new_event()
        self.log.add("record", "copy", first, event=event)
        self.log.add("wait_event", "copy", then, event=event)


def _reads(sources: Sequence[Access], written: Sequence[Access]) -> Iterator[Access]:
    """Return the reads of regions that are not also written. A write implies the same order as a read."""
    both = {(access.storage, access.region) for access in written}
    return (access for access in sources if (access.storage, access.region) not in both)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _on_gpu(value: torch.Tensor) -> bool:
    return is_fake(value) and value.device.type == "cuda"


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.").removesuffix(".default")
