"""Preallocated memory: each bucket's shard buffer, the arena of shared slots, and the views into both.

[Note: Who may overwrite what]
Three kinds of memory hold parameters and gradients, and each has one rule.
*Shard buffers* belong to the optimizer: parameters are views of them and a step never writes them.
*Private slots* (ZeRO-2) belong to one bucket; a gather overwrites them with the same bytes as long as the parameters do
not change, and a change under a live graph is an error (``fsdp_params_unchanged``).
*Shared slots* are ranges of the arena. Within a trace the ``plan_slots`` pass gives a range to another collective only
after the last reader of the old one, or each parameter's to its own gradient after the last reader of that; ``verify``
proves it. Between two traces they hold nothing, or, for the backward that follows, what the end of forward left there:
see [Note: What forward leaves] in ``transforms.reuse_from_forward``.
"""

from __future__ import annotations

import functools
import linecache
import re
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .sending import Source, source_of

if TYPE_CHECKING:
    from .buckets import BucketSpec
    from .groups import Ranks
    from .transports import Transport, Work

__all__ = ["SLOT_ALIGNMENT", "Arena", "Bucket", "InFlight", "Slot", "Views", "failed", "slot_bytes"]

SLOT_ALIGNMENT = 512
"""Bytes to which each slot's offset in the arena is aligned (what CUDA's caching allocator does)."""


class Slot:
    """A range of bytes that holds one unsharded bucket (parameters, or gradients before they are reduced).

    It is an opaque argument in traces, compared by identity, and prints under its name.

    Attributes:
        params: the slot as each bucket's parameters lie in it.
        grads: the slot as each bucket's gradients lie in it.
        sharing: all slots that share memory with it, itself among them.
    """

    def __init__(self, name: str, arena: Arena, offset: int, nbytes: int) -> None:
        self.name = name
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.params = _Lying(lambda bucket: arena.lay(bucket, self, bucket.spec.param_dtype))
        self.grads = _Lying(lambda bucket: arena.lay(bucket, self, bucket.spec.reduce_dtype))
        self.sharing = {self}

    def __repr__(self) -> str:
        return self.name

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def overlaps(self, other: Slot) -> bool:
        """Whether the two share memory."""
        return self.arena is other.arena and self.offset < other.end and other.offset < self.end


class _Lying(dict["Bucket", "Views"]):
    """The views that buckets have of a slot, each made when it is first asked for: a step only looks them up."""

    def __init__(self, make: Callable[[Bucket], Views]) -> None:
        self._make = make

    def __missing__(self, bucket: Bucket) -> Views:
        views = self[bucket] = self._make(bucket)
        return views


class Views(NamedTuple):
    """A slot as a bucket lies in it.

    Attributes:
        flat: the interleaved unsharded buffer.
        tensors: the parameters, or their gradients, as views of ``flat``.
        staging: the same bytes again, in the order in which the ranks send, if the transport needs that.
    """

    flat: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    staging: torch.Tensor | None = None


class InFlight(NamedTuple):
    """A collective that was issued and not yet waited for.

    ``slot`` is the memory it writes (parameters) or reads (gradients); nobody else may touch it until the wait.
    ``output`` is the flat sharded gradient of a reduction, ``None`` for a gather. ``only_unreduced`` are the parameters
    that this backward has no gradient of, but an earlier one under ``no_sync`` had. ``works`` finish in any order.
    ``sent`` is what a gather reads: a copy of an offloaded shard lives no longer.
    """

    bucket: Bucket
    what: str
    slot: Slot | None
    works: Sequence[Work]
    output: torch.Tensor | None = None
    only_unreduced: tuple[int, ...] = ()
    sent: torch.Tensor | None = None

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
            raise failed(self.bucket, self.what, error) from error


def failed(bucket: Bucket, what: str, error: RuntimeError) -> RuntimeError:
    """What to raise if a collective of ``bucket`` failed: names this rank, the collective and the line of the trace."""
    text = f"rank {bucket.ranks.group.global_ranks[bucket.rank]}: the {what} of bucket {bucket.spec.name!r} failed: {error}"
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith("thunder."):
        frame = frame.f_back
    if frame is not None:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        text += f"\nin line {frame.f_lineno} of {frame.f_code.co_name}: {line}"
    return RuntimeError(f"{text}\n{why}" if (why := bucket.whole.explain_failure()) else text)


class Arena:
    """One allocation per device that all shared slots are ranges of.

    It grows to the largest end of any slot of any trace, at compile time; a step allocates nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0
        self._in_flight: dict[Slot, InFlight] = {}
        self._issued = 0
        self._left: dict[Bucket, tuple[Slot, int]] = {}  # by forward: where, and the number of issues at its end
        self._memory: torch.Tensor | None = None
        self._slots: dict[tuple[int, int], Slot] = {}

    def slot(self, offset: int, nbytes: int, name: str | None = None) -> Slot:
        """The slot at ``offset`` bytes with ``nbytes`` bytes; the same object for the same range."""
        assert offset % SLOT_ALIGNMENT == 0
        slot = self._slots.get((offset, nbytes))
        if slot is None:
            slot = Slot(name or f"slot_{len(self._slots)}", self, offset, nbytes)
            for other in self._slots.values():
                if other.overlaps(slot):
                    other.sharing.add(slot)
                    slot.sharing.add(other)
            self._slots[offset, nbytes] = slot
            if slot.end > self.nbytes:
                self.nbytes = slot.end
                self.let_go()
        return slot

    def allocate(self) -> None:
        """Allocates the memory now instead of at the first gather."""
        if self._memory is None:
            with torch.inference_mode(False):  # training may come after a first call for inference
                self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    def let_go(self) -> None:
        """Keeps the memory no longer than those do who hold views of it; slots know their arena, so it would stay."""
        self._memory = None
        self._left.clear()
        for slot in self._slots.values():
            slot.params.clear()
            slot.grads.clear()

    def lay(self, bucket: Bucket, slot: Slot, dtype: torch.dtype) -> Views:
        """The slot as ``bucket`` lies in it, with elements of ``dtype``."""
        self.allocate()
        assert self._memory is not None
        spec = bucket.spec
        nbytes = spec.layout.unsharded_numel * dtype.itemsize
        with torch.inference_mode(False):
            # What is written is not what parameters are views of: `.data` gives it a version of its own. gloo bumps
            # it from a thread, and autograd compares that of saved views of the parameters.
            flat = self._memory[slot.offset : slot.offset + nbytes].view(dtype).data
            staging, end = None, nbytes
            if spec.travel.staging:
                begin, end = _aligned(nbytes), _aligned(nbytes) + spec.sent_numel * dtype.itemsize
                staging = self._memory[slot.offset + begin : slot.offset + end].view(dtype).data
            assert end <= slot.nbytes, (bucket, slot)
            # Nor are parameters views to autograd: Thunder detaches each view that backward reads, in every step.
            return Views(flat, tuple(view.data for view in unsharded_views(spec, flat)), staging)

    @property
    def in_flight(self) -> tuple[InFlight, ...]:
        """What was issued and not yet waited for; one at most for a slot."""
        return tuple(self._in_flight.values())

    def issue(self, flight: InFlight) -> InFlight:
        assert flight.slot is not None
        self._in_flight[flight.slot] = flight
        self._issued += 1
        return flight

    def leave(self, bucket: Bucket, slot: Slot, followed_by: int) -> None:
        """What was issued last is a gather whose memory the next ``followed_by`` issues leave alone."""
        self._left[bucket] = slot, self._issued + followed_by

    def take_left(self, bucket: Bucket, slot: Slot, preceded_by: int | None) -> bool:
        """Whether forward left ``bucket`` in ``slot`` and exactly ``preceded_by`` issues came behind that forward.

        Either way the next issue may write there: nobody else finds it.
        """
        left = self._left.pop(bucket, None)
        return left is not None and preceded_by is not None and left == (slot, self._issued - preceded_by)

    def finish(self, flight: InFlight) -> None:
        assert flight.slot is not None
        flight.wait()
        self._in_flight.pop(flight.slot, None)

    def finish_leftovers(self, slot: Slot) -> None:
        """Waits for collectives on the memory of ``slot`` that an exception in an earlier step left in flight."""
        if not self._in_flight.keys().isdisjoint(slot.sharing):
            for flight in [flight for other, flight in self._in_flight.items() if other in slot.sharing]:
                self.finish(flight)


class Bucket:
    """A bucket at run time, and the opaque handle by which traces name it.

    It is compared and hashed by identity: two models, or two plans of one model, share nothing.

    Args:
        spec: the planned bucket.
        ranks: the ranks that share the bucket.
        transport: moves the bucket.
        arena: memory for the slots that the bucket shares with others.
        handle: the name under which it prints.

    Attributes:
        source: what is sent of it.
        whole: itself; for a handle under which a bucket is gathered in another way (``parts``) that bucket.
        shard: the flat shard buffer; ``params`` are this rank's rows of each parameter, views of it.
    """

    source: Source

    def __init__(self, spec: BucketSpec, ranks: Ranks, transport: Transport, arena: Arena, handle: str) -> None:
        self._adopt(spec, ranks, transport, arena, handle)
        self.shard = transport.allocate(spec.layout.shard_numel, spec.dtype, spec.shard_device, ranks)
        if spec.travel.pin_memory:
            self.shard = self.shard.pin_memory()
        self.shard_views = shard_views(spec, self.rank, self.shard)
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
        self.blank_version: int | None = None
        """The version of the shard as long as nobody has written to it, if its parameters were on the meta device."""
        self.source = source_of(self)
        self.parts: dict[Any, Bucket] = {}
        """Handles under which it is gathered in another way: see ``parts``."""

    def _adopt(self, spec: BucketSpec, ranks: Ranks, transport: Transport, arena: Arena, handle: str) -> None:
        self.spec = spec
        self.whole: Bucket = self
        self.ranks = ranks
        self.rank = ranks.group.rank
        self.transport = transport
        self.arena = arena
        self.handle = handle
        self.private_slot: Slot | None = None
        self._strided = _strided(spec, self.rank)
        self.all_gather_label = f"fsdp_all_gather({spec.name})"
        self.reduce_scatter_label = f"fsdp_reduce_scatter({spec.name})"
        self.all_reduce_label = f"fsdp_all_reduce({spec.name})"

    def __repr__(self) -> str:
        return self.handle

    def keep_unsharded(self) -> Slot:
        """The bucket's own slot, where it stays from forward to backward (ZeRO-2); allocated when it is first used."""
        if self.private_slot is None:  # an arena of its own: nobody else can be given a part of it
            arena = Arena(self.spec.device)
            name = self.handle.replace("bucket_", "own_", 1)
            self.private_slot = arena.slot(0, slot_bytes(self.spec, self.spec.param_dtype), name)
        return self.private_slot

    def shard_to_send(self, *, again: bool) -> torch.Tensor:
        """The flat shard as it travels; ``again`` if backward gathers what its forward gathered."""
        return self.source.shard(again=again or self.whole.unreduced is not None)

    def gather_into(self, unsharded: Views, *, again: bool) -> tuple[Sequence[Work], torch.Tensor]:
        """Issues a gather into ``unsharded``; its works, and what it reads, to be kept until they are done."""
        with self.source.sending():
            sent = self.shard_to_send(again=again)
            return self.transport.all_gather(self, sent, unsharded), sent

    def sharded_grads(self, reduced: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A flat reduced gradient as that of each shard, in their dtype and on their device."""
        spec = self.spec
        flat = reduced if reduced.dtype is spec.dtype else reduced.to(spec.dtype)
        if spec.travel.offload:
            # The host waits for it: autograd may add it to a gradient at once, and an optimizer reads it.
            on_host = torch.empty_like(flat, device="cpu", pin_memory=spec.travel.pin_memory)
            flat = on_host.copy_(flat)
        assert flat.storage_offset() == 0
        return tuple(map(flat.as_strided, *self._strided))

    @functools.cached_property
    def own_pieces(self) -> list[tuple[slice, slice]]:
        """Which elements of the shard go to which elements of the unsharded buffer."""
        return [
            (
                slice(s.shard_offset, s.shard_offset + s.shard_numel),
                slice(
                    s.unsharded_offset + self.rank * s.shard_numel, s.unsharded_offset + (self.rank + 1) * s.shard_numel
                ),
            )
            for s in self.spec.layout.segments
            if s.shard_numel
        ]

    def accumulate(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Adds unsharded gradients, one per parameter or ``None``, to :attr:`unreduced`."""
        if self.unreduced is None:
            self.unreduced = torch.zeros(
                self.spec.layout.unsharded_numel, dtype=self.spec.reduce_dtype, device=self.spec.device
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


def slot_bytes(spec: BucketSpec, dtype: torch.dtype) -> int:
    """Bytes of a slot that holds the bucket in ``dtype``, staging and alignment included."""
    staging = _aligned(spec.sent_numel * dtype.itemsize) if spec.travel.staging else 0
    return _aligned(spec.layout.unsharded_numel * dtype.itemsize) + staging


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def shard_views(spec: BucketSpec, rank: int, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rows that ``rank`` owns of each parameter, as views of a flat shard buffer (or of sharded gradients)."""
    shapes, strides, offsets = _strided(spec, rank)
    return tuple(map(flat.as_strided, shapes, strides, (flat.storage_offset() + offset for offset in offsets)))


def _strided(spec: BucketSpec, rank: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[int]]:
    """Shapes, strides and offsets of the rows that ``rank`` owns of each parameter, within the flat shard."""
    shapes = [placement.shard_shape(rank) for placement in spec.layout.placements]
    return shapes, list(map(_contiguous_strides, shapes)), [p.shard_offsets[rank] for p in spec.layout.placements]


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
