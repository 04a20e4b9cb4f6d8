"""Preallocated memory: each bucket's shard buffer, the arena of shared slots, and the views into both.

[Note: Ownership of memory]
Three kinds of memory hold parameters and gradients, each with one rule.

*Shard buffers* belong to the optimizer. Parameters are views of them, and forward and backward never write them.

*Private slots* (ZeRO-2) belong to one bucket. As long as the parameters do not change, a gather overwrites a slot with
the same bytes; a change between forward and backward is an error (``fsdp_params_unchanged``). Backward first checks
each slot: if a forward without gradients, or one that failed, has written it since, the bucket is gathered again.

*Shared slots* are ranges of the arena. Within a trace, ``plan_slots`` assigns a range to another collective only after
the last reader of the previous one. The range of a single parameter may be assigned to its own gradient after the last
read of that parameter. ``verify`` proves both. Between two traces shared slots hold nothing that is used again, with
one exception: buckets from the end of forward, for the backward that follows. See [Note: Buckets left by forward] in
``transforms.reuse_from_forward``.

[Note: State after an exception]
An exception (an index out of range, out of memory, an interrupt) may end a forward or a backward between any two lines.

*Collectives in flight* stay registered in their arena until they are waited for. The next use of overlapping memory
waits for them first (``Arena.claim``), and a later reader of a private slot waits for that slot. If an issue itself was
interrupted, it is unknown what is in flight, so every later use of that memory is an error.

*Resident buckets* are reused only by the backward of the forward that left them, and only if no other issue has used
the arena since. An aborted run in between rules that out, no matter how far it got.

*Gradients of* ``no_sync`` stay in ``Bucket.unreduced`` until the backward that reduces them has run to its end, where
``fsdp_backward_done`` drops them. A ``no_sync`` backward that fails after adding some of its gradients leaves a sum
that cannot be repaired: every later backward raises an error until ``discard_unreduced`` is called.
"""

from __future__ import annotations

import functools
import linecache
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ..compat import replace_data
from ..transports.base import Transport, TransportedBucket, Views, Work
from .coordination import Coordinator, Tally
from .forward_numbers import forward_number, is_backward_of
from .shard_grads import mark, mark_after_backward
from .shard_source import Source, source_of

if TYPE_CHECKING:
    from ..distributed.process_groups import Ranks
    from ..plan.specs import BucketSpec
    from ..transports.peer_memory import PeerMemory

__all__ = ["SLOT_ALIGNMENT", "Arena", "Bucket", "InFlight", "Slot", "failed", "slot_bytes"]

SLOT_ALIGNMENT = 512
"""Alignment (bytes) of each slot's offset in the arena, as in CUDA's caching allocator."""


class SlottedBucket(TransportedBucket, Protocol):
    """The values of a bucket that are needed to lay it into a slot, and to report what fails there."""

    rank: int

    def explain(self, text: str) -> str:
        """Report a failure to the other ranks and return their reports."""


class Slot:
    """A range of bytes that holds one unsharded bucket: its parameters, or its gradients before they are reduced.

    In traces it is an opaque argument that prints its name and is compared by identity.

    Attributes:
        params: views of the slot as the parameters of each bucket.
        grads: views of the slot as the gradients of each bucket.
        sharing: all slots that share memory with it, including itself.
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
        """Return whether the two slots share memory."""
        return self.arena is other.arena and self.offset < other.end and other.offset < self.end

    def contains(self, span: tuple[int, int]) -> bool:
        """Return whether the slot contains a range of bytes of the arena."""
        return self.offset <= span[0] and span[1] <= self.end


class _Lying(dict[SlottedBucket, Views]):
    """The views of a slot for each bucket, created on first use; a step only looks them up."""

    def __init__(self, make: Callable[[SlottedBucket], Views]) -> None:
        self._make = make

    def __missing__(self, bucket: SlottedBucket) -> Views:
        views = self[bucket] = self._make(bucket)
        return views


class InFlight(NamedTuple):
    """A collective that was issued and not yet waited for.

    ``slot`` is the memory that it writes (parameters) or reads (gradients); nothing else may touch it until the wait.
    ``output`` is the flat sharded gradient of a reduction, ``None`` for a gather. ``only_unreduced`` are the indices of
    parameters that have a gradient from an earlier ``no_sync`` backward but none from this one. ``works`` finish in any
    order. ``sent`` is the tensor that a gather reads; this reference keeps the copy of an offloaded shard alive.
    """

    bucket: SlottedBucket
    what: str
    slot: Slot | None
    works: Sequence[Work]
    output: torch.Tensor | None = None
    only_unreduced: tuple[int, ...] = ()
    sent: torch.Tensor | None = None

    def wait(self) -> None:
        """Wait for all works.

        Raises:
            RuntimeError: one of them failed. The message names this rank, the collective, the bucket, and the cause if
                it is known.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise failed(self.bucket, self.what, error) from error


def failed(bucket: SlottedBucket, what: str, error: RuntimeError) -> RuntimeError:
    """Return the error for a failed collective of ``bucket``, with this rank, collective and line of the trace."""
    text = f"rank {bucket.ranks.group.global_ranks[bucket.rank]}: the {what} of bucket {bucket.spec.name!r} failed: {error}"
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith("thunder."):
        frame = frame.f_back
    if frame is not None:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        text += f"\nin line {frame.f_lineno} of {frame.f_code.co_name}: {line}"
    why = bucket.explain(text)
    return RuntimeError(f"{text}\n{why}" if why else text)


class Arena:
    """The memory of all shared slots of one device, as one allocation.

    At compile time it grows to the largest end of any slot of any trace. A step allocates nothing.

    Attributes:
        scratch: idle temporary memory of transports, keyed by dtype and number of elements.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0
        self._in_flight: dict[Slot, InFlight] = {}
        self._issued = 0
        self._left: dict[SlottedBucket, _Left] = {}
        self.scratch: dict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)
        self._memory: torch.Tensor | None = None
        self._slots: dict[tuple[int, int], Slot] = {}

    def slot(self, offset: int, nbytes: int, name: str | None = None) -> Slot:
        """Return the slot at ``offset`` bytes with ``nbytes`` bytes; the same object for the same range."""
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
        """Allocate the memory now instead of at the first gather."""
        if self._memory is None:
            with torch.inference_mode(False):  # training may follow a first call in inference mode
                self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    def let_go(self) -> None:
        """Drop the arena's references to its memory, which slots would keep alive; the last view frees it."""
        self._memory = None
        self._left.clear()
        for slot in self._slots.values():
            slot.params.clear()
            slot.grads.clear()

    def lay(self, bucket: SlottedBucket, slot: Slot, dtype: torch.dtype) -> Views:
        """Return the views of ``slot`` for ``bucket``, with elements of ``dtype``."""
        self.allocate()
        assert self._memory is not None
        spec = bucket.spec
        nbytes = spec.layout.unsharded_numel * dtype.itemsize
        with torch.inference_mode(False):
            # Collectives write through `flat`, a `.data` alias with its own version counter. gloo bumps the version
            # from a thread, and must not invalidate saved views of the parameters.
            flat = self._memory[slot.offset : slot.offset + nbytes].view(dtype).data
            staging, end = None, nbytes
            if spec.travel.staging:
                begin, end = _aligned(nbytes), _aligned(nbytes) + spec.sent_numel * dtype.itemsize
                staging = self._memory[slot.offset + begin : slot.offset + end].view(dtype).data
            assert end <= slot.nbytes, (bucket, slot)
            # `.data` also hides from autograd that parameters are views: Thunder detaches views that backward reads.
            tensors = tuple(view.data for view in unsharded_views(spec, flat))
            return Views(flat, tensors, [piece.data for piece in spec.layout.pieces(flat)], staging)

    def span_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the range of bytes of the arena that ``tensor`` spans, or ``None`` if it is not in the arena."""
        memory = self._memory
        if memory is None or tensor.device != memory.device or tensor.numel() == 0 or memory.is_meta:
            return None
        begin = tensor.data_ptr() - memory.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (last + 1) * tensor.element_size()
        return (begin, end) if begin < memory.numel() and end > 0 else None

    @property
    def in_flight(self) -> tuple[InFlight, ...]:
        """The collectives that were issued and not yet waited for, at most one per slot."""
        return tuple(self._in_flight.values())

    def claim(self, slot: Slot) -> None:
        """Prepare ``slot`` for an issue: wait for collectives on its memory that an exception left in flight.

        This counts as an issue even if it fails, because from here on the memory may be written.
        """
        self._issued += 1
        self.finish_leftovers(slot)

    def issue(self, flight: InFlight) -> InFlight:
        """Register ``flight``, whose slot was claimed, as in flight."""
        assert flight.slot is not None and flight.slot not in self._in_flight, flight
        self._in_flight[flight.slot] = flight
        return flight

    def lose(self, bucket: SlottedBucket, what: str, slot: Slot) -> None:
        """Record that an issue on the memory of ``slot`` was interrupted, so it is unknown what is in flight there."""
        self._in_flight[slot] = InFlight(bucket, what, slot, (_Lost(),))

    def leave(self, bucket: SlottedBucket, slot: Slot, followed_by: int) -> None:
        """Record that the last issue was a gather that the next ``followed_by`` issues of forward do not overwrite."""
        self._left[bucket] = _Left(slot, self._issued + followed_by, forward_number())

    def take_left(self, bucket: SlottedBucket, slot: Slot, preceded_by: int | None) -> bool:
        """Return whether ``bucket`` is still resident in ``slot``, which the running backward has claimed.

        It is if this backward's own forward left it there and only the rest of that forward and ``preceded_by`` issues
        of this backward were issued since. In both cases the bucket no longer counts as left.
        """
        left = self._left.pop(bucket, None)
        return (
            left is not None
            and preceded_by is not None
            and left.slot is slot
            and left.issued == self._issued - 1 - preceded_by
            and is_backward_of(left.number)
        )

    def write_gradient(self, slot: Slot) -> None:
        """Prepare the memory of ``slot`` for gradients before their reduction claims it.

        The backward of an earlier forward may fail before its first issue. Buckets that it has overwritten by then must
        not count as resident from the latest forward.
        """
        self.finish_leftovers(slot)
        if self._left and not all(is_backward_of(left.number) for left in self._left.values()):
            self._left.clear()

    def finish(self, flight: InFlight) -> None:
        """Wait for ``flight``. If that fails, it stays in flight and its memory stays unusable."""
        slot = flight.slot
        assert slot is not None
        flight.wait()
        if self._in_flight.get(slot) is flight:
            del self._in_flight[slot]

    def finish_leftovers(self, slot: Slot) -> None:
        """Wait for collectives on the memory of ``slot`` that an exception in an earlier step left in flight."""
        if not self._in_flight.keys().isdisjoint(slot.sharing):
            for flight in [flight for other, flight in self._in_flight.items() if other in slot.sharing]:
                self.finish(flight)


class _Left(NamedTuple):
    """A bucket that forward left in shared memory.

    ``issued`` is the arena's number of issues at the end of that forward, ``number`` its ``forward_number``.
    """

    slot: Slot
    issued: int
    number: int


class _Lost:
    """A stand-in for works that an interrupted issue may have started; waiting for it is an error."""

    def wait(self) -> None:
        raise RuntimeError(
            "it was interrupted while it was being issued, so its memory cannot be used again: restart the process"
        )


class Bucket:
    """A bucket at run time, and the opaque handle that represents it in traces.

    It is compared and hashed by identity, so two models, or two plans of one model, share nothing.

    Args:
        spec: the planned bucket.
        ranks: the ranks that share the bucket.
        transport: moves the bucket.
        arena: memory for the slots that the bucket shares with others.
        handle: the name under which it prints.
        whole: for a bucket alias (``bucket_aliases``), the bucket whose shard and parameters it uses.
        peer_memory: allocates what the bucket sends if peers read it there; the bucket is announced to it.

    Attributes:
        source: provides the tensor that a gather sends.
        whole: the bucket itself; for a bucket alias, the bucket that it stands for.
        shard: the flat shard buffer. ``params`` are this rank's rows of each parameter, views of it with their own
            version counters.
    """

    source: Source
    shard: torch.Tensor
    params: tuple[torch.nn.Parameter, ...]
    tally: Tally

    def __init__(
        self,
        spec: BucketSpec,
        ranks: Ranks,
        transport: Transport,
        arena: Arena,
        handle: str,
        *,
        whole: Bucket | None = None,
        peer_memory: PeerMemory | None = None,
    ) -> None:
        self.spec = spec
        self.whole: Bucket = whole or self
        self.ranks = ranks
        self.rank = ranks.group.rank
        self.transport = transport
        self.arena = arena
        self.handle = handle
        self.private_slot: Slot | None = None
        self.tally = Tally() if whole is None else whole.tally
        self.peer_memory = peer_memory
        self.kept_since: int | None = None
        """The ``forward_number`` of the last gather into the private slot; ``None`` until it is waited for."""
        self._strided = _strided(spec, self.rank)
        self.all_gather_label = f"fsdp_all_gather({spec.name})"
        self.reduce_scatter_label = f"fsdp_reduce_scatter({spec.name})"
        self.all_reduce_label = f"fsdp_all_reduce({spec.name})"
        self.shard = self._allocate_shard() if whole is None else whole.shard
        self.shard_views = shard_views(spec, self.rank, self.shard)
        self.shard_pointers = tuple(map(address, self.shard_views))
        if whole is None:
            self.params = tuple(
                torch.nn.Parameter(view, param.requires_grad)
                for view, param in zip(self.shard_views, spec.params, strict=True)
            )
        else:
            by_name = {param.name: whole.params[i] for i, param in enumerate(whole.spec.params)}
            self.params = tuple(by_name[param.name] for param in spec.params)
        self.control: Coordinator | None = None
        """How the model agrees with the other ranks on what runs next."""
        self.unreduced: torch.Tensor | None = None
        """Flat unsharded gradients that ``no_sync`` backwards have accumulated and no backward has reduced yet."""
        self.unreduced_params: set[int] = set()
        self.adding = False
        """Whether a ``no_sync`` backward has added gradients to :attr:`unreduced` and has not run to its end."""
        self.adding_first = False
        """Whether :attr:`unreduced` then holds only gradients of that backward."""
        self.late_grads: dict[int, torch.Tensor] = {}
        """Sharded gradients of parameters that only earlier ``no_sync`` backwards had; added at the end of backward."""
        self.source = source_of(self)
        self.parts: dict[Any, Bucket] = {}
        """Aliases of this bucket, gathered in another way; see the module ``parts``."""

    def __repr__(self) -> str:
        return self.handle

    def explain(self, text: str) -> str:
        """Tell the other ranks what failed here and return what they tell; nothing without other ranks."""
        control = self.whole.control
        return "" if control is None else control.explain(text)

    def _allocate_shard(self) -> torch.Tensor:
        spec = self.spec
        if spec.param_dtype != spec.dtype:  # gathers send a cast
            shard = torch.zeros(spec.layout.shard_numel, dtype=spec.dtype, device=spec.shard_device)
        else:
            shard = self.allocate_sent()
        return shard.pin_memory() if spec.travel.pin_memory else shard

    def allocate_sent(self) -> torch.Tensor:
        """Allocate what gathers send: the flat shard, or memory for its cast."""
        spec = self.spec
        if self.peer_memory is not None:
            return self.peer_memory.take(spec.name)
        return self.transport.allocate(spec.layout.shard_numel, spec.param_dtype, spec.shard_device, self.ranks)

    @property
    def scratch(self) -> dict[tuple[torch.dtype, int], list[torch.Tensor]]:
        """Idle temporary memory of transports, keyed by dtype and number of elements."""
        return self.arena.scratch

    def keep_unsharded(self) -> Slot:
        """Return the bucket's private slot, where it stays from forward to backward (ZeRO-2); created on first use."""
        if self.private_slot is None:  # with an arena of its own, no other slot can overlap it
            arena = Arena(self.spec.device)
            name = self.handle.replace("bucket_", "own_", 1)
            self.private_slot = arena.slot(0, slot_bytes(self.spec, self.spec.param_dtype), name)
        return self.private_slot

    def shard_to_send(self, *, again: bool) -> torch.Tensor:
        """Return the flat shard as it is sent; ``again`` if backward gathers the same values as its forward."""
        return self.source.shard(again=again)

    def gather_into(self, unsharded: Views, sent: torch.Tensor) -> Sequence[Work]:
        """Issue a gather of ``sent``, which :meth:`shard_to_send` has just returned, and return its works.

        Keep ``sent`` alive until they finish.
        """
        with self.source.sending():
            return self.transport.all_gather(self, sent, unsharded)

    def is_kept_for_this_backward(self) -> bool:
        """Return whether the private slot holds the values that the running backward's own forward gathered.

        Another forward may have gathered other values since: swapping parameters through ``.data`` changes no version.
        """
        return self.kept_since is not None and is_backward_of(self.kept_since)

    def sharded_grads(self, reduced: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradient of each shard as views of a flat reduced gradient, in dtype and on device of shards."""
        spec = self.spec
        flat = reduced if reduced.dtype is spec.dtype else reduced.to(spec.dtype)
        if spec.travel.offload:
            # The copy blocks the host: autograd may add it to a gradient at once, and the optimizer reads it.
            on_host = torch.empty_like(flat, device="cpu", pin_memory=spec.travel.pin_memory)
            flat = on_host.copy_(flat)
        assert flat.storage_offset() == 0
        return tuple(map(flat.as_strided, *self._strided))

    @functools.cached_property
    def own_pieces(self) -> list[tuple[slice, slice]]:
        """The elements of the shard, and their elements in the unsharded buffer, as pairs of slices."""
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
        """Add unsharded gradients, one per parameter or ``None``, to :attr:`unreduced`."""
        self._refuse_half_a_sum()
        self.adding_first = self.unreduced is None
        if self.unreduced is None:
            self.unreduced = torch.zeros(
                self.spec.layout.unsharded_numel, dtype=self.spec.reduce_dtype, device=self.spec.device
            )
        self.adding = True
        for index, view in enumerate(unsharded_views(self.spec, self.unreduced)):
            grad = grads[index]
            if grad is not None:
                view.add_(grad)
                self.unreduced_params.add(index)

    def unreduced_grads(self) -> tuple[torch.Tensor | None, set[int]]:
        """Return :attr:`unreduced` and the indices of the parameters whose gradients it holds.

        Raises:
            RuntimeError: a backward under ``no_sync`` failed after adding some of its gradients.
        """
        self._refuse_half_a_sum()
        return self.unreduced, self.unreduced_params

    def drop_unreduced(self) -> None:
        """Drop :attr:`unreduced`, after adding to ``.grad`` the gradients that backward cannot return."""
        for index, grad in self.late_grads.items():
            self.add_to_grad(index, grad)
        self.discard_unreduced()

    def discard_unreduced(self) -> None:
        """Drop :attr:`unreduced`."""
        self.unreduced, self.unreduced_params, self.late_grads, self.adding = None, set(), {}, False

    def _refuse_half_a_sum(self) -> None:
        if self.adding and self.adding_first:  # it holds only gradients of the failed backward
            self.discard_unreduced()
        elif self.adding:
            raise RuntimeError(
                f"a backward under no_sync failed after it had added gradients to bucket {self.spec.name!r}, so the sum "
                f"includes part of a backward. Call thunder_fsdp_sched.discard_unreduced(model) and repeat the "
                f"accumulation from its first batch"
            )

    def add_to_grad(self, index: int, grad: torch.Tensor) -> None:
        """Add a sharded gradient to ``.grad`` as autograd does."""
        param = self.params[index]
        param.grad = grad if param.grad is None else param.grad.add_(grad)
        if self.ranks.group.size > 1:
            mark(param)

    def adopt(self, index: int, param: torch.nn.Parameter) -> None:
        """Turn ``param``, the unsharded parameter ``index``, into this rank's shard; the object stays the same."""
        replace_data(param, self.shard_views[index])
        self.params = (*self.params[:index], param, *self.params[index + 1 :])
        # Loading through this view bumps the version of the parameter, so autograd sees the change in saved tensors.
        view = param.detach()
        self.shard_views = (*self.shard_views[:index], view, *self.shard_views[index + 1 :])
        if self.ranks.group.size > 1:
            mark_after_backward(param)

    def copy_in(self, index: int, unsharded: torch.Tensor) -> None:
        """Copy this rank's rows of the unsharded parameter ``index`` into its shard."""
        self.shard_views[index].copy_(self.own_rows(index, unsharded))

    def own_rows(self, index: int, unsharded: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the unsharded parameter ``index``, as a view."""
        starts = self.spec.layout.placements[index].row_starts
        rows = unsharded.reshape(1) if unsharded.ndim == 0 else unsharded
        return rows[starts[self.rank] : starts[self.rank + 1]]


def slot_bytes(spec: BucketSpec, dtype: torch.dtype) -> int:
    """Return the bytes of a slot that holds the bucket in ``dtype``, including staging and alignment."""
    staging = _aligned(spec.sent_numel * dtype.itemsize) if spec.travel.staging else 0
    return _aligned(spec.layout.unsharded_numel * dtype.itemsize) + staging


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def shard_views(spec: BucketSpec, rank: int, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the rows that ``rank`` owns of each parameter, as views of a flat shard (or of its gradients)."""
    shapes, strides, offsets = _strided(spec, rank)
    return tuple(map(flat.as_strided, shapes, strides, (flat.storage_offset() + offset for offset in offsets)))


def _strided(spec: BucketSpec, rank: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[int]]:
    """Return shapes, strides and offsets, within the flat shard, of the rows that ``rank`` owns of each parameter."""
    shapes = [placement.shard_shape(rank) for placement in spec.layout.placements]
    return shapes, list(map(_contiguous_strides, shapes)), [p.shard_offsets[rank] for p in spec.layout.placements]


def unsharded_views(spec: BucketSpec, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return each whole parameter as a contiguous view of a flat unsharded buffer."""
    return tuple(
        flat.as_strided(p.shape, _contiguous_strides(p.shape), flat.storage_offset() + p.unsharded_offset)
        for p in spec.layout.placements
    )


def address(shard: torch.Tensor) -> int:
    """Return the address of ``shard``, or of its storage if it has no rows, so that all ranks notice a replacement."""
    return shard.data_ptr() or shard.untyped_storage().data_ptr()


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def handle_name(bucket_name: str) -> str:
    """Return a Python identifier for a bucket's name: ``transformer.h.0`` -> ``bucket_transformer_h_0``."""
    return "bucket_" + re.sub(r"\W", "_", bucket_name)
