"""Build the trace that a rank runs when programs differ: from its own scheduled trace and the merged order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from thunder import transform_to_torch_types
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import unwrap_return_value
from thunder.executors.passes import del_last_used

from ...ir.effects import effects
from ...ir.inspection import before_return, has_backward
from ...ir.registry import with_caches
from ...ir.symbols import fsdp_backward_done
from ...passes import Context
from ...proof import verify
from ...proof.machine import Machine
from ...runtime.bucket import Bucket
from ...runtime.memory import Slot
from ...transforms.assign_slots import assign_slots
from ...transforms.insert_agreement import fsdp_audit_agreed
from ...transforms.release_slots import fsdp_release, release_extension, release_slots
from .follow_order import follow_order
from .merging import BucketKey, Key
from .symbols import ServingStart, fsdp_finish_served, fsdp_serve_left, fsdp_wait_served_grads


class MachineInAnyOrder(Machine):
    """The rules for a merged trace, whose gathers are in the merged order, not in that of their first consumers."""

    def check_order(self, futures: Collection[str]) -> None:
        pass


def build(
    trace: TraceCtx,
    *,
    order: Sequence[Key],
    start: ServingStart,
    buckets: Mapping[BucketKey, Bucket],
    sources: Mapping[Key, str],
    context: Context,
    half: Literal["forward", "backward"],
) -> TraceCtx:
    """Return the merged trace: with slots, proved, complete with ``del`` statements, and as Thunder would run it.

    It is the result of the phases "scheduled" and "finished" of the pipeline for the own trace, in the merged order. No
    slot is left for another trace or reused from one, and ``max_gathers_in_flight`` does not hold, because others
    decide the order.

    Args:
        trace: the own trace after the phase "scheduled", or :func:`~.follow_order.empty_trace`.
        context: the context of the compilation. Without ``forward``, a backward counts as that of a rank without a
            batch.
        order, start, buckets, sources: see :func:`~.follow_order.follow_order`.

    Raises:
        VerificationError: the order cannot be followed.
    """
    forward = context.forward if half == "backward" else None
    no_sync = context.no_sync and half == "backward"
    merged = follow_order(trace, order=order, start=start, buckets=buckets, sources=sources, no_sync=no_sync)
    merged = _with_slots(merged, context, forward, trains=context.trains and (forward is not None or half == "forward"))
    merged = verify(merged, forward=forward, original=trace, machine=MachineInAnyOrder)
    merged = _with_end(merged, start, buckets.values(), context, half)
    merged = del_last_used(merged, clear_mutable_collections=half == "backward")
    if half == "forward":  # what Thunder does after the last hook of transforms
        if not context.trains and has_backward(merged):
            merged = unwrap_return_value(merged)
        merged = transform_to_torch_types(merged)
    return with_caches(merged)


def _with_slots(trace: TraceCtx, context: Context, forward: TraceCtx | None, *, trains: bool) -> TraceCtx:
    """Assign and release slots as the pipeline does."""
    sharding, settings = context.options.sharding_strategy, context.settings
    trace = assign_slots(
        trace,
        kept_buckets=settings.kept_buckets,
        arena_of=context.arena_of,
        forward=forward,
        release=sharding.release,
        trains=trains,
        backward_arena=settings.backward_arena,
    )
    if sharding.release:
        trace = release_slots(trace, forward=forward, trains=trains)
        return trace if forward is not None or not trains else _release_shared(trace)
    if settings.backward_arena:
        return release_extension(trace, buckets=context.buckets, arena_of=context.arena_of)
    return trace


def _shared_slots(trace: TraceCtx) -> list[Slot]:
    used = [(e.bucket, e.uses) for e in map(effects, trace.bound_symbols)]
    return [
        slot for bucket, slot in used if bucket is not None and slot is not None and slot is not bucket.private_slot
    ]


def _release_shared(trace: TraceCtx) -> TraceCtx:
    """Free the shared slots at the end of forward: backward may be an own trace, which has none of them to free."""
    one_of_each_arena = {slot.arena: slot for slot in _shared_slots(trace)}
    release = fsdp_release.bind(*one_of_each_arena.values(), output=None)
    return before_return(trace, release, pass_name="fsdp: release shared slots") if one_of_each_arena else trace


def _with_end(
    trace: TraceCtx,
    start: ServingStart,
    buckets: Collection[Bucket],
    context: Context,
    half: Literal["forward", "backward"],
) -> TraceCtx:
    """Insert the statements that ranks run together at the end, and in backward ``fsdp_backward_done``."""
    served = (bsym.args[0] for bsym in trace.bound_symbols if bsym.sym is fsdp_wait_served_grads)
    end = [fsdp_finish_served.bind(start, *() if context.no_sync else dict.fromkeys(served), output=None)]
    if context.options.debug.audit:
        end.append(fsdp_audit_agreed.bind(start, output=None))
    if half == "backward":
        of_all = [e for e in map(effects, trace.bound_symbols) if e.bucket is not None]
        done = dict.fromkeys(e.bucket for e in of_all if e.leaves or (e.collects and not context.no_sync))
        if not context.no_sync:
            left = [bucket for bucket in buckets if bucket.base is bucket and bucket not in done]
            end.insert(1, fsdp_serve_left.bind(start, *left, output=None))
            done.update(dict.fromkeys(left))
        end.append(fsdp_backward_done.bind(context.no_sync, *done, output=None))
    return before_return(trace, *end, pass_name="fsdp: end of the merged trace")
