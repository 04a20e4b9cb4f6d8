"""Runs a function as each rank of a world of virtual GPUs, one rank after the other, and checks the logs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

from thunder_fsdp_sched.extras.low_precision import formats
from thunder_fsdp_sched.transports import base, works

import torch
import torch.distributed as dist
from device_thread import backward_on
from internals import control, joint_control, new_groups, shard_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from .clocks import Fault, check
from .collectives import make_group_class
from .guard import library, listen
from .log import Log
from .memory import Memory, is_fake
from .mode import Recording
from .streams import Cuda, engine_listeners
from .symmetric import SymmetricMemory

DEVICES = 8


@dataclass
class Rank:
    """The rank as which a test's function runs.

    Attributes:
        device: this rank's GPU.
    """

    rank: int
    world_size: int
    device: torch.device
    recording: Recording

    @property
    def log(self) -> Log:
        return self.recording.log

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Compute with real tensors of the host within the context, as the constructor of a device mesh does."""
        with _disable_current_modes():
            yield

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Label the entries that are logged within the context."""
        before, self.log.phase = self.log.phase, name
        try:
            yield
        finally:
            self.log.phase = before


@dataclass(frozen=True)
class Result:
    """The logs of all ranks and the faults in them.

    Attributes:
        values: the function's result on each rank.
    """

    logs: Sequence[Log]
    values: Sequence[Any]

    @property
    def faults(self) -> list[Fault]:
        """The faults, computed at each access."""
        return check(self.logs)

    def assert_clean(self) -> None:
        """Fail with a description of the faults, if there are any."""
        __tracebackhide__ = True
        faults = self.faults
        assert not faults, f"{len(faults)} faults:\n" + "\n".join(map(str, faults[:10]))

    def count(self, phase: str | None = None, rank: int = 0) -> Counter[str]:
        """Count the entries of one rank's log in a phase by kind. ``syncs`` are the host's waits for a device."""
        counts: Counter[str] = Counter()
        for entry in self.logs[rank].entries:
            if phase is None or entry.phase == phase:
                counts[entry.kind] += 1
                counts["syncs"] += entry.blocks or entry.kind == "sync_event"
        return counts


def run(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    ranks: Sequence[int] | None = None,
    set_device: bool = True,
    bind_device: bool = False,
    **kwargs: Any,
) -> Result:
    """Run ``function(rank, *args, **kwargs)`` as each rank, on ``cuda:<rank>`` and with an NCCL process group.

    Data are fake, so no rank depends on the results of another. Ranks assume that they have compiled the same traces.

    Args:
        ranks: the ranks to run, by default all. Collectives are matched among these.
        set_device: whether to call ``torch.cuda.set_device``. Otherwise every rank's current device is 0.
        bind_device: whether to pass the device to ``init_process_group``. Further groups then split the communicator.
    """
    logs, values = [], []
    for rank in range(world_size) if ranks is None else ranks:
        with virtual_rank(rank, world_size, set_device=set_device, bind_device=bind_device) as as_rank:
            values.append(function(as_rank, *args, **kwargs))
        logs.append(as_rank.log)
    return Result(logs, values)


@contextlib.contextmanager
def virtual_rank(
    rank: int,
    world_size: int,
    *,
    set_device: bool = True,
    bind_device: bool = False,
    open_channel: Callable[[Any, str], Any] = lambda group, name: None,
) -> Iterator[Rank]:
    """Run the context as one rank, on virtual GPUs, with fake tensors and a process group. At its end, undo everything.

    Args:
        open_channel: returns the channel of a process group; by default ranks assume that they agree.
    """
    guard = library()
    log = Log(rank)
    cuda = Cuda(log, DEVICES)
    recording = Recording(log, Memory(log, cuda.key), cuda)
    device = torch.device("cuda", rank % DEVICES)
    with contextlib.ExitStack() as stack:
        for where, name, value in _replacements(recording, open_channel):
            stack.enter_context(mock.patch.object(where, name, value, create=name in ("ProcessGroupNCCL", "type")))
        guard.virtual_gpu_set_available(1)
        stack.callback(guard.virtual_gpu_set_available, 0)
        callbacks = listen(*engine_listeners(log))
        stack.callback(guard.virtual_gpu_listen, None, None)
        guard.virtual_gpu_set_device(device.index if set_device else 0)
        stack.callback(guard.virtual_gpu_set_device, 0)
        for index in range(DEVICES):
            guard.virtual_gpu_set_stream(index, 0)
            stack.callback(guard.virtual_gpu_set_stream, index, 0)
        # Autograd's own threads have no modes of Python. One of ours has; each node runs on the stream of its forward.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(backward_on("device", partial(_use_current, guard)))
        stack.enter_context(SymmetricMemory(recording).installed())
        stack.enter_context(_process_group(rank, world_size, device if bind_device else None))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recording)
        yield Rank(rank, world_size, device, recording)
        del callbacks


def _use_current(guard: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context for another thread with the current device and streams of this one."""
    device, streams = guard.virtual_gpu_device(), [guard.virtual_gpu_stream(index) for index in range(DEVICES)]

    @contextlib.contextmanager
    def use() -> Iterator[None]:
        guard.virtual_gpu_set_device(device)
        for index, stream in enumerate(streams):
            guard.virtual_gpu_set_stream(index, stream)
        yield

    return use()


def _replacements(recording: Recording, open_channel: Callable[[Any, str], Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the attributes that are replaced during a run: owner, name, new value."""
    memory = recording.memory
    for name, value in recording.cuda.replacements().items():
        yield torch.cuda, name, value
    yield torch.cuda.nvtx, "range_push", lambda *args, **kwargs: None
    yield torch.cuda.nvtx, "range_pop", lambda *args, **kwargs: None
    pointer, storage_pointer = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr

    def data_ptr(tensor: torch.Tensor) -> int:
        return memory.address_of(tensor) if is_fake(tensor) else pointer(tensor)

    def storage_data_ptr(storage: torch.UntypedStorage) -> int:
        return memory.address_of_storage(storage) or storage_pointer(storage)

    def export(tensor: torch.Tensor, **kwargs: Any) -> Any:
        # torch would export a null pointer. Whoever prints the imported tensor, as pytest does in tracebacks, would read it.
        if is_fake(tensor):
            raise NotImplementedError(f"{tensor} has no memory that DLPack could export")
        return own_export(tensor, **kwargs)

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        memory.record_stream(tensor, stream.key)

    def set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
        own_data.__set__(tensor, new)
        if is_fake(tensor) and is_fake(new):  # a fake tensor stores its device in an attribute
            tensor.fake_device = new.fake_device

    def as_subclass(tensor: torch.Tensor, kind: Any) -> Any:
        return tensor if is_fake(tensor) else own_subclass(tensor, kind)  # a fake tensor has no second class

    own_data, own_export, own_subclass = torch._C.TensorBase.data, torch.Tensor.__dlpack__, torch.Tensor.as_subclass
    yield torch.Tensor, "as_subclass", as_subclass
    yield torch.Tensor, "data", property(own_data.__get__, set_data)
    yield torch.Tensor, "data_ptr", data_ptr
    yield torch.UntypedStorage, "data_ptr", storage_data_ptr
    yield torch.Tensor, "record_stream", record_stream
    yield torch.Tensor, "__dlpack__", export
    yield distributed_c10d, "_NCCL_AVAILABLE", True
    yield distributed_c10d, "ProcessGroupNCCL", make_group_class(recording)
    yield torch.accelerator, "is_available", lambda: True
    yield torch.accelerator, "current_accelerator", lambda *args, **kwargs: torch.device("cuda")
    yield works, "_side_streams", {}
    yield base.Transport, "refuses_encoded", lambda transport, device: ""  # there is no triton
    yield formats, "_compiled", lambda function, *_: function  # operators in turn, on the same stream
    yield shard_module, "type", _type_of
    yield joint_control, "open_joint_control", partial(_open_control, open_channel)
    yield new_groups, "_level_group_counts", lambda *ranks: []


def _open_control(open_channel: Callable[[Any, str], Any], group: Any, name: str, title: str, agreement: Any) -> Any:
    if (channel := open_channel(group, name)) is None:
        return control.Control(group, name, title, agreement=agreement)
    return joint_control.JointControl(channel, group, name, title, agreement=agreement)


def _type_of(value: Any) -> type:
    """Return ``nn.Parameter`` for a fake parameter, whose class is ``FakeTensor``, and otherwise the type."""
    return torch.nn.Parameter if is_fake(value) and getattr(value, "_is_param", False) else type(value)


@contextlib.contextmanager
def _process_group(rank: int, world_size: int, device: torch.device | None) -> Iterator[None]:
    dist.init_process_group(
        "nccl", store=FakeStore(), rank=rank, world_size=world_size, device_id=device, timeout=timedelta(minutes=5)
    )
    try:
        if device is not None:
            dist.group.WORLD.bound_device_id = device
        yield
    finally:
        dist.destroy_process_group()
