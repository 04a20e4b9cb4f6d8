"""The placement of a DTensor whose ranks have unevenly many rows: see [Note: Uneven DTensors] in ``row_dtensor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from ..errors import coded_error
from ..extensions import load


class RowShard(Shard):
    """``Shard(0)`` with given cuts: rank ``r`` of the mesh's dimension has the rows ``[starts[r], starts[r + 1])``.

    torch asks a placement for the size and offset of a rank's part (``compute_local_shape_and_global_offset``) when it
    loads whole state dicts, and so do tools that read a DTensor's local tensor. ``distribute_tensor`` cuts evenly in any
    case, and returns a DTensor with a plain ``Shard(0)``.
    """

    starts: Sequence[int]

    def __new__(cls, starts: Sequence[int]) -> RowShard:
        return super().__new__(cls, 0)  # type: ignore[call-arg]

    def __init__(self, starts: Sequence[int]) -> None:
        super().__init__(0)
        object.__setattr__(self, "starts", starts)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowShard):
            return self.starts == other.starts
        return super().__eq__(other)  # torch asserts that it equals Shard(0)

    def __hash__(self) -> int:
        # Not that of Shard(0), so that torch's caches keep them apart. It takes constant time for any number of ranks.
        return hash((RowShard, len(self.starts), self.starts[len(self.starts) // 2], self.starts[-1]))

    def __repr__(self) -> str:
        return f"RowShard(starts={tuple(self.starts)})"

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return RowShard, (tuple(self.starts),)

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        return self.starts[rank + 1] - self.starts[rank], self.starts[rank]

    def _split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[torch.Tensor], list[int]]:
        if with_padding:
            raise coded_error(NotImplementedError, "parameter.uneven-rows-cannot-scatter", rows=self)
        return list(torch.tensor_split(tensor, self.starts[1:-1])), []

    def _to_replicate_tensor(
        self, local_tensor: torch.Tensor, mesh: Any, mesh_dim: int, current_logical_shape: Sequence[Any]
    ) -> torch.Tensor:
        whole = local_tensor.new_empty(self.starts[-1], *local_tensor.shape[1:])
        gathered: torch.Tensor = load("extras.row_operators:gather_rows")(
            whole, local_tensor, self.starts, mesh.get_group(mesh_dim)
        )
        return gathered.reshape(current_logical_shape)  # a 0-dim tensor has one row
