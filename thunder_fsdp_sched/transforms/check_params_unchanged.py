from __future__ import annotations

from collections.abc import Collection

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..errors import coded_error
from ..ir.effects import Effects, SlotRegion, bucket_of, effects
from ..ir.inspection import args_of, forward_part, outs_of, with_bound_symbols
from ..ir.registry import register
from ..runtime.bucket import Bucket
from ..runtime.ops import check_shards, gather_again, reuses
from ..runtime.row_dtensor import RowDTensor


def _params_unchanged(bucket: Bucket, *shards: RowDTensor | None) -> None:
    # Backward receives the shards as saved tensors, and autograd compares their versions when it unpacks them.
    check_shards(bucket, shards)
    slot = bucket.private_slot
    if not slot.arena.is_memory_of_running_backward():
        raise coded_error(RuntimeError, "step.memory-released-before-backward", bucket=bucket.spec.name)
    if reuses(bucket, slot):
        return
    if bucket.base.control is not None and not bucket.base.control.agrees_in_steps:
        raise coded_error(
            RuntimeError,
            "step.bucket-lost-before-backward",
            agreement=bucket.base.control.agreement,
            bucket=bucket.spec.name,
        )
    gather_again(bucket, slot)


def _params_unchanged_effects(bsym: BoundSymbol) -> Effects:
    bucket = bucket_of(bsym)
    return Effects(bucket=bucket, ensures=SlotRegion(bucket, bucket.private_slot, bucket.spec.param_dtype))


fsdp_params_unchanged = register("fsdp_params_unchanged", _params_unchanged, _params_unchanged_effects)


def check_params_unchanged(trace: TraceCtx, *, kept_buckets: Collection[Bucket]) -> TraceCtx:
    """Insert a guard for every kept bucket before all else in backward, with the bucket's shards as arguments.

    Runs on the joint trace after ``remove_cuts``, because fusion executors could move the guards. Does nothing if no bucket
    is kept (ZeRO-3) or the trace has no backward part. After, in the backward trace that Thunder splits from it (ZeRO-2)::

        t119, t117, t116, t115, t113, t112, t111, x, t_blocks_0_weight, t_blocks_1_weight, t_blocks_2_weight, = C0
        fsdp_params_unchanged(bucket_blocks_0, t_blocks_0_weight)
        fsdp_params_unchanged(bucket_blocks_1, t_blocks_1_weight)
        fsdp_params_unchanged(bucket_blocks_2, t_blocks_2_weight)
        t121 = torch.where(t119, t70, 0)

    The guard makes the shards saved tensors, and autograd raises an error if their version has changed. Under ZeRO-3
    they are saved anyway, because backward gathers them. At run time the guard also gathers a bucket again if an
    aborted forward or an evaluation may have overwritten it since.
    """
    bsyms = trace.bound_symbols
    gathers = [b for b in bsyms if effects(b).is_gather and bucket_of(b).base in kept_buckets]
    if not gathers or all(forward_part(trace)[:-1]):
        return trace
    guards = [
        fsdp_params_unchanged.bind(bucket, *shards, output=None) for bucket, _, *shards in (g.args for g in gathers)
    ]
    checked = {arg for guard in guards for arg in args_of(guard)}
    begin = 1 + max(i for i, b in enumerate(bsyms) if checked.intersection(outs_of(b)))
    return with_bound_symbols(
        trace, [*bsyms[:begin], *guards, *bsyms[begin:]], "fsdp: check that parameters are unchanged"
    )
