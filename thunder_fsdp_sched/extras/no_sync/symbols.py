"""The symbols that accumulate gradients under ``no_sync``, and that reduce what a window has left of a frozen bucket.

``fsdp_accumulate_grads(bucket_h_0, dw, db)`` adds whole gradients to the bucket's sum. With ``accumulate="sharded"`` they
are reduced, and ``fsdp_accumulate_reduced(bucket_h_0, ft1)`` waits and adds this rank's rows to another sum: see [Note: Two
ways to accumulate] in ``runtime.accumulation``. ``fsdp_reduce_unreduced`` reduces both sums, if there are any, of a bucket
whose gradients the trace itself does not reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag

from ...ir.effects import Effects, Wait, bucket_of, left_reduced, left_unsharded
from ...ir.registry import register
from ...ir.schedule import WAITS
from ...ir.symbols import fsdp_reduce_scatter, reduction_of
from ...runtime.accumulation import AccumulationMode
from ...runtime.bucket import Bucket
from .ops import accumulate_grads, accumulate_reduced, reduce_unreduced


def _accumulate_grads_effects(bsym: BoundSymbol) -> Effects:
    bucket = bucket_of(bsym)
    return Effects(bucket=bucket, leaves=(left_unsharded(bucket),))


fsdp_accumulate_grads = register("fsdp_accumulate_grads", accumulate_grads, _accumulate_grads_effects)


def _accumulate_reduced_effects(bsym: BoundSymbol) -> Effects:
    bucket, wait = bucket_of(bsym), Wait(bsym.args[1].name, (fsdp_reduce_scatter.name,))
    return Effects(waits=wait, bucket=bucket, leaves=(left_reduced(bucket),))


fsdp_accumulate_reduced = register(
    "fsdp_accumulate_reduced", accumulate_reduced, _accumulate_reduced_effects, kinds=[WAITS]
)


def _reduce_unreduced_effects(bsym: BoundSymbol) -> Effects:
    bucket, hook = bucket_of(bsym), bsym.kwargs.get("hook")
    return Effects(runs=reduction_of(bucket), bucket=bucket, hook=hook)


fsdp_reduce_unreduced = register("fsdp_reduce_unreduced", reduce_unreduced, _reduce_unreduced_effects)


def accumulate(bucket: Bucket, grads: Sequence[TensorProxy | None], mode: AccumulationMode) -> list[BoundSymbol]:
    """Return the bound symbols that add gradients of a bucket to its sums, in the given way."""
    if mode == "unsharded":
        return [fsdp_accumulate_grads.bind(bucket, *grads, output=None)]
    future = fsdp_reduce_scatter.meta(bucket, None, *grads)
    return [
        fsdp_reduce_scatter.bind(bucket, None, *grads, output=future),
        fsdp_accumulate_reduced.bind(bucket, future, output=None),
    ]


def reduce_left(bucket: Bucket, **hook: str) -> BoundSymbol:
    """Return the bound symbol of backward that reduces what a window has left of a bucket."""
    idle: BoundSymbol = fsdp_reduce_unreduced.bind(bucket, **hook, output=None)
    idle.tags.add(BoundSymbolTag.BACKWARD)
    return idle
