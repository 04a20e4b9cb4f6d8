"""Layouts: every rank gets whole rows, and one all-gather per segment makes every parameter contiguous."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from internals import make_layout

ALIGNMENT = 16  # bytes, for any dtype and any kernel that loads vectors

shapes = st.lists(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 16, 33]), max_size=3).map(tuple), min_size=1, max_size=8)


def gather_all(layout: Any, params: list[torch.Tensor]) -> list[torch.Tensor]:
    """Fill each rank's shard with its rows, gather each segment, and return the parameters found at their offsets."""
    shards = torch.full((layout.world_size, layout.shard_numel), -1.0)
    for param, placement in zip(params, layout.placements, strict=True):
        rows = param.reshape(1) if param.ndim == 0 else param
        for rank in range(layout.world_size):
            own = rows[placement.row_starts[rank] : placement.row_starts[rank + 1]]
            assert own.shape == placement.shard_shape(rank)
            begin = placement.shard_offset(rank)
            destination = shards[rank, begin : begin + own.numel()]
            assert (destination == -1).all(), "two parameters overlap in a shard"
            destination.copy_(own.reshape(-1))
    unsharded = torch.full((layout.unsharded_numel,), -2.0)
    for s in layout.segments:
        piece = shards[:, s.shard_offset : s.shard_offset + s.shard_numel].reshape(-1)
        unsharded[s.unsharded_offset : s.unsharded_offset + piece.numel()] = piece
    return [unsharded[p.unsharded_offset : p.unsharded_offset + p.numel].reshape(p.shape) for p in layout.placements]


@settings(deadline=None)
@example([(0,), (0,)], 2, 4, False)
@given(shapes, st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_gathering_all_segments_makes_every_parameter_contiguous(shapes, world_size, itemsize, per_param):
    params = [torch.rand(shape) for shape in shapes]
    layout = make_layout(shapes, world_size, itemsize, per_param=per_param)
    for actual, param in zip(gather_all(layout, params), params, strict=True):
        assert torch.equal(actual, param)
    assert sum(end - begin for begin, end in layout.gaps) == layout.padding_numel
    assert layout == make_layout(shapes, world_size, itemsize, per_param=per_param)


@settings(deadline=None)
@given(shapes, st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_parameters_are_aligned(shapes, world_size, itemsize):
    layout = make_layout(shapes, world_size, itemsize)
    assert all(p.unsharded_offset * itemsize % ALIGNMENT == 0 for p in layout.placements)


@settings(deadline=None)
@given(shapes, st.sampled_from([2, 3, 8]), st.sampled_from([1, 2, 4, 8]))
def test_segments_of_a_shard_are_aligned(shapes, world_size, itemsize):
    layout = make_layout(shapes, world_size, itemsize, exempt=range(0, len(shapes), 2))
    assert all(s.shard_offset * itemsize % ALIGNMENT == 0 for s in layout.segments)
    assert layout.shard_numel * itemsize % ALIGNMENT == 0


@settings(deadline=None)
@given(shapes, st.sampled_from([2, 3, 8]))
@example([(5,), (7, 2)], 2)  # a fifth would be padding
def test_more_than_an_eighth_is_padding_only_if_rows_of_one_width_need_as_much(shapes, world_size):
    layout = make_layout(shapes, world_size, 4)
    widths = {math.prod(shape[1:]) for shape in shapes}
    of_width = [[shape for shape in shapes if math.prod(shape[1:]) == width] for width in widths]
    split = sum(world_size * make_layout(each, world_size, 4).segments[0].shard_numel for each in of_width)
    numel = sum(world_size * s.shard_numel for s in layout.segments)
    if sum(p.numel for p in layout.placements) < 7 / 8 * numel:
        assert numel <= split


@pytest.mark.parametrize(("world_size", "padding"), [(2, 1e-4), (8, 1e-3), (64, 0.01), (1024, 0.08)])
def test_a_llama_block_is_one_segment_with_little_padding(world_size, padding):
    d, ff, kv = 4096, 14336, 1024
    shapes = [(d, d), (kv, d), (kv, d), (d, d), (ff, d), (ff, d), (d, ff), (d,), (d,)]
    layout = make_layout(shapes, world_size, 2)
    assert len(layout.segments) == 1
    assert layout.padding_numel / layout.unsharded_numel < padding


def test_per_param_divides_the_rows_of_each_parameter_evenly():
    layout = make_layout([(10, 3), (7,)], 4, 4, per_param=True)
    assert [p.row_starts for p in layout.placements] == [(0, 3, 6, 9, 10), (0, 2, 4, 6, 7)]
    assert len(layout.segments) == 2


def test_shards_keep_the_number_of_dimensions():
    layout = make_layout([(16, 8), (8,), ()], 2, 4)
    assert [[len(p.shard_shape(r)) for r in range(2)] for p in layout.placements] == [[2, 2], [1, 1], [1, 1]]
    assert sum(math.prod(layout.placements[2].shard_shape(r)) for r in range(2)) == 1
