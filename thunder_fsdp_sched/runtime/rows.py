"""The rows of a tensor that each rank has, and gathering all of them.

A bucket's layout assigns each rank a run of whole rows of each parameter (see ``layout``). :class:`Rows` is the part of
it that concerns one parameter. The parameter, its gradients and its optimizer state share it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from ..private_api import new_spec
from .row_placement import RowShard

if TYPE_CHECKING:
    from ..distributed.process_groups import Ranks
    from ..plan.layout import Placement

__all__ = ["Rows"]


class Rows:
    """The rows ``[starts[r], starts[r + 1])`` of a tensor that rank ``r`` of a process group has.

    Attributes:
        shape: the shape of the whole tensor. A 0-dim tensor counts as one row.
        starts: ``world_size + 1`` row numbers.
        rank: this process's rank in the group.
        ranks: the group, and the ranks that have the same rows (hybrid sharding).
        is_even: whether these are the rows of DTensor's ``Shard(0)``.
        is_equal: whether, in addition, every rank has as many, so that all of DTensor's operators are right.
        is_cut: whether more than one rank has rows.
        label: the name of the parameter.
    """

    def __init__(self, placement: Placement, ranks: Ranks, label: str, *, bucket: Any = None, index: int = 0) -> None:
        self.shape = torch.Size(placement.shape)
        self.starts: Sequence[int] = placement.row_starts
        self.rank = ranks.group.rank
        self.ranks = ranks
        self.label = label
        rows, size = (placement.shape or (1,))[0], ranks.group.size
        each = -(-rows // size)
        self.is_even = bool(placement.shape) and all(
            start == min(rank * each, rows) for rank, start in enumerate(self.starts)
        )
        self.is_equal = self.is_even and bool(rows) and rows % size == 0
        self.is_cut = placement.is_cut
        self._bucket = None if bucket is None else weakref.ref(bucket)
        self._index = index
        self._specs: dict[tuple[torch.dtype, str], Any] = {}
        self._plain_specs: dict[tuple[torch.dtype, str], Any] = {}

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Rows)
            and self.shape == other.shape
            and self.starts == other.starts
            and self.ranks.group.global_ranks == other.ranks.group.global_ranks
        )

    def __hash__(self) -> int:
        return hash((self.shape, tuple(self.starts), self.ranks.group.global_ranks))

    @property
    def start(self) -> int:
        """The first row of this rank."""
        return self.starts[self.rank]

    @property
    def end(self) -> int:
        """The row after the last of this rank."""
        return self.starts[self.rank + 1]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's rows; for a 0-dim tensor ``(1,)`` on its owner and ``(0,)`` elsewhere."""
        return (self.end - self.start, *self.shape[1:])

    def spec(self, dtype: torch.dtype, device_type: str) -> Any:
        """Return the description of a :class:`RowDTensor`, with these rows as an attribute."""
        spec = self._specs.get((dtype, device_type))
        if spec is None:
            spec = self._specs[dtype, device_type] = self._new_spec(
                dtype, device_type, Shard(0) if self.is_even else RowShard(self.starts)
            )
            spec.rows = self  # an attribute of each gradient would cost time in each backward
        return spec

    def plain_spec(self, dtype: torch.dtype, device_type: str) -> Any:
        """Return DTensor's description of the tensor. Its placements do not tell where uneven rows are cut."""
        spec = self._plain_specs.get((dtype, device_type))
        if spec is None:
            spec = self._plain_specs[dtype, device_type] = self._new_spec(dtype, device_type, Shard(0))
        return spec

    def _new_spec(self, dtype: torch.dtype, device_type: str, placement: Shard) -> Any:
        mesh = self.ranks.mesh(device_type)
        placements = (*(Replicate() for _ in range(mesh.ndim - 1)), placement)
        return new_spec(mesh, placements, self.shape, torch.empty(self.shape, device="meta").stride(), dtype)

    @property
    def place(self) -> tuple[Any, int] | None:
        """The bucket of the parameter and its index there; ``None`` if the model is gone."""
        bucket = None if self._bucket is None else self._bucket()
        return None if bucket is None else (bucket, self._index)

    @functools.cached_property
    def as_vector(self) -> Rows:
        """The same rows of a 1-D tensor of one element, for a 0-dim tensor."""
        vector = copy.copy(self)
        vector.shape, vector._specs, vector._plain_specs = torch.Size((1,)), {}, {}
        return vector

    @property
    def is_on_all_ranks(self) -> bool:
        """Whether the model has no other ranks; with ``process_group_for`` it may."""
        bucket, _ = self.place or (None, 0)
        return bucket is None or bucket.base.control is None or bucket.base.control.is_on_all_ranks(bucket)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a whole tensor, as a view."""
        return (whole if whole.ndim else whole.reshape(1))[self.start : self.end]

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor, bit for bit, from the rows of all ranks; a collective.

        It is on the device of the parameter's bucket, where offloaded rows are sent from.

        Raises:
            ValueError: the process group cannot send from that device.
            ScheduleDisagreement: other ranks do something else.
        """
        group = self.ranks.group
        bucket, _ = self.place or (None, 0)
        device = local.device if bucket is None else bucket.spec.device
        group.check_sends(device, f"the rows of {self.label!r}")
        control = None if bucket is None else bucket.base.control
        if control is not None and bucket is not None and control.is_on_all_ranks(bucket):
            control.rendezvous("gathering for a state dict the parameter", self.label)
        local = local.detach()
        whole = local.new_empty(self.shape or (1,), device=device)
        whole[self.start : self.end].copy_(local)
        with control.doing(f"gathering {self.label}") if control is not None else contextlib.nullcontext():
            for rank, source in enumerate(group.global_ranks):
                piece = whole[self.starts[rank] : self.starts[rank + 1]]
                if piece.numel():
                    dist.broadcast(piece, src=source, group=group.process_group)
        return whole.reshape(self.shape)

    def __deepcopy__(self, memo: Any) -> Rows:
        return self

    def __repr__(self) -> str:
        return f"rows [{self.start}, {self.end}) of {tuple(self.shape)}"
