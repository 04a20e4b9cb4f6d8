"""Gather whole buckets, each with one collective, for callers outside of a compiled trace.

[Note: Gathering ahead]
Bucket ``n + 1`` is in flight while the caller uses bucket ``n``. Buckets alternate between the two ends of an arena that
fits any two successive ones. It takes over the memory of the model's own arena, which holds nothing between traces, if
that suffices (``borrow_memory``).

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

from ...errors import coded_error
from ...ranks.process_groups import ProcessGroupRef
from ...runtime.bucket import Bucket
from ...runtime.bucket_aliases import temporary_alias_in_dtype
from ...runtime.memory import Arena, InFlight, Slot, slot_bytes
from ...runtime.ops import all_gather, wait_params
from ...sharding.sharded_module import ShardedModule


def gather_ahead(
    sharded: ShardedModule, what: str, wanted: Sequence[tuple[Bucket, torch.dtype]], *, own_memory: bool = False
) -> Iterator[tuple[Bucket, tuple[torch.Tensor, ...]]]:
    """Yield each bucket with its whole parameters; a collective. See [Note: Gathering ahead].

    The parameters are views of a slot, which is overwritten after the next bucket has been asked for.

    Cost: two rounds of agreement, and one round and one gather for each bucket, whatever the number of ranks.

    Args:
        what: the caller, for messages.
        wanted: buckets in the order of the plan, and the dtype in which to gather each.
        own_memory: gather no bucket ahead, and each into new memory, which its parameters keep alive.

    Raises:
        RuntimeError: parameters were changed since the start, or given other memory; a collective failed.
        ScheduleDisagreement: other ranks do something else.
    """
    control = sharded.control
    on_all = [one for one in wanted if one[0].is_on_all_ranks]
    others = sorted((one for one in wanted if one not in on_all), key=lambda one: _order(one[0].ranks.group))
    control.rendezvous(what, *(f"{bucket.spec.name} as {dtype}" for bucket, dtype in on_all))
    control.check_same_in_groups(
        f"the buckets of {what}", [(bucket.ranks.group, f"{bucket.spec} as {dtype}") for bucket, dtype in others]
    )
    wanted = on_all + others
    versions = [bucket.version() for bucket, _ in wanted]
    flights: list[tuple[Bucket, InFlight]] = []
    with contextlib.ExitStack() as undo:
        if own_memory:
            arenas = [Arena(bucket.spec.device, bucket.arena) for bucket, _ in wanted]
            slots = {n: arenas[n].slot(0, slot_bytes(b.spec, dtype)) for n, (b, dtype) in enumerate(wanted)}
        else:
            slots = _alternating_slots(wanted, undo)
        undo.callback(_release_shards, flights)

        def issue(number: int) -> tuple[Bucket, InFlight]:
            bucket, dtype = wanted[number]
            if bucket.version() != versions[number]:
                raise coded_error(
                    RuntimeError, "step.parameters-changed-during-gathers", caller=what, bucket=bucket.spec.name
                )
            if bucket.is_on_all_ranks:
                control.rendezvous(f"{what}: gathering", f"{bucket.spec.name} as {dtype}")
            if dtype is not bucket.spec.param_dtype or bucket.spec.gather_wire is not None:
                bucket = temporary_alias_in_dtype(bucket, dtype)
            bucket.issue_counts.expected += 2
            return bucket, all_gather(bucket, slots[number], *bucket.params)  # type: ignore[arg-type]

        for number, (bucket, _) in enumerate(wanted):
            while len(flights) < (1 if own_memory else 2) and number + len(flights) < len(wanted):
                flights.append(issue(number + len(flights)))
            source, flight = flights[0]
            params = wait_params(source, flight)
            _release_shards(flights[:1])
            del flights[0], flight
            if own_memory:
                slots[number].arena.release()
            yield bucket, params
            del params
            slots[number].params.pop(source, None)


def _release_shards(flights: Sequence[tuple[Bucket, InFlight]]) -> None:
    """Let the host write the shards that these gathers send again, and free casts of them."""
    for bucket, _ in flights:
        bucket.source.finish_copy()
        if bucket is not bucket.base:
            bucket.source.free()


def _alternating_slots(wanted: Sequence[tuple[Bucket, torch.dtype]], undo: contextlib.ExitStack) -> dict[int, Slot]:
    """Return a slot for each bucket by its number, so that those of two successive ones are disjoint.

    Args:
        undo: the stack that gives the memory back.
    """
    of_arena: dict[Arena, list[int]] = defaultdict(list)  # one arena for each device
    for number, (bucket, _) in enumerate(wanted):
        of_arena[bucket.arena].append(number)
    slots = {}
    for arena, numbers in of_arena.items():
        sizes = [slot_bytes(bucket.spec, dtype) for bucket, dtype in (wanted[number] for number in numbers)]
        lent = undo.enter_context(borrow_memory(arena, max(map(sum, zip([0, *sizes], sizes, strict=False)))))
        for position, (number, nbytes) in enumerate(zip(numbers, sizes, strict=True)):
            slots[number] = lent.slot(lent.nbytes - nbytes if position % 2 else 0, nbytes)
    return slots


def _order(group: ProcessGroupRef) -> tuple[tuple[int, ...], str]:
    return tuple(group.global_ranks), group.name


@contextlib.contextmanager
def borrow_memory(arena: Arena, nbytes: int) -> Iterator[Arena]:
    """Yield another arena of ``nbytes`` that has the memory of ``arena``, for use between two traces.

    If it is too small, it is freed, and the other arena allocates its own. A trace that runs in the meantime
    allocates new memory, and no bucket that forward left is resident any more.
    """
    arena.follow_stream()
    arena.finish_all()
    memory = arena._memory
    arena.release()
    other = Arena(arena.device, arena)
    other.nbytes = nbytes
    if memory is not None and memory.numel() >= nbytes:
        other._memory = memory
    del memory
    try:
        yield other
    finally:
        for flight in other.in_flight:  # of a caller that stopped early: nobody will read it
            with contextlib.suppress(RuntimeError):
                other.finish(flight)
        memory = other._memory
        other.release()
        if memory is not None and memory.numel() == arena.nbytes and arena._memory is None and not other.in_flight:
            arena._memory = memory
