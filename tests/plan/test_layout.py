"""The layout gives every rank whole rows, and one plain all-gather per segment gives every parameter contiguously."""

import math

from thunder_fsdp_sched.plan.layout import ALIGNMENT, Layout, make_layout

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

shapes = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 16, 33]), max_size=3).map(tuple),
    min_size=1,
    max_size=8,
)


def gathered(layout: Layout, params: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the parameters look like after each rank put its rows into its shard and each segment was gathered."""
    shards = torch.full((layout.world_size, layout.shard_numel), -1.0)
    for param, placement in zip(params, layout.placements, strict=True):
        rows = param.reshape(1) if param.ndim == 0 else param
        for rank in range(layout.world_size):
            own = rows[placement.row_starts[rank] : placement.row_starts[rank + 1]]
            assert own.shape == placement.shard_shape(rank)
            begin = placement.shard_offsets[rank]
            place = shards[rank, begin : begin + own.numel()]
            assert (place == -1).all(), "two parameters overlap in a shard"
            place.copy_(own.reshape(-1))
    unsharded = torch.full((layout.unsharded_numel,), -2.0)
    for s in layout.segments:
        piece = shards[:, s.shard_offset : s.shard_offset + s.shard_numel].reshape(-1)
        unsharded[s.unsharded_offset : s.unsharded_offset + piece.numel()] = piece
    return [unsharded[p.unsharded_offset : p.unsharded_offset + p.numel].reshape(p.shape) for p in layout.placements]


@settings(max_examples=300, deadline=None)
@given(shapes, st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_gathering_every_segment_gives_every_parameter_contiguously(shapes, world_size, itemsize, per_param):
    params = [torch.rand(shape) for shape in shapes]
    layout = make_layout(shapes, world_size, itemsize, per_param=per_param)
    for got, param in zip(gathered(layout, params), params, strict=True):
        assert torch.equal(got, param)


@settings(max_examples=100, deadline=None)
@given(shapes, st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_parameters_start_aligned(shapes, world_size, itemsize):
    layout = make_layout(shapes, world_size, itemsize)
    assert all(p.unsharded_offset * itemsize % ALIGNMENT == 0 for p in layout.placements)


@pytest.mark.parametrize(("world_size", "padding"), [(2, 1e-4), (8, 1e-3), (64, 0.01), (1024, 0.08)])
def test_a_llama_block_is_one_segment_with_little_padding(world_size, padding):
    d, ff, kv = 4096, 14336, 1024
    shapes = [(d, d), (kv, d), (kv, d), (d, d), (ff, d), (ff, d), (d, ff), (d,), (d,)]
    layout = make_layout(shapes, world_size, 2)
    assert len(layout.segments) == 1
    assert layout.padding_numel / layout.unsharded_numel < padding


def test_rows_of_unrelated_widths_do_not_blow_the_bucket_up():
    shapes = [(1000, 97), (1000, 101), (1000, 103)]
    layout = make_layout(shapes, 8, 4)
    assert layout.padding_numel / layout.unsharded_numel < 0.05


def test_per_param_gives_even_runs_of_rows():
    layout = make_layout([(10, 3), (7,)], 4, 4, per_param=True)
    assert [p.row_starts for p in layout.placements] == [(0, 3, 6, 9, 10), (0, 2, 4, 6, 7)]
    assert len(layout.segments) == 2


def test_a_piece_of_a_matrix_stays_a_matrix():
    layout = make_layout([(16, 8), (8,), ()], 2, 4)
    assert [[len(p.shard_shape(r)) for r in range(2)] for p in layout.placements] == [[2, 2], [1, 1], [1, 1]]
    assert sum(math.prod(layout.placements[2].shard_shape(r)) for r in range(2)) == 1
