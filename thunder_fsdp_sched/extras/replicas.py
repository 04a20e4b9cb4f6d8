"""The reduction across replicas, for hybrid sharding: a mesh of two dimensions."""

from __future__ import annotations

import torch.distributed as dist
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol

from ..ir.effects import Effects, Issue, Wait, bucket_of
from ..ir.registry import register
from ..ir.schedule import ISSUES
from ..ir.symbols import fsdp_reduce_scatter, reduction_meta, shard_bytes_in
from ..runtime.bucket import Bucket
from ..runtime.memory import InFlight
from ..runtime.ops import issue
from ..transports.base import Traffic


def all_reduce(bucket: Bucket, flight: InFlight) -> InFlight:
    assert flight.slot is not None and flight.output is not None
    flight.slot.arena.finish(flight)
    output = flight.output
    if bucket.ends_window() and (total := bucket.accumulation.with_reduced(output)) is not output:
        output.copy_(total)
    assert bucket.ranks.replicas is not None
    group = bucket.ranks.replicas.process_group
    work = issue(bucket, "all-reduce", lambda: dist.all_reduce(output, dist.ReduceOp.AVG, group, async_op=True))
    return flight._replace(what="all-reduce", slot=None, works=[work])


def all_reduce_effects(bsym: BoundSymbol, *, of: str = fsdp_reduce_scatter.name) -> Effects:
    """Return the effects of an all-reduce that waits for a reduction by the symbol of this name."""
    bucket, (_, future), result = bucket_of(bsym), bsym.args, bsym.output.name
    dtype = bucket.spec.reduce_dtype
    nbytes = shard_bytes_in(bucket, dtype)
    traffic, group = Traffic((nbytes,), 1, passes=2.0), bucket.ranks.replicas
    return Effects(
        waits=Wait(future.name, (of,)),
        issues=Issue(bsym.sym.name, result, bucket, group, nbytes, dtype, transport="all_reduce", traffic=traffic),
        bucket=bucket,
    )


fsdp_all_reduce = register("fsdp_all_reduce", all_reduce, all_reduce_effects, reduction_meta, kinds=[ISSUES])


def reduce_across(bucket: Bucket, inside: Proxy) -> BoundSymbol:
    """Return the bound symbol that waits for a reduction within the sharding group and issues the one across replicas."""
    across: BoundSymbol = fsdp_all_reduce.bind(bucket, inside, output=fsdp_all_reduce.meta(bucket, inside))
    return across
