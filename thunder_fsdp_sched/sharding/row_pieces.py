"""Entries of state dicts for sharded tensors, which record the rows that this rank has of a whole tensor.

[Note: Two kinds of entries]
A bucket's layout assigns each rank a run of whole rows of each parameter (see ``layout``). If these runs are those of
DTensor's ``Shard(0)``, the entry of a state dict is a DTensor. Otherwise the cuts are where the bucket is cut, which no
DTensor placement describes, and the entry is a :class:`RowPiece`. torch.distributed.checkpoint (DCP) saves both as
chunks of the whole tensor, so a checkpoint does not depend on how it was sharded.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils import dlpack
from torch.utils._pytree import tree_map

from ..runtime.bucket import Bucket

__all__ = ["RowPiece", "as_entry", "local_rows", "param_entry", "refuse_unshared", "rows_from"]


class RowPiece(torch.Tensor):
    """Rows ``[start, start + len(local))`` of a whole tensor, whose other rows are on other ranks.

    It has the whole tensor's shape but only these rows. It can be saved, loaded, copied, moved and cast, and
    :meth:`to_local` returns the rows. A 0-dim tensor is one row; ranks without it have none.
    """

    _local: torch.Tensor
    _start: int

    @staticmethod
    def __new__(cls, local: torch.Tensor, start: int, shape: tuple[int, ...]) -> RowPiece:
        piece = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        piece._local, piece._start = local, start
        return piece

    def to_local(self) -> torch.Tensor:
        """Return this rank's rows; a 0-dim tensor as one row or none."""
        return self._local

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        rows = self._local.shape[0]
        return (
            f"RowPiece(rows [{self._start}, {self._start + rows}) of {tuple(self.shape)}, {self.dtype}, {self.device})"
        )

    def share_memory_(self) -> NoReturn:
        # torch would look for memory of the whole tensor, which does not exist.
        raise NotImplementedError("share_memory_ of a RowPiece: share the memory of its rows, to_local()")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _ON_LOCAL_ROWS:
            raise NotImplementedError(
                f"{func} on a RowPiece, which holds some rows of a parameter: take them with to_local(), or the whole "
                f"parameter with full_state_dict(model)"
            )
        piece = args[0]
        if func in _IN_PLACE and not _same_rows(*args[:2]):
            raise ValueError(
                f"copy_ between a RowPiece and other rows, from {_describe(args[1])} to {_describe(piece)}: take this "
                f"rank's rows with to_local(), or the whole parameter with full_state_dict(model)"
            )
        if func is torch.ops.aten.new_empty.default:  # a tensor of another size has no rows of this parameter
            size, args = args[1], (args[0], piece._local.shape)
            if not isinstance(piece, RowPiece) or tuple(size) != tuple(piece.shape):
                return piece._local.new_empty(size, **(kwargs or {}))
        local = func(*tree_map(_rows, args), **tree_map(_rows, kwargs or {}))
        if func in _IN_PLACE:
            return piece
        return RowPiece(local, piece._start, tuple(piece.shape))

    # The methods that DCP requires of an entry that is not a DTensor.

    def __create_write_items__(self, fqn: str, entry: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self._local.numel():
            return []
        if not self.ndim:
            return [ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
        offsets = torch.Size([self._start, *(0 for _ in self.shape[1:])])
        return [ChunkStorageMetadata(offsets, torch.Size([self._local.shape[0], *self.shape[1:]]))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._local if self.ndim else self._local.reshape(())


_IN_PLACE = {torch.ops.aten.copy_.default}

_ON_LOCAL_ROWS = _IN_PLACE | {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.zeros_like.default,
}


def _rows(value: Any) -> Any:
    return value._local if isinstance(value, RowPiece) else value


def _same_rows(target: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        isinstance(target, RowPiece)
        and isinstance(source, RowPiece)
        and (target.shape, target._start, target._local.shape) == (source.shape, source._start, source._local.shape)
    )


def _describe(tensor: torch.Tensor) -> str:
    return repr(tensor) if isinstance(tensor, RowPiece) else f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}"


def param_entry(bucket: Bucket, index: int) -> torch.Tensor:
    """Return the entry of a parameter in a state dict; it shares the memory of this rank's rows.

    Raises:
        ValueError: other ranks have another parameter of this name.
    """
    refuse_unshared(bucket)
    return as_entry(bucket, index, bucket.params[index].detach())


def refuse_unshared(bucket: Bucket) -> None:
    """Raise an error if ranks have different parameters under one name, of which a checkpoint would keep only one.

    Raises:
        ValueError: names the parameter and its ranks.
    """
    if bucket.control is not None and not bucket.control.is_on_all_ranks(bucket):
        raise ValueError(
            f"checkpoint: {bucket.spec.params[0].name!r} is sharded over ranks {list(bucket.ranks.group.global_ranks)} "
            f"alone (process_group_for), and the others hold another parameter of this name: a checkpoint keeps one "
            f"of each name. Give parameters that differ by rank names that do, experts.0 and experts.1"
        )


def rows_from(bucket: Bucket, index: int, value: torch.Tensor, *, as_rows: bool = False) -> torch.Tensor:
    """Return this rank's rows, as a view, of a state dict's value for parameter ``index`` of ``bucket``.

    Args:
        value: a whole tensor, or an entry with at least this rank's rows.
        as_rows: a 0-dim parameter's entry has the shape ``(1,)`` (optimizer state).

    Raises:
        ValueError: it has another shape, or other rows.
    """
    placement, rank = bucket.spec.layout.placements[index], bucket.rank
    expected = placement.shape or ((1,) if as_rows else ())
    if tuple(value.shape) != expected:
        raise ValueError(f"the unsharded parameter has shape {expected}, the entry {tuple(value.shape)}")
    value = value.detach()
    if not isinstance(value, (DTensor, RowPiece)):
        return bucket.local_rows(index, value)
    start, end = placement.row_starts[rank : rank + 2]
    local = local_rows(value)
    if start == end:
        return local.new_empty(placement.shard_shape(rank))
    for chunk in value.__create_chunk_list__():
        first, length = (chunk.offsets[0], chunk.sizes[0]) if chunk.offsets else (0, 1)
        if first <= start and end <= first + length and chunk.sizes[1:] == value.shape[1:]:
            return (local if local.ndim else local.reshape(1))[start - first : end - first]
    raise ValueError(
        f"this rank needs rows [{start}, {end}) of {expected}, but the entry holds others: it is of another rank, or "
        f"sharded otherwise. Load it by dcp.load into state_dict(), or give whole tensors (full_tensor())"
    )


def as_entry(bucket: Bucket, index: int, local: torch.Tensor, *, as_rows: bool = False) -> torch.Tensor:
    """Return the state dict entry for rows of a tensor that is sharded like parameter ``index`` of ``bucket``.

    Args:
        local: the rows, ``(rows, *parameter.shape[1:])``; the entry shares their memory.
        as_rows: give a 0-dim parameter's entry the shape ``(1,)`` (optimizer state, where it tells such an entry from a
            number that every rank has).
    """
    placement = bucket.spec.layout.placements[index]
    starts, shape = placement.row_starts, placement.shape
    if not shape:
        return RowPiece(local, starts[bucket.rank], (1,) if as_rows else ())
    rows, ranks = shape[0], bucket.spec.layout.world_size
    each = -(-rows // ranks)
    if any(start != min(rank * each, rows) for rank, start in enumerate(starts)):
        return RowPiece(local, starts[bucket.rank], shape)
    if local.numel() and local.storage_offset():
        # The same memory as a storage of its own: a DTensor takes over its local tensor's offset, and dcp.async_save
        # takes one with an offset for a plain tensor, which it cannot copy (torch 2.13).
        local = dlpack.from_dlpack(local)
    # A mesh of the rows' own device: with offload_policy that is the CPU, and for a mesh of GPUs from_local would copy
    # them.
    mesh = DeviceMesh.from_group(bucket.ranks.group.process_group, local.device.type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)


def local_rows(entry: torch.Tensor) -> torch.Tensor:
    """Return the memory of an entry: this rank's rows, or a whole tensor that is not sharded."""
    return entry.to_local() if isinstance(entry, (DTensor, RowPiece)) else entry
