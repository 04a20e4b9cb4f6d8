"""Prove that backward gathers from secondary shards what forward has gathered; a part of ``verify``."""

from __future__ import annotations

from collections.abc import Iterator

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.inspection import names, outs_of
from ..ir.operands import Gather, Wait, bucket_of
from ..ir.symbols import fsdp_all_gather, fsdp_copy_secondary_shard, fsdp_wait_params
from ..runtime.bucket import Bucket

__all__ = ["secondary_faults"]


def secondary_faults(trace: TraceCtx, forward: TraceCtx | None) -> Iterator[tuple[int, str]]:
    """Return the position and a description of each bound symbol that copies or sends a wrong secondary shard.

    See [Note: Secondary shards] in ``runtime.secondary``.

    Args:
        forward: for a backward trace, its forward trace.
    """
    kept: dict[str, Bucket] = {}
    for bsym in forward.bound_symbols if forward is not None else ():
        if bsym.sym is fsdp_copy_secondary_shard:
            kept[bsym.output[0].name] = bucket_of(bsym)
    waits: dict[str, BoundSymbol] = {}
    for position, bsym in enumerate(trace.bound_symbols):
        if bsym.sym is fsdp_wait_params:
            waits[Wait(bsym).future.name] = bsym
        elif bsym.sym is fsdp_copy_secondary_shard:
            bucket, (_, future, _, *params) = bucket_of(bsym), bsym.args
            wait = waits.get(future.name)
            if wait is None or bucket_of(wait) is not bucket.primary or tuple(names(params)) != outs_of(wait):
                yield (
                    position,
                    f"copies a secondary shard of bucket {bucket.primary.spec.name!r} from {future.name!r}, which is not "
                    f"its gather",
                )
        elif bsym.sym is fsdp_all_gather:
            bucket, shard = bucket_of(bsym), Gather(bsym).secondary
            sent = None if shard is None else kept.get(shard.name)
            if sent is not (None if bucket is bucket.primary else bucket):
                shown = "shards" if shard is None else repr(shard.name)
                yield position, f"gathers bucket {bucket.spec.name!r} from {shown}, not from its own secondary shards"
