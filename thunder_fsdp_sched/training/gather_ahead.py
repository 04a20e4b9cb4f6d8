"""Gather whole parameters outside of traces, bucket by bucket, one bucket ahead of the consumer.

[Note: Gathering ahead]
Bucket ``n + 1`` is in flight while the caller uses bucket ``n``. Buckets alternate between the two ends of an arena that
fits any two successive ones. It takes over the memory of the model's own arena, which holds nothing between traces, if
that suffices (``Arena.lend``).

Before each gather, ranks agree that all of them issue it. So a rank that stops early leaves nothing in flight that the
others do not complete, and a rank that goes on alone gets an error instead of waiting for a collective. Ranks may have
different buckets (``process_group_for``). Those that all ranks have come first, then the others in an order of groups
that is the same on all ranks, so they cannot block each other.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from ..ranks.process_groups import ProcessGroupRef
from ..runtime.bucket import Bucket
from ..runtime.bucket_aliases import temporary_alias_in_dtype
from ..runtime.memory import Arena, InFlight, Slot, slot_bytes
from ..runtime.ops import all_gather, wait_params
from ..runtime.shard_source import version_of
from ..sharding.sharded_module import ShardedModule

__all__ = ["gather_ahead", "sent_dtype"]


def sent_dtype(bucket: Bucket, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which to gather ``bucket`` so that values in ``dtype`` cost the fewest bytes.

    Args:
        dtype: the wanted dtype of floating-point parameters; ``None`` for that of the shards.
    """
    own = bucket.spec.dtype
    if dtype is None or not own.is_floating_point or dtype.itemsize > own.itemsize:
        return own
    try:
        bucket.transport.check(bucket.spec.device, (dtype,), bucket.ranks)
    except ValueError:
        return own  # the backend cannot send it
    is_divisible = bucket.spec.layout.unsharded_numel * dtype.itemsize % 4 == 0  # all_reduce adds 32-bit integers
    return dtype if is_divisible else own


def gather_ahead(
    sharded: ShardedModule, what: str, wanted: Sequence[tuple[Bucket, torch.dtype]]
) -> Iterator[tuple[Bucket, tuple[torch.Tensor, ...]]]:
    """Yield each bucket with its whole parameters; a collective. See [Note: Gathering ahead].

    The parameters are views of a slot, which is overwritten after the next bucket has been asked for.

    Args:
        what: the caller, for messages.
        wanted: buckets in the order of the plan, and the dtype in which to gather each.

    Raises:
        RuntimeError: parameters were changed since the start, or given other memory; a collective failed.
        ScheduleDisagreement: other ranks do something else.
    """
    control = sharded.control
    on_all = [one for one in wanted if control.is_on_all_ranks(one[0])]
    others = sorted((one for one in wanted if one not in on_all), key=lambda one: _order(one[0].ranks.group))
    control.rendezvous(what, *(f"{bucket.spec.name} as {dtype}" for bucket, dtype in on_all))
    _compare_in_groups(sharded, what, others)
    wanted = on_all + others
    versions = [version_of(bucket) for bucket, _ in wanted]
    flights: list[InFlight] = []
    with contextlib.ExitStack() as undo:
        slots = _alternating_slots(wanted, undo)
        undo.callback(_release_shards, flights)

        def issue(number: int) -> InFlight:
            bucket, dtype = wanted[number]
            if version_of(bucket) != versions[number]:
                raise RuntimeError(
                    f"{what}: parameters of bucket {bucket.spec.name!r} were changed after it had started: finish or close "
                    f"it before optimizer.step() and before loading parameters"
                )
            if control.is_on_all_ranks(bucket):
                control.rendezvous(f"{what}: gathering", f"{bucket.spec.name} as {dtype}")
            if dtype is not bucket.spec.param_dtype:
                bucket = temporary_alias_in_dtype(bucket, dtype)
            bucket.issue_counts.expected += 2
            return all_gather(bucket, slots[number], *bucket.params)  # type: ignore[arg-type]

        for number, (bucket, _) in enumerate(wanted):
            while len(flights) < 2 and number + len(flights) < len(wanted):
                flights.append(issue(number + len(flights)))
            source = flights[0].bucket
            assert isinstance(source, Bucket)
            params = wait_params(source, flights[0])
            _release_shards(flights[:1])
            del flights[0]
            yield bucket, params
            slots[number].params.pop(source)


def _release_shards(flights: Sequence[InFlight]) -> None:
    """Let the host write the shards again that these gathers send, and free casts of them."""
    for bucket in (flight.bucket for flight in flights):
        assert isinstance(bucket, Bucket)
        bucket.source.finish_copy()
        if bucket is not bucket.base:
            bucket.source.free()


def _alternating_slots(wanted: Sequence[tuple[Bucket, torch.dtype]], undo: contextlib.ExitStack) -> list[Slot]:
    """Return a slot for each bucket, so that those of two successive ones are disjoint.

    Args:
        undo: gives the memory back.
    """
    sizes: dict[Arena, list[int]] = defaultdict(list)  # one arena for each device
    for bucket, dtype in wanted:
        sizes[bucket.arena].append(slot_bytes(bucket.spec, dtype))
    lent = {
        arena: undo.enter_context(arena.lend(max(map(sum, zip([0, *each], each, strict=False)))))
        for arena, each in sizes.items()
    }
    numbers: dict[Arena, int] = defaultdict(int)
    slots = []
    for bucket, _ in wanted:
        arena = bucket.arena
        nbytes, is_upper = sizes[arena][numbers[arena]], numbers[arena] % 2
        slots.append(lent[arena].slot(lent[arena].nbytes - nbytes if is_upper else 0, nbytes))
        numbers[arena] += 1
    return slots


def _compare_in_groups(sharded: ShardedModule, what: str, others: Sequence[tuple[Bucket, torch.dtype]]) -> None:
    """Raise an error if ranks of a group would gather different buckets over it."""
    lines: dict[ProcessGroupRef, list[str]] = defaultdict(list)
    for bucket, dtype in others:
        lines[bucket.ranks.group].append(f"{bucket.spec} as {dtype}")
    sharded.control.check_same(f"the buckets of {what}", lines)


def _order(group: ProcessGroupRef) -> tuple[tuple[int, ...], str]:
    return tuple(group.global_ranks), group.name
