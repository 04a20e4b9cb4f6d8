"""The interface of a transport."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import coded_error
from ..plan.specs import BucketSpec
from ..ranks.process_groups import BucketRanks

_GLOO = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Work(Protocol):
    """An issued operation that can be waited for, such as a ``torch.distributed.Work``."""

    def wait(self) -> Any:
        """Block the current stream (on a CPU: the caller) until it has finished."""


class Views(NamedTuple):
    """The views of one slot for one bucket.

    Attributes:
        flat: the interleaved unsharded buffer.
        tensors: the parameters, or their gradients, as views of ``flat``.
        segments: the non-empty segments of the layout, as views of ``flat``, created in advance so that a step creates
            none.
    """

    flat: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    segments: list[torch.Tensor]


class TransportedBucket(Protocol):
    """The values of a bucket that a transport may use: transports lie below ``runtime``, which has the bucket."""

    @property
    def spec(self) -> BucketSpec:
        """The planned bucket."""

    @property
    def ranks(self) -> BucketRanks:
        """The ranks that share it, with their process groups."""

    @property
    def local_slices(self) -> list[tuple[slice, slice]]:
        """Pairs of slices: elements of this rank's shard, and the same elements in the unsharded buffer."""

    @property
    def feedback(self) -> Any:
        """The rounding errors of this rank's last gradients, an ``ErrorFeedback``."""

    @property
    def scratch(self) -> dict[tuple[torch.dtype, int], list[torch.Tensor]]:
        """Idle temporary memory, keyed by dtype and number of elements; a missing key is an empty list."""


class Traffic(NamedTuple):
    """The bytes that one gather or one reduction of a bucket sends and copies, for planning and the simulator.

    Attributes:
        messages: unsharded bytes of each ring collective with a start-up cost of its own.
        launches: number of calls of the communication library.
        passes: how often each byte goes around the ring: once in an all-gather or a reduce-scatter, twice in an
            all-reduce.
        is_reduce_scatter: whether it uses the backend's reduce-scatter, which sends everything twice with gloo.
        copied_before: bytes read and written at the issue, before sending.
        copied_after: bytes read and written after everything has arrived: on a GPU on the communication stream, on a
            CPU in the wait.
    """

    messages: tuple[int, ...]
    launches: int
    passes: float = 1.0
    is_reduce_scatter: bool = False
    copied_before: int = 0
    copied_after: int = 0

    def in_one_launch(self) -> Traffic:
        """Return the same traffic if all collectives start together."""
        total = sum(self.messages)
        return self._replace(messages=(total,) * bool(total), launches=min(1, self.launches))


class Buffer(NamedTuple):
    """Idle temporary memory that a collective takes, and that its wait gives back.

    Attributes:
        dtype: the dtype of its elements; a buffer of another dtype does not serve.
        nbytes: its bytes.
    """

    dtype: torch.dtype
    nbytes: int


class Transport(ABC):
    """The interface for moving a bucket between its sharded and its interleaved unsharded form.

    There is one transport object per process. It keeps no state between a call and its wait, except caches per bucket.
    Methods issue their collectives immediately, in the same order on all ranks. If a method raises, none of its
    collectives is in flight any more (``issue_each``).

    Attributes:
        per_param: whether it needs a layout that splits every parameter evenly by rows
            (``make_layout(per_param=True)``).
        peers_read_shards: whether other ranks read a shard directly, so that it must be on the device.
    """

    name: str
    per_param = False
    peers_read_shards = False

    def check(self, device: torch.device, dtypes: Sequence[torch.dtype], ranks: BucketRanks) -> None:
        """Check whether it can send these dtypes between these ranks.

        Raises:
            ValueError: names what is missing.
        """
        if ranks.group.backend_for(device) == "gloo":
            for dtype in dtypes:
                if dtype.is_floating_point and dtype not in _GLOO:
                    raise coded_error(
                        ValueError,
                        "transport.gloo-cannot-send-dtype",
                        transport=self.name,
                        dtype=dtype,
                        dtypes=", ".join(map(str, _GLOO)),
                    )

    def refuses_encoded(self, device: torch.device) -> str:
        """Return why it cannot send encoded bytes of buckets on this device, and what to do; empty if it can."""
        if device.type == "cuda" and importlib.util.find_spec("triton") is None:
            return "encoding on a GPU is compiled with torch.compile, which needs triton; install it"
        return ""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device, ranks: BucketRanks) -> torch.Tensor:
        """Return memory for a flat shard, filled with zeros, from which it can send."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def allocate_together(
        self, sizes: Sequence[tuple[int, torch.dtype]], device: torch.device, ranks: BucketRanks, *, workspace: int
    ) -> list[torch.Tensor]:
        """Return memory for several buckets over the same ranks, as :meth:`allocate`; called if ``peers_read_shards``.

        Args:
            sizes: the number and the dtype of the elements that each sends.
            workspace: bytes that their reductions share, the largest :meth:`reduce_workspace`.
        """
        return [self.allocate(numel, dtype, device, ranks) for numel, dtype in sizes]

    @abstractmethod
    def all_gather(self, bucket: TransportedBucket, shard: torch.Tensor, unsharded: Views) -> Sequence[Work]:
        """Issue the gather that fills ``unsharded.flat`` (``layout.unsharded_numel`` elements) from all flat shards."""

    @abstractmethod
    def reduce_scatter(self, bucket: TransportedBucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        """Issue the reduction that fills ``shard`` (``layout.shard_numel``) with the mean over ranks of ``unsharded.flat``.

        Leave ``unsharded`` untouched until the work has been waited for; afterwards its contents are undefined.
        """

    def gather_traffic(self, spec: BucketSpec) -> Traffic:
        """Return the traffic of one gather of the bucket; by default one ring all-gather for each segment."""
        messages = segment_bytes(spec, spec.param_dtype)
        return Traffic(messages, len(messages))

    def reduce_traffic(self, spec: BucketSpec) -> Traffic:
        """Return the traffic of one reduction of the bucket's gradients.

        By default one reduce-scatter of the backend for each segment.
        """
        messages = segment_bytes(spec, spec.reduce_dtype)
        return Traffic(messages, len(messages), is_reduce_scatter=True)

    def gather_buffers(self, spec: BucketSpec) -> tuple[Buffer, ...]:
        """Return the buffers that one gather uses from its issue to its wait, and that later collectives reuse."""
        return ()

    def reduce_buffers(self, spec: BucketSpec) -> tuple[Buffer, ...]:
        """Return the same for one reduction."""
        return ()

    def reduce_workspace(self, spec: BucketSpec) -> int:
        """Return the bytes that reductions between the same ranks share, which stay allocated; the largest one counts."""
        return 0

    def gather_temporary(self, spec: BucketSpec) -> int:
        """Return the bytes that one gather allocates and frees again after its collective."""
        return 0

    def sending_temporary(self, spec: BucketSpec) -> int:
        """Return the bytes that one reduction allocates and frees again before its collectives."""
        return 0

    def reduce_temporary(self, spec: BucketSpec) -> int:
        """Return the bytes that one reduction allocates and frees again after its collectives."""
        return 0


def segment_bytes(spec: BucketSpec, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the unsharded bytes of each non-empty segment of the bucket."""
    world_size = spec.layout.world_size
    return tuple(s.shard_numel * world_size * dtype.itemsize for s in spec.layout.segments if s.shard_numel)


def issue_each(issues: Iterable[Callable[[], Work]]) -> list[Work]:
    """Issue works in order and return them; if one cannot be issued, wait for the others before raising."""
    works: list[Work] = []
    try:
        for issue in issues:
            works.append(issue())
    except Exception:
        for work in works:
            with suppress(Exception):  # the first error is more specific
                work.wait()
        raise
    return works
