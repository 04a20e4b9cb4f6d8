"""Bucket aliases: handles that gather a bucket differently: in lower precision, or only in part.

An alias uses the shards of its bucket and allocates none. Gradients are reduced under the bucket itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..plan.layout import ALIGNMENT, Layout, Placement, round_up
from ..plan.specs import BucketSpec
from ..transports import find_transport
from .bucket import Bucket, handle_name

if TYPE_CHECKING:
    from ..ranks.process_groups import BucketRanks


def make_alias(
    base: Bucket, spec: BucketSpec, *, ranks: BucketRanks | None = None, primary: Bucket | None = None
) -> Bucket:
    """Return a bucket that uses the shards of another one. It is sent without encoding, even if that one is encoded.

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

    Memory for a cast of the shard is freed with the alias. That is not possible if peers read from it, because
    allocating it is a collective; buckets with such a transport are sent by ``flat``, which has the same layout.
    """
    transport = bucket.spec.comm.transport
    return _alias_in_dtype(bucket, dtype, "flat" if find_transport(transport).peers_read_shards else transport)


def _alias_in_dtype(bucket: Bucket, dtype: torch.dtype, transport: str) -> Bucket:
    reason = f"{bucket.spec.comm.reason}; cast before it"
    comm = replace(bucket.spec.comm, transport=transport, reason=reason)
    policy = replace(bucket.spec.options.mp_policy, param_dtype=dtype)
    name = f"{bucket.spec.name}.{str(dtype).removeprefix('torch.')}"
    return make_alias(bucket, replace(bucket.spec.with_options(mp_policy=policy), name=name, comm=comm))


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
        alias = bucket.aliases[key] = make_alias(
            bucket,
            replace(
                spec,
                name=f"{spec.name}.{str(spec.dtype).removeprefix('torch.')}",
                params=tuple(spec.params[i] for i in indices),
                layout=layout,
                comm=replace(spec.comm, transport="all_reduce", reason=reason, per_param=False),
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


def _local_slice(placement: Placement, rank: int) -> tuple[slice, slice]:
    first, last = (placement.row_starts[r] * placement.row_numel for r in (rank, rank + 1))
    begin = placement.shard_offset(rank)
    return (
        slice(begin, begin + last - first),
        slice(placement.unsharded_offset + first, placement.unsharded_offset + last),
    )
