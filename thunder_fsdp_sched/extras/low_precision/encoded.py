"""Send encoded bytes over another transport: see [Note: Formats] in ``extras.low_precision.formats``.

[Note: Encoded buckets]
A rank sends one run of bytes: the codes and the scales of each segment, and the exact elements of exempt parameters,
which have segments of their own. So a gather is one all-gather of bytes, over any transport, and a reduction one
exchange of bytes, after which each rank decodes and adds up the rows that it owns. Encoded gradients are never added.
Decoding belongs to the wait: on a GPU it runs on the communication stream, and compute waits for it.

A gather sends what ``CastShardSource`` has encoded, so backward sends the bytes of its forward. The received bytes, and
those that a reduction sends, are in idle memory from the issue to the wait: a slot never holds bytes that are not decoded.

[Note: Error feedback]
A rank adds the rounding errors of its last gradients to the next ones (1-bit SGD, Seide et al. 2014; LoCo,
arXiv:2407.04480). The errors belong to gradients that were requested, in units of the loss. A backward that was asked
for other gradients (``torch.autograd.grad`` of inputs, ``backward(inputs=...)``) neither adds nor changes the errors of
a parameter whose gradient autograd drops. An error that is not finite counts as zero.

A ``GradScaler`` changes the scale of the loss between two steps and skips steps, and a backward can detect neither. So
it is refused when it unscales such gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...plan.layout import Layout, Segment
from ...plan.specs import BucketOptions, BucketSpec, ParamSpec, WireFormat
from ...private_distributed import all_to_all
from ...ranks.process_groups import BucketRanks
from ...transports.base import (
    Buffer,
    Traffic,
    Transport,
    TransportedBucket,
    Views,
    Work,
)
from ...transports.works import issue_then, returning, take_idle


class Encoded(Transport):
    """The transport of one bucket that is gathered or reduced encoded.

    Args:
        inner: the transport that sends the bytes, and the direction that is not encoded.
    """

    def __init__(self, inner: Transport, spec: BucketSpec) -> None:
        self.name, self.per_param = inner.name, inner.per_param
        self.peers_read_shards = inner.peers_read_shards
        self._inner = inner
        self._on_wire = None if spec.gather_wire is None else _on_wire(spec, spec.gather_wire)

    def check(self, device: torch.device, dtypes: Sequence[torch.dtype], ranks: BucketRanks) -> None:
        self._inner.check(device, dtypes, ranks)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device, ranks: BucketRanks) -> torch.Tensor:
        return self._inner.allocate(numel, dtype, device, ranks)

    def all_gather(self, bucket: TransportedBucket, shard: torch.Tensor, unsharded: Views) -> Sequence[Work]:
        if (wire := bucket.spec.gather_wire) is None:
            return self._inner.all_gather(bucket, shard, unsharded)
        assert self._on_wire is not None
        sent = _BytesOf(self._on_wire, bucket.ranks, _slices(self._on_wire, bucket.ranks), bucket.scratch)
        received = take_idle(bucket.scratch, self._on_wire.layout.unsharded_numel, torch.uint8, shard.device)

        def issue() -> Sequence[Work]:
            return self._inner.all_gather(sent, shard, Views(received, (), [received]))

        def decode() -> None:
            wire.decode(_by_rank(received, bucket), _segments(unsharded.segments, bucket))

        work = issue_then(issue, decode, (shard, received, unsharded.flat))
        return [returning(work, bucket.scratch, received)]

    def reduce_scatter(self, bucket: TransportedBucket, unsharded: Views, shard: torch.Tensor) -> Sequence[Work]:
        spec = bucket.spec
        if (wire := spec.reduce_wire) is None:
            return self._inner.reduce_scatter(bucket, unsharded, shard)
        numel, segments = wire.nbytes * spec.layout.world_size, _segments(unsharded.segments, bucket)
        sent, received = (take_idle(bucket.scratch, numel, torch.uint8, shard.device) for _ in range(2))
        for begin, end in spec.layout.gaps:  # gaps of a slot are not zero, but part of blocks
            unsharded.flat[begin:end].zero_()
        with bucket.feedback.added_to(unsharded.flat) if spec.has_error_feedback else nullcontext() as seen:
            wire.encode(segments, _by_rank(sent, bucket))
            if seen is not None:
                wire.decode(_by_rank(sent, bucket), _segments(spec.layout.unsharded_segments(seen), bucket))

        def issue() -> Sequence[Work]:
            group = bucket.ranks.reductions.process_group
            return [all_to_all(received, sent, group)]

        def add_up() -> None:
            own = [segment[None] for segment in spec.layout.shard_segments(shard)]
            wire.decode_mean(_by_rank(received, bucket), own)

        work = issue_then(issue, add_up, (sent, received, shard))
        return [returning(work, bucket.scratch, sent, received)]

    def gather_traffic(self, spec: BucketSpec) -> Traffic:
        if self._on_wire is None or spec.gather_wire is None:
            return self._inner.gather_traffic(spec)
        return self._inner.gather_traffic(self._on_wire)._replace(
            copied_after=_moved(spec.gather_wire, spec, spec.unsharded_bytes)
        )

    def reduce_traffic(self, spec: BucketSpec) -> Traffic:
        if (wire := spec.reduce_wire) is None:
            return self._inner.reduce_traffic(spec)
        moved = _moved(wire, spec, spec.grad_bytes)
        feedback = 5 * spec.grad_bytes if spec.has_error_feedback else 0
        return Traffic((wire.nbytes * spec.layout.world_size,), 1, copied_before=moved + feedback, copied_after=moved)

    def gather_buffers(self, spec: BucketSpec) -> tuple[Buffer, ...]:
        if self._on_wire is None:
            return self._inner.gather_buffers(spec)
        return (Buffer(torch.uint8, self._on_wire.layout.unsharded_numel),)

    def reduce_buffers(self, spec: BucketSpec) -> tuple[Buffer, ...]:
        if (wire := spec.reduce_wire) is None:
            return self._inner.reduce_buffers(spec)
        return (Buffer(torch.uint8, wire.nbytes * spec.layout.world_size),) * 2

    def reduce_workspace(self, spec: BucketSpec) -> int:
        return self._inner.reduce_workspace(spec) if spec.reduce_wire is None else 0

    def gather_temporary(self, spec: BucketSpec) -> int:
        if (wire := spec.gather_wire) is None:
            return self._inner.gather_temporary(spec)
        return wire.temporary_bytes(spec.layout.world_size, spec.param_dtype, decodes=True)

    def sending_temporary(self, spec: BucketSpec) -> int:
        if (wire := spec.reduce_wire) is None:
            return self._inner.sending_temporary(spec)
        world_size, dtype = spec.layout.world_size, spec.reduce_dtype
        return max(wire.temporary_bytes(world_size, dtype, decodes=d) for d in {False, spec.has_error_feedback})

    def reduce_temporary(self, spec: BucketSpec) -> int:
        if (wire := spec.reduce_wire) is None:
            return self._inner.reduce_temporary(spec)
        return wire.temporary_bytes(1, spec.reduce_dtype, decodes=True, adds=True)


class _BytesOf(NamedTuple):
    """The bytes of a bucket as a bucket that a transport can send."""

    spec: BucketSpec
    ranks: BucketRanks
    local_slices: list[tuple[slice, slice]]
    scratch: dict[tuple[torch.dtype, int], list[torch.Tensor]]

    @property
    def feedback(self) -> Any:
        raise AssertionError("gathers have no error feedback")


def _on_wire(spec: BucketSpec, wire: WireFormat) -> BucketSpec:
    """Describe the bytes that all ranks send as a bucket of one segment."""
    numel = wire.nbytes * spec.layout.world_size
    layout = Layout(spec.layout.world_size, (Segment(0, 0, wire.nbytes),), (), numel, wire.nbytes)
    param = ParamSpec((spec.name,), (numel,), torch.uint8, spec.device, requires_grad=False)
    return replace(spec, params=(param,), layout=layout, options=BucketOptions())


def _slices(spec: BucketSpec, ranks: BucketRanks) -> list[tuple[slice, slice]]:
    own = spec.layout.shard_numel
    return [(slice(0, own), slice(ranks.group.rank * own, (ranks.group.rank + 1) * own))]


def _by_rank(wire: torch.Tensor, bucket: TransportedBucket) -> torch.Tensor:
    return wire.view(bucket.spec.layout.world_size, -1)


def _segments(segments: Sequence[torch.Tensor], bucket: TransportedBucket) -> list[torch.Tensor]:
    return [_by_rank(segment, bucket) for segment in segments]


def _moved(wire: WireFormat, spec: BucketSpec, nbytes: int) -> int:
    """Return the bytes that encoding or decoding a bucket reads and writes."""
    return wire.nbytes * spec.layout.world_size + nbytes


class ErrorFeedback:
    """The error feedback of one bucket on this rank: see [Note: Error feedback].

    Args:
        wanted: returns the indices of the parameters whose gradients the running backward was asked for.

    Attributes:
        lost: the errors, laid out as the unsharded buffer; zeros at first.
    """

    def __init__(self, spec: BucketSpec, wanted: Callable[[], frozenset[int]]) -> None:
        with torch.inference_mode(False):
            self.lost = torch.zeros(spec.layout.unsharded_numel, dtype=spec.reduce_dtype, device=spec.device)
        self._views = spec.layout.unsharded_views(self.lost)
        self._wanted = wanted

    @contextmanager
    def added_to(self, flat: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """Add the errors to gradients, yield a buffer for their decoded values, and store the new rounding errors in it.

        It yields ``None`` if none of the gradients is wanted.
        """
        wanted = self._wanted()
        if not wanted:
            yield None
            return
        others = {i: view.clone() for i, view in enumerate(self._views) if i not in wanted}
        for index in others:
            self._views[index].zero_()
        flat.add_(self.lost)
        yield self.lost
        torch.sub(flat, self.lost, out=self.lost).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for index, view in others.items():
            self._views[index].copy_(view)
