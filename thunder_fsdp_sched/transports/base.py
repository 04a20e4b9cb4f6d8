"""The interface of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch._C._autograd import _profiler_enabled

if TYPE_CHECKING:
    from ..buckets import BucketSpec
    from ..groups import Ranks

__all__ = [
    "NOWHERE",
    "Traffic",
    "Transport",
    "TransportedBucket",
    "Views",
    "Work",
    "behind",
    "issue_each",
    "labelled",
    "segment_bytes",
]


_GLOO = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Work(Protocol):
    """What was issued and is to be waited for; ``torch.distributed.Work`` is one."""

    def wait(self) -> Any:
        """Holds back the current stream (on a CPU: the caller) until it is done."""


class Views(NamedTuple):
    """The views of one slot for one bucket.

    Attributes:
        flat: the interleaved unsharded buffer.
        tensors: the parameters, or their gradients, as views of ``flat``.
        pieces: the segments of the layout that have elements, as views of ``flat``; a step makes none.
        staging: the same bytes again, in the order in which the ranks send, if the transport needs that.
    """

    flat: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    pieces: list[torch.Tensor]
    staging: torch.Tensor | None = None


class TransportedBucket(Protocol):
    """The values of a bucket that a transport may use."""

    @property
    def spec(self) -> BucketSpec:
        """The planned bucket."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that share it, with their process groups."""

    @property
    def own_pieces(self) -> list[tuple[slice, slice]]:
        """Which elements of this rank's shard belong to which elements of the unsharded buffer."""

    @property
    def scratch(self) -> dict[tuple[torch.dtype, int], list[torch.Tensor]]:
        """Memory that no transport uses at the moment, by dtype and number of elements; missing keys are empty lists."""


class Traffic(NamedTuple):
    """What one gather or one reduction of a bucket sends and copies: all that planning and the simulator ask.

    Attributes:
        messages: unsharded bytes of each ring collective that pays for a start of its own.
        launches: calls of the communication library.
        passes: how often each byte goes around the ring: once in an all-gather or a reduce-scatter, twice in an
            all-reduce.
        is_reduce_scatter: whether it is the backend's own reduce-scatter, which with gloo sends everything twice.
        copied_before: bytes that are read and written when it is issued, before anything is sent.
        copied_after: bytes that are read and written once everything has arrived: on a GPU by the stream of the
            communication, on a CPU in the wait.
    """

    messages: tuple[int, ...]
    launches: int
    passes: float = 1.0
    is_reduce_scatter: bool = False
    copied_before: int = 0
    copied_after: int = 0

    def wire_bytes(self, world_size: int) -> int:
        """Return the bytes that one rank sends."""
        return int(sum(self.messages) * self.passes * (world_size - 1) / world_size)


class Transport(ABC):
    """Moves a bucket between its sharded and its interleaved unsharded form.

    A transport is one object a process and keeps nothing between a call and the wait for it, except what it caches for
    a bucket. Every method issues its collectives at once and in an order that is the same on all ranks. If it raises,
    nothing that it has issued is in flight any more (``issue_each``).

    Attributes:
        per_param: it needs a layout in which every parameter is cut into even rows (``plan_layout(per_param=True)``).
        staging: its slots have a second half, in the order in which the ranks send (``Views.staging``).
        peers_read_shards: other ranks read a shard where it lies, so that it has to lie on the device.
    """

    name: str
    per_param = False
    staging = False
    peers_read_shards = False

    def check(self, device: torch.device, dtypes: Sequence[torch.dtype], ranks: Ranks) -> None:
        """Checks whether it can carry these dtypes between these ranks.

        Raises:
            ValueError: naming what is missing.
        """
        if ranks.group.backend_for(device) == "gloo":
            for dtype in dtypes:
                if dtype.is_floating_point and dtype not in _GLOO:
                    raise ValueError(
                        f"transport={self.name!r}: the backend gloo cannot send {dtype}; it knows "
                        f"{', '.join(map(str, _GLOO))}. Choose another dtype in mp_policy, or another backend"
                    )

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> torch.Tensor:
        """Memory for what it sends: a flat shard, zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)

    @abstractmethod
    def all_gather(self, bucket: TransportedBucket, shard: torch.Tensor, unsharded: Views) -> Sequence[Work]:
        """Issues what fills ``unsharded.flat`` (``layout.unsharded_numel`` elements) from all ranks' flat shards."""

    @abstractmethod
    def reduce_scatter(self, bucket: TransportedBucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        """Issues what fills ``shard`` (flat, ``layout.shard_numel``) with the mean over ranks of ``unsharded.flat``.

        ``unsharded`` must stay untouched until the work is waited for; its contents are undefined afterwards.
        """

    def gather_traffic(self, spec: BucketSpec) -> Traffic:
        """Return what one gather of the bucket sends and copies; by default one ring all-gather for each segment."""
        messages = segment_bytes(spec, spec.param_dtype)
        return Traffic(messages, len(messages))

    def reduce_traffic(self, spec: BucketSpec) -> Traffic:
        """Return what one reduction of the bucket's gradients sends and copies.

        By default one reduce-scatter of the backend for each segment.
        """
        messages = segment_bytes(spec, spec.reduce_dtype)
        return Traffic(messages, len(messages), is_reduce_scatter=True)


def segment_bytes(spec: BucketSpec, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the bytes of each unsharded segment of the bucket that has elements."""
    world_size = spec.layout.world_size
    return tuple(s.shard_numel * world_size * dtype.itemsize for s in spec.layout.segments if s.shard_numel)


NOWHERE = nullcontext()
"""A context that does nothing."""


def labelled(name: str) -> AbstractContextManager[Any]:
    """Has a profiler show what happens inside under ``name``. Without a profiler a label would cost 6 microseconds."""
    return torch.profiler.record_function(name) if _profiler_enabled() else NOWHERE


def issue_each(issues: Iterable[Callable[[], Work]]) -> list[Work]:
    """Issue one work after the other and return them; if one cannot be issued, wait for those that were."""
    works: list[Work] = []
    try:
        for issue in issues:
            works.append(issue())
    except Exception:
        for work in works:
            with suppress(Exception):  # the first error says more
                work.wait()
        raise
    return works


class _OnStream:
    """Work that a side stream is doing.

    It keeps the tensors that the stream uses, as a work of NCCL does. If nobody has waited when it is dropped, an
    exception having come in between, the allocator is told that the stream still uses them.
    """

    def __init__(self, stream: torch.cuda.Stream, device: torch.device, uses: Sequence[torch.Tensor]) -> None:
        self._stream, self._device, self._uses = stream, device, uses
        self._done = stream.record_event()

    def wait(self) -> None:
        # Not the current stream of the current device, which may be another.
        torch.cuda.current_stream(self._device).wait_event(self._done)
        self._uses = ()

    def __del__(self) -> None:
        with suppress(Exception):  # at exit
            for tensor in self._uses:
                tensor.record_stream(self._stream)


class _Then:
    """Does something when it is waited for, once its works are done."""

    def __init__(self, works: Sequence[Work], action: Callable[[], None]) -> None:
        self.works = works
        self.action = action

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.action()


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for what belongs to communication, one for each device."""
    if device not in _side_streams:  # of high priority: its short copies and sums hold up communication
        _side_streams[device] = torch.cuda.Stream(device, priority=-1)
    return _side_streams[device]


def behind(issue: Callable[[], Sequence[Work]], action: Callable[[], None], uses: Sequence[torch.Tensor]) -> Work:
    """Issue works and do ``action`` after them: on a side stream at once, or on a CPU at the wait.

    Args:
        uses: the tensors that ``issue`` and ``action`` read and write, all on one device.
    """
    device = uses[0].device
    if device.type != "cuda":
        return _Then(issue(), action)
    current, stream = torch.cuda.current_stream(device), side_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        try:
            for work in issue():
                work.wait()
            action()
        except BaseException:
            current.wait_stream(stream)  # what was issued is not in flight any more
            raise
        return _OnStream(stream, device, uses)
