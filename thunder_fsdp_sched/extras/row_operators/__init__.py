"""Gather rows into whole tensors, take them as plain tensors, and reduce them to numbers, with gradients."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...private_distributed import all_gather
from ...runtime.row_dtensor import RowDTensor, local_rows
from ...runtime.rows import Rows


def gather_rows(
    whole: torch.Tensor, local: torch.Tensor, starts: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Fill ``whole`` with the rows of all ranks, bit for bit, and return it; one collective.

    Rows that one rank has are broadcast. Others are summed as integers, as by the transport ``all_reduce``: that sends at
    most twice the tensor's bytes, however the ranks share it. Padding to the longest share would send up to W times the
    tensor among W ranks.

    Args:
        whole: contiguous memory for the tensor.
        starts: as in :class:`RowShard`.
    """
    if not whole.numel():
        return whole
    rank, first = group.rank(), bisect.bisect_right(starts, 0) - 1  # the first that has rows
    has_all = starts[first + 1] == starts[-1]
    if not has_all:
        whole.zero_()
    whole[starts[rank] : starts[rank + 1]].copy_(local)
    if has_all:
        dist.broadcast(_bytes(whole), group=group, group_src=first)
    else:
        dist.all_reduce(_bytes(whole).view(torch.int32 if whole.nbytes % 4 == 0 else torch.uint8), group=group)
    return whole


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor: backends send neither all dtypes nor all shapes."""
    return tensor.view(-1).view(torch.uint8)


def gather(rows: Rows, local: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, bit for bit, from the rows of all ranks; one collective.

    It is on the device of the parameter's bucket, from which offloaded rows are sent.

    Cost, whatever the number of ranks: a round of agreement and one collective. Each rank receives the tensor once if all
    ranks have equally many rows or one has all of them, else twice.

    Raises:
        ValueError: the process group cannot send from that device.
        ScheduleDisagreement: other ranks do something else.
    """
    with _collective(rows, "gathering", local.device) as device:
        local, starts, group = local.detach(), rows.starts, rows.ranks.group
        whole = local.new_empty(rows.shape or (1,), device=device)
        if rows.is_even and whole.numel() and starts[1] * group.size == starts[-1]:
            all_gather(_bytes(whole), _bytes(local.to(device).contiguous()), group.process_group).wait()
        else:
            gather_rows(whole, local, starts, group.process_group)
    return whole.reshape(rows.shape)


def exchange(rows: Rows, part: torch.Tensor, what: str, *labels: str) -> torch.Tensor:
    """Return the tensors of all ranks, of the same shape, stacked in the order of ranks; a collective.

    Args:
        what: the operator, for messages.
        labels: the parameters that it concerns, unless it is this one.

    Raises:
        ValueError: the process group cannot send from the parameter's device.
        ScheduleDisagreement: other ranks do something else.
    """
    size = rows.ranks.group.size
    with _collective(rows, what, part.device, *labels) as device:
        sent = _bytes(part.detach().to(device).contiguous())
        received = sent.new_empty(size, sent.numel())
        dist.all_gather(list(received), sent, group=rows.ranks.group.process_group)
    return received.view(part.dtype).view(size, *part.shape).to(part.device)


@contextlib.contextmanager
def _collective(rows: Rows, what: str, device: torch.device, *labels: str) -> Iterator[torch.device]:
    """Check that all ranks are about to do the same, and yield the device from which to send."""
    bucket, _ = rows.in_bucket or (None, 0)
    if bucket is not None:
        device = bucket.spec.device
    rows.ranks.group.check_sends(device, f"the rows of {rows.label!r}")
    control = None if bucket is None else bucket.base.control
    if control is None:
        yield device
        return
    if rows.is_on_all_ranks:
        control.rendezvous(f"{what} of", *(labels or (rows.label,)))
    with control.doing(f"{what} of {rows.label}"):
        yield device


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
