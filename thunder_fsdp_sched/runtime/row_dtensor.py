"""Parameters, gradients and state as DTensors of which each rank has some rows, not necessarily the same number.

[Note: Uneven DTensors]
PyTorch's tools (clipping, GradScaler, distributed checkpoints) look for DTensors with the shape of the whole tensor. To
avoid copies, a bucket is cut between ranks as a whole, so a rank may have any number of rows of a parameter. DTensor
has no placement for this: ``Shard(0)`` means the cuts of ``torch.chunk``, and operators that communicate rely on them.
:class:`RowDTensor` therefore is a DTensor that handles operators itself (see [Note: Operators on rows] in
``extras.row_operators.operators``), and its placement, :class:`RowShard`, is a ``Shard(0)`` that knows the cuts.

Alternatives: attributes of the local tensor that tell DCP the rows, as in Megatron-FSDP (NVIDIA/Megatron-LM#3190), keep
DTensor's operators, which are wrong for uneven rows. A placement alone (RaggedShard, pytorch/pytorch#169320) needs
sharding rules in torch for each operator. Even rows need a copy of each bucket in each gather, or padding of each
parameter to a multiple of the number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..errors import coded_error
from ..extensions import load
from ..private_torch import dtensor_base, dtensor_constructor, register_foreach_type
from .rows import Rows

aten = torch.ops.aten
construct = dtensor_constructor()
if TYPE_CHECKING:
    _Base = DTensor
else:
    _Base = dtensor_base()


class StateEntry:
    """An entry of a state dict that holds some rows of a tensor, with the methods that distributed checkpoints call."""

    shape: torch.Size

    def chunks(self) -> list[tuple[int, torch.Tensor]]:
        """Return the rows that this rank saves, as one or several runs, each with the number of its first row."""
        raise NotImplementedError

    def to_local(self) -> torch.Tensor:
        """Return this rank's rows, sharing their memory."""
        raise NotImplementedError

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunks: list[ChunkStorageMetadata] = load("extras.state_dicts.row_piece:chunk_list")(self)
        return chunks

    def __create_write_items__(self, fqn: str, entry: object) -> list[WriteItem]:
        items: list[WriteItem] = load("extras.state_dicts.row_piece:write_items")(self, fqn)
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the rows of a chunk, from which DCP reads, or into which it loads."""
        rows: torch.Tensor = load("extras.state_dicts.row_piece:shard_of")(self, index)
        return rows


class RowDTensor(StateEntry, _Base):
    """This rank's rows of a tensor that is sharded along its first dimension; see [Note: Uneven DTensors].

    It has the shape of the whole tensor. :meth:`to_local` returns the rows, :meth:`full_tensor` gathers all of them.

    Attributes:
        rows: which rows each rank has.
    """

    run_operator: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    """Runs an operator; ``row_elements`` sets it."""

    of_spec: ClassVar[Callable[[torch.Tensor, Any], RowDTensor]]
    """Like :meth:`wrap`, with the result of ``rows.spec(...)``, but without a Python frame for each gradient."""

    @property
    def rows(self) -> Rows:
        rows: Rows = self._spec.rows  # type: ignore[attr-defined]
        return rows

    @staticmethod
    def wrap(local: torch.Tensor, rows: Rows) -> RowDTensor:
        """Return a tensor that shares the memory of ``local``, this rank's rows, of shape ``rows.local_shape``."""
        assert not isinstance(local, DTENSORS)
        return RowDTensor.of_spec(local, rows.spec(local.dtype, local.device.type))

    @staticmethod
    def entry(local: torch.Tensor, rows: Rows) -> RowDTensor:
        """Return the same as :meth:`wrap`, for a state dict: with a storage offset, and so an address, of 0.

        A DTensor takes over its local tensor's offset. ``dcp.async_save`` copies a tensor with an address like a plain
        one, from a storage that a DTensor does not have (torch 2.13). Parameters keep the offset, because Dynamo cannot
        trace their optimizers without it.
        """
        wrapped = RowDTensor.wrap(local.as_strided(local.shape, local.stride(), 0), rows)
        wrapped._local_tensor = local
        return wrapped

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DETACH:  # autograd detaches each gradient
            local, spec = args[0]._local_tensor, args[0]._spec
            if args[0].storage_offset() == local.storage_offset():
                return construct(cls, local, spec, requires_grad=False)
            return RowDTensor.entry(local, spec.rows)
        return cls.run_operator(func, args, kwargs or {})

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's rows, sharing their memory; of a 0-dim tensor, one row or none."""
        if torch.is_grad_enabled() and self.requires_grad:
            differentiable: torch.Tensor = load("extras.row_operators:to_local")(self)
            return differentiable
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Gather the whole tensor on every rank; a round of agreement and one collective on any number of ranks."""
        whole: torch.Tensor = load("extras.row_operators:full_tensor")(self)
        return whole

    def sum(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the sum; without arguments, a collective. In a loss it is a ``WholeNumber`` with a gradient."""
        return (
            load("extras.row_operators:sum_of")(self)
            if self._is_in_loss(args, kwargs)
            else super().sum(*args, **kwargs)
        )

    def mean(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the mean; see :meth:`sum`."""
        return (
            load("extras.row_operators:mean_of")(self)
            if self._is_in_loss(args, kwargs)
            else super().mean(*args, **kwargs)
        )

    def _is_in_loss(self, args: Any, kwargs: Any) -> bool:
        return torch.is_grad_enabled() and self.requires_grad and not (args or kwargs)

    @property
    def data(self) -> torch.Tensor:
        """The tensor without autograd; it cannot be replaced, because the rows belong to a bucket."""
        data: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        raise coded_error(RuntimeError, "parameter.data-cannot-be-assigned", parameter=self.rows.label)

    # Like any DTensor, it has no memory itself: its address is 0 and its storage is empty. Methods that export memory
    # raise an error, because torch's own would read invalid addresses.

    def is_shared(self) -> bool:
        return self._local_tensor.is_shared()

    def _refuse_memory(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise coded_error(
            NotImplementedError,
            "parameter.exported-as-whole-tensor",
            parameter=self.rows.label,
            shape=tuple(self.shape),
        )

    share_memory_ = numpy = __array__ = __dlpack__ = apply_ = map_ = map2_ = as_subclass = _refuse_memory
    __cuda_array_interface__ = property(_refuse_memory)

    def register_hook(self, hook: Any) -> Any:
        """Register a tensor hook. A parameter's hook runs only if there is a gradient: [Note: Hooks of parameters]."""
        return super().register_hook(load("extras.parameter_hooks:guarded_hook")(self, hook))

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        guarded = load("extras.parameter_hooks:guarded_accumulated_hook")(self, hook)
        return super().register_post_accumulate_grad_hook(guarded)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowDTensor:
        """Copy the rows. A copy of a parameter belongs to no bucket."""
        copied: RowDTensor = load("extras.state_dicts.row_piece:copy_rows")(self, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return load("extras.state_dicts.row_piece:reduce_rows")(self, protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RowDTensor({self.rows}, {self.dtype}, {self.device}, {self._local_tensor})"

    def chunks(self) -> list[tuple[int, torch.Tensor]]:
        chunks: list[tuple[int, torch.Tensor]] = load("extras.state_dicts.row_piece:chunks_of")(self)
        return chunks


def local_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a DTensor or a ``RowPiece``, sharing its memory; any other tensor itself."""
    if isinstance(tensor, DTENSORS):
        return tensor._local_tensor
    return tensor.to_local() if isinstance(tensor, StateEntry) else tensor


def replicated(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor of ``whole``, which every rank of the mesh has."""
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


DETACH = aten.detach.default
RowDTensor.of_spec = functools.partial(construct, RowDTensor, requires_grad=False)
register_foreach_type(RowDTensor)


DTENSORS = (DTensor, RowDTensor)
"""The classes of DTensors, for ``isinstance``; a :class:`RowDTensor` is a DTensor from torch 2.12 on."""
