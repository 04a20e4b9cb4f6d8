"""Preallocated memory: the arena of shared slots, and the views that buckets have of it.

[Note: Ownership of memory]
Three kinds of memory hold parameters and gradients, each with one rule.

*Shard buffers* belong to the optimizer. Parameters are views of them, and forward and backward never write them. If a rank
has the whole bucket, and sends it unchanged (``Bucket.is_whole_in``), unsharded parameters are views of it as well, and
a gather copies nothing. The proofs about slots still hold: nothing writes an unsharded parameter, and autograd compares
the versions of shards between forward and backward. Slots are still planned and allocated, because gradients use them.

*Private slots* (ZeRO-2) belong to one bucket. As long as the parameters do not change, a gather overwrites a slot with
the same bytes; a change between forward and backward is an error (``fsdp_params_unchanged``). Backward first checks what
each slot contains. If something else has written it since (a forward without gradients, a failed forward, or the
gradients of another backward), the bucket is gathered again. See [Note: Gradients in the place of their parameters] in
``ir.slots``.

With ``release``, their memory is freed after backward. Tensors that an earlier forward has saved keep the old memory
alive, but no gather writes it any more, so the backward of that forward is an error.

*Shared slots* are ranges of the arena. Within a trace, ``assign_slots`` assigns a range to another collective only after
the last reader of the previous one. The range of a single parameter may be assigned to its own gradient after the last
read of that parameter. ``verify`` proves both. Between two traces shared slots hold nothing that is used again, with
one exception: buckets from the end of forward, for the backward that follows. See [Note: Buckets left by forward] in
``transforms.reuse_from_forward``.

*The extension* of an arena holds shared slots of backward that do not fit into the memory that forward needs. It exists
only with ``max_memory``, from its first use in a backward to the end of that backward. See
[Note: Memory that only backward needs] in ``transforms.release_slots``.

[Note: Contents of slots]
The verifier knows what was last written to each range of bytes. So does the arena at run time: after a gather, a slot
contains that bucket (:class:`Contents`) until something else writes overlapping memory, or the memory is freed. The
contents alone decide whether a gather may be left out, and whether a kept bucket is still resident in backward. They
also say when the bucket was gathered: backward uses it if its own forward gathered it, or if it was gathered again at
the start of this backward; a micro-batch uses it if an earlier one of its window gathered it.

[Note: Storages of parameters]
An operator may address memory by its position in the storage of its input: ``as_strided`` with an offset, or
``as_strided_scatter``, which also copies the whole storage. In the unsharded model a storage holds one parameter, so
each unsharded parameter has a storage of its own here, too: a slice of the arena's, without a copy. Positions are those
of the unsharded model, and an operator that reads beyond its parameter fails instead of reading another one. To find
out whether a tensor is in a slot, compare addresses (``Arena.span_of``), not storages.

[Note: Streams of traces]
A model's slots, the idle memory of its transports, its casts and its accumulated gradients are reused in the order in
which the host runs traces. A trace runs on the current stream, and a backward on that of its forward. So the first use
of this memory on another stream waits for the last stream that used it: two forwards on two streams run one after the
other. Each arena of the model is then also recorded as in use on the new stream, and idle memory is dropped.

[Note: State after an exception]
An exception (an index out of range, out of memory, an interrupt) may end a forward or a backward between any two lines.

*Collectives in flight* stay registered in their arena until they are waited for. The next use of overlapping memory
waits for them first (``Arena.begin_use``). If an issue itself was interrupted, it is unknown what is in flight, so every
later use of that memory is an error.

*Contents of slots* are unknown from the moment at which an issue or a gradient may write them to the end of the wait.
So after a failed run, only slots that it has not touched have known contents.

*A round of agreement* that a backward has posted and not settled stays pending until the model's next round. It is not
settled while the exception leaves backward: that would wait for ranks that never reach this backward, and delay the
error.

*Gradients of* ``no_sync`` stay in ``Bucket.accumulation`` until the backward that reduces them has run to its end, where
``fsdp_backward_done`` drops them. A ``no_sync`` backward that fails after adding some of its gradients leaves a sum
that cannot be repaired: every later backward raises an error until ``discard_unreduced`` is called.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from ..errors import coded_error
from ..plan.layout import round_up
from ..plan.specs import BucketSpec
from ..private_torch import labelled
from ..transports.base import Views, Work
from .autograd import is_of_running_backward, moment, running_backward_of

SLOT_ALIGNMENT = 512
"""Alignment (bytes) of each slot's offset in the arena, as in CUDA's caching allocator."""


class StoredBucket(Protocol):
    """The attributes and methods of a bucket (:class:`~.bucket.Bucket`) that slots use."""

    spec: BucketSpec
    shard: torch.Tensor
    shard_views: tuple[torch.Tensor, ...]

    @property
    def primary(self) -> StoredBucket: ...

    def is_whole_in(self, slot: Slot) -> bool: ...

    def failure(self, what: str, error: RuntimeError) -> RuntimeError: ...


class Slot:
    """A range of bytes that holds one unsharded bucket: its parameters, or its gradients before they are reduced.

    In traces it is an opaque argument that prints its name and is compared by identity.

    Attributes:
        params: views of the slot as the parameters of each bucket.
        grads: views of the slot as the gradients of each bucket.
    """

    def __init__(self, name: str, arena: Arena, offset: int, nbytes: int) -> None:
        self.name = name
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.end = offset + nbytes
        self.params = _ViewCache(lambda bucket: arena.make_params(bucket, self))
        self.grads = _ViewCache(lambda bucket: arena.make_views(bucket, self, bucket.spec.reduce_dtype))

    def __repr__(self) -> str:
        return self.name

    def overlaps(self, other: Slot) -> bool:
        """Return whether the two slots share memory."""
        return self.arena is other.arena and self.offset < other.end and other.offset < self.end

    def contains(self, span: tuple[int, int]) -> bool:
        """Return whether the slot contains a range of bytes of the arena."""
        return self.offset <= span[0] and span[1] <= self.end


class _ViewCache(dict[StoredBucket, Views]):
    """The views of a slot for each bucket, created on first use; a step only looks them up."""

    def __init__(self, make: Callable[[StoredBucket], Views]) -> None:
        self._make = make

    def __missing__(self, bucket: StoredBucket) -> Views:
        views = self[bucket] = self._make(bucket)
        return views


class Contents(NamedTuple):
    """The bucket that a slot contains: see [Note: Contents of slots].

    Attributes:
        bucket: the primary of the bucket that was gathered into the slot.
        moment: the moment at which the gather was issued.
        version: the version of the gathered shard, if later micro-batches of the window may reuse it.
        restored_for: the backward at whose start it was gathered again: see ``autograd.running_backward_of``.
    """

    bucket: StoredBucket
    moment: int
    version: tuple[int, ...] | None = None
    restored_for: tuple[int, int] | None = None

    @classmethod
    def from_gather(cls, bucket: StoredBucket, version: tuple[int, ...] | None = None) -> Contents:
        """Return the contents of a slot into which a bucket is gathered now."""
        return cls(bucket.primary, moment(), version)

    def is_for_running_backward(self) -> bool:
        """Return whether the running backward may use it: its forward gathered it, or it was gathered again at the
        start.

        If a hook calls another forward during the backward, the buckets that it gathers may not be used.
        """
        is_restored = self.restored_for is not None and self.restored_for == running_backward_of()
        return is_restored or is_of_running_backward(self.moment)


class InFlight(NamedTuple):
    """A collective that was issued and not yet waited for.

    ``slot`` is the memory that it writes (parameters) or reads (gradients); nothing else may touch it until the wait.
    ``output`` is the flat sharded gradient of a reduction, ``None`` for a gather. ``missing`` are the indices of parameters
    that have no gradient in this backward. ``works`` finish in any order. ``sent`` is the tensor that a gather reads; this
    reference keeps the copy of an offloaded shard alive; a gather that finds its bucket in the slot sends none. ``contents``
    is what the slot contains after a gather.
    """

    bucket: StoredBucket
    what: str
    slot: Slot | None
    works: Sequence[Work]
    output: torch.Tensor | None = None
    missing: tuple[int, ...] = ()
    sent: torch.Tensor | None = None
    contents: Contents | None = None

    def wait(self) -> None:
        """Wait for all works.

        Raises:
            RuntimeError: one of them failed. The message names this rank, the collective, the bucket, and the cause if
                it is known.
        """
        try:
            with labelled(f"wait-{self.what}", self.bucket.spec.name):
                for work in self.works:
                    work.wait()
        except RuntimeError as error:
            raise self.bucket.failure(self.what, error) from error


class Arena:
    """The memory of all shared slots of one device, as one allocation.

    At compile time it grows to the largest end of any slot of any trace. A step allocates nothing.

    Args:
        shared: the model's arena of shared slots, for its other arenas: those of private slots, and those that exist
            for a single call.

    Attributes:
        scratch: idle temporary memory of transports, keyed by dtype and number of elements. All arenas of a model have
            that of the shared arena, so freeing any of them frees the idle memory.
        contents: the contents of its slots, where they are known: see [Note: Contents of slots].
    """

    def __init__(self, device: torch.device, shared: Arena | None = None, *, prefix: str = "slot") -> None:
        self.device = device
        self._shared: Arena | None = shared if shared is None else shared._shared or shared
        self.nbytes = 0
        self._in_flight: dict[Slot, InFlight] = {}
        self.contents: dict[Slot, Contents] = {}
        self._writing: Slot | None = None  # the last slot that `begin_write` has prepared, if nothing was issued since
        self.scratch: dict[tuple[torch.dtype, int], list[torch.Tensor]] = (
            defaultdict(list) if self._shared is None else self._shared.scratch
        )
        self._arenas: weakref.WeakSet[Arena] = weakref.WeakSet() if shared is None else shared._arenas  # of the model
        self._arenas.add(self)
        self._stream: torch.cuda.Stream | None = None  # of a shared arena: the last one that used the model's memory
        self._was_freed = False
        self._allocated_at = 0  # a `moment`, kept only once the memory was freed
        self._memory: torch.Tensor | None = None
        self._slots: dict[tuple[int, int], Slot] = {}
        self._prefix = prefix

    @functools.cached_property
    def extension(self) -> Arena:
        """An arena for slots that only backward needs, which shares the idle memory of transports with this one."""
        return Arena(self.device, self, prefix=f"more_{self._prefix}")

    @property
    def all_of_it(self) -> Slot:
        """A slot without bytes, by which traces name the arena."""
        return self.slot(0, 0, f"{self._prefix}s")

    def slot(self, offset: int, nbytes: int, name: str | None = None) -> Slot:
        """Return the slot at ``offset`` bytes with ``nbytes`` bytes; the same object for the same range."""
        assert offset % SLOT_ALIGNMENT == 0
        slot = self._slots.get((offset, nbytes))
        if slot is None:
            slot = Slot(name or f"{self._prefix}_{len(self._slots)}", self, offset, nbytes)
            self._slots[offset, nbytes] = slot
            if slot.end > self.nbytes:
                self.nbytes = slot.end
                self.finish_all()  # otherwise later traces would look for these gathers in the new memory
                self.release()
        return slot

    def allocate(self) -> None:
        """Allocate the memory now instead of at the first gather."""
        if self._memory is None:
            if self._was_freed:
                self._allocated_at = moment()
            with torch.inference_mode(False):  # training may follow a first call in inference mode
                self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    def release(self) -> None:
        """Drop all references to the memory from the arena and its slots; the last view frees it."""
        self._memory = None
        self.contents.clear()
        for slot in self._slots.values():
            slot.params.clear()
            slot.grads.clear()

    def free(self) -> None:
        """Wait for collectives that an exception left in flight, then release the memory and that of transports.

        The current stream has waited for all others, so the allocator may hand the memory out on that stream. The next
        issue allocates it again.
        """
        self.finish_all()
        self.release()
        self.scratch.clear()
        self._was_freed = True

    def is_memory_of_running_backward(self) -> bool:
        """Return whether the memory has not been freed since the forward of the running backward."""
        return not self._was_freed or (self._memory is not None and is_of_running_backward(self._allocated_at))

    def make_views(self, bucket: StoredBucket, slot: Slot, dtype: torch.dtype) -> Views:
        """Return the views of ``slot`` for ``bucket``, with elements of ``dtype``."""
        self.allocate()
        assert self._memory is not None
        spec = bucket.spec
        nbytes = spec.layout.unsharded_numel * dtype.itemsize
        with torch.inference_mode(False):
            # Collectives write through `flat`, a `.data` alias with its own version counter. gloo bumps the version
            # from a thread, and must not invalidate saved views of the parameters.
            flat = self._memory[slot.offset : slot.offset + nbytes].view(dtype).data
            assert nbytes <= slot.nbytes, (bucket, slot)
            # `.data` also hides from autograd that parameters are views: Thunder detaches views that backward reads.
            tensors = tuple(view.data for view in spec.layout.unsharded_views(flat))
            return Views(flat, tensors, [piece.data for piece in spec.layout.unsharded_segments(flat)])

    def make_params(self, bucket: StoredBucket, slot: Slot) -> Views:
        """Return the views of ``slot`` as parameters of ``bucket``, each with a storage of its own.

        If :meth:`Bucket.is_whole_in` is true, they are views of the shard instead, with the shard as ``flat``.
        """
        if bucket.is_whole_in(slot):
            self.allocate()  # as planned; gradients may be written there
            with torch.inference_mode(False):
                shapes = (placement.shape for placement in bucket.spec.layout.placements)
                wholes = (view.view(shape) for view, shape in zip(bucket.shard_views, shapes, strict=True))
                return Views(bucket.shard, tuple(with_own_storage(whole.data) for whole in wholes), [])
        views = self.make_views(bucket, slot, bucket.spec.param_dtype)
        with torch.inference_mode(False):
            return views._replace(tensors=tuple(map(with_own_storage, views.tensors)))

    def span_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the range of bytes of the arena that ``tensor`` spans, or ``None`` if it is not in the arena."""
        return None if self._memory is None else span_in(self._memory, tensor)

    @property
    def in_flight(self) -> tuple[InFlight, ...]:
        """The collectives that were issued and not yet waited for, at most one per slot."""
        return tuple(self._in_flight.values())

    def begin_use(self, slot: Slot) -> None:
        """Prepare ``slot`` for use: wait for collectives on its memory that an exception left in flight."""
        self.follow_stream()
        if self._in_flight:
            self.wait_for_overlapping(slot)

    def begin_write(self, slot: Slot) -> None:
        """Prepare ``slot`` for an issue or a gradient, and forget what the memory contains."""
        if slot is self._writing:  # an earlier gradient has prepared it
            self.follow_stream()
            return
        self.begin_use(slot)
        for other in [other for other in self.contents if other is slot or other.overlaps(slot)]:
            del self.contents[other]
        self._writing = slot

    def follow_stream(self) -> None:
        """Let the current stream wait for the last one that used the model's memory; see [Note: Streams of traces]."""
        if self.device.type != "cuda":
            return
        shared, current = self._shared or self, torch.cuda.current_stream(self.device)
        if current == shared._stream:
            return
        if shared._stream is not None:
            current.wait_stream(shared._stream)
            self.scratch.clear()
            for arena in self._arenas:
                if arena._memory is not None:
                    arena._memory.record_stream(current)
        shared._stream = current

    def register(self, flight: InFlight) -> InFlight:
        """Register ``flight``, whose slot was prepared, as in flight."""
        assert flight.slot is not None and flight.slot not in self._in_flight, flight
        self._in_flight[flight.slot] = flight
        self._writing = None
        return flight

    def mark_interrupted(self, bucket: StoredBucket, what: str, slot: Slot) -> None:
        """Record that an issue on the memory of ``slot`` was interrupted, so it is unknown what is in flight there."""
        self._in_flight[slot] = InFlight(bucket, what, slot, (InterruptedWork(),))
        self._writing = None

    def gather_in(self, slot: Slot) -> InFlight | None:
        """Return the gather in flight into ``slot``, if there is one."""
        flight = self._in_flight.get(slot)
        return flight if flight is not None and flight.contents is not None else None

    def replace(self, flight: InFlight) -> InFlight:
        """Replace the collective that is in flight in the slot of ``flight``."""
        assert flight.slot is not None
        self._in_flight[flight.slot] = flight
        return flight

    def finish(self, flight: InFlight) -> None:
        """Wait for ``flight``. If that fails, it stays in flight and its memory stays unusable."""
        slot = flight.slot
        assert slot is not None
        flight.wait()
        if self._in_flight.get(slot) is flight:
            del self._in_flight[slot]
            if flight.contents is not None:
                self.contents[slot] = flight.contents

    def finish_all(self) -> None:
        """Wait for everything in flight."""
        for flight in self.in_flight:
            self.finish(flight)

    def wait_for_overlapping(self, slot: Slot) -> None:
        """Wait for collectives on the memory of ``slot`` that an exception in an earlier step left in flight."""
        for flight in [f for other, f in self._in_flight.items() if other is slot or other.overlaps(slot)]:
            self.finish(flight)


class InterruptedWork:
    """A stand-in for works that an interrupted issue may have started; waiting for it is an error."""

    def wait(self) -> None:
        raise coded_error(RuntimeError, "step.interrupted-while-issued")


def span_in(memory: torch.Tensor, tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the range of bytes of flat ``memory`` that ``tensor`` spans, or ``None`` if it is not there."""
    if tensor.device != memory.device or tensor.numel() == 0 or memory.is_meta:
        return None
    begin = tensor.data_ptr() - memory.data_ptr()
    end = begin + extent(tensor.shape, tensor.stride()) * tensor.element_size()
    return (begin, end) if begin < memory.nbytes and end > 0 else None


def extent(shape: Iterable[int], strides: Iterable[int]) -> int:
    """Return the number of elements from the first to the last one of a tensor that is not empty."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype hold the same bytes, also if they are NaN."""
    given = (tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in (a, b))
    return torch.equal(*(tensor.view(-1).view(torch.uint8) for tensor in given))


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return ``view`` with a storage of its own, if there is memory; see [Note: Storages of parameters]."""
    storage = view.untyped_storage()
    if storage.device.type == "meta":  # those of fake tensors, too
        return view
    begin = int(view.storage_offset()) * view.itemsize
    nbytes = extent(view.shape, view.stride()) * view.itemsize if view.numel() else 0
    own = torch.empty(0, dtype=view.dtype, device=view.device)
    return own.set_(storage[begin : begin + nbytes], 0, view.shape, view.stride())


def slot_bytes(spec: BucketSpec, dtype: torch.dtype) -> int:
    """Return the bytes of a slot that holds the bucket in ``dtype``, including alignment."""
    return round_up(spec.layout.unsharded_numel * dtype.itemsize, SLOT_ALIGNMENT)


def address(shard: torch.Tensor) -> int:
    """Return the address of ``shard``, or of its storage if it has no rows, so that all ranks notice when it is replaced."""
    return shard.data_ptr() or shard.untyped_storage().data_ptr()
