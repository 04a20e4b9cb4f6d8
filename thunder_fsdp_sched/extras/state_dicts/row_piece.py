"""Rows of a tensor without its other rows: what an entry of a state dict becomes when it is pickled."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from ...errors import coded_error
from ...runtime.row_dtensor import StateEntry

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
            if tuple(args[1]) != tuple(piece.shape):  # it has no rows of this parameter
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
