"""The layout of a bucket: where each rank's rows of each parameter are stored. Pure data, no communication.

[Note: Interleaved layout with row-aligned cuts]
The unsharded bucket is *parameter-major*: each parameter is one contiguous range, so the unsharded parameter is a view
and needs no unpacking after an all-gather. The bucket is divided into segments. One plain all-gather or reduce-scatter
communicates one segment, of which rank ``r`` owns the elements ``[r * shard_numel, (r + 1) * shard_numel)``.

Usually one segment holds the whole bucket, like FSDP1's flat parameter. Unlike there, parameters are placed so that
every cut between two ranks falls on the start of a row (dim 0) or into padding. A rank's shard of a parameter is
therefore a number of whole rows (possibly none, possibly all), has as many dimensions as the parameter, and is
contiguous in the shard buffer. So there is no copy before or after the collective, and optimizers that check ``p.ndim``
see the expected value.

Alternatives: FSDP2's even dim-0 shards spread every parameter over all ranks. They need one collective or one copy per
parameter to reach parameter-major order; here that is the special case of one segment per parameter (``per_param``).
FSDP1 cuts within rows, which turns every shard into a 1-D tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16
"""Alignment (bytes) of each parameter in the unsharded buffer, for vector loads and inductor's guard."""

_MAX_PADDING = 1 / 8
"""The largest share of padding in a segment; beyond it, the parameters are divided into several segments."""


@dataclass(frozen=True)
class Segment:
    """A range of the bucket that one collective communicates."""

    unsharded_offset: int  # first element in the unsharded buffer, where it has world_size * shard_numel elements
    shard_offset: int  # first element in a rank's shard buffer, where it has shard_numel elements
    shard_numel: int  # elements that each rank owns, padding included
    exempt: bool = False  # whether its parameters are sent exactly although others are encoded


@dataclass(frozen=True, eq=False)
class RowStarts(Sequence[int]):
    """The first row of each rank, then the number of rows; computed, so that memory does not grow with the ranks.

    It equals the tuple of these numbers.
    """

    rows: int
    row_numel: int
    offset: int  # the parameter's first element in its segment
    shard_numel: int  # elements of the segment that each rank owns
    world_size: int

    def __len__(self) -> int:
        return self.world_size + 1

    @overload
    def __getitem__(self, rank: int) -> int: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[int, ...]: ...
    def __getitem__(self, rank: int | slice) -> int | tuple[int, ...]:
        if isinstance(rank, slice):
            return tuple(map(self.__getitem__, range(*rank.indices(len(self)))))
        rank = range(len(self))[rank]
        if not self.row_numel:  # rows without elements: the last rank has them all
            return self.rows if rank == self.world_size else 0
        elements = min(max(rank * self.shard_numel - self.offset, 0), self.rows * self.row_numel)
        return elements // self.row_numel

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowStarts) and vars(self) == vars(other):
            return True
        return isinstance(other, RowStarts | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True)
class Placement:
    """The position of one parameter in its bucket. A 0-dim parameter counts as one row."""

    shape: tuple[int, ...]  # of the unsharded parameter
    unsharded_offset: int  # its first element in the unsharded buffer
    row_starts: RowStarts  # world_size + 1 numbers; rank r owns rows [row_starts[r], row_starts[r + 1])
    segment_offset: int  # the first element of its segment in a rank's shard buffer

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the rows of ``rank``; for a 0-dim parameter ``(1,)`` on its owner and ``(0,)`` elsewhere."""
        return (self.row_starts[rank + 1] - self.row_starts[rank], *self.shape[1:])

    def shard_offset(self, rank: int) -> int:
        """Return the element of the shard buffer of ``rank`` at which its rows start."""
        starts = self.row_starts
        begin = starts.offset + starts[rank] * self.row_numel - rank * starts.shard_numel
        return self.segment_offset + min(max(begin, 0), starts.shard_numel)


@dataclass(frozen=True)
class Layout:
    """The layout of one bucket over ``world_size`` ranks, in elements of the bucket's dtype."""

    world_size: int
    segments: tuple[Segment, ...]
    placements: tuple[Placement, ...]
    unsharded_numel: int
    shard_numel: int

    @property
    def padding_numel(self) -> int:
        """Elements of the unsharded buffer that belong to no parameter."""
        return self.unsharded_numel - sum(p.numel for p in self.placements)

    @functools.cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The ranges of the unsharded buffer that belong to no parameter."""
        found, end = [], 0
        for placement in sorted(self.placements, key=lambda p: (p.unsharded_offset, p.numel)):
            found.append((end, placement.unsharded_offset))
            end = max(end, placement.unsharded_offset + placement.numel)
        return tuple((begin, end) for begin, end in (*found, (end, self.unsharded_numel)) if begin < end)

    def unsharded_segments(self, unsharded: torch.Tensor) -> list[torch.Tensor]:
        """Return each non-empty segment as a view of a flat unsharded buffer."""
        return [
            _narrow(unsharded, s.unsharded_offset, self.world_size * s.shard_numel)
            for s in self.segments
            if s.shard_numel
        ]

    def shard_segments(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return a rank's own range of each non-empty segment, as a view of its flat shard."""
        return [_narrow(shard, s.shard_offset, s.shard_numel) for s in self.segments if s.shard_numel]

    def shard_views(self, rank: int, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows that ``rank`` owns of each parameter, as views of its flat shard or gradients."""
        shapes = [placement.shard_shape(rank) for placement in self.placements]
        offsets = [placement.shard_offset(rank) for placement in self.placements]
        return tuple(
            flat.narrow(0, offset, math.prod(shape)).view(shape) for offset, shape in zip(offsets, shapes, strict=True)
        )

    def unsharded_views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each parameter as a view of a flat unsharded buffer."""
        return tuple(flat.narrow(0, p.unsharded_offset, p.numel).view(p.shape) for p in self.placements)


def _narrow(flat: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    return flat if numel == flat.numel() else flat.narrow(0, start, numel)  # usually one segment is all


def make_layout(
    shapes: Sequence[tuple[int, ...]],
    world_size: int,
    itemsize: int,
    *,
    per_param: bool = False,
    exempt: Collection[int] = (),
) -> Layout:
    """Lay out parameters of the given shapes, in order, in one bucket for ``world_size`` ranks.

    Args:
        shapes: shapes of the unsharded parameters.
        world_size: number of ranks that share the bucket.
        itemsize: bytes of one element in the narrowest dtype in which the bucket is sent or stored.
        per_param: give each parameter a segment of its own, which splits it evenly by rows. The segments of a shard
            then follow each other without gaps.
        exempt: indices of parameters that are sent exactly although others are encoded; they get segments of their own.
    """
    align = max(1, ALIGNMENT // itemsize)
    if per_param:
        memberships = [[i] for i in range(len(shapes))]
    else:
        parts = ([i for i in range(len(shapes)) if (i in exempt) is apart] for apart in (False, True))
        memberships = [members for part in parts for members in _divided(shapes, part, world_size, align)]
    segments: list[Segment] = []
    placements: dict[int, Placement] = {}
    unsharded_offset = shard_offset = 0
    for members in memberships:
        shard_numel, offsets = _fill_segment(shapes, members, world_size, align)
        segments.append(Segment(unsharded_offset, shard_offset, shard_numel, members[0] in exempt))
        for i, offset in zip(members, offsets, strict=True):
            placements[i] = make_placement(shapes[i], offset, segments[-1], world_size)
        unsharded_offset = round_up(unsharded_offset + world_size * shard_numel, align)
        shard_offset = shard_offset + shard_numel if per_param else round_up(shard_offset + shard_numel, align)
    return Layout(
        world_size,
        tuple(segments),
        tuple(placements[i] for i in range(len(shapes))),
        unsharded_offset,
        shard_offset,
    )


def _divided(shapes: Sequence[tuple[int, ...]], members: list[int], world_size: int, align: int) -> list[list[int]]:
    """Return the parameters as one segment, or as one for each width of rows if one segment has too much padding."""
    if not members:
        return []
    total = _total(shapes, [members], world_size, align)
    if sum(math.prod(shapes[i]) for i in members) >= (1 - _MAX_PADDING) * total:
        return [members]
    by_width: dict[int, list[int]] = {}
    for i in members:
        by_width.setdefault(math.prod(shapes[i][1:]), []).append(i)
    split = list(by_width.values())
    return split if _total(shapes, split, world_size, align) < total else [members]


def make_placement(shape: tuple[int, ...], offset: int, segment: Segment, world_size: int) -> Placement:
    row_numel = math.prod(shape[1:])
    rows = shape[0] if shape else 1
    if rows * row_numel:
        cuts = range(-offset % segment.shard_numel, rows * row_numel, segment.shard_numel)
        assert not any(cut % row_numel for cut in cuts), f"a cut between ranks falls into a row of shape {shape[1:]}"
    starts = RowStarts(rows, row_numel, offset, segment.shard_numel, world_size)
    return Placement(shape, segment.unsharded_offset + offset, starts, segment.shard_offset)


def _fill_segment(
    shapes: Sequence[tuple[int, ...]], members: list[int], world_size: int, align: int
) -> tuple[int, list[int]]:
    """Return the segment's elements per rank, and the offset of each parameter of ``members`` within the segment."""
    if len(members) == 1:  # even runs of rows
        shape = shapes[members[0]]
        return _ceil_div(shape[0] if shape else 1, world_size) * math.prod(shape[1:]), [0]
    numels = [math.prod(shapes[i]) for i in members]
    widths = [math.prod(shapes[i][1:]) for i in members]
    least = _ceil_div(sum(round_up(n, align) for n in numels), world_size)
    # A parameter longer than a shard is cut more than once, so the distance between cuts must be a multiple of its
    # rows.
    quantum = math.lcm(align, *(w for n, w in zip(numels, widths, strict=True) if n > least and w))
    shard_numel = max(round_up(least, quantum), quantum)
    while True:
        offsets, end = _pack_in_order(numels, widths, shard_numel, align)
        if end <= world_size * shard_numel:
            return shard_numel, offsets
        shard_numel = round_up(_ceil_div(end, world_size), quantum)


def _pack_in_order(numels: Sequence[int], widths: Sequence[int], shard_numel: int, align: int) -> tuple[list[int], int]:
    """Place parameters in order, each with the least padding that puts its first cut on the start of a row."""
    offsets = []
    end = 0
    for numel, width in zip(numels, widths, strict=True):
        start = round_up(end, align)
        cut = (start // shard_numel + 1) * shard_numel
        if numel and width and start + numel > cut:
            # The parameter starts a whole number of (aligned) rows before the cut, or at the cut itself.
            step = math.lcm(width, align)
            start = cut - (cut - start) // step * step
        offsets.append(start)
        end = start + numel
    return offsets, end


def _total(shapes: Sequence[tuple[int, ...]], memberships: list[list[int]], world_size: int, align: int) -> int:
    return sum(_fill_segment(shapes, members, world_size, align)[0] for members in memberships) * world_size


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
