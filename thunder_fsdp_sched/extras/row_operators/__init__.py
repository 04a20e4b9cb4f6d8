"""Rows as plain tensors, and plain tensors of rows, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...runtime.row_dtensor import RowDTensor, local_rows
from ...runtime.rows import Rows
from .collectives import gather


def to_local(tensor: RowDTensor) -> torch.Tensor:
    """Return this rank's rows, sharing their memory, with the gradient of the tensor."""
    return _convert(tensor, lambda local: local.view_as(local), lambda rows, grad: grad)


def full_tensor(tensor: RowDTensor) -> torch.Tensor:
    """Gather the whole tensor on every rank; a collective."""
    return _convert(tensor, lambda local: gather(tensor.rows, local).to(local.device), Rows.of)


def sum_of(tensor: RowDTensor) -> torch.Tensor:
    """Return the sum, a :class:`WholeNumber`; a collective."""
    total = local_rows(tensor.detach().sum())
    return _convert(tensor, lambda _: total.as_subclass(WholeNumber), lambda rows, grad: grad.expand(rows.local_shape))


def mean_of(tensor: RowDTensor) -> torch.Tensor:
    """Return the mean, a :class:`WholeNumber`; a collective."""
    return (sum_of(tensor) / tensor.numel()).as_subclass(WholeNumber)


class _Convert(torch.autograd.Function):
    """Applies ``convert`` to a tensor's rows; ``rows_of_grad`` returns their gradient from that of the result."""

    @staticmethod
    def forward(ctx: Any, tensor: RowDTensor, convert: Any, rows_of_grad: Any) -> torch.Tensor:
        ctx.rows, ctx.rows_of_grad = tensor.rows, rows_of_grad
        result: torch.Tensor = convert(tensor._local_tensor)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # The gradient of a sum is an expanded number. Autograd adds to gradients in place, for which they need memory.
        return RowDTensor.wrap(ctx.rows_of_grad(ctx.rows, grad).contiguous(), ctx.rows), None, None


_convert: Callable[..., torch.Tensor] = _Convert.apply


class WholeNumber(torch.Tensor):
    """A number computed from all rows: a plain tensor, so that it can be added to a loss.

    Its gradient goes to the rows of each rank once, and is not averaged: it has to be the same on all ranks.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def full_tensor(self) -> torch.Tensor:
        """Return the number, as this method of DTensors does."""
        return self
