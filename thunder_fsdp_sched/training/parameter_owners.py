"""Send the rows of parameters to the rank that owns them, and back.

See [Note: One owner for each parameter] in ``whole_parameters``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..runtime.bucket import Bucket
from ..runtime.row_dtensor import local_rows

__all__ = ["OwnedParam", "choose_owners", "rows_from_owners", "rows_to_owners"]


class OwnedParam:
    """A parameter, this rank's rows of it, and its owner.

    Attributes:
        param: the parameter of the sharded model.
        rows: this rank's rows, as a plain tensor.
        unsharded: the parameter that the optimizer updates. Outside of a step it has a shape but no memory.
        owner: the rank that updates it, in the process group over which it is sharded.
    """

    def __init__(self, param: torch.Tensor, bucket: Bucket, index: int) -> None:
        self.param = param
        self.rows = local_rows(param)
        self.spec = bucket.spec.params[index]
        self.ranks = bucket.ranks
        self.group = bucket.ranks.group
        self.control = bucket.control
        self.owner = 0
        self._placement = bucket.spec.layout.placements[index]
        self.unsharded = torch.nn.Parameter(self._blank(), param.requires_grad)

    @property
    def is_owned_here(self) -> bool:
        return self.owner == self.group.rank

    @property
    def exchange_key(self) -> tuple[Any, ...]:
        """A key that is equal for parameters that one collective can send, and that sorts equally on all ranks."""
        return (tuple(self.group.global_ranks), self.group.name, str(self.rows.dtype), str(self.spec.device))

    @property
    def grad(self) -> torch.Tensor:
        """Return this rank's rows of the gradient, which must exist."""
        assert self.param.grad is not None
        return local_rows(self.param.grad)

    def shape_on(self, rank: int) -> tuple[int, ...]:
        return self._placement.shard_shape(rank)

    def rows_of(self, rank: int) -> torch.Tensor:
        start, end = self._placement.row_starts[rank : rank + 2]
        return self.unsharded[start:end]

    def fill(self, values: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Assemble :attr:`unsharded` from the rows of each rank."""
        self.unsharded.data = torch.cat(list(values))
        self.unsharded.grad = torch.cat(list(grads))

    def empty(self) -> None:
        self.unsharded.grad = None
        self.unsharded.data = self._blank()

    def _blank(self) -> torch.Tensor:
        # A 0-dim parameter counts as one row, as in its bucket and in checkpoints.
        return self.rows.new_zeros(()).expand(self._placement.shape or (1,))


def choose_owners(known: Iterable[OwnedParam], new: Iterable[OwnedParam]) -> None:
    """Assign new parameters, largest first, to the rank that owns least; among equals to the one with most of its rows."""
    loads: dict[str, list[int]] = {}
    for param in known:
        loads.setdefault(param.group.name, [0] * param.group.size)[param.owner] += param.spec.numel
    for param in sorted(new, key=lambda p: -p.spec.numel):
        load = loads.setdefault(param.group.name, [0] * param.group.size)
        param.owner = min(range(param.group.size), key=lambda r, p=param, load=load: (load[r], -p.shape_on(r)[0], r))  # type: ignore[misc]
        load[param.owner] += param.spec.numel


def rows_to_owners(params: Sequence[OwnedParam]) -> None:
    """Send this rank's rows of parameters and gradients to their owners, which assemble them."""
    group = params[0].group
    mine = [p for p in params if p.is_owned_here]
    received = _all_to_all(
        params[0],
        [[t for p in params if p.owner == rank for t in (p.rows, p.grad)] for rank in range(group.size)],
        [[shape for p in mine for shape in (p.shape_on(rank), p.shape_on(rank))] for rank in range(group.size)],
    )
    for i, param in enumerate(mine):
        param.fill([pieces[2 * i] for pieces in received], [pieces[2 * i + 1] for pieces in received])


def rows_from_owners(params: Sequence[OwnedParam]) -> None:
    """Send updated rows from this rank to the ranks that hold them, and receive its own rows from the other owners."""
    group = params[0].group
    mine = [p for p in params if p.is_owned_here]
    by_owner = [[p for p in params if p.owner == rank] for rank in range(group.size)]
    received = _all_to_all(
        params[0],
        [[p.rows_of(rank) for p in mine] for rank in range(group.size)],
        [[p.shape_on(group.rank) for p in owned] for owned in by_owner],
    )
    updated = [param for owned in by_owner for param in owned]
    torch._foreach_copy_([p.rows for p in updated], list(itertools.chain.from_iterable(received)))
    torch.autograd.graph.increment_version(p.param for p in updated)
    for param in mine:
        param.empty()


def _all_to_all(
    of: OwnedParam, sent: Sequence[Sequence[Any]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[torch.Tensor]]:
    """Send tensors to each rank of a group and return those from each, with the given shapes; one collective.

    Args:
        of: a parameter with the group, the device and the dtype to use.
    """
    group, rows, device = of.group, of.rows, of.spec.device
    lengths = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
    outgoing = torch.cat([rows.new_empty(0), *(t.reshape(-1) for of_rank in sent for t in of_rank)])
    if group.size == 1:
        incoming = outgoing
    else:
        # They may be on a device that the group does not support, such as the CPU.
        incoming = rows.new_empty(sum(map(sum, lengths)), device=device)
        counts = [sum(t.numel() for t in of_rank) for of_rank in sent]
        process_group = group.process_group
        assert of.control is not None
        with of.control.doing("the exchange of rows with the owners of whole parameters"):
            dist.all_to_all_single(incoming, outgoing.to(device), list(map(sum, lengths)), counts, group=process_group)
    flat = iter(incoming.to(rows.device).split(list(itertools.chain.from_iterable(lengths))))
    return [[next(flat).view(shape) for shape in of_rank] for of_rank in shapes]
