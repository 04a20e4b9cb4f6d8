"""Preallocated memory: each bucket's shard buffer, the arena of shared slots, and the views into both.

[Note: Who may overwrite what]
Three kinds of memory hold parameters and gradients, and each has one rule.
*Shard buffers* belong to the optimizer: parameters are views of them and a step never writes them.
*Private slots* (ZeRO-2) belong to one bucket; a gather overwrites them with the same bytes as long as the parameters do
not change, and a change under a live graph is an error (``fsdp_params_unchanged``).
*Shared slots* are ranges of the arena. They hold nothing between two traces, and within a trace the ``plan_slots`` pass
gives a range to another collective only after the last reader of the old one; ``verify`` proves it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .buckets import BucketSpec
    from .groups import Group
    from .transports import Transport

__all__ = ["SLOT_ALIGNMENT", "Arena", "Bucket", "InFlight", "Slot"]

SLOT_ALIGNMENT = 512
"""Bytes to which each slot's offset in the arena is aligned (what CUDA's caching allocator does)."""


class Slot:
    """A range of bytes that holds one unsharded bucket (parameters, or gradients before they are reduced).

    It is an opaque argument in traces, compared by identity, and prints under its name.
    """

    def __init__(self, name: str, arena: Arena, offset: int, nbytes: int) -> None:
        self.name = name
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes

    def __repr__(self) -> str:
        return self.name

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def overlaps(self, other: Slot) -> bool:
        """Whether the two share memory."""
        return self.arena is other.arena and self.offset < other.end and other.offset < self.end


class InFlight(NamedTuple):
    """A collective that was issued and not yet waited for.

    ``slot`` is the memory it writes (parameters) or reads (gradients); nobody else may touch it until the wait.
    ``output`` is the flat sharded gradient of a reduction, ``None`` for a gather. ``only_unreduced`` are the parameters
    that this backward has no gradient of, but an earlier one under ``no_sync`` had. ``works`` finish in any order.
    """

    bucket: Bucket
    slot: Slot
    works: list[torch.distributed.Work]
    output: torch.Tensor | None = None
    only_unreduced: tuple[int, ...] = ()

    def wait(self) -> None:
        """Waits for all works.

        Raises:
            RuntimeError: one of them failed; the message names this rank, the collective and the bucket, and why if that
                is known.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            what = "all-gather" if self.output is None else "reduce-scatter"
            raise RuntimeError(
                f"rank {self.bucket.rank}: the {what} of bucket {self.bucket.spec.name!r} failed: {error}"
                + (f"\n{why}" if (why := self.bucket.explain_failure()) else "")
            ) from error


class Arena:
    """One allocation per device that all shared slots are ranges of.

    It grows to the largest end of any slot of any trace, at compile time; a step allocates nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0
        self.in_flight: list[InFlight] = []
        self._memory: torch.Tensor | None = None
        self._slots: dict[tuple[int, int], Slot] = {}
        self._views: dict[tuple[Bucket, int], tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}

    def slot(self, offset: int, nbytes: int, name: str | None = None) -> Slot:
        """The slot at ``offset`` bytes with ``nbytes`` bytes; the same object for the same range."""
        assert offset % SLOT_ALIGNMENT == 0
        slot = self._slots.get((offset, nbytes))
        if slot is None:
            slot = self._slots[offset, nbytes] = Slot(name or f"slot_{len(self._slots)}", self, offset, nbytes)
            if slot.end > self.nbytes:
                self.nbytes = slot.end
                self._memory = None
                self._views.clear()
        return slot

    def allocate(self) -> None:
        """Allocates the memory now instead of at the first gather."""
        if self._memory is None:
            with torch.inference_mode(False):  # training may come after a first call for inference
                self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    def views(self, bucket: Bucket, slot: Slot) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The slot as ``bucket`` lies in it: its flat unsharded buffer, and the parameters as views of that buffer."""
        key = (bucket, slot.offset)
        views = self._views.get(key)
        if views is None:
            self.allocate()
            assert self._memory is not None
            spec = bucket.spec
            nbytes = spec.unsharded_bytes
            assert nbytes <= slot.nbytes, (bucket, slot)
            with torch.inference_mode(False):
                flat = self._memory[slot.offset : slot.offset + nbytes].view(spec.dtype)
                # gloo bumps the version of its output from a thread of its own: through `.data` that version is not the
                # one that autograd compares for saved views of this buffer.
                views = self._views[key] = (flat.data, unsharded_views(spec, flat.data))
        return views

    def issue(self, flight: InFlight) -> InFlight:
        self.in_flight.append(flight)
        return flight

    def finish(self, flight: InFlight) -> None:
        flight.wait()
        self.in_flight = [other for other in self.in_flight if other is not flight]

    def finish_leftovers(self, slot: Slot) -> None:
        """Waits for collectives on the memory of ``slot`` that an exception in an earlier step left in flight."""
        for flight in [f for f in self.in_flight if f.slot.overlaps(slot)]:
            self.finish(flight)


class Bucket:
    """A bucket at run time, and the opaque handle by which traces name it.

    It is compared and hashed by identity: two models, or two plans of one model, share nothing.

    Args:
        spec: the planned bucket.
        group: the ranks that shard the bucket.
        transport: moves the bucket.
        arena: memory for the slots that the bucket shares with others.
        handle: the name under which it prints.

    Attributes:
        shard: the flat shard buffer; ``params`` are this rank's rows of each parameter, views of it.
    """

    def __init__(self, spec: BucketSpec, group: Group, transport: Transport, arena: Arena, handle: str) -> None:
        self.spec = spec
        self.group = group
        self.rank = group.rank
        self.transport = transport
        self.arena = arena
        self.handle = handle
        self.shard = torch.zeros(spec.layout.shard_numel, dtype=spec.dtype, device=spec.device)
        self.private_slot: Slot | None = None
        self.shard_views = shard_views(spec, group.rank, self.shard)
        self.shard_pointers = tuple(map(address, self.shard_views))
        self.params = tuple(
            torch.nn.Parameter(view, param.requires_grad)
            for view, param in zip(self.shard_views, spec.params, strict=True)
        )
        self.explain_failure: Callable[[], str] = str
        """Gives what is known about why a collective failed, or nothing."""
        self.unreduced: torch.Tensor | None = None
        """Flat unsharded gradients that ``no_sync`` backwards have summed up and no reduction has taken yet."""
        self.unreduced_params: set[int] = set()
        self.all_gather_label = f"fsdp_all_gather({spec.name})"
        self.reduce_scatter_label = f"fsdp_reduce_scatter({spec.name})"

    def __repr__(self) -> str:
        return self.handle

    def keep_unsharded(self) -> Slot:
        """The bucket's own slot, where it stays from forward to backward (ZeRO-2); allocated when it is first used."""
        if self.private_slot is None:  # an arena of its own: nobody else can be given a part of it
            arena = Arena(self.spec.device)
            self.private_slot = arena.slot(0, self.spec.unsharded_bytes, name=self.handle.replace("bucket_", "own_", 1))
        return self.private_slot

    def accumulate(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Adds unsharded gradients, one per parameter or ``None``, to :attr:`unreduced`."""
        if self.unreduced is None:
            self.unreduced = torch.zeros(
                self.spec.layout.unsharded_numel, dtype=self.spec.dtype, device=self.shard.device
            )
        for index, view in enumerate(unsharded_views(self.spec, self.unreduced)):
            grad = grads[index]
            if grad is not None:
                view.add_(grad)
                self.unreduced_params.add(index)

    def take_unreduced(self) -> tuple[torch.Tensor | None, set[int]]:
        """Hands over :attr:`unreduced` and the parameters it holds gradients of."""
        taken = self.unreduced, self.unreduced_params
        self.unreduced, self.unreduced_params = None, set()
        return taken

    def add_to_grad(self, index: int, grad: torch.Tensor) -> None:
        """Adds a sharded gradient to ``.grad`` as autograd does."""
        param = self.params[index]
        param.grad = grad if param.grad is None else param.grad.add_(grad)

    def copy_in(self, index: int, unsharded: torch.Tensor) -> None:
        """Fills this rank's shard of parameter ``index`` from the unsharded parameter."""
        self.shard_views[index].copy_(self.own_rows(index, unsharded))

    def own_rows(self, index: int, unsharded: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the unsharded parameter ``index``, as a view."""
        starts = self.spec.layout.placements[index].row_starts
        rows = unsharded.reshape(1) if unsharded.ndim == 0 else unsharded
        return rows[starts[self.rank] : starts[self.rank + 1]]


def shard_views(spec: BucketSpec, rank: int, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rows that ``rank`` owns of each parameter, as views of a flat shard buffer (or of sharded gradients)."""
    views = []
    for placement in spec.layout.placements:
        shape = placement.shard_shape(rank)
        stride = _contiguous_strides(shape)
        views.append(flat.as_strided(shape, stride, flat.storage_offset() + placement.shard_offsets[rank]))
    return tuple(views)


def unsharded_views(spec: BucketSpec, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each whole parameter as a contiguous view of a flat unsharded buffer."""
    return tuple(
        flat.as_strided(p.shape, _contiguous_strides(p.shape), flat.storage_offset() + p.unsharded_offset)
        for p in spec.layout.placements
    )


def address(shard: torch.Tensor) -> int:
    """Where ``shard`` lies, or its storage if it has no rows: every rank is to see that a parameter was replaced."""
    return shard.data_ptr() or shard.untyped_storage().data_ptr()


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def handle_name(bucket_name: str) -> str:
    """A Python identifier for a bucket's name: ``transformer.h.0`` -> ``bucket_transformer_h_0``."""
    return "bucket_" + re.sub(r"\W", "_", bucket_name)
