"""Stream whole parameters out of a sharded model, to an inference engine for example: bucket by bucket, one ahead.

[Note: Gathering ahead]
Bucket ``n + 1`` is in flight while the caller uses bucket ``n``. Buckets alternate between the two ends of an arena that
fits any two successive ones. It takes over the memory of the model's own arena, which holds nothing between traces, if
that suffices (``Arena.borrow_memory``).

Before each gather, ranks agree that all of them issue it. So a rank that stops early leaves nothing in flight that the
others do not complete, and a rank that goes on alone gets an error instead of waiting for a collective. Ranks may have
different buckets (``process_group_for``). Those that all ranks have come first, then the others in an order of groups
that is the same on all ranks, so they cannot block each other.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence

import torch
from thunder.core.module import ThunderModule

from ...private_torch import state_name
from ...ranks.process_groups import ProcessGroupRef
from ...runtime.bucket import Bucket
from ...runtime.bucket_aliases import temporary_alias_in_dtype
from ...runtime.memory import Arena, InFlight, Slot, slot_bytes
from ...runtime.ops import all_gather, wait_params
from ...sharding.sharded_module import ShardedModule, find_jitted


def stream_full_parameters(
    model: ThunderModule, dtype: torch.dtype | None = None, *, trainable_only: bool = False
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the name and the whole value of each parameter, on all ranks; a collective.

    Parameters are gathered bucket by bucket, the next bucket while the current one is consumed. Two unsharded buckets are
    in memory at a time; they use the memory of the training step if it suffices::

        for name, tensor in tfs.stream_full_parameters(model, dtype=torch.bfloat16):
            if dist.get_rank() == 0:
                dist.broadcast(tensor, src=0, group=group_with_engine)

    **A tensor is valid until the next one is asked for**: its memory is overwritten by later buckets, and afterwards by
    training. To keep it, copy it (``tensor.clone()``), and wait for an asynchronous send of it within the loop. Writes to
    it are lost.

    Names are those of ``model.state_dict()``, tied parameters appear once. Sharded parameters come first, in the
    order of the plan. Then come those that are not sharded (``ignored_params``), which may be this rank's own memory.
    Buffers are not included; every rank has them.

    All ranks must run the loop to its end, or leave it within the same bucket. Otherwise the next thing that they do
    together raises an error. Parameters must not change during the loop. The model may be called in it.

    Args:
        dtype: the dtype of floating-point tensors; the default is that of the parameters (not of ``mp_policy``). If it is
            smaller, each rank casts its rows before they are sent. That needs memory for two buckets' shards in it.
        trainable_only: leave out parameters that do not require gradients, such as the base model of adapters.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``, or ``dtype`` is no dtype.
        ValueError: ``dtype`` is not a floating-point dtype.
        RuntimeError: parameters were changed during the loop, or given other memory; a collective failed.
        ScheduleDisagreement: ranks asked for different things, or one left the loop earlier.
    """
    model, sharded = find_jitted(model)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype or None, got {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point dtype, got {dtype}")
    sharded.check_ready()
    return _stream(model, sharded, dtype, trainable_only)


def _stream(
    model: ThunderModule, sharded: ShardedModule, dtype: torch.dtype | None, trainable_only: bool
) -> Generator[tuple[str, torch.Tensor], None, None]:
    def is_wanted(param: torch.Tensor) -> bool:
        return param.requires_grad or not trainable_only

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    wanted: list[tuple[Bucket, torch.dtype]] = [
        (bucket, sent_dtype(bucket, dtype)) for bucket in sharded.buckets if any(map(is_wanted, bucket.params))
    ]
    for bucket, tensors in gather_ahead(sharded, f"stream_full_parameters(dtype={dtype})", wanted):
        for spec, param, tensor in zip(bucket.spec.params, bucket.params, tensors, strict=True):
            if is_wanted(param):
                yield state_name(spec.name), cast(tensor)
        del tensor, tensors
    for name, param in model.named_parameters():
        if name not in sharded.locations and is_wanted(param):
            yield state_name(name), cast(param.detach())


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
        slots = _alternating_slots(wanted, undo)
        undo.callback(_release_shards, flights)

        def issue(number: int) -> tuple[Bucket, InFlight]:
            bucket, dtype = wanted[number]
            if bucket.version() != versions[number]:
                raise RuntimeError(
                    f"{what}: parameters of bucket {bucket.spec.name!r} were changed after it had started: finish or close "
                    f"it before optimizer.step() and before loading parameters"
                )
            if bucket.is_on_all_ranks:
                control.rendezvous(f"{what}: gathering", f"{bucket.spec.name} as {dtype}")
            if dtype is not bucket.spec.param_dtype or bucket.spec.gather_wire is not None:
                bucket = temporary_alias_in_dtype(bucket, dtype)
            bucket.issue_counts.expected += 2
            return bucket, all_gather(bucket, slots[number], *bucket.params)  # type: ignore[arg-type]

        for number, (bucket, _) in enumerate(wanted):
            while len(flights) < 2 and number + len(flights) < len(wanted):
                flights.append(issue(number + len(flights)))
            source, flight = flights[0]
            params = wait_params(source, flight)
            _release_shards(flights[:1])
            del flights[0]
            yield bucket, params
            slots[number].params.pop(source)


def _release_shards(flights: Sequence[tuple[Bucket, InFlight]]) -> None:
    """Let the host write the shards again that these gathers send, and free casts of them."""
    for bucket, _ in flights:
        bucket.source.finish_copy()
        if bucket is not bucket.base:
            bucket.source.free()


def _alternating_slots(wanted: Sequence[tuple[Bucket, torch.dtype]], undo: contextlib.ExitStack) -> dict[int, Slot]:
    """Return a slot for each bucket by its number, so that those of two successive ones are disjoint.

    Args:
        undo: gives the memory back.
    """
    of_arena: dict[Arena, list[int]] = defaultdict(list)  # one arena for each device
    for number, (bucket, _) in enumerate(wanted):
        of_arena[bucket.arena].append(number)
    slots = {}
    for arena, numbers in of_arena.items():
        sizes = [slot_bytes(bucket.spec, dtype) for bucket, dtype in (wanted[number] for number in numbers)]
        lent = undo.enter_context(arena.borrow_memory(max(map(sum, zip([0, *sizes], sizes, strict=False)))))
        for position, (number, nbytes) in enumerate(zip(numbers, sizes, strict=True)):
            slots[number] = lent.slot(lent.nbytes - nbytes if position % 2 else 0, nbytes)
    return slots


def _order(group: ProcessGroupRef) -> tuple[tuple[int, ...], str]:
    return tuple(group.global_ranks), group.name
