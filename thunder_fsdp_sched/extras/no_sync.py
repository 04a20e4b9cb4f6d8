"""Accumulation of gradients under ``no_sync``: its symbols and their functions.

``fsdp_accumulate_grads(bucket_h_0, dw, db)`` adds whole gradients to the bucket's sum. With ``accumulate="sharded"`` they
are reduced, and ``fsdp_accumulate_reduced(bucket_h_0, ft1)`` waits and adds this rank's rows to another sum: see [Note: Two
ways to accumulate] in ``runtime.accumulation``. ``fsdp_reduce_unreduced`` reduces both sums, if there are any, of a bucket
whose gradients the trace itself does not reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag

from ..ir.effects import Effects, Wait, bucket_of, left_reduced, left_unsharded
from ..ir.registry import register
from ..ir.schedule import WAITS
from ..ir.symbols import fsdp_reduce_scatter, reduction_of
from ..runtime.accumulation import AccumulationMode
from ..runtime.autograd import requested
from ..runtime.bucket import Bucket
from ..runtime.memory import InFlight
from ..runtime.ops import reduce_scatter, wait_grads
from ..runtime.unused_outputs import not_used_here
from .replicas import all_reduce


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
    """Add the flat reduced gradients of these parameters; all other rows are 0. It may keep ``shard``."""
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
    """Reduce a bucket's unreduced gradients, which exist on at least one rank.

    Args:
        scatters: whether those of some rank are unsharded.
    """
    spec = bucket.spec
    slot = bucket.temporary_slot(spec.reduce_dtype)
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
    """Return the bound symbols that add gradients of a bucket to its sums, by the given mode."""
    if mode == "unsharded":
        return [fsdp_accumulate_grads.bind(bucket, *grads, output=None)]
    future = fsdp_reduce_scatter.meta(bucket, None, *grads)
    return [
        fsdp_reduce_scatter.bind(bucket, None, *grads, output=future),
        fsdp_accumulate_reduced.bind(bucket, future, output=None),
    ]


def reduce_left(bucket: Bucket, **hook: str) -> BoundSymbol:
    """Return the bound symbol of backward that reduces a bucket's unreduced gradients."""
    idle: BoundSymbol = fsdp_reduce_unreduced.bind(bucket, **hook, output=None)
    idle.tags.add(BoundSymbolTag.BACKWARD)
    return idle
