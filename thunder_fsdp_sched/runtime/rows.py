"""The rows of a tensor that each rank has, and their placement for DTensor.

A bucket's layout assigns each rank a run of whole rows of each parameter (see ``layout``). :class:`Rows` is the part of
it that concerns one parameter. The parameter, its gradients and its optimizer state share it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Replicate, Shard

from ..private_torch import new_spec

if TYPE_CHECKING:
    from ..ranks.process_groups import BucketRanks


@dataclass(frozen=True, eq=False, repr=False)
class Rows:
    """The rows ``[starts[r], starts[r + 1])`` of a tensor that rank ``r`` of a process group has.

    Attributes:
        shape: the shape of the whole tensor. A 0-dim tensor counts as one row.
        starts: ``world_size + 1`` row numbers.
        ranks: the group, and the ranks that have the same rows (hybrid sharding).
        label: the name of the parameter.
    """

    shape: torch.Size
    starts: Sequence[int]
    ranks: BucketRanks
    label: str
    _in_bucket: tuple[weakref.ref[Any], int] | None = None

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Rows) and self.shape == other.shape and self.has_cuts_of(other))

    def __hash__(self) -> int:
        starts = self.starts  # some of them, so that its time does not grow with the number of ranks
        return hash((self.shape, starts[len(starts) // 2], starts[-1], self.ranks.group.global_ranks))

    def has_cuts_of(self, other: Rows) -> bool:
        """Return whether each rank has rows of the same numbers of both tensors."""
        return self is other or (
            self.starts == other.starts and self.ranks.group.global_ranks == other.ranks.group.global_ranks
        )

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.ranks.group.rank

    @property
    def start(self) -> int:
        """The first row of this rank."""
        return self.starts[self.rank]

    @property
    def end(self) -> int:
        """The row after the last of this rank."""
        return self.starts[self.rank + 1]

    @property
    def lengths(self) -> list[int]:
        """The number of rows that each rank has."""
        return [end - start for start, end in itertools.pairwise(self.starts)]

    @property
    def holders(self) -> list[int]:
        """The ranks of the group that have rows."""
        return [rank for rank, length in enumerate(self.lengths) if length]

    @property
    def is_cut(self) -> bool:
        """Whether more than one rank has rows."""
        end = bisect.bisect_right(self.starts, 0)  # of the first rank that has rows
        return end < len(self.starts) and self.starts[end] < self.starts[-1]

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether these are the rows of DTensor's ``Shard(0)``."""
        rows, size = self.starts[-1], len(self.starts) - 1
        each = -(-rows // size)
        return bool(self.shape) and all(start == min(rank * each, rows) for rank, start in enumerate(self.starts))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's rows; for a 0-dim tensor ``(1,)`` on its owner and ``(0,)`` elsewhere."""
        return (self.end - self.start, *self.shape[1:])

    @property
    def placements(self) -> tuple[Any, ...]:
        """The placements of a :class:`RowDTensor`: replicated over all dimensions of the mesh but the last."""
        replicas = () if self.ranks.replicas is None else (Replicate(),)
        if self.is_even:
            return (*replicas, Shard(0))
        from .row_shard import RowShard  # here, because most buckets on few ranks have none

        return (*replicas, RowShard(self.starts))

    @functools.cached_property
    def _specs(self) -> dict[tuple[torch.dtype, str], Any]:
        return {}

    def spec(self, dtype: torch.dtype, device_type: str) -> Any:
        """Return the description of a :class:`RowDTensor`, with these rows as an attribute."""
        spec = self._specs.get((dtype, device_type))
        if spec is None:
            stride = torch.empty(self.shape, device="meta").stride()
            spec = new_spec(self.ranks.mesh(device_type), self.placements, self.shape, stride, dtype)
            spec.rows = self  # an attribute of each gradient would cost time in each backward
            self._specs[dtype, device_type] = spec
        return spec

    @functools.cached_property
    def _reshaped(self) -> dict[tuple[int, ...], Rows]:
        return {}

    def reshaped(self, shape: Sequence[int]) -> Rows:
        """Return the rows of a tensor of another shape, cut between the same rows."""
        key = tuple(shape)
        if key == self.shape:
            return self
        if key not in self._reshaped:
            self._reshaped[key] = replace(self, shape=torch.Size(shape))
        return self._reshaped[key]

    @property
    def in_bucket(self) -> tuple[Any, int] | None:
        """The bucket of the parameter and its index there; ``None`` if the model is gone."""
        bucket = None if self._in_bucket is None else self._in_bucket[0]()
        return None if self._in_bucket is None or bucket is None else (bucket, self._in_bucket[1])

    @property
    def is_on_all_ranks(self) -> bool:
        """Whether the model has no other ranks; with ``process_group_for`` it may."""
        bucket, _ = self.in_bucket or (None, 0)
        return bucket is None or bucket.is_on_all_ranks

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a whole tensor, as a view."""
        return (whole if whole.ndim else whole.reshape(1))[self.start : self.end]

    def __deepcopy__(self, memo: Any) -> Rows:
        return self

    def __repr__(self) -> str:
        return f"rows [{self.start}, {self.end}) of {tuple(self.shape)}"
