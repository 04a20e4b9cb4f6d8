"""Process groups that log collectives with NCCL's semantics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from .log import HOST, Access, Stream
from .mode import Recording


class Work:
    """A collective on the communicator's stream.

    ``wait`` orders the device's current stream after it. As in torch, the work holds the tensors until then.
    """

    def __init__(self, group: Any, tensors: Sequence[torch.Tensor], device: torch.device | None, event: int) -> None:
        self._group, self._device, self._event = group, device, event
        self._stash: tuple[torch.Tensor, ...] = tuple(tensors)

    def wait(self, timeout: object = None) -> bool:
        if self._device is not None and self._event:
            self._group.recording.log.add(
                "wait_event", "nccl wait", self._group.recording.cuda.key(self._device), event=self._event
            )
        self._stash = ()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return False

    def exception(self) -> None:
        return None


class _Options:
    """A stand-in for ``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.split_from: Any = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout: Any = None

    def __deepcopy__(self, memo: Any) -> _Options:
        return copy.copy(self)


def make_group_class(recording: Recording) -> type[dist.ProcessGroup]:
    """Return a class of process groups for one rank, the stand-in for ``ProcessGroupNCCL``."""

    class VirtualNccl(dist.ProcessGroup):
        Options = _Options

        def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
            super().__init__(rank, size)
            self.recording = recording
            self.options = options or _Options()
            self._streams: dict[int, Stream] = {}
            self._batch: list[tuple[str, Sequence[torch.Tensor], Sequence[torch.Tensor], tuple[Any, ...]]] | None = None
            name, ranks = self.options.group_name, tuple(self.options.global_ranks_in_group) or tuple(range(size))
            self._name = name or "default"
            recording.log.members[self._name] = ranks
            if self.options.split_from is not None:
                parent = self.options.split_from
                recording.log.add("split", "ncclCommSplit", HOST, group=parent._name, signature=("split",))

        def getBackendName(self) -> str:
            return "nccl"

        @property
        def supports_splitting(self) -> bool:
            return True

        @property
        def group_name(self) -> str:
            return self._group_name

        @property
        def group_desc(self) -> str:
            return self._desc

        def _set_group_name(self, name: str) -> None:
            self._group_name = name

        def get_group_store(self) -> Any:
            return FakeStore()

        def split_group(self, ranks: Sequence[int], *, opts: Any, group_name: str, group_desc: Any, **more: Any) -> Any:
            members = recording.log.members[self._name]
            opts.split_from, opts.group_name = self, group_name
            opts.global_ranks_in_group = [members[rank] for rank in ranks]
            split = VirtualNccl(None, ranks.index(self.rank()), len(ranks), opts)
            split._set_group_name(group_name)
            split._set_group_desc(group_desc)
            return split

        def _set_group_desc(self, desc: str) -> None:
            self._desc = desc

        def _set_sequence_number_for_group(self) -> None:
            pass

        def _get_backend(self, device: torch.device) -> Any:
            return self

        def perform_nocolor_split(self, device: torch.device) -> None:
            recording.log.add("split", "ncclCommSplit", HOST, group=self._name, signature=("split",))

        def eager_connect_single_device(self, device: torch.device) -> None:
            pass

        def _start_coalescing(self, device: torch.device) -> None:
            self._batch = []

        def _end_coalescing(self, device: torch.device) -> Any:
            batch, self._batch = self._batch or [], None
            return self._launch("coalesced", batch, True)

        def _issue(self, name: str, outputs: Any, inputs: Any, options: Any = None, *details: Any) -> Any:
            if self._batch is not None:
                self._batch.append((name, outputs, inputs, details))
                return None
            return self._launch(name, [(name, outputs, inputs, details)], bool(getattr(options, "asyncOp", True)))

        def _launch(self, name: str, batch: Sequence[Any], async_op: bool) -> Any:
            """Log one launch: if asynchronous on NCCL's stream, after the current stream, else on the current stream."""
            recording.memory.collect()
            tensors = [t for _, outputs, inputs, _ in batch for t in (*outputs, *inputs)]
            devices = {t.device for t in tensors}
            if any(device.type != "cuda" for device in devices):
                raise RuntimeError(f"No backend type associated with device type {next(iter(devices)).type}")
            assert len(devices) == 1, f"one collective on {devices}"
            [device] = devices
            log, cuda = recording.log, recording.cuda
            accesses = [recording.memory.access(t, False) for _, _, inputs, _ in batch for t in inputs]
            accesses += [recording.memory.access(t, True) for _, outputs, _, _ in batch for t in outputs]
            signature = tuple((n, *_signature(o, i), *details) for n, o, i, details in batch)
            current = cuda.key(device)
            if not async_op:
                log.add("collective", name, current, _writes_win(accesses), group=self._name, signature=signature)
                return Work(self, (), None, 0)
            stream = self._streams.setdefault(
                current.device, Stream(current.device, cuda.guard.virtual_gpu_new_stream())
            )
            started, done = cuda.guard.virtual_gpu_new_event(), cuda.guard.virtual_gpu_new_event()
            log.add("record", "nccl start", current, event=started)
            log.add("wait_event", "nccl start", stream, event=started)
            log.add("collective", name, stream, _writes_win(accesses), group=self._name, signature=signature)
            log.add("record", "nccl end", stream, event=done)
            return Work(self, tensors, device, done)

        def barrier(self, options: Any = None) -> Any:
            stream, meets = recording.cuda.key(), {"group": self._name, "signature": ("barrier",)}
            recording.log.add("collective", "barrier", stream, **meets, blocks=True)
            return Work(self, (), None, 0)

        def shutdown(self) -> None:
            pass

        def abort(self) -> None:
            pass

    for method, issue in _METHODS.items():
        setattr(VirtualNccl, method, issue)
    return VirtualNccl


def _one(name: str, *, reduces: bool = False) -> Callable[..., Any]:
    """Return a method that issues a collective of one output and one input. Its options come last."""

    def issue(self: Any, output: torch.Tensor, own: torch.Tensor, *rest: Any) -> Any:
        options = rest[-1] if rest else None
        return self._issue(name, [output], [own], options, *([_op(options)] if reduces else []))

    return issue


def _several(name: str, *, reduces: bool = False) -> Callable[..., Any]:
    """Return a method that launches collectives of one output and one input each together."""

    def issue(self: Any, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Any = None) -> Any:
        details = (_op(options),) if reduces else ()
        batch = [(name, [o], [i], details) for o, i in zip(outputs, inputs, strict=True)]
        return self._launch(f"{name}_coalesced", batch, bool(getattr(options, "asyncOp", True)))

    return issue


def _all_reduce(self: Any, tensors: Sequence[torch.Tensor], options: Any = None) -> Any:
    return self._issue("all_reduce", tensors, tensors, options, _op(options))


def _broadcast(self: Any, tensors: Sequence[torch.Tensor], options: Any = None) -> Any:
    root = getattr(options, "rootRank", 0)
    mine = root == self.rank()
    return self._issue("broadcast", [] if mine else tensors, tensors if mine else [], options, root)


def _all_gather_list(self: Any, outputs: Any, inputs: Sequence[torch.Tensor], options: Any = None) -> Any:
    return self._issue("all_gather_list", outputs[0], inputs, options)


_METHODS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("_allgather_base", "all_gather_single"), _one("all_gather")),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), _several("all_gather")),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), _one("reduce_scatter", reduces=True)),
    **dict.fromkeys(
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), _several("reduce_scatter", reduces=True)
    ),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _one("all_to_all")),
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), _all_reduce),
    "broadcast": _broadcast,
    "allgather": _all_gather_list,
}


def _op(options: Any) -> str:
    return next(
        (name for name in ("SUM", "AVG", "MAX", "MIN") if options.reduceOp == getattr(dist.ReduceOp, name)), "?"
    )


def _signature(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return what must be equal on all ranks: the dtype, and the numbers of elements of inputs and outputs."""
    tensors = [*outputs, *inputs]
    return (tensors[0].dtype, *sorted({sum(t.numel() for t in outputs), sum(t.numel() for t in inputs)} - {0}))


def _writes_win(accesses: Sequence[Access]) -> list[Access]:
    written = {(a.storage, a.region) for a in accesses if a.write}
    return [a for a in accesses if a.write or (a.storage, a.region) not in written]
