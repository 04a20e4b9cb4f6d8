"""Run-time implementations of the symbols in ``symbols``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ...runtime.autograd import requested
from ...runtime.bucket import Bucket
from ...runtime.memory import Arena, InFlight, slot_bytes
from ...runtime.ops import reduce_scatter, wait_grads
from ...runtime.unused_outputs import not_used_here
from ..replicas import all_reduce


def accumulate_grads(bucket: Bucket, *grads: torch.Tensor | None) -> None:
    given = {i: grad for i, grad in enumerate(grads) if grad is not None}
    bucket.arena.follow_stream()
    if added := _accumulated_of(bucket, given):
        add_grads(bucket, {i: bucket.sum_to_param(i, given[i]) for i in sorted(added)})
        bucket.accumulation.used |= added - not_used_here(bucket)


def accumulate_reduced(bucket: Bucket, flight: InFlight, *, sent_left: bool = True) -> None:
    """Add reduced gradients to the sharded sums.

    Args:
        sent_left: whether the reduction has also sent the unsharded sums of the window.
    """
    assert flight.slot is not None and flight.output is not None
    flight.slot.arena.finish(flight)
    given = set(range(len(bucket.params))).difference(flight.missing)
    from_others = bucket.accumulation.from_others()
    added = _accumulated_of(bucket, given | from_others)
    if dropped := (given | from_others) - added:
        rows = bucket.spec.layout.shard_views(bucket.rank, flight.output)
        for index in dropped:
            rows[index].zero_()
    if added:
        is_sent = sent_left and bucket.ends_window()
        add_reduced(bucket, flight.output, added)
        if is_sent:
            bucket.accumulation.unsharded = None
        bucket.accumulation.used |= (added & given) - not_used_here(bucket)


def add_grads(bucket: Bucket, grads: Mapping[int, torch.Tensor]) -> None:
    """Add unsharded gradients, each with the index of its parameter."""
    sums, spec = bucket.accumulation, bucket.spec
    sums.begin()
    if sums.unsharded is None:
        sums.unsharded = torch.zeros(spec.layout.unsharded_numel, dtype=spec.reduce_dtype, device=spec.device)
    views = spec.layout.unsharded_views(sums.unsharded)
    for index, grad in grads.items():
        views[index].add_(grad)
        sums.params.add(index)


def add_reduced(bucket: Bucket, shard: torch.Tensor, indices: Iterable[int]) -> None:
    """Add the flat reduced gradients of these parameters, of which the rows of all others are 0; may keep ``shard``."""
    sums = bucket.accumulation
    sums.begin()
    if sums.sharded is None:
        sums.sharded = shard.to(bucket.spec.accumulate_dtype)
    else:
        sums.sharded.add_(shard)
    sums.params.update(indices)


def _accumulated_of(bucket: Bucket, indices: Iterable[int]) -> set[int]:
    """Return the parameters whose gradients accumulate: autograd drops the others, too."""
    wanted = requested(bucket.params)
    return {i for i in indices if i in wanted and bucket.params[i].requires_grad}  # it may be frozen since forward


def reduce_unreduced(bucket: Bucket, *, hook: str | None = None) -> None:
    bucket.accumulation.check_complete()
    if bucket.ends_window():
        reduce_sums(bucket, scatters=bucket.accumulation.unsharded is not None)
    else:
        bucket.accumulation.deferred = {}  # those of a backward that failed


def reduce_sums(bucket: Bucket, *, scatters: bool) -> None:
    """Reduce what a window has left of a bucket, on some rank at least.

    Args:
        scatters: whether some rank has left unsharded gradients.
    """
    spec = bucket.spec
    slot = Arena(spec.device, bucket.arena).slot(0, slot_bytes(spec, spec.reduce_dtype))
    nothing = [None] * len(spec.params)
    if scatters:
        flight = reduce_scatter(bucket, slot, *nothing)
    else:
        output = torch.zeros(bucket.shard.numel(), dtype=spec.reduce_dtype, device=spec.device)
        flight = InFlight(bucket, "reduce-scatter", slot, (), output, tuple(range(len(nothing))))
    if bucket.ranks.replicas is not None:
        flight = all_reduce(bucket, flight)
    wait_grads(bucket, flight)
    slot.arena.release()
