"""Collectives on the rows of a tensor."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from ...private_distributed import all_gather
from ...runtime.rows import Rows


def gather_rows(
    whole: torch.Tensor, local: torch.Tensor, starts: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Fill ``whole`` with the rows of all ranks, bit for bit, and return it; one collective.

    Rows that one rank has are broadcast. Others are summed as integers, as by the transport ``all_reduce``: that sends at
    most twice the tensor's bytes, however the ranks share it. Padding to the longest share would send up to as many times
    the tensor as there are ranks.

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

    It is on the device of the parameter's bucket, where offloaded rows are sent from.

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
    """Check that all ranks are about to do the same, and yield the device to send from."""
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
