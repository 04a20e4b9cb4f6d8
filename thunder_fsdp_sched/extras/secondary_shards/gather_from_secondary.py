from __future__ import annotations

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx

from ...ir.effects import bucket_of, effects
from ...ir.inspection import first_tensor, forward_part, with_bound_symbols
from ...ir.symbols import fsdp_all_gather
from ...runtime.bucket import Bucket
from .secondary import fsdp_copy_secondary_shard, secondary_of


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
    [Note: Tokens of copies] in ``extras.secondary_shards.secondary``.
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
