"""Broadcasts of tensors over the ranks that share them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .process_groups import BucketRanks


def broadcast(tensor: torch.Tensor, source: int, ranks: BucketRanks, *, via: torch.device | None = None) -> None:
    """Broadcast a tensor from the global rank ``source``, one of those that share it, to the others.

    Args:
        via: device from which to send a copy if the tensor's own device has no backend (a CPU, with NCCL only).

    Raises:
        ValueError: neither device has a backend.
    """
    can_send = all(group.backend_for(tensor.device) for group in ranks.groups)
    if not can_send:
        for group in ranks.groups:
            group.check_sends(via or tensor.device, f"a tensor of shape {tuple(tensor.shape)} for broadcast_from")
    if not can_send or not tensor.is_contiguous():  # bytes are sent, and strides may differ between ranks
        copy = (tensor if can_send else tensor.to(via)).contiguous()
        broadcast(copy, source, ranks)
        tensor.copy_(copy)
        return
    if ranks.replicas is not None and ranks.grid is not None:
        if source in ranks.replicas.global_ranks:
            dist.broadcast(tensor, src=source, group=ranks.replicas.process_group)
        # Now the rank in the column of `source` has it in each row of the mesh.
        rows = [list(row) for row in ranks.grid]
        own_row = next(row for row in rows if dist.get_rank() in row)
        source = own_row[next(row.index(source) for row in rows if source in row)]
    dist.broadcast(tensor, src=source, group=ranks.group.process_group)
