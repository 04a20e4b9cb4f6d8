"""The symbols that accumulate gradients under ``no_sync``, and that reduce what a window has left of a frozen bucket.

``fsdp_accumulate_grads(bucket_h_0, dw, db)`` adds whole gradients to the bucket's sum. With ``accumulate="sharded"`` they
are reduced, and ``fsdp_accumulate_reduced(bucket_h_0, ft1)`` waits and adds this rank's rows to another sum: see [Note: Two
ways to accumulate] in ``runtime.accumulation``. ``fsdp_reduce_unreduced`` reduces both sums, if there are any, of a bucket
whose gradients the trace itself does not reduce.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag

from ...ir.effects import Allocation, Effects, LocalWork, Wait, bucket_of, reduced_gradients, unsharded_gradients
from ...ir.registry import register
from ...ir.schedule import WAITS
from ...ir.symbols import (
    call_memory,
    fsdp_reduce_scatter,
    memory_of_sums,
    reduction_of,
    shard_bytes_in,
    transport_memory,
)
from ...runtime.accumulation import AccumulationMode
from ...runtime.bucket import Bucket
from ...runtime.memory import slot_bytes
from .ops import accumulate_grads, accumulate_reduced, reduce_unreduced


def _accumulate_grads_effects(bsym: BoundSymbol) -> Effects:
    bucket, grads = bucket_of(bsym), bsym.args[1:]
    memory = (unsharded_gradients(bucket), *memory_of_sums(bucket, grads))
    return Effects(work=LocalWork(touches=3), bucket=bucket, allocates=memory)


fsdp_accumulate_grads = register("fsdp_accumulate_grads", accumulate_grads, _accumulate_grads_effects)


def accumulate_costs(bucket: Bucket) -> tuple[tuple[Allocation, ...], LocalWork]:
    """Return the memory and the work of adding reduced gradients to the sum."""
    spec, kept = bucket.spec, reduced_gradients(bucket)
    if spec.accumulate_dtype == spec.reduce_dtype:  # the first ones stay where the reduction has put them
        kept = kept._replace(scope="persistent later")
    moved = shard_bytes_in(bucket, spec.reduce_dtype) + 2 * spec.accumulated_bytes
    return (kept,), LocalWork(moved=moved, moved_at_once=moved + bucket.transport.reduce_traffic(spec).copied_after)


def _accumulate_reduced_effects(bsym: BoundSymbol) -> Effects:
    bucket, wait = bucket_of(bsym), Wait(bsym.args[1].name, (fsdp_reduce_scatter.name,))
    memory, work = accumulate_costs(bucket)
    return Effects(waits=wait, work=work, bucket=bucket, allocates=memory)


fsdp_accumulate_reduced = register(
    "fsdp_accumulate_reduced", accumulate_reduced, _accumulate_reduced_effects, kinds=[WAITS]
)


def sharded_gradients(bucket: Bucket, only_with: Hashable = None) -> Allocation:
    """Return the memory of gradients that a backward adds to ``.grad`` itself."""
    spec = bucket.spec
    label, key = f"sharded gradients of {spec.name}", ("sharded gradients", bucket)
    device, on_host = spec.shard_device.type, spec.comm.offload
    return Allocation(key, spec.shard_bytes, device, "persistent", "gradients", label, only_with, on_host)


def unreduced_memory(bucket: Bucket) -> tuple[Allocation, ...]:
    """Return the memory of reducing what a window has left of a bucket."""
    spec = bucket.spec
    unsharded, reduced = unsharded_gradients(bucket).owner, reduced_gradients(bucket).owner
    label = "copy of accumulated gradients"
    own = spec.accumulated_bytes if spec.accumulate_dtype != spec.dtype or spec.comm.offload else 0
    # The result of a reduction is cast or copied. Reduced gradients are added to it, in a wider dtype if they have one.
    cast = spec.reduce_dtype != spec.dtype or spec.comm.offload
    result = shard_bytes_in(bucket, spec.reduce_dtype) if cast else 0
    widened = spec.accumulate_dtype != spec.reduce_dtype
    temporary = max(bucket.transport.sending_temporary(spec), bucket.transport.reduce_temporary(spec))
    copied = spec.shard_bytes if spec.reduce_dtype != spec.dtype and spec.comm.offload else 0
    whole = slot_bytes(spec, spec.reduce_dtype) + temporary + result + copied
    return (
        *call_memory(bucket, label, whole, unsharded),
        *call_memory(bucket, label, own + (result if widened else 0), reduced),
        *transport_memory(bucket, unsharded),
        *(sharded_gradients(bucket, key) for key in (unsharded, reduced)),
    )


def _reduce_unreduced_effects(bsym: BoundSymbol) -> Effects:
    bucket, hook = bucket_of(bsym), bsym.kwargs.get("hook")
    memory = unreduced_memory(bucket)
    return Effects(runs=reduction_of(bucket), work=LocalWork(), bucket=bucket, hook=hook, allocates=memory)


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
