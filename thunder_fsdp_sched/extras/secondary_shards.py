"""The secondary of a bucket, the symbol that copies a rank's secondary shard, and the pass that inserts it.

[Note: Secondary shards]
With ``Sharding(secondary_ranks=N)``, the ranks that share a bucket form subgroups of N successive ranks. After its gather in
forward each rank copies its part of the unsharded bucket, the secondary shard, so that each subgroup has the whole
bucket. Backward gathers it within the subgroup. If that is a node, only forward's gather and the reduction use the links
between nodes. ZeRO++ calls this hierarchical partitioning (hpZ, arXiv:2306.10209), and FSDP2 has it as
``reshard_after_forward=N``.

The *secondary* of a bucket is an alias with the same unsharded buffer, divided among the N ranks: each has the elements
of a run of successive shards, so cuts stay on rows and the order of elements does not change. Its *primary* is the
bucket that forward gathers. Both gather the same values into the same places, so a slot may hold either.

The secondary shard is a value of the trace: forward returns it for backward, like an activation. So each backward reads
the secondary shard of its own forward, no shard outlives an exception, and memory plans count its bytes. It is already
in the dtype in which the bucket is gathered and on the device. Backward still takes the shards, although it does not
send them: autograd then raises an error if a parameter has changed since forward, as it does in the unsharded model.

[Note: Tokens of copies]
Thunder's split moves everything to backward that no output of forward needs, and none needs the secondary shard. So the
copy also takes and returns an argument of the trace, the token: Thunder counts a bound symbol that returns one as forward.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import TypeVar

import torch
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..ir.effects import Effects, bucket_of, effects
from ..ir.inspection import first_tensor, forward_part, with_bound_symbols
from ..ir.registry import register
from ..ir.symbols import fsdp_all_gather, tensor_proxy
from ..plan.layout import Layout, make_placement
from ..runtime.bucket import Bucket
from ..runtime.bucket_aliases import make_alias
from ..runtime.memory import InFlight
from ..transports import find_transport

_Token = TypeVar("_Token")


def secondary_of(primary: Bucket) -> Bucket | None:
    """Return the secondary of a bucket; ``None`` if backward gathers it among all ranks that share it.

    The parameters that ``alias_of_params`` gathers have none, because they are not cut into equal
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
            layout=over_fewer_ranks(spec.layout, ranks.group.size),
            comm=comm,
            group=ranks.group.description,
        )
        primary.aliases["secondary"] = make_alias(primary.base, secondary, ranks=ranks, primary=primary)
    return primary.aliases["secondary"]


def over_fewer_ranks(layout: Layout, world_size: int) -> Layout:
    """Return the layout in which each of ``world_size`` ranks owns the elements of a run of successive ranks.

    The unsharded buffer is the same. ``world_size`` divides the number of ranks.
    """
    each, rest = divmod(layout.world_size, world_size)
    assert not rest, (layout.world_size, world_size)
    segments = tuple(
        replace(s, shard_offset=s.shard_offset * each, shard_numel=s.shard_numel * each) for s in layout.segments
    )
    placements = []
    for placement in layout.placements:
        # An empty segment starts where the next one does.
        before = [s for s in segments if s.unsharded_offset <= placement.unsharded_offset]
        segment = max(before, key=lambda s: (s.unsharded_offset, s.shard_numel))
        offset = placement.unsharded_offset - segment.unsharded_offset
        placements.append(make_placement(placement.shape, offset, segment, world_size))
    return Layout(world_size, segments, tuple(placements), layout.unsharded_numel, layout.shard_numel * each)


def copy_secondary_shard(
    bucket: Bucket, flight: InFlight, token: _Token, *params: torch.Tensor
) -> tuple[torch.Tensor, _Token]:
    """Return this rank's secondary shard of a gathered bucket, and the token.

    Args:
        bucket: the secondary.
        flight: the gather of its primary, which has been waited for.
        params: the unsharded parameters: because they are read here, they stay in their slot until here.
    """
    spec, slot = bucket.spec, flight.slot
    assert slot is not None
    unsharded = slot.params[bucket.primary].flat
    shard = torch.empty(spec.layout.shard_numel, dtype=spec.dtype, device=spec.device)
    for own, whole in bucket.local_slices:
        shard[own].copy_(unsharded[whole])
    return shard, token


def _copy_secondary_shard_meta(
    bucket: Bucket, future: FutureTensorProxy, token: TensorProxy, *params: TensorProxy
) -> tuple[TensorProxy, TensorProxy]:
    spec = bucket.spec
    return tensor_proxy((spec.layout.shard_numel,), spec.device, spec.dtype), token


def _copy_secondary_shard_effects(bsym: BoundSymbol) -> Effects:
    bucket, (_, future, _, *params), copy = bucket_of(bsym), bsym.args, bsym.output[0]
    read: list[tuple[str | None, Hashable]] = [(future.name, ("params", bucket.primary, None))]
    read += [(param.name, ("params", bucket.primary, index)) for index, param in enumerate(params)]
    return Effects(
        bucket=bucket,
        requires=tuple(read),
        gives={copy.name: ("secondary", bucket)},
        copies_slot=True,
    )


fsdp_copy_secondary_shard = register(
    "fsdp_copy_secondary_shard", copy_secondary_shard, _copy_secondary_shard_effects, _copy_secondary_shard_meta
)


def gather_from_secondary(trace: TraceCtx) -> TraceCtx:
    """Copy a secondary shard after forward's gather of a bucket, and gather it from these copies in backward.

    Runs on the joint trace after ``regather_for_backward`` has run for the last time, because fusion executors could
    move the copies. Does nothing without ``secondary_ranks`` or without a
    backward part. Before::

        ft150 = fsdp_all_gather(bucket_blocks_1, None, t_blocks_1_weight)  # 16,384 bytes float32
        (t109,) = fsdp_wait_params(bucket_blocks_1, ft150)
        ...
        ft157 = fsdp_all_gather(bucket_blocks_1, None, t_blocks_1_weight)  # 16,384 bytes float32
        (bw_t109,) = fsdp_wait_params(bucket_blocks_1, ft157)

    After::

        ft150 = fsdp_all_gather(bucket_blocks_1, None, t_blocks_1_weight)  # 16,384 bytes float32
        (t109,) = fsdp_wait_params(bucket_blocks_1, ft150)
        (t160, x) = fsdp_copy_secondary_shard(bucket_blocks_1_secondary, ft150, x, t109)
        ...
        ft157 = fsdp_all_gather(bucket_blocks_1_secondary, None, t_blocks_1_weight, secondary=t160)  # 16,384 bytes float32
        (bw_t109,) = fsdp_wait_params(bucket_blocks_1_secondary, ft157)

    A bucket that only backward reads is gathered among all ranks. See [Note: Secondary shards] and
    [Note: Tokens of copies] in ``extras.secondary_shards``.
    """
    bsyms, forward = trace.bound_symbols, forward_part(trace)
    in_forward, in_backward = (
        {bucket_of(b) for b, f in zip(bsyms, forward, strict=True) if f is half and effects(b).unshards}
        for half in (True, False)
    )
    found = {bucket: secondary_of(bucket) for bucket in in_forward & in_backward}
    regathered = {bucket: secondary for bucket, secondary in found.items() if secondary is not None}
    if not regathered:
        return trace
    token = first_tensor(trace)
    shards: dict[Bucket, TensorProxy] = {}
    new = with_bound_symbols(trace, (), "fsdp: gather from secondary shards")
    out = new.bound_symbols
    with tracectx(new):
        for bsym, is_forward in zip(bsyms, forward, strict=True):
            e = effects(bsym)
            secondary = regathered.get(bucket_of(bsym)) if e.is_gather or e.unshards else None
            if secondary is None:
                out.append(bsym)
            elif is_forward:
                out.append(bsym)
                if e.unshards:
                    operands = (secondary, bsym.args[1], token, *bsym.output)
                    copied = fsdp_copy_secondary_shard.meta(*operands)
                    shards[secondary] = copied[0]
                    out.append(fsdp_copy_secondary_shard.bind(*operands, output=copied))
            elif e.is_gather:
                _, _, *sent = bsym.args
                out.append(
                    fsdp_all_gather.bind(secondary, None, *sent, secondary=shards[secondary], output=bsym.output)
                )
                out[-1].tags.add(BoundSymbolTag.BACKWARD)
            else:
                out.append(bsym.from_bsym(args=(secondary, *bsym.args[1:])))
    return new
