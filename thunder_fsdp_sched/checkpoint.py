"""State dicts of whole parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule

from .buffers import Bucket

__all__ = ["full_state_dict", "gather_param"]


def gather_param(bucket: Bucket, index: int, shard: torch.Tensor) -> torch.Tensor:
    """The whole parameter ``index`` of ``bucket``, bit for bit, from every rank's rows; a collective.

    Args:
        shard: this rank's rows.

    Returns:
        A new tensor of the unsharded shape on the bucket's device, on every rank.
    """
    placement = bucket.spec.layout.placements[index]
    whole = torch.empty(placement.shape, dtype=bucket.spec.dtype, device=bucket.spec.device)
    rows = whole.reshape(1) if whole.ndim == 0 else whole
    bucket.own_rows(index, whole).copy_(shard)
    for rank, global_rank in enumerate(bucket.ranks.group.global_ranks):
        start, end = placement.row_starts[rank : rank + 2]
        if rows[start:end].numel():
            dist.broadcast(rows[start:end], src=global_rank, group=bucket.ranks.group.process_group)
    return whole


def full_state_dict(model: ThunderModule) -> dict[str, torch.Tensor]:
    """The state dict of the original, unsharded module: whole parameters under the original module's keys; a collective.

    It is what ``model.original_state_dict()`` gives, with the keys that ``load_state_dict(strict=True)`` of the original
    module wants: tied names included, and no dot in front of what the root module owns (as Thunder 0.2.6 has it).
    """
    entries = {key.removeprefix("."): value for key, value in model.original_state_dict().items()}
    for name, tied in model._get_shared_names().items():
        known = next((entries[other] for other in tied if other in entries), None)
        if known is not None:
            entries.setdefault(name, known)
    return entries
