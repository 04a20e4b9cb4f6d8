"""Rows of a tensor without the ranks that have the others: what a pickled :class:`RowDTensor` is when it is loaded."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_map

aten = torch.ops.aten


def write_items(entry: Any, fqn: str, local: torch.Tensor) -> list[WriteItem]:
    """Return what DCP writes for ``entry``, an entry of a state dict whose rows are ``local``."""
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=entry.size()),
        )
        for chunk in entry.__create_chunk_list__()
    ]


def chunk_of(entry: Any, local: torch.Tensor, start: int) -> ChunkStorageMetadata:
    """Return the place of ``local`` in the whole tensor, from row ``start`` on."""
    if not entry.ndim:
        return ChunkStorageMetadata(torch.Size([]), torch.Size([]))
    return ChunkStorageMetadata(torch.Size([start, *(0 for _ in entry.shape[1:])]), local.shape)


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
        piece, kwargs = args[0], kwargs or {}
        if func is aten.new_empty.default and isinstance(piece, RowPiece):
            if tuple(args[1]) != tuple(piece.shape):  # it has no rows of this parameter
                return piece._local.new_empty(args[1], **kwargs)
            args = (piece, piece._local.shape)
        elif func not in _ON_LOCAL_ROWS:
            raise NotImplementedError(
                f"{func} on a RowPiece, which holds some rows of a parameter: take them with to_local(), or the whole "
                f"parameter with full_state_dict(model)"
            )
        if func is aten.copy_.default and not _same_rows(*args[:2]):
            raise ValueError(
                f"copy_ between a RowPiece and other rows, from {_describe(args[1])} to {_describe(piece)}: take this "
                f"rank's rows with to_local(), or the whole parameter with full_state_dict(model)"
            )
        local = func(*tree_map(_rows, args), **tree_map(_rows, kwargs))
        return piece if func is aten.copy_.default else RowPiece(local, piece._start, tuple(piece.shape))

    # The methods that DCP requires of an entry that is not a DTensor.

    def __create_write_items__(self, fqn: str, entry: object) -> list[WriteItem]:
        return write_items(self, fqn, self._local)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk_of(self, self._local, self._start)] if self._local.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._local if self.ndim else self._local.reshape(())


_ON_LOCAL_ROWS = {
    aten._to_copy.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.zeros_like.default,
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
