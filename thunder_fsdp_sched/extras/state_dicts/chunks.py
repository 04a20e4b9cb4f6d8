"""The methods of row tensors that distributed checkpoints (DCP), pickle and copy call."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ...errors import coded_error
from ...runtime.row_dtensor import RowDTensor, StateEntry
from .row_piece import RowPiece


def chunk_list(entry: StateEntry) -> list[ChunkStorageMetadata]:
    """Return the places of the rows that this rank saves."""
    if not entry.shape:
        return [ChunkStorageMetadata(torch.Size([]), torch.Size([])) for _ in entry.chunks()]
    others = [0] * (len(entry.shape) - 1)
    return [ChunkStorageMetadata(torch.Size([start, *others]), rows.shape) for start, rows in entry.chunks()]


def write_items(entry: StateEntry, fqn: str) -> list[WriteItem]:
    """Return what DCP writes of an entry with the name ``fqn``."""
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
