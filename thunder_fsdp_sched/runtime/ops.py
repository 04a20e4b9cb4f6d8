"""Run-time implementations of the symbols in ``ir.symbols``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..errors import coded_error
from ..private_torch import running_node
from .autograd import running_backward_of
from .bucket import WINDOW_FIRST, WINDOW_LAST, WINDOW_OPEN, Bucket
from .memory import Contents, InFlight, Slot, address
from .names import issue_named
from .row_dtensor import RowDTensor
from .unused_outputs import drop_gradients, unused_gradients

T = TypeVar("T")


def check_shards(bucket: Bucket, shards: Sequence[RowDTensor | None]) -> None:
    for index, (shard, pointer) in enumerate(zip(shards, bucket.shard_pointers, strict=True)):
        if shard is not None and address(shard._local_tensor) != pointer:
            raise bucket.lost_shard(index)


def all_gather(
    bucket: Bucket,
    slot: Slot,
    *shards: RowDTensor | None,
    reuse_cast: bool = False,
    resident: bool = False,
    window: str | None = None,
    secondary: torch.Tensor | None = None,
) -> InFlight:
    check_shards(bucket, shards)
    if bucket.base.early is not None:
        bucket.base.early.note(bucket, slot, may_find=window is not None)
    if (resident or window is not None) and reuses(bucket, slot, in_window=window is not None):
        return _found(bucket, slot, window)
    version = bucket.version() if window == WINDOW_OPEN else None
    return start_gather(bucket, slot, version, reuse_cast=reuse_cast, secondary=secondary)


def _found(bucket: Bucket, slot: Slot, window: str | None) -> InFlight:
    """Return the gather of a bucket that is resident in the slot, or the one in flight into it."""
    arena = slot.arena
    if (flight := arena.gather_in(slot)) is not None:
        arena.follow_stream()
    else:
        arena.begin_use(slot)
        flight = arena.register(InFlight(bucket, "all-gather", slot, (), contents=arena.contents[slot]))
    bucket.issue_counts.issued += 2
    if window in (WINDOW_LAST, WINDOW_FIRST) and flight.contents is not None:  # no later forward may find it
        flight = arena.replace(flight._replace(contents=flight.contents._replace(version=None)))
    return flight


def start_gather(
    bucket: Bucket, slot: Slot, version: tuple[int, ...] | None, *, reuse_cast: bool = False, secondary: Any = None
) -> InFlight:
    """Issue a gather of a bucket into a slot. With a ``version``, later forwards may reuse it while the bucket has that."""
    arena = slot.arena
    arena.begin_write(slot)
    unsharded = slot.params[bucket]
    contents = Contents.from_gather(bucket, version)
    sent = bucket.source.shard(reuse_cast=reuse_cast) if secondary is None else secondary

    def gather() -> InFlight:
        works = bucket.gather_into(unsharded, sent)
        return arena.register(InFlight(bucket, "all-gather", slot, works, sent=sent, contents=contents))

    return issue(bucket, "all-gather", gather, slot)


def reuses(bucket: Bucket, slot: Slot, *, in_window: bool = False) -> bool:
    """Return whether the bucket is still resident on all ranks, from this backward's forward or an earlier micro-batch.

    Raises:
        RuntimeError: it was when the trace started, and this rank has lost it since.
    """
    has = bucket.is_resident(slot, in_window=in_window)
    if bucket.is_reuse_agreed is None:
        return has
    if bucket.is_reuse_agreed and not has:
        raise coded_error(RuntimeError, "step.resident-bucket-lost", bucket=bucket.spec.name)
    return bucket.is_reuse_agreed


def gather_again(bucket: Bucket, slot: Slot | None) -> None:
    """Gather a bucket again that some rank has lost since forward, in addition to the collectives of the trace.

    Args:
        slot: the slot in which the running backward expects it, if this rank has lost it. Otherwise this rank gathers
            into temporary memory, because the slot may hold gradients already.
    """
    spec = bucket.spec
    bucket.issue_counts.expected += 2
    into = slot or bucket.temporary_slot(spec.param_dtype)
    wait_params(bucket, all_gather(bucket, into, *[None] * len(spec.params), reuse_cast=True))
    if slot is None:
        into.arena.release()
    elif (contents := slot.arena.contents.get(slot)) is not None:
        slot.arena.contents[slot] = contents._replace(restored_for=running_backward_of())


def issue(bucket: Bucket, what: str, function: Callable[[], T], slot: Slot | None = None) -> T:
    """Issue a collective: count it, and name it in profiles, stacks and errors.

    Args:
        slot: the memory that it uses, if it is tracked there.
    """
    bucket.issue_counts.issued += 1
    try:
        issued = issue_named(what, bucket.spec.name, function)
    except RuntimeError as error:
        raise bucket.failure(what, error) from error
    except BaseException as error:
        # A transport that raises an Exception leaves nothing in flight; an interrupt may have come at any time.
        if slot is not None and not isinstance(error, Exception):
            slot.arena.mark_interrupted(bucket, what, slot)
        raise
    bucket.issue_counts.issued += 1
    if (log := bucket.issue_counts.log) is not None:
        log.append((what, bucket.handle))
    return issued


def wait_params(bucket: Bucket, flight: InFlight, token: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    slot = flight.slot
    assert slot is not None
    slot.arena.finish(flight)
    if flight.sent is not None and bucket.spec.comm.offload and running_node() is not None:
        bucket.source.finish_copy()
    return slot.params[bucket].tensors


def _grad_view(bucket: Bucket, slot: Slot, index: int) -> torch.Tensor:
    slot.arena.begin_write(slot)  # the slot of a reduction is in use from its first gradient on
    return slot.grads[bucket].tensors[index]


def matmul_into(bucket: Bucket, slot: Slot, index: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    multiply = torch.mm if a.ndim == 2 else torch.bmm  # what torch.matmul calls; both write into `out`
    return multiply(a, b, out=_grad_view(bucket, slot, index))


def sum_into(
    bucket: Bucket, slot: Slot, index: int, a: torch.Tensor, dims: int | tuple[int, ...] | None, keepdim: bool
) -> torch.Tensor:
    grad = _grad_view(bucket, slot, index)
    return torch.sum(a, dims, keepdim, dtype=grad.dtype, out=grad)


def reduce_scatter(bucket: Bucket, slot: Slot, *grads: torch.Tensor | None, adds_left: bool = True) -> InFlight:
    arena = slot.arena
    arena.begin_write(slot)
    unsharded = slot.grads[bucket]
    bucket.accumulation.check_complete()
    # All but gradients written in place, which are the view itself.
    copied = [
        (v, bucket.sum_to_param(i, g))
        for i, (v, g) in enumerate(zip(unsharded.tensors, grads, strict=True))
        if g is not None and g is not v
    ]
    if copied:
        torch._foreach_copy_([v for v, _ in copied], [g for _, g in copied])  # one kernel on a GPU
    missing = tuple(i for i, grad in enumerate(grads) if grad is None)
    for index in missing:  # other micro-batches may have gradients there
        unsharded.tensors[index].zero_()
    if adds_left and (accumulated := bucket.accumulation.unsharded) is not None and bucket.ends_window():
        unsharded.flat.add_(accumulated)
    # Autograd keeps the sharded gradients as `.grad` without a copy and adds to them, so this must be new memory.
    shard = torch.empty(bucket.shard.numel(), dtype=bucket.spec.reduce_dtype, device=bucket.spec.device)

    def reduce() -> InFlight:
        works = bucket.transport.reduce_scatter(bucket, unsharded, shard)
        return arena.register(InFlight(bucket, "reduce-scatter", slot, works, shard, missing))

    return issue(bucket, "reduce-scatter", reduce, slot)


def wait_grads(bucket: Bucket, flight: InFlight, *, hook: str | None = None) -> tuple[torch.Tensor, ...]:
    assert flight.output is not None
    output, ends_window = flight.output, bucket.ends_window()
    defer = None if ends_window else bucket.base.defer
    if defer is None or (grads := defer(bucket, flight)) is None:
        if flight.slot is None:
            flight.wait()
        else:
            flight.slot.arena.finish(flight)
            if ends_window:
                output = bucket.accumulation.with_reduced(output)
        grads = bucket.sharded_grads(output)
    unused = unused_gradients(bucket, frozenset(flight.missing))
    drop_gradients(bucket, unused)
    accumulated = bucket.accumulation.params if ends_window else set()
    for index in accumulated.difference(flight.missing):
        if not bucket.params[index].requires_grad:  # autograd drops what backward returns for it
            raise coded_error(
                RuntimeError, "parameter.frozen-between-forward-and-backward", parameter=bucket.spec.params[index].name
            )
    deferred = (bucket.accumulation.from_others() | (accumulated - unused)).intersection(flight.missing)
    bucket.accumulation.deferred = {index: grads[index] for index in deferred}
    return grads


def backward_done(no_sync: bool, *buckets: Bucket) -> None:
    for bucket in buckets:
        if no_sync:
            bucket.accumulation.is_running = False
        elif (ends_window := bucket.ends_window()) or bucket.accumulation.deferred:
            bucket.accumulation.flush(bucket.params, ends_window=ends_window)
