"""Parameters, gradients and state as DTensors, of which each rank has some rows, not necessarily evenly many.

[Note: Uneven DTensors]
PyTorch's tools (clipping, GradScaler, distributed checkpoints) look for DTensors with the shape of the whole tensor. A
bucket without copies cuts between ranks where the bucket is cut, so a rank may have any number of rows of a parameter.
DTensor has no placement for this: ``Shard(0)`` means the cuts of ``torch.chunk``, and operators that communicate rely on
it. :class:`RowDTensor` therefore is a DTensor that handles operators itself, and its placement, :class:`RowShard`, is a
``Shard(0)`` that knows the cuts:

- Operators that compute each element from the same elements of their operands run on the rows, as do norms, which
  DTensor then reduces over the ranks.
- All other operators run on the gathered operands, and give replicated DTensors. In-place results go back to the rows.
- Operators that return a view of other rows raise an error, because a view of a gathered copy would lose writes.
- Operators that draw random numbers draw those of the whole tensor and keep the rows, so that with equal seeds on all
  ranks the result is that of the unsharded tensor.

If every rank has as many rows, all but the last rule are left to DTensor. (With the uneven rows of ``Shard(0)`` itself,
``amax`` fails on a rank without rows, and leaves the others waiting; torch 2.13.)

Alternatives: attributes of the local tensor that tell DCP the rows, as Megatron-FSDP has (NVIDIA/Megatron-LM#3190), keep
DTensor's operators, which are wrong for uneven rows. A placement alone (RaggedShard, pytorch/pytorch#169320) needs
sharding rules in torch for each operator. Even rows need a copy of each bucket in each gather, or padding of each
parameter to a multiple of the number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..private_api import dtensor_constructor
from .row_pieces import RowPiece, chunk_of, write_items
from .rows import Rows

__all__ = ["RowDTensor", "local_rows", "replicated"]

aten = torch.ops.aten
_construct = dtensor_constructor()


class RowDTensor(DTensor):
    """This rank's rows of a tensor that is sharded along its first dimension; see [Note: Uneven DTensors].

    It has the shape of the whole tensor. :meth:`to_local` returns the rows, :meth:`full_tensor` gathers all of them.

    Attributes:
        rows: which rows each rank has.
    """

    run_operator: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    """Runs an operator; ``row_operators`` sets it."""

    of_spec: ClassVar[Callable[[torch.Tensor, Any], RowDTensor]]
    """Does the same as :meth:`wrap`, with the result of ``rows.spec(...)``; without a Python frame for each gradient."""

    @property
    def rows(self) -> Rows:
        rows: Rows = self._spec.rows  # type: ignore[attr-defined]
        return rows

    @staticmethod
    def wrap(local: torch.Tensor, rows: Rows) -> RowDTensor:
        """Return a tensor that shares the memory of ``local``, this rank's rows, of shape ``rows.local_shape``."""
        assert not isinstance(local, DTensor)
        return RowDTensor.of_spec(local, rows.spec(local.dtype, local.device.type))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DETACH:  # autograd detaches each gradient
            return _construct(cls, args[0]._local_tensor, args[0]._spec, requires_grad=False)
        return cls.run_operator(func, args, kwargs or {})

    def as_dtensor(self, local: torch.Tensor | None = None) -> DTensor:
        """Return a DTensor of the same rows, or of other local ones, that handles operators as torch does."""
        local = self._local_tensor if local is None else local
        spec = self.rows.plain_spec(local.dtype, local.device.type)
        plain: DTensor = _construct(DTensor, local, spec, requires_grad=False)
        return plain

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's rows, sharing their memory; of a 0-dim tensor, one row or none."""
        if torch.is_grad_enabled() and self.requires_grad:
            local: torch.Tensor = _ToLocal.apply(self)
            return local
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Gather the whole tensor on every rank; a collective."""
        whole: torch.Tensor = _ToFull.apply(self)
        return whole

    def redistribute(self, device_mesh: Any = None, placements: Sequence[Any] | None = None, **options: Any) -> DTensor:
        """Return a DTensor of other placements; a collective. ``options`` are those of DTensor's method."""
        if self.rows.is_even:
            return self.as_dtensor().redistribute(device_mesh, placements, **options)
        if placements is None:
            raise ValueError("redistribute: pass placements, one for each dimension of the mesh")
        if tuple(placements) == tuple(self.placements):
            return self
        return replicated(self.full_tensor(), self.device_mesh).redistribute(device_mesh, placements, **options)

    @property
    def data(self) -> torch.Tensor:
        """The tensor without autograd; it cannot be replaced, because the rows belong to a bucket."""
        data: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            f"{self.rows.label!r} cannot be given other memory (`p.data = ...`), because its rows are part of the shard "
            f"buffer of a bucket. Copy into it instead: `with torch.no_grad(): p.copy_(new)`, with a DTensor, or "
            f"p.to_local().copy_(rows)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RowDTensor:
        """Copy the rows. A copy of a parameter belongs to no bucket."""
        copied: Any = RowDTensor.wrap(self._local_tensor.clone(), self.rows)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the rows with their numbers (:class:`RowPiece`), or as a DTensor if they are even."""
        if isinstance(self, torch.nn.Parameter):
            raise TypeError(
                f"parameter {self.rows.label!r} of a sharded model cannot be pickled: it holds this rank's rows. Save "
                f"model.state_dict() or full_state_dict(model), or its rows: p.to_local().detach()"
            )
        if self.rows.is_even:
            return self.as_dtensor().__reduce_ex__(protocol)
        return RowPiece(self._local_tensor, self.rows.start, tuple(self.shape)).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RowDTensor({self.rows}, {self.dtype}, {self.device}, {self._local_tensor})"

    # What distributed checkpoints (DCP) ask of a DTensor.

    def __create_write_items__(self, fqn: str, entry: object) -> list[WriteItem]:
        return write_items(self, fqn, self._local_tensor)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        saves_empty = not self.numel() and self.rows.rank == 0  # one rank saves a tensor without elements
        if not self._local_tensor.numel() and not saves_empty:
            return []
        return [chunk_of(self, self._local_tensor, self.rows.start)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._local_tensor if self.ndim else self._local_tensor.reshape(())


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a DTensor or a :class:`RowPiece`, sharing its memory; any other tensor itself."""
    if isinstance(tensor, RowPiece):
        return tensor.to_local()
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def replicated(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor of ``whole``, which every rank of the mesh has."""
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


_DETACH = aten.detach.default
RowDTensor.of_spec = functools.partial(_construct, RowDTensor, requires_grad=False)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RowDTensor) -> torch.Tensor:
        ctx.rows = tensor.rows
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> RowDTensor:
        return RowDTensor.wrap(grad, ctx.rows)


class _ToFull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RowDTensor) -> torch.Tensor:
        ctx.rows = tensor.rows
        return tensor.rows.gather(tensor._local_tensor).to(tensor.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> RowDTensor:
        return RowDTensor.wrap(ctx.rows.of(grad), ctx.rows)
