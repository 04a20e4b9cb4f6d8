"""A process group of one rank whose collectives occupy a stream of the GPU for as long as a link would take.

One GPU is enough to see how communication overlaps with real compute: of ``world_size`` ranks only rank 0 exists. A gather
fills the whole output from the rank's own shard, a reduction averages the rows of its input, so both move in memory what
they would move in truth, and every number stays finite. Then a kernel of one block waits for the rest of the time. A real
collective also takes some multiprocessors from compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_NAME = "cpu:fake,cuda:emulated_link"
_CYCLES = 50_000_000


class Link:
    """The speed of the link, and what was sent on it.

    Attributes:
        bytes_per_second: that a rank sends; infinity waits for nothing. It may change at any time.
        sent: bytes that the rank has sent.
    """

    def __init__(self) -> None:
        self.bytes_per_second, self.sent = float("inf"), 0.0
        self._cycles_per_second = 0.0

    def occupy(self, nbytes: float) -> None:
        """Let the current stream wait for as long as the link takes."""
        self.sent += nbytes
        seconds = nbytes / self.bytes_per_second
        if seconds:
            torch.cuda._sleep(int(seconds * self._rate()))

    def _rate(self) -> float:
        """Return the cycles per second that the waiting kernel counts, measured once."""
        if not self._cycles_per_second:
            for _ in range(2):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                torch.cuda._sleep(_CYCLES)
                end.record()
                torch.cuda.synchronize()
                self._cycles_per_second = _CYCLES / start.elapsed_time(end) * 1e3
        return self._cycles_per_second


def join_emulated_ranks(world_size: int) -> Link:
    """Join, as rank 0, a default process group over an emulated link, and return the link."""
    link = Link()

    def create(common: Any, options: Any) -> dist.ProcessGroup:
        return _Group(link, common.group_rank, common.group_size)

    dist.Backend.register_backend("emulated_link", create, extended_api=True, devices=["cuda"])
    dist.init_process_group(_NAME, store=dist.HashStore(), rank=0, world_size=world_size)
    return link


class _Work:
    """A collective on the link's stream; ``wait`` lets the current stream wait for it."""

    def __init__(self, tensors: Sequence[torch.Tensor], done: torch.cuda.Event | None) -> None:
        self._tensors, self._done = list(tensors), done

    def wait(self, timeout: object = None) -> bool:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        self._tensors.clear()  # as NCCL's work, it keeps the tensors until then
        return True

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()

    def exception(self) -> None:
        return None


class _Group(dist.ProcessGroup):
    def __init__(self, link: Link, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._link, self._share = link, (size - 1) / size
        self._stream: Any = None
        self._last: Any = None  # collectives of one communicator run one after the other, on whichever streams they are
        self._group_name = self._description = ""

    def getBackendName(self) -> str:
        return "emulated_link"

    @property
    def group_name(self) -> str:
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    def _run(self, tensors: Sequence[torch.Tensor], options: Any, collective: Callable[[], float]) -> _Work:
        """Run what a collective does in memory, and wait for the bytes that it returns.

        An asynchronous one runs on the link's stream, as with NCCL.
        """
        if tensors[0].device.type != "cuda":
            self._link.sent += collective()
            return _Work((), None)
        current = torch.cuda.current_stream()
        if not getattr(options, "asyncOp", True):  # as NCCL, on the current stream
            self._on(current, collective)
            return _Work((), None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        self._stream.wait_stream(current)
        return _Work(tensors, self._on(self._stream, collective))

    def _on(self, stream: torch.cuda.Stream, collective: Callable[[], float]) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            if self._last is not None:
                stream.wait_event(self._last)
            self._link.occupy(collective())
            self._last = torch.cuda.Event()
            self._last.record()
        return self._last

    def _gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Any = None) -> _Work:
        def collective() -> float:
            for output, own in zip(outputs, inputs, strict=True):
                rows = output.view(self.size(), own.numel())
                rows[1:].copy_(own.view(-1))
                if own.data_ptr() != output.data_ptr():  # FSDP2 gathers in place
                    rows[0].copy_(own.view(-1))
            return sum(output.nbytes for output in outputs) * self._share

        return self._run([*outputs, *inputs], options, collective)

    def _reduce(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Any = None) -> _Work:
        def collective() -> float:
            for output, whole in zip(outputs, inputs, strict=True):
                output.copy_(whole.view(self.size(), *output.shape).mean(0))
            return sum(whole.nbytes for whole in inputs) * self._share

        return self._run([*outputs, *inputs], options, collective)

    def _gather_one(self, output: torch.Tensor, own: torch.Tensor, *options: Any) -> _Work:
        return self._gather([output], [own], *options[-1:])

    def _reduce_one(self, output: torch.Tensor, whole: torch.Tensor, *options: Any) -> _Work:
        return self._reduce([output], [whole], *options[-1:])

    _allgather_base = all_gather_single = _gather_one
    _reduce_scatter_base = reduce_scatter_single = _reduce_one
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _gather
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _reduce

    def alltoall_base(self, output: torch.Tensor, own: torch.Tensor, *options: Any) -> _Work:
        def collective() -> float:
            output.copy_(own)
            return output.nbytes * self._share

        return self._run([output, own], options[-1], collective)

    all_to_all_single = alltoall_base

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any = None) -> _Work:
        return _Work((), None)  # once, before training

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> _Work:
        return self._run(tensors, options, lambda: 2 * sum(t.nbytes for t in tensors) * self._share)

    def barrier(self, options: Any = None) -> _Work:
        return _Work((), None)

    def shutdown(self) -> None:
        pass
