"""Views of flat buffers: the rows of parameters in a shard, and whole parameters in a slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..plan.specs import BucketSpec


def shard_views(spec: BucketSpec, rank: int, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the rows that ``rank`` owns of each parameter, as views of a flat shard (or of its gradients)."""
    shapes, strides, offsets = shard_strides(spec, rank)
    return tuple(map(flat.as_strided, shapes, strides, (flat.storage_offset() + offset for offset in offsets)))


def shard_strides(spec: BucketSpec, rank: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[int]]:
    """Return shapes, strides and offsets, within the flat shard, of the rows that ``rank`` owns of each parameter."""
    shapes = [placement.shard_shape(rank) for placement in spec.layout.placements]
    return shapes, list(map(_contiguous_strides, shapes)), [p.shard_offsets[rank] for p in spec.layout.placements]


def unsharded_views(spec: BucketSpec, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return each whole parameter as a contiguous view of a flat unsharded buffer."""
    return tuple(
        flat.as_strided(p.shape, _contiguous_strides(p.shape), flat.storage_offset() + p.unsharded_offset)
        for p in spec.layout.placements
    )


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return ``view`` with a storage of its own, if there is memory; see [Note: Storages of parameters] in ``memory``."""
    storage = view.untyped_storage()
    if storage.device.type == "meta":  # those of fake tensors, too
        return view
    begin = view.storage_offset() * view.element_size()
    own = torch.empty(0, dtype=view.dtype, device=view.device)
    return own.set_(storage[begin : begin + view.nbytes], 0, view.shape, view.stride())


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
