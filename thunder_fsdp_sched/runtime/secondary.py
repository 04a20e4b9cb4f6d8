"""Secondary shards: what ranks keep of a gathered bucket, so that backward gathers it among fewer ranks.

[Note: Secondary shards]
With ``reshard_after_forward=N``, the ranks that share a bucket form subgroups of N successive ranks. After its gather in
forward each rank copies its part of the unsharded bucket, the secondary shard, so that each subgroup has the whole
bucket. Backward gathers it within the subgroup. If that is a node, only forward's gather and the reduction use the links
between nodes. ZeRO++ calls this hierarchical partitioning (hpZ, arXiv:2306.10209), and FSDP2 has it under the name of the
option.

The *secondary* of a bucket is an alias with the same unsharded buffer, divided among the N ranks: a rank's part is what N
ranks' worth of successive shards fill, so cuts stay on rows and nothing is interleaved anew. Its *primary* is the bucket
that forward gathers. Both gather the same values into the same places, so a slot may hold either.

The secondary shard is a value of the trace: forward returns it for backward, like an activation. So each backward has that
of its own forward, an exception leaves nothing behind, and memory plans count it. It is already in the dtype in which the
bucket is gathered and on the device. Backward still takes the shards, although it does not send them: autograd then raises
an error if a parameter has changed since forward, as it does in the unsharded model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..transports import TRANSPORTS
from .bucket import Bucket
from .bucket_aliases import BucketAlias
from .memory import InFlight

_KEY = "secondary"

_Token = TypeVar("_Token")


def secondary_of(primary: Bucket) -> Bucket | None:
    """Return the secondary of a bucket; ``None`` if backward gathers it among all ranks that share it.

    The parameters that :func:`~.bucket_aliases.alias_of_params` gathers have none, because they are not cut into equal
    parts.
    """
    ranks, spec = primary.base.secondary_ranks, primary.spec
    if ranks is None or not spec.layout.segments:
        return None
    if _KEY not in primary.aliases:
        # Peers read shards only in memory that was allocated for it.
        transport = "flat" if TRANSPORTS[spec.comm.transport].peers_read_shards else spec.comm.transport
        comm = replace(
            spec.comm,
            transport=transport,
            reason=f"{spec.comm.reason}; from secondary shards",
            offload=False,
            pin_memory=False,
        )
        secondary = replace(
            spec.with_options(mp_policy=MixedPrecisionPolicy()),
            name=f"{spec.name}.secondary",
            params=tuple(replace(param, dtype=spec.param_dtype) for param in spec.params),
            layout=spec.layout.over_fewer_ranks(ranks.group.size),
            comm=comm,
            group=ranks.group.description,
        )
        primary.aliases[_KEY] = BucketAlias(primary.base, secondary, ranks=ranks, primary=primary)
    return primary.aliases[_KEY]


def copy_secondary_shard(
    bucket: Bucket, flight: InFlight, token: _Token, *params: torch.Tensor
) -> tuple[torch.Tensor, _Token]:
    """Return this rank's secondary shard of a bucket that has been gathered, and the token.

    Args:
        bucket: the secondary.
        flight: the gather of its primary, which has been waited for.
        params: the unsharded parameters, which are read here for the last time at the earliest.
    """
    spec, slot = bucket.spec, flight.slot
    assert slot is not None
    unsharded = slot.params[bucket.primary].flat
    shard = torch.empty(spec.layout.shard_numel, dtype=spec.dtype, device=spec.device)
    for own, whole in bucket.local_slices:
        shard[own].copy_(unsharded[whole])
    return shard, token
