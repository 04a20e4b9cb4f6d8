"""Where every rank's rows of every parameter of a bucket lie: pure data, no tensors, no communication.

[Note: Interleaved layout with row-aligned cuts]
The unsharded bucket is *parameter-major*: each parameter is one contiguous range, so the unsharded parameter is a view
and nothing is unpacked after an all-gather. The bucket is cut into segments; one plain all-gather (or reduce-scatter)
moves one segment, and rank ``r`` owns elements ``[r * shard_numel, (r + 1) * shard_numel)`` of it. Usually one segment
holds the whole bucket, as FSDP1's flat parameter does, but parameters are placed so that every cut between two ranks
falls on the start of a row (dim 0) or into padding. A rank's piece of a parameter is therefore always a number of whole
rows (maybe none, maybe all of them), has the parameter's number of dimensions, and is contiguous in the shard buffer:
no copy before the collective, none after it, and optimizers that look at ``p.ndim`` see what they expect.

Alternatives: FSDP2's even dim-0 shards (every parameter is spread over all ranks) reach the parameter-major order only
with a collective or a copy per parameter: that is the degenerate case of one segment per parameter here (``per_param``).
FSDP1's cuts in the middle of a row turn every parameter into a 1-D piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "Layout", "Placement", "Segment", "plan_layout"]

ALIGNMENT = 16
"""Bytes to which the start of each parameter is aligned in the unsharded buffer (vector loads, inductor's guard)."""

_MAX_PADDING = 1 / 8
"""Largest share of padding in one segment before its parameters are spread over several segments."""


@dataclass(frozen=True)
class Segment:
    """A range of the bucket that travels in one collective.

    Attributes:
        unsharded_offset: first element in the unsharded buffer, which has ``world_size * shard_numel`` elements of it.
        shard_offset: first element in a rank's shard buffer, which has ``shard_numel`` elements of it.
        shard_numel: elements that each rank owns, padding included.
    """

    unsharded_offset: int
    shard_offset: int
    shard_numel: int


@dataclass(frozen=True)
class Placement:
    """Where one parameter lies.

    Attributes:
        shape: shape of the unsharded parameter.
        unsharded_offset: its first element in the unsharded buffer.
        row_starts: ``world_size + 1`` row numbers; rank ``r`` owns rows ``[row_starts[r], row_starts[r + 1])``. A 0-dim
            parameter counts as one row.
        shard_offsets: for each rank the element of its shard buffer where its rows begin.
    """

    shape: tuple[int, ...]
    unsharded_offset: int
    row_starts: tuple[int, ...]
    shard_offsets: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])

    @property
    def is_cut(self) -> bool:
        """Whether more than one rank has rows."""
        return sum(end > start for start, end in itertools.pairwise(self.row_starts)) > 1

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the rows that ``rank`` owns; a 0-dim parameter has shape ``(1,)`` on its owner and ``(0,)`` elsewhere."""
        return (self.row_starts[rank + 1] - self.row_starts[rank], *self.shape[1:])


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

    def pieces(self, unsharded: torch.Tensor) -> list[torch.Tensor]:
        """Return each segment that has elements, as it lies in a flat unsharded buffer."""
        return [
            _piece(unsharded, s.unsharded_offset, self.world_size * s.shard_numel)
            for s in self.segments
            if s.shard_numel
        ]

    def own_pieces(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return a rank's own piece of each of these segments, as it lies in its flat shard."""
        return [_piece(shard, s.shard_offset, s.shard_numel) for s in self.segments if s.shard_numel]


def _piece(flat: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    return flat if numel == flat.numel() else flat.narrow(0, start, numel)  # usually there is one segment, and no rest


def plan_layout(
    shapes: Sequence[tuple[int, ...]], world_size: int, itemsize: int, *, per_param: bool = False
) -> Layout:
    """Places parameters of the given shapes, in order, into one bucket for ``world_size`` ranks.

    Args:
        shapes: shapes of the unsharded parameters.
        world_size: ranks that share the bucket.
        itemsize: bytes of one element, in the narrowest dtype in which the bucket travels.
        per_param: give each parameter a segment of its own, which cuts it into even runs of rows. The segments of a
            shard then lie right behind one another.
    """
    align = max(1, ALIGNMENT // itemsize)
    if per_param:
        groups = [[i] for i in range(len(shapes))]
    else:
        everything = list(range(len(shapes)))
        groups = [everything]
        if (
            _padding(_fill_segment(shapes, everything, world_size, align), shapes, everything, world_size)
            > _MAX_PADDING
        ):
            # Rows of unrelated widths have no small common multiple: give each width its own segment.
            by_width: dict[int, list[int]] = {}
            for i in everything:
                by_width.setdefault(math.prod(shapes[i][1:]), []).append(i)
            split = list(by_width.values())
            if len(split) > 1 and _total(shapes, split, world_size, align) < _total(shapes, groups, world_size, align):
                groups = split

    segments: list[Segment] = []
    placements: dict[int, Placement] = {}
    unsharded_offset = shard_offset = 0
    for group in groups:
        shard_numel, offsets = _fill_segment(shapes, group, world_size, align)
        segments.append(Segment(unsharded_offset, shard_offset, shard_numel))
        for i, offset in zip(group, offsets, strict=True):
            placements[i] = _place(shapes[i], offset, segments[-1], world_size)
        unsharded_offset = _round_up(unsharded_offset + world_size * shard_numel, align)
        shard_offset = shard_offset + shard_numel if per_param else _round_up(shard_offset + shard_numel, align)
    return Layout(
        world_size,
        tuple(segments),
        tuple(placements[i] for i in range(len(shapes))),
        unsharded_offset,
        shard_offset,
    )


def _place(shape: tuple[int, ...], offset: int, segment: Segment, world_size: int) -> Placement:
    row_numel = math.prod(shape[1:])
    rows = shape[0] if shape else 1
    starts = []
    for rank in range(world_size + 1):
        elements = min(max(rank * segment.shard_numel - offset, 0), rows * row_numel)
        start, rest = divmod(elements, row_numel) if row_numel else (0, 0)
        assert rest == 0, f"a cut between ranks falls into a row of a parameter of shape {shape}"
        starts.append(start)
    if not row_numel:  # rows without elements: the last rank may as well own them all
        starts[-1] = rows
    shard_offsets = tuple(
        segment.shard_offset
        + min(max(offset + starts[r] * row_numel - r * segment.shard_numel, 0), segment.shard_numel)
        for r in range(world_size)
    )
    return Placement(shape, segment.unsharded_offset + offset, tuple(starts), shard_offsets)


def _fill_segment(
    shapes: Sequence[tuple[int, ...]], group: list[int], world_size: int, align: int
) -> tuple[int, list[int]]:
    """Returns the segment's elements per rank and the offset of each parameter of ``group`` within the segment."""
    if len(group) == 1:  # even runs of rows
        shape = shapes[group[0]]
        return _ceil_div(shape[0] if shape else 1, world_size) * math.prod(shape[1:]), [0]
    numels = [math.prod(shapes[i]) for i in group]
    widths = [math.prod(shapes[i][1:]) for i in group]
    least = _ceil_div(sum(_round_up(n, align) for n in numels), world_size)
    # A parameter longer than a shard is cut more than once, so the distance of two cuts must be whole rows of it.
    quantum = math.lcm(align, *(w for n, w in zip(numels, widths, strict=True) if n > least and w))
    shard_numel = max(_round_up(least, quantum), quantum)
    while True:
        offsets, end = _place_in_order(numels, widths, shard_numel, align)
        if end <= world_size * shard_numel:
            return shard_numel, offsets
        shard_numel = _round_up(max(shard_numel + 1, _ceil_div(end, world_size)), quantum)


def _place_in_order(
    numels: Sequence[int], widths: Sequence[int], shard_numel: int, align: int
) -> tuple[list[int], int]:
    """Places parameters one behind the other, each moved on by as little as puts its first cut onto a row's start."""
    offsets = []
    end = 0
    for numel, width in zip(numels, widths, strict=True):
        start = _round_up(end, align)
        cut = (start // shard_numel + 1) * shard_numel
        if numel and width and start + numel > cut:
            # The parameter starts a whole number of (aligned) rows before the cut, or at the cut itself.
            step = math.lcm(width, align)
            start = cut - (cut - start) // step * step
        offsets.append(start)
        end = start + numel
    return offsets, end


def _padding(filled: tuple[int, list[int]], shapes: Sequence[tuple[int, ...]], group: list[int], world: int) -> float:
    total = filled[0] * world
    return 1 - sum(math.prod(shapes[i]) for i in group) / total if total else 0.0


def _total(shapes: Sequence[tuple[int, ...]], groups: list[list[int]], world_size: int, align: int) -> int:
    return sum(_fill_segment(shapes, group, world_size, align)[0] for group in groups) * world_size


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(value: int, multiple: int) -> int:
    return _ceil_div(value, multiple) * multiple
