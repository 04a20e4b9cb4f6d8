"""Functions for pickle, ``copy`` and distributed checkpoints (DCP), which pickle, copy and save row tensors."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ...errors import coded_error
from ...runtime.row_dtensor import RowDTensor, StateEntry

aten = torch.ops.aten


class RowPiece(StateEntry, torch.Tensor):
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

    @property
    def start(self) -> int:
        """The number of the first of these rows in the whole tensor."""
        return self._start

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        rows = self._local.shape[0]
        return (
            f"RowPiece(rows [{self._start}, {self._start + rows}) of {tuple(self.shape)}, {self.dtype}, {self.device})"
        )

    def share_memory_(self) -> NoReturn:
        # torch would look for memory of the whole tensor, which does not exist.
        raise coded_error(NotImplementedError, "state-dict.row-piece-memory-shared")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        piece, kwargs = args[0], kwargs or {}
        if func is aten.new_empty.default and isinstance(piece, RowPiece):
            if tuple(args[1]) != tuple(piece.shape):  # another shape, of which it has no rows
                return piece._local.new_empty(args[1], **kwargs)
            args = (piece, piece._local.shape)
        elif func not in _ON_LOCAL_ROWS:
            raise coded_error(NotImplementedError, "state-dict.row-piece-unsupported-operator", operator=func)
        if func is aten.copy_.default and _rows_of(args[0]) != _rows_of(args[1]):
            target, source = map(_describe, args[:2])
            raise coded_error(ValueError, "state-dict.row-piece-copies-other-rows", source=source, target=target)
        args, kwargs = tree_map_only(RowPiece, RowPiece.to_local, (args, kwargs))
        local = func(*args, **kwargs)
        return piece if func is aten.copy_.default else RowPiece(local, piece._start, tuple(piece.shape))

    def chunks(self) -> list[tuple[int, torch.Tensor]]:
        return [(self._start, self._local)] if self._local.numel() else []


_ON_LOCAL_ROWS = {
    aten._to_copy.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.zeros_like.default,
}


def _rows_of(tensor: torch.Tensor) -> Any:
    return isinstance(tensor, RowPiece) and (tensor.shape, tensor.start, tensor.to_local().shape)


def _describe(tensor: torch.Tensor) -> str:
    return repr(tensor) if isinstance(tensor, RowPiece) else f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}"


def chunk_list(entry: StateEntry) -> list[ChunkStorageMetadata]:
    """Return the positions of the rows that this rank saves."""
    if not entry.shape:
        return [ChunkStorageMetadata(torch.Size([]), torch.Size([])) for _ in entry.chunks()]
    others = [0] * (len(entry.shape) - 1)
    return [ChunkStorageMetadata(torch.Size([start, *others]), rows.shape) for start, rows in entry.chunks()]


def write_items(entry: StateEntry, fqn: str) -> list[WriteItem]:
    """Return the items that DCP writes for an entry with the name ``fqn``."""
    items = []
    for chunk, (_, rows) in zip(chunk_list(entry), entry.chunks(), strict=True):
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(rows), entry.shape)
        items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def shard_of(entry: StateEntry, index: MetadataIndex) -> torch.Tensor:
    """Return the rows of a chunk, from which DCP reads, or into which it loads."""
    rows = next(rows for start, rows in entry.chunks() if not index.offset or index.offset[0] == start)
    return rows if entry.shape else rows.reshape(())


def chunks_of(entry: RowDTensor) -> list[tuple[int, torch.Tensor]]:
    """Return the rows that this rank saves, if any, with the number of the first row."""
    local, rows = entry._local_tensor, entry.rows
    is_saved = local.numel() or (not entry.numel() and rows.rank == 0)  # one rank saves a tensor without elements
    return [(rows.start, local)] if is_saved else []


def reduce_rows(entry: RowDTensor, protocol: Any) -> Any:
    """Pickle rows with their numbers (``RowPiece``), or as a DTensor if they are even."""
    if isinstance(entry, torch.nn.Parameter):
        raise coded_error(TypeError, "state-dict.sharded-parameter-pickled", label=entry.rows.label)
    local = entry._local_tensor
    if local.is_contiguous():  # torch pickles whole storages, and this one is that of a bucket
        begin = local.storage_offset() * local.element_size()
        own = local.untyped_storage()[begin : begin + local.nbytes]
        local = local.new_empty(0).set_(own, 0, local.shape, local.stride())
    if entry.rows.is_even:
        spec = entry._spec
        plain = DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
        return plain.__reduce_ex__(protocol)
    piece = RowPiece(local, entry.rows.start, tuple(entry.shape))
    return piece.__reduce_ex__(protocol)


def copy_rows(entry: RowDTensor, memo: dict[int, Any]) -> RowDTensor:
    """Copy rows, for ``copy.deepcopy``. A copy of a parameter belongs to no bucket."""
    copied: Any = RowDTensor.wrap(entry._local_tensor.clone(), entry.rows)
    if isinstance(entry, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, entry.requires_grad)
    memo[id(entry)] = copied
    return copied
