"""The costs of the symbols of this package, those of other extras included; see [Note: Costs] in ``costs``."""

from __future__ import annotations

from collections.abc import Callable

from thunder.core.symbol import BoundSymbol

from ...ir.effects import bucket_of, effects, is_declared, left_reduced, left_unsharded
from ...ir.inspection import names, nbytes_of
from ...ir.symbols import loaded_bytes, shard_bytes_in
from ...plan.specs import BucketSpec
from ...private_thunder import COSTS
from ...runtime.bucket import Bucket
from ...runtime.memory import slot_bytes
from .costs import (
    FREE,
    Allocation,
    Costs,
    LocalWork,
    call_memory,
    memory_afterwards,
    memory_of_sums,
    pooled_memory,
    reduced_gradients,
    sharded_gradients,
    transport_memory,
    unsharded_gradients,
)


def costs(bsym: BoundSymbol) -> Costs:
    """Return the costs of a bound symbol, without observation; see [Note: Costs]."""
    if not is_declared(bsym.sym):
        return FREE
    known = vars(bsym)
    found: Costs | None = known.get(COSTS)
    if found is None:
        found = known[COSTS] = COSTS_OF.get(bsym.sym.name, _of_call)(bsym)
    return found


def _of_call(bsym: BoundSymbol) -> Costs:
    """Return the costs of a symbol that only calls a function, and whose results are views of all they may alias."""
    return Costs(work=LocalWork(), views=effects(bsym).aliases)


def _all_gather(bsym: BoundSymbol) -> Costs:
    bucket, issue, marks = bucket_of(bsym), effects(bsym).issues, bsym.kwargs
    assert issue is not None and issue.traffic is not None
    spec, traffic, resends = bucket.spec, issue.traffic, not marks.get("reuse_cast")
    offload, casts, nbytes = spec.comm.offload, spec.sends_copy, spec.sent_bytes
    shards, memory = tuple(names(bsym.args[2:])), []
    if casts and not offload:
        memory.append(Allocation(("cast", bucket), nbytes, spec.device.type, "steps", label=f"cast of {spec.name}"))
    if issue.resident:
        return Costs(shards, {issue.future: ()}, allocates=tuple(memory), work=LocalWork())
    if offload:
        memory.append(Allocation(issue.future, nbytes, spec.device.type))
        if spec.gather_wire is not None:
            memory += call_memory(bucket, "copy of the shard on the device", loaded_bytes(bucket))
    memory += pooled_memory(bucket, bucket.transport.gather_buffers(spec))
    memory += memory_afterwards(bucket, "decoding", bucket.transport.gather_temporary(spec))
    if spec.gather_wire is not None and (offload or resends):
        memory += call_memory(bucket, "encoding", spec.gather_wire.temporary_bytes(1, spec.dtype))
    at_once = traffic.copied_before + (spec.shard_bytes + nbytes if offload or (casts and resends) else 0)
    work = LocalWork(traffic.launches, traffic.copied_before if offload else at_once, at_once)
    return Costs(shards, {issue.future: tuple(names([marks.get("secondary")]))}, allocates=tuple(memory), work=work)


def _wait_params(bsym: BoundSymbol) -> Costs:
    bucket = bucket_of(bsym)
    return Costs(work=LocalWork(moved_at_once=bucket.transport.gather_traffic(bucket.spec).copied_after))


def _reduce_scatter(bsym: BoundSymbol) -> Costs:
    bucket, spec = bucket_of(bsym), bucket_of(bsym).spec
    nbytes, transport = shard_bytes_in(bucket, spec.reduce_dtype), bucket.transport
    memory = (
        *memory_of_sums(bucket, bsym.args[2:]),
        Allocation(bsym.output.name, nbytes, spec.device.type, kind="gradients"),
        *memory_afterwards(bucket, f"temporary memory of {spec.comm.transport}", transport.reduce_temporary(spec)),
        *call_memory(bucket, "encoding", transport.sending_temporary(spec)),
        *transport_memory(bucket),
    )
    traffic = transport.reduce_traffic(spec)
    return Costs(
        allocates=memory, work=LocalWork(traffic.launches, traffic.copied_before, traffic.copied_before, touches=2)
    )


def _all_reduce(bsym: BoundSymbol) -> Costs:
    bucket, spec = bucket_of(bsym), bucket_of(bsym).spec
    added = spec.accumulated_bytes if spec.accumulate_dtype != spec.reduce_dtype else 0
    memory = call_memory(bucket, "sum of sharded gradients", added, left_reduced(bucket))
    return Costs(views={bsym.output.name: (bsym.args[1].name,)}, allocates=memory, work=LocalWork())


def _copies_gradients(spec: BucketSpec) -> bool:
    """Return whether reduced gradients are copied from the memory into which the reduction has put them."""
    return spec.reduce_dtype != spec.dtype or spec.comm.offload


def _wait_costs(bucket: Bucket) -> tuple[tuple[Allocation, ...], LocalWork]:
    """Return the memory and the work of a wait for reduced gradients, without the gradients that it returns."""
    spec = bucket.spec
    casts, offload, flat = spec.reduce_dtype != spec.dtype, spec.comm.offload, spec.shard_bytes
    memory: list[Allocation] = []
    if bucket.ranks.replicas is None and spec.accumulate_dtype not in (spec.reduce_dtype, spec.dtype):
        memory += call_memory(bucket, "sum of sharded gradients", spec.accumulated_bytes, left_reduced(bucket))
    if casts and offload:
        memory += call_memory(bucket, "cast of sharded gradients", flat)
    own = shard_bytes_in(bucket, spec.reduce_dtype)
    divides = spec.options.gradient_divide_factor not in (None, spec.layout.world_size * spec.replicas)
    moved = (2 * own if divides else 0) + (own + flat if casts else 0)
    work = LocalWork(
        moved=moved,
        moved_at_once=moved + bucket.transport.reduce_traffic(spec).copied_after,
        to_host=flat if offload else 0,
    )
    return tuple(memory), work


def _wait_grads(bsym: BoundSymbol) -> Costs:
    bucket, future = bucket_of(bsym), bsym.args[1]
    spec, (first, *rest) = bucket.spec, [p.name for p in bsym.output]
    memory, work = _wait_costs(bucket)
    views: dict[str, tuple[str, ...]] = dict.fromkeys((first, *rest), (future.name,))
    if _copies_gradients(spec):
        own = Allocation(first, spec.shard_bytes, spec.shard_device.type, kind="gradients", on_host=spec.comm.offload)
        memory, views = (own, *memory), {first: (), **dict.fromkeys(rest, (first,))}
    return Costs(views=views, allocates=memory, work=work)


def _backward_done(bsym: BoundSymbol) -> Costs:
    no_sync, *buckets = bsym.args
    left = tuple(key for bucket in buckets for key in (left_unsharded(bucket), left_reduced(bucket)))
    return Costs(forgets=() if no_sync else left, work=LocalWork())


def _value(bsym: BoundSymbol) -> Costs:
    out = bsym.output
    return Costs(allocates=(Allocation(out.name, nbytes_of(out), out.device.type, kind="values"),))


def _copy_secondary_shard(bsym: BoundSymbol) -> Costs:
    copy, nbytes = bsym.output[0], nbytes_of(bsym.output[0])
    memory = Allocation(copy.name, nbytes, bucket_of(bsym).spec.device.type, kind="values")
    return Costs(allocates=(memory,), work=LocalWork(0, 2 * nbytes, 2 * nbytes))


def _accumulate_grads(bsym: BoundSymbol) -> Costs:
    bucket = bucket_of(bsym)
    memory = (unsharded_gradients(bucket), *memory_of_sums(bucket, bsym.args[1:]))
    return Costs(allocates=memory, work=LocalWork(touches=3))


def _accumulate_reduced(bsym: BoundSymbol) -> Costs:
    bucket, spec, kept = bucket_of(bsym), bucket_of(bsym).spec, reduced_gradients(bucket_of(bsym))
    if spec.accumulate_dtype == spec.reduce_dtype:  # the first ones stay where the reduction has put them
        kept = kept._replace(scope="persistent later")
    moved = shard_bytes_in(bucket, spec.reduce_dtype) + 2 * spec.accumulated_bytes
    copied = bucket.transport.reduce_traffic(spec).copied_after
    return Costs(allocates=(kept,), work=LocalWork(moved=moved, moved_at_once=moved + copied))


def _unreduced_memory(bucket: Bucket) -> tuple[Allocation, ...]:
    """Return the memory of reducing a bucket's unreduced gradients."""
    spec = bucket.spec
    unsharded, reduced = left_unsharded(bucket), left_reduced(bucket)
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


def _reduce_unreduced(bsym: BoundSymbol) -> Costs:
    return Costs(allocates=_unreduced_memory(bucket_of(bsym)), work=LocalWork())


def _wait_served_grads(bsym: BoundSymbol) -> Costs:
    bucket, _, _, no_sync = bsym.args
    if no_sync:
        return _accumulate_reduced(bsym)
    return Costs(allocates=(_served(bucket),), work=_wait_costs(bucket)[1])


def _served(bucket: Bucket) -> Allocation:
    """Return the memory that a served reduction leaves until the end of the trace; then it may be cast or copied."""
    left = sharded_gradients(bucket)._replace(scope="persistent later")
    if _copies_gradients(bucket.spec):
        nbytes, device = shard_bytes_in(bucket, bucket.spec.reduce_dtype), bucket.spec.device.type
        left = left._replace(owner=("served gradients", bucket), nbytes=nbytes, device=device, on_host=False)
    return left


def _finish_served(bsym: BoundSymbol) -> Costs:
    """Return the memory, all casts and copies at once, although each replaces the result of one reduction."""
    _, *buckets = bsym.args
    memory = tuple(m for bucket in buckets for m in (sharded_gradients(bucket), *_wait_costs(bucket)[0]))
    return Costs(allocates=memory, forgets=tuple(("served gradients", bucket) for bucket in buckets), work=LocalWork())


def _serve_left(bsym: BoundSymbol) -> Costs:
    _, *buckets = bsym.args
    return Costs(allocates=tuple(m for bucket in buckets for m in _unreduced_memory(bucket)), work=LocalWork())


COSTS_OF: dict[str, Callable[[BoundSymbol], Costs]] = {
    "fsdp_unshard": _value,
    "fsdp_reduce": _value,
    "fsdp_all_gather": _all_gather,
    "fsdp_wait_params": _wait_params,
    "fsdp_fusion_barrier": lambda bsym: Costs(views=effects(bsym).aliases),
    "fsdp_matmul_into": lambda bsym: FREE,
    "fsdp_sum_into": lambda bsym: FREE,
    "fsdp_reduce_scatter": _reduce_scatter,
    "fsdp_all_reduce": _all_reduce,
    "fsdp_wait_grads": _wait_grads,
    "fsdp_backward_done": _backward_done,
    "fsdp_copy_secondary_shard": _copy_secondary_shard,
    "fsdp_accumulate_grads": _accumulate_grads,
    "fsdp_accumulate_reduced": _accumulate_reduced,
    "fsdp_reduce_unreduced": _reduce_unreduced,
    "fsdp_serve_gather": _all_gather,
    "fsdp_wait_served": _wait_params,
    "fsdp_serve_reduce": _reduce_scatter,
    "fsdp_serve_all_reduce": _all_reduce,
    "fsdp_wait_served_grads": _wait_served_grads,
    "fsdp_finish_served": _finish_served,
    "fsdp_serve_left": _serve_left,
}
"""The costs of the symbols for which :func:`_of_call` is not enough, including those of other extras."""
