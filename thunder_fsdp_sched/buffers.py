"""Preallocated memory: each bucket's shard buffer, the arena of shared slots, and the views into both.

[Note: Who may overwrite what]
Three kinds of memory hold parameters and gradients, and each has one rule.
*Shard buffers* belong to the optimizer: parameters are views of them and a step never writes them.
*Private slots* (ZeRO-2) belong to one bucket; a gather overwrites them with the same bytes as long as the parameters do
not change, and a change under a live graph is an error (``fsdp_params_unchanged``). Backward begins with a look at each
slot: if a forward without gradients, or one that failed, has written it since, the bucket is gathered again.
*Shared slots* are ranges of the arena. Within a trace the ``plan_slots`` pass gives a range to another collective only
after the last reader of the old one, or each parameter's to its own gradient after the last reader of that; ``verify``
proves it. Between two traces they hold nothing, or, for the backward that follows, what the end of forward left there:
see [Note: What forward leaves] in ``transforms.reuse_from_forward``.

[Note: What an exception leaves]
An exception (an index out of range, no memory, an interrupt) may end a forward or a backward between any two lines.
*Collectives in flight* stay known to their arena until somebody waits for them. Whoever uses memory next finishes first
what is in flight on any byte of it (``Arena.claim``), and a later reader of a private slot finishes that slot. If an
issue itself was interrupted, nobody knows what is in flight: every later use of that memory is an error.
*Resident buckets* are taken only by the backward of the forward that left them, and only if exactly the issues of these
two have used the arena since: an aborted run in between, however far it came, rules that out.
*Gradients of* ``no_sync`` stay in ``Bucket.unreduced`` until the backward that reduces them has run to its end, where
``fsdp_backward_done`` drops them. A ``no_sync`` backward that fails after it has added some of its own leaves a sum that
nothing can undo: every later backward raises until ``discard_unreduced`` was called.
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

from .compat import replace_data
from .coordination import Coordinator, Tally
from .runs import forward_number, is_backward_of
from .sending import Source, source_of
from .shard_grads import mark, mark_after_backward
from .transports.base import Transport, TransportedBucket, Views, Work

if TYPE_CHECKING:
    from .buckets import BucketSpec
    from .groups import Ranks

__all__ = ["SLOT_ALIGNMENT", "Arena", "Bucket", "InFlight", "Slot", "failed", "slot_bytes"]

SLOT_ALIGNMENT = 512
"""Bytes to which each slot's offset in the arena is aligned (what CUDA's caching allocator does)."""


class SlottedBucket(TransportedBucket, Protocol):
    """The values of a bucket that are needed to lay it into a slot, and to report what fails there."""

    rank: int

    def explain(self, text: str) -> str:
        """Tell the other ranks what failed here and return what they tell."""


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

    def contains(self, span: tuple[int, int]) -> bool:
        """Whether a range of bytes of the arena lies in the slot."""
        return self.offset <= span[0] and span[1] <= self.end


class _Lying(dict[SlottedBucket, Views]):
    """The views that buckets have of a slot, each made when it is first asked for: a step only looks them up."""

    def __init__(self, make: Callable[[SlottedBucket], Views]) -> None:
        self._make = make

    def __missing__(self, bucket: SlottedBucket) -> Views:
        views = self[bucket] = self._make(bucket)
        return views


class InFlight(NamedTuple):
    """A collective that was issued and not yet waited for.

    ``slot`` is the memory it writes (parameters) or reads (gradients); nobody else may touch it until the wait.
    ``output`` is the flat sharded gradient of a reduction, ``None`` for a gather. ``only_unreduced`` are the parameters
    that this backward has no gradient of, but an earlier one under ``no_sync`` had. ``works`` finish in any order.
    ``sent`` is what a gather reads: a copy of an offloaded shard lives no longer.
    """

    bucket: SlottedBucket
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


def failed(bucket: SlottedBucket, what: str, error: RuntimeError) -> RuntimeError:
    """What to raise if a collective of ``bucket`` failed: names this rank, the collective and the line of the trace."""
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
    """One allocation per device that all shared slots are ranges of.

    It grows to the largest end of any slot of any trace, at compile time; a step allocates nothing.

    Attributes:
        scratch: memory that transports use for nothing at the moment, by dtype and number of elements.
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

    def lay(self, bucket: SlottedBucket, slot: Slot, dtype: torch.dtype) -> Views:
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
            tensors = tuple(view.data for view in unsharded_views(spec, flat))
            return Views(flat, tensors, [piece.data for piece in spec.layout.pieces(flat)], staging)

    def span_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the range of bytes of the arena that ``tensor`` spans, or ``None`` if it lies elsewhere."""
        memory = self._memory
        if memory is None or tensor.device != memory.device or tensor.numel() == 0 or memory.is_meta:
            return None
        begin = tensor.data_ptr() - memory.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (last + 1) * tensor.element_size()
        return (begin, end) if begin < memory.numel() and end > 0 else None

    @property
    def in_flight(self) -> tuple[InFlight, ...]:
        """What was issued and not yet waited for; one at most for a slot."""
        return tuple(self._in_flight.values())

    def claim(self, slot: Slot) -> None:
        """Prepare the memory of ``slot`` for an issue: nothing that an exception left in flight uses it any more.

        It counts as an issue whether or not that succeeds: from here on the memory may be written.
        """
        self._issued += 1
        self.finish_leftovers(slot)

    def issue(self, flight: InFlight) -> InFlight:
        """Note that ``flight``, whose slot was claimed, is in flight."""
        assert flight.slot is not None and flight.slot not in self._in_flight, flight
        self._in_flight[flight.slot] = flight
        return flight

    def lose(self, bucket: SlottedBucket, what: str, slot: Slot) -> None:
        """Note that an issue on the memory of ``slot`` was interrupted: what is in flight there is unknown."""
        self._in_flight[slot] = InFlight(bucket, what, slot, (_Lost(),))

    def leave(self, bucket: SlottedBucket, slot: Slot, followed_by: int) -> None:
        """Note that the last issue is a gather whose memory the next ``followed_by`` issues of its forward leave alone."""
        self._left[bucket] = _Left(slot, self._issued + followed_by, forward_number())

    def take_left(self, bucket: SlottedBucket, slot: Slot, preceded_by: int | None) -> bool:
        """Return whether the running backward finds ``bucket`` in ``slot``, which it has claimed.

        That is so if its own forward left the bucket there, and nothing was issued since but the end of that forward and
        ``preceded_by`` issues of this backward. Either way nobody else finds it.
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

        The backward of an earlier forward may fail before it issues anything: then what it has overwritten must not be
        taken for what the latest forward left.
        """
        self.finish_leftovers(slot)
        if self._left and not all(is_backward_of(left.number) for left in self._left.values()):
            self._left.clear()

    def finish(self, flight: InFlight) -> None:
        """Wait for ``flight``. If that fails it stays in flight, and its memory stays unusable."""
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
    """A bucket that a forward leaves in shared memory.

    ``issued`` is the arena's number of issues at the end of that forward, ``number`` its ``forward_number``.
    """

    slot: Slot
    issued: int
    number: int


class _Lost:
    """Stands for works that an interrupted issue may have started."""

    def wait(self) -> None:
        raise RuntimeError(
            "it was interrupted while it was issued, so its memory cannot be used again: restart the process"
        )


class Bucket:
    """A bucket at run time, and the opaque handle by which traces name it.

    It is compared and hashed by identity: two models, or two plans of one model, share nothing.

    Args:
        spec: the planned bucket.
        ranks: the ranks that share the bucket.
        transport: moves the bucket.
        arena: memory for the slots that the bucket shares with others.
        handle: the name under which it prints.
        whole: the bucket whose shard and parameters this is another handle of.

    Attributes:
        source: what is sent of it.
        whole: itself; for a handle under which a bucket is gathered in another way (``parts``) that bucket.
        shard: the flat shard buffer; ``params`` are this rank's rows of each parameter, views of it with version counters
            of their own.
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
        self.kept_since: int | None = None
        """The ``forward_number`` of the last gather into the private slot; ``None`` until it is waited for."""
        self._strided = _strided(spec, self.rank)
        self.all_gather_label = f"fsdp_all_gather({spec.name})"
        self.reduce_scatter_label = f"fsdp_reduce_scatter({spec.name})"
        self.all_reduce_label = f"fsdp_all_reduce({spec.name})"
        if whole is None:
            self.shard = self._allocate_shard()
        else:
            self.shard = whole.shard
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
        """Flat unsharded gradients that ``no_sync`` backwards have summed up and no reduction has taken yet."""
        self.unreduced_params: set[int] = set()
        self.adding = False
        """Whether a ``no_sync`` backward has added gradients to :attr:`unreduced` and has not run to its end."""
        self.adding_first = False
        """Whether there is nothing else in :attr:`unreduced` then."""
        self.late_grads: dict[int, torch.Tensor] = {}
        """Sharded gradients of parameters that only earlier ``no_sync`` backwards had; for the end of backward."""
        self.source = source_of(self)
        self.parts: dict[Any, Bucket] = {}
        """Handles under which it is gathered in another way: see ``parts``."""

    def __repr__(self) -> str:
        return self.handle

    def explain(self, text: str) -> str:
        """Tell the other ranks what failed here and return what they tell; nothing without other ranks."""
        control = self.whole.control
        return "" if control is None else control.explain(text)

    def _allocate_shard(self) -> torch.Tensor:
        spec, transport = self.spec, self.transport
        if spec.param_dtype != spec.dtype:  # a cast of it travels, for which the transport allocates memory
            shard = torch.zeros(spec.layout.shard_numel, dtype=spec.dtype, device=spec.shard_device)
        else:
            shard = transport.allocate(spec.layout.shard_numel, spec.dtype, spec.shard_device, self.ranks)
        return shard.pin_memory() if spec.travel.pin_memory else shard

    @property
    def scratch(self) -> dict[tuple[torch.dtype, int], list[torch.Tensor]]:
        """Memory that no transport uses at the moment, by dtype and number of elements."""
        return self.arena.scratch

    def keep_unsharded(self) -> Slot:
        """The bucket's own slot, where it stays from forward to backward (ZeRO-2); allocated when it is first used."""
        if self.private_slot is None:  # an arena of its own: nobody else can be given a part of it
            arena = Arena(self.spec.device)
            name = self.handle.replace("bucket_", "own_", 1)
            self.private_slot = arena.slot(0, slot_bytes(self.spec, self.spec.param_dtype), name)
        return self.private_slot

    def shard_to_send(self, *, again: bool) -> torch.Tensor:
        """The flat shard as it travels; ``again`` if backward gathers what its forward gathered."""
        with self.source.sending():
            return self.source.shard(again=again)

    def gather_into(self, unsharded: Views, sent: torch.Tensor) -> Sequence[Work]:
        """Issue a gather of ``sent`` into ``unsharded`` and return its works; ``sent`` has to live until they are done."""
        with self.source.sending():
            return self.transport.all_gather(self, sent, unsharded)

    def is_kept_for_this_backward(self) -> bool:
        """Return whether the private slot holds what the running backward's own forward gathered.

        Another forward may have gathered other values since: parameters swapped in through ``.data`` change no version.
        """
        return self.kept_since is not None and is_backward_of(self.kept_since)

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
        """Return :attr:`unreduced` and the parameters it holds gradients of, for a reduction.

        Raises:
            RuntimeError: a backward under ``no_sync`` failed after it had added some of its gradients.
        """
        self._refuse_half_a_sum()
        return self.unreduced, self.unreduced_params

    def drop_unreduced(self) -> None:
        """Forget :attr:`unreduced`, after adding to ``.grad`` what the backward that reduced it cannot return."""
        for index, grad in self.late_grads.items():
            self.add_to_grad(index, grad)
        self.discard_unreduced()

    def discard_unreduced(self) -> None:
        """Forget :attr:`unreduced`."""
        self.unreduced, self.unreduced_params, self.late_grads, self.adding = None, set(), {}, False

    def _refuse_half_a_sum(self) -> None:
        if self.adding and self.adding_first:  # all of it is of the backward that failed
            self.discard_unreduced()
        elif self.adding:
            raise RuntimeError(
                f"a backward under no_sync failed after it had added gradients to bucket {self.spec.name!r}, so the sum is "
                f"not that of whole backwards. Call thunder_fsdp_sched.discard_unreduced(model) and repeat the "
                f"accumulation from its first batch"
            )

    def add_to_grad(self, index: int, grad: torch.Tensor) -> None:
        """Adds a sharded gradient to ``.grad`` as autograd does."""
        param = self.params[index]
        param.grad = grad if param.grad is None else param.grad.add_(grad)
        if self.ranks.group.size > 1:
            mark(param)

    def adopt(self, index: int, param: torch.nn.Parameter) -> None:
        """Makes ``param``, until now the unsharded parameter ``index``, this rank's shard; the object stays the same."""
        replace_data(param, self.shard_views[index])
        self.params = (*self.params[:index], param, *self.params[index + 1 :])
        # What is loaded through it counts as a change of the parameter, which a live graph has saved.
        view = param.detach()
        self.shard_views = (*self.shard_views[:index], view, *self.shard_views[index + 1 :])
        if self.ranks.group.size > 1:
            mark_after_backward(param)

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
