"""Bucket aliases: handles that gather a bucket differently: in lower precision, only in part, or among fewer ranks.

An alias uses the shards of its bucket and allocates none. Gradients are reduced under the bucket itself.

[Note: Secondary shards]
With ``Sharding(secondary_ranks=N)``, the ranks that share a bucket form subgroups of N successive ranks. After its gather in
forward each rank copies its part of the unsharded bucket, the secondary shard, so that each subgroup has the whole
bucket. Backward gathers it within the subgroup. If that is a node, only forward's gather and the reduction use the links
between nodes. ZeRO++ calls this hierarchical partitioning (hpZ, arXiv:2306.10209), and FSDP2 has it under the name of the
option.

The *secondary* of a bucket is an alias with the same unsharded buffer, divided among the N ranks: a rank's part is what N
ranks' worth of successive shards fill, so cuts stay on rows and nothing is interleaved anew. Its *primary* is the bucket
that forward gathers. Both gather the same values into the same places, so a slot may hold either.

The secondary shard is a value of the trace: forward returns it for backward, like an activation. So each backward reads
the secondary shard of its own forward, no shard outlives an exception, and memory plans count its bytes. It is already
in the dtype in which the bucket is gathered and on the device. Backward still takes the shards, although it does not
send them: autograd then raises an error if a parameter has changed since forward, as it does in the unsharded model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..plan.layout import ALIGNMENT, Layout, Placement
from ..plan.specs import BucketSpec
from ..sizes import round_up
from ..transports import find_transport
from .bucket import Bucket, handle_name
from .memory import InFlight

if TYPE_CHECKING:
    from ..ranks.process_groups import BucketRanks


_Token = TypeVar("_Token")


def _alias(
    base: Bucket, spec: BucketSpec, *, ranks: BucketRanks | None = None, primary: Bucket | None = None
) -> Bucket:
    """Return a bucket that uses the shards of another one. Whatever the bucket's formats are, it is sent exactly.

    Args:
        base: the bucket with the shards.
        spec: how the alias is gathered.
        ranks: the ranks that gather it, if they are not those of ``base``.
        primary: see :attr:`Bucket.primary`.
    """
    spec = spec.with_options(comm_policy=None)
    transport = find_transport(spec.comm.transport)
    memory = base.peer_memory if transport.peers_read_shards else None
    if memory is not None:
        memory.announce(spec.name, *spec.sent_shard, workspace=transport.reduce_workspace(spec))
    handle = handle_name(spec.name)
    return Bucket(spec, ranks or base.ranks, base.arena, handle, base=base, primary=primary, peer_memory=memory)


def alias_in_dtype(bucket: Bucket, dtype: torch.dtype) -> Bucket:
    """Return the alias that gathers all of ``bucket`` in lower precision, by casting its shard before sending it."""
    key = (dtype,)
    if key not in bucket.aliases:
        bucket.aliases[key] = _alias_in_dtype(bucket, dtype, bucket.spec.comm.transport)
    return bucket.aliases[key]


def temporary_alias_in_dtype(bucket: Bucket, dtype: torch.dtype) -> Bucket:
    """Return a new alias that gathers all of ``bucket`` in any dtype that its ranks can send, for use between traces.

    Memory for a cast of the shard is freed with the alias. So it is not memory from which peers read, which takes a
    collective to allocate; such buckets are sent by ``flat``, which has the same layout.
    """
    transport = bucket.spec.comm.transport
    return _alias_in_dtype(bucket, dtype, "flat" if find_transport(transport).peers_read_shards else transport)


def _alias_in_dtype(bucket: Bucket, dtype: torch.dtype, transport: str) -> Bucket:
    reason = f"{bucket.spec.comm.reason}; cast before it"
    comm = replace(bucket.spec.comm, transport=transport, reason=reason)
    policy = replace(bucket.spec.options.mp_policy, param_dtype=dtype)
    name = f"{bucket.spec.name}.{str(dtype).removeprefix('torch.')}"
    return _alias(bucket, replace(bucket.spec.with_options(mp_policy=policy), name=name, comm=comm))


def alias_of_params(bucket: Bucket, indices: Sequence[int]) -> Bucket:
    """Return the alias that gathers only the parameters with these indices, in their own dtype.

    Each rank owns the same rows as in the bucket, so ranks have different amounts to send. The alias therefore uses the
    transport ``all_reduce``, which sends twice the bytes; these parameters are expected to be small.
    """
    key = tuple(indices)
    if key not in bucket.aliases:
        spec = bucket.spec
        layout = _layout_of(spec, indices)
        reason = "the rest of a bucket that is gathered in lower precision: ranks send different amounts"
        alias = bucket.aliases[key] = _alias(
            bucket,
            replace(
                spec,
                name=f"{spec.name}.{str(spec.dtype).removeprefix('torch.')}",
                params=tuple(spec.params[i] for i in indices),
                layout=layout,
                comm=replace(spec.comm, transport="all_reduce", reason=reason, per_param=False, staging=False),
            ),
        )
        alias.local_slices = [_local_slice(placement, bucket.rank) for placement in layout.placements]
    return bucket.aliases[key]


def alias_bytes(bucket: Bucket, indices: Sequence[int]) -> int:
    """Return the bytes of the unsharded buffer of :func:`alias_of_params`."""
    return _layout_of(bucket.spec, indices).unsharded_numel * bucket.spec.dtype.itemsize


def _layout_of(spec: BucketSpec, indices: Sequence[int]) -> Layout:
    """Return the layout of these parameters alone, of which each rank owns the same rows as in the bucket."""
    placements, end = [], 0
    for index in indices:
        placements.append(replace(spec.layout.placements[index], unsharded_offset=end))
        end += round_up(placements[-1].numel, max(1, ALIGNMENT // spec.dtype.itemsize))
    return Layout(spec.layout.world_size, (), tuple(placements), end, spec.layout.shard_numel)


def secondary_of(primary: Bucket) -> Bucket | None:
    """Return the secondary of a bucket; ``None`` if backward gathers it among all ranks that share it.

    The parameters that :func:`alias_of_params` gathers have none, because they are not cut into equal
    parts.
    """
    ranks, spec = primary.base.secondary_ranks, primary.spec
    if ranks is None or not spec.layout.segments:
        return None
    if "secondary" not in primary.aliases:
        # Peers read shards only in memory that was allocated for it.
        transport = "flat" if find_transport(spec.comm.transport).peers_read_shards else spec.comm.transport
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
        primary.aliases["secondary"] = _alias(primary.base, secondary, ranks=ranks, primary=primary)
    return primary.aliases["secondary"]


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


def _local_slice(placement: Placement, rank: int) -> tuple[slice, slice]:
    first, last = (placement.row_starts[r] * placement.row_numel for r in (rank, rank + 1))
    begin = placement.shard_offsets[rank]
    return (
        slice(begin, begin + last - first),
        slice(placement.unsharded_offset + first, placement.unsharded_offset + last),
    )
