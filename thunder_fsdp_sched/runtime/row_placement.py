"""DTensor's placement of rows that are cut otherwise than ``Shard(0)`` cuts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard


class RowShard(Shard):
    """``Shard(0)`` with given cuts: rank ``r`` of the mesh's dimension has the rows ``[starts[r], starts[r + 1])``.

    torch asks a placement for the size and offset of a rank's part (``compute_local_shape_and_global_offset``) when it
    loads whole state dicts, and so do tools that read a DTensor's local tensor. ``distribute_tensor`` cuts evenly in any
    case, and returns a DTensor with a plain ``Shard(0)``.

    Attributes:
        starts: row numbers, one more than there are ranks.
    """

    starts: tuple[int, ...]

    def __new__(cls, starts: Sequence[int]) -> RowShard:
        return super().__new__(cls, 0)  # type: ignore[call-arg]

    def __init__(self, starts: Sequence[int]) -> None:
        super().__init__(0)
        object.__setattr__(self, "starts", tuple(starts))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowShard):
            return self.starts == other.starts
        return super().__eq__(other)  # torch asserts that it equals Shard(0)

    def __hash__(self) -> int:
        return hash((RowShard, self.starts))  # other than that of Shard(0), so that torch's caches keep them apart

    def __repr__(self) -> str:
        return f"RowShard(starts={self.starts})"

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return RowShard, (self.starts,)

    def _rows(self, rank: int) -> tuple[int, int]:
        return self.starts[rank], self.starts[rank + 1] - self.starts[rank]

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        start, size = self._rows(rank)
        return size, start

    def _split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[torch.Tensor], list[int]]:
        pieces = [tensor.narrow(0, *self._rows(rank)) for rank in range(num_chunks)]
        padding = [self._longest - len(piece) for piece in pieces] if with_padding else []
        pieces = [self._padded(piece) for piece in pieces] if with_padding else pieces
        return [piece.contiguous() for piece in pieces] if contiguous else pieces, padding

    def _to_replicate_tensor(
        self, local_tensor: torch.Tensor, mesh: Any, mesh_dim: int, current_logical_shape: Sequence[Any]
    ) -> torch.Tensor:
        own = self._padded(local_tensor).contiguous()
        pieces = [torch.empty_like(own) for _ in range(len(self.starts) - 1)]
        dist.all_gather(pieces, own, group=mesh.get_group(mesh_dim))
        return torch.cat([piece[: self._rows(rank)[1]] for rank, piece in enumerate(pieces)])

    @property
    def _longest(self) -> int:
        return max(self._rows(rank)[1] for rank in range(len(self.starts) - 1))

    def _padded(self, piece: torch.Tensor) -> torch.Tensor:
        missing = self._longest - len(piece)
        return torch.cat([piece, piece.new_zeros(missing, *piece.shape[1:])]) if missing else piece
