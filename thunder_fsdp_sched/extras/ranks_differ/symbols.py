"""The symbols with which a rank serves others: it takes part in collectives that its own trace does not need.

A merged trace (``follow_order``) contains them at the position of the collective in the merged order::

    ft3 = fsdp_serve_gather(bucket_h_2, slot_1, forward_0, 0)    # issue; nothing reads slot_1
    fsdp_wait_served(bucket_h_2, ft3, forward_0)
    ft4 = fsdp_serve_reduce(bucket_h_2, slot_1, backward_0, 0)   # issue; slot_1 holds zeros, and what no_sync has left
    fsdp_wait_served_grads(bucket_h_2, ft4, backward_0, False)
    fsdp_finish_served(backward_0, bucket_h_2)

With hybrid sharding, ``ft5 = fsdp_serve_all_reduce(bucket_h_2, ft4)`` is between the last two. The start of the trace
knows which of these collectives some rank needs in this run. The others are left out: the issue returns ``None``, and
the wait accepts it. The last arguments of an issue are the start and the number of earlier collectives of this kind and
bucket in the merged order.

[Note: Served collectives in flight]
A merged trace has few slots for served collectives, and waits for one before it needs the slot again. But in most runs
most of them are left out, for example those of the experts that no rank uses. So a wait only allows other uses of the
slot from here on. If something does use it, the arena waits (``Arena.wait_for_overlapping``). Otherwise
``fsdp_finish_served`` waits at the end of the trace, and takes the reduced rows. If the waits blocked, a rank that
serves one of eight towers would take twice as long.

``fsdp_serve_left(backward_0, bucket_h_0)`` is at the end of a merged backward that reduces gradients. It reduces the
unreduced gradients of any rank in buckets for which the trace has no reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from thunder.core.proxies import FutureTensorProxy
from thunder.core.symbol import BoundSymbol

from ...ir.effects import Effects, Wait, left_reduced
from ...ir.registry import register
from ...ir.schedule import GATHER_WAITS, GATHERS, ISSUES, WAITS
from ...ir.symbols import (
    fsdp_all_gather,
    gather_of,
    reduction_meta,
    reduction_of,
)
from ...runtime import ops
from ...runtime.bucket import Bucket
from ...runtime.bucket_aliases import alias_in_dtype, alias_of_params
from ...runtime.memory import InFlight, Slot
from ..no_sync import accumulate_reduced
from ..replicas import all_reduce, all_reduce_effects
from .merging import GATHER, REDUCE, BucketKey


class ServingStart(Protocol):
    """The start of a merged trace, which prints its name.

    Attributes:
        no_sync: whether gradients accumulate.
    """

    no_sync: bool

    def serves(self, kind: str, bucket: Bucket, occurrence: int, /) -> bool:
        """Return whether a rank that shares the bucket takes part in this collective for itself, in this run."""

    waiting: list[Callable[[], object]]
    """Waits for served collectives at the end of the trace."""

    def serve_left(self) -> None:
        """Reduce the unreduced gradients of any rank in buckets that no trace of this round reduces."""


def key_of(bucket: Bucket) -> BucketKey:
    """Return the key of a bucket, the same on all ranks."""
    if bucket.base is bucket:
        return bucket.spec.name, "", ()
    [(first, *rest)] = [key for key, alias in bucket.base.aliases.items() if alias is bucket]
    if isinstance(first, torch.dtype):
        return bucket.base.spec.name, str(first).removeprefix("torch."), ()
    return bucket.base.spec.name, "", (first, *rest)


def bucket_with_key(base: Bucket, key: BucketKey) -> Bucket:
    """Return the bucket of a key: ``base`` itself or an alias of it, which is created if this rank has none yet."""
    _, dtype, indices = key
    if dtype:
        return alias_in_dtype(base, getattr(torch, dtype))
    return alias_of_params(base, indices) if indices else base


def serve_gather(bucket: Bucket, slot: Slot, start: ServingStart, occurrence: int) -> InFlight | None:
    if not start.serves(GATHER, bucket, occurrence):
        return None
    return ops.all_gather(bucket, slot, *[None] * len(bucket.params))


def _serve_gather_effects(bsym: BoundSymbol) -> Effects:
    bucket, slot, *_ = bsym.args
    issue = gather_of(bucket, slot, bsym.output.name)._replace(kind=bsym.sym.name, gathers=False)
    return Effects(issues=issue, bucket=bucket, uses=slot)


def _serve_gather_meta(bucket: Bucket, *arguments: Any) -> FutureTensorProxy:
    return fsdp_all_gather.meta(bucket, None)


fsdp_serve_gather = register(
    "fsdp_serve_gather", serve_gather, _serve_gather_effects, _serve_gather_meta, kinds=[GATHERS, ISSUES]
)


def wait_served(bucket: Bucket, flight: InFlight | None, start: ServingStart) -> None:
    if flight is not None:
        assert flight.slot is not None
        # Without `flight`, which keeps the sent tensor alive until its slot is used again.
        start.waiting.append(partial(_finish_gather, bucket, flight.slot))


def _finish_gather(bucket: Bucket, slot: Slot) -> None:
    slot.arena.wait_for_overlapping(slot)
    bucket.source.finish_copy()


def _wait_served_effects(bsym: BoundSymbol) -> Effects:
    bucket, future, _ = bsym.args
    return Effects(waits=Wait(future.name, (fsdp_serve_gather.name,)), bucket=bucket)


fsdp_wait_served = register("fsdp_wait_served", wait_served, _wait_served_effects, kinds=[GATHER_WAITS, WAITS])


def serve_reduce(bucket: Bucket, slot: Slot, start: ServingStart, occurrence: int) -> InFlight | None:
    if not start.serves(REDUCE, bucket, occurrence):
        return None
    # Under no_sync the own trace may add to unreduced gradients while this reduction is in flight.
    return ops.reduce_scatter(bucket, slot, *[None] * len(bucket.params), adds_left=not start.no_sync)


def _serve_reduce_effects(bsym: BoundSymbol) -> Effects:
    bucket, slot, *_ = bsym.args
    issue = reduction_of(bucket, slot, bsym.output.name)._replace(kind=bsym.sym.name)
    return Effects(issues=issue, bucket=bucket, uses=slot)


fsdp_serve_reduce = register("fsdp_serve_reduce", serve_reduce, _serve_reduce_effects, reduction_meta, kinds=[ISSUES])


def serve_all_reduce(bucket: Bucket, flight: InFlight | None) -> InFlight | None:
    return None if flight is None else all_reduce(bucket, flight)


fsdp_serve_all_reduce = register(
    "fsdp_serve_all_reduce",
    serve_all_reduce,
    lambda bsym: all_reduce_effects(bsym, of=fsdp_serve_reduce.name),
    reduction_meta,
    kinds=[ISSUES],
)


def wait_served_grads(bucket: Bucket, flight: InFlight | None, start: ServingStart, no_sync: bool) -> None:
    if flight is None:
        bucket.accumulation.deferred = {}  # those of a backward that failed
    else:
        finish = partial(accumulate_reduced, sent_left=False) if no_sync else ops.wait_grads
        start.waiting.append(partial(finish, bucket, flight))


def _wait_served_grads_effects(bsym: BoundSymbol) -> Effects:
    bucket, future, _, no_sync = bsym.args
    issued_by = fsdp_serve_reduce if no_sync or bucket.ranks.replicas is None else fsdp_serve_all_reduce
    left = left_reduced(bucket) if no_sync else ("served gradients", bucket)
    return Effects(waits=Wait(future.name, (issued_by.name,)), bucket=bucket, leaves=(left,))


fsdp_wait_served_grads = register(
    "fsdp_wait_served_grads", wait_served_grads, _wait_served_grads_effects, kinds=[WAITS]
)


def finish_served(start: ServingStart, *buckets: Bucket) -> None:
    while start.waiting:
        start.waiting.pop(0)()


fsdp_finish_served = register("fsdp_finish_served", finish_served)


def serve_left(start: ServingStart, *buckets: Bucket) -> None:
    for bucket in buckets:
        bucket.accumulation.deferred = {}  # those of a backward that failed
    start.serve_left()


fsdp_serve_left = register("fsdp_serve_left", serve_left)
