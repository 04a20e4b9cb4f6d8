"""A bucket at run time: its shard buffer, its parameters and its collectives.

See [Note: Ownership of memory] and [Note: State after an exception] in ``memory``.

[Note: Gathered once in a window]
An accumulation window is a sequence of micro-batches under ``no_sync``, and the one after it that reduces gradients. A
bucket that stays unsharded between forward and backward (ZeRO-2, or chosen by ``max_memory``) stays so between
micro-batches, too: its private slot belongs to no other bucket. So the forward of a later micro-batch sends nothing if

* the slot still contains it: see [Note: Contents of slots] in ``memory``;
* it was gathered there by a forward under ``no_sync`` with a backward. Evaluations, backwards, and the forward after
  ``no_sync`` leave nothing to reuse;
* no parameter of the bucket has changed since. Every write through a parameter or its ``.data`` counts, as does each step
  of an optimizer in this process. Writes that torch cannot see, by kernels of others or through ``to_local().data``, do
  not: no window may contain them, unless ``Sharding(reshard_after_backward=True)`` gathers in each micro-batch;
* all of that holds on every rank. Each rank offers what it could reuse in the round of agreement at the start of forward,
  and only what all of them offer is reused. So a rank that has changed its own rows never skips a gather alone, and
  others do not skip it either.
"""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import coded_error
from ..extensions import load
from ..plan.specs import BucketSpec
from ..private_torch import NO_CONTEXT
from ..ranks.control import Control
from ..ranks.rounds import IssueCounts
from ..transports import transport_of
from ..transports.base import Views, Work
from .accumulation import Accumulation
from .autograd import requested, wanted
from .memory import Arena, InFlight, Slot, address, slot_bytes
from .names import optimizer_steps
from .row_dtensor import RowDTensor
from .rows import Rows

if TYPE_CHECKING:
    from ..ranks.process_groups import BucketRanks


class ShardSource:
    """The source of the tensor that a gather sends: the shard itself. ``extras.low_precision.cast_source`` casts it."""

    def __init__(self, spec: BucketSpec, shard: torch.Tensor) -> None:
        self._spec = spec
        self._shard = shard

    def shard(self, *, reuse_cast: bool) -> torch.Tensor:
        """Return the flat shard on the device and in the dtype in which it is sent; valid until the gather finishes.

        Args:
            reuse_cast: return the tensor that forward sent if it is known to be up to date.
        """
        return self._shard

    def send_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which to issue the gather of the tensor that :meth:`shard` has just returned."""
        return NO_CONTEXT

    def finish_copy(self) -> None:
        """Wait until the host may write the shard again, if it was offloaded: see ``extras.shard_offload``."""

    def free(self) -> None:
        """Free the tensor that :meth:`shard` has returned, after its gather."""


WINDOW_OPEN = "open"
"""The mark of a gather in a forward under ``no_sync``: it may reuse an earlier one, and may be reused by a later one."""

WINDOW_LAST = "last"
"""The mark of a gather in a forward whose backward reduces gradients: it may reuse an earlier one, but is not reused."""

WINDOW_FIRST = "first"
"""The mark of a gather at the start of a forward, into memory that no statement before it uses: it may take over a
gather that the optimizer's step has begun. See ``extras.training.early_gathers``."""


class Bucket:
    """A bucket at run time, and the opaque handle that represents it in traces.

    It is compared and hashed by identity, so two models, or two plans of one model, share nothing.

    Args:
        spec: the planned bucket.
        ranks: the ranks that share the bucket.
        arena: memory for the slots that the bucket shares with others.
        handle: the name under which it prints.
        base: for a bucket alias (``bucket_aliases``), the bucket whose shard and parameters it uses.
        primary: for a secondary, its primary bucket.
        secondary_ranks: the ranks among which backward gathers it; ``None`` if they are ``ranks``.
        peer_memory: the ``PeerMemory`` that allocates the sent tensor if peers read it there; it knows the bucket.
        accumulation: the class that adds up the gradients of a window.

    Attributes:
        source: provides the tensor that a gather sends.
        base: the bucket itself; for a bucket alias, the bucket that it stands for.
        primary: the bucket itself; for a secondary, the bucket that gathers the same values from primary shards. See
            [Note: Secondary shards] in ``extras.secondary_shards``.
        shard: the flat shard buffer.
        shard_views: this rank's rows of each parameter, as views of ``shard``.
        rows: which rows of each parameter each rank has.
        params: the parameters, DTensors over ``shard_views``.
    """

    source: ShardSource
    shard: torch.Tensor
    params: tuple[torch.nn.Parameter, ...]
    issue_counts: IssueCounts

    def __init__(
        self,
        spec: BucketSpec,
        ranks: BucketRanks,
        arena: Arena,
        handle: str,
        *,
        base: Bucket | None = None,
        primary: Bucket | None = None,
        secondary_ranks: BucketRanks | None = None,
        peer_memory: Any = None,
        accumulation: type[Accumulation] = Accumulation,
    ) -> None:
        self.spec = spec
        self.base: Bucket = base or self
        self.primary: Bucket = primary or self
        self.ranks = ranks
        self.secondary_ranks = secondary_ranks
        self.rank = ranks.group.rank
        self.transport = transport_of(spec)
        self.arena = arena
        self.handle = handle
        own = Arena(spec.device, arena)
        self.private_slot = own.slot(0, slot_bytes(spec, spec.param_dtype), handle.replace("bucket", "own", 1))
        """Where the bucket stays from forward to backward, if it is kept (ZeRO-2); allocated by the first gather into it."""
        self.issue_counts = IssueCounts() if base is None else base.issue_counts
        self.peer_memory = peer_memory
        self.is_reuse_agreed: bool | None = None
        """Whether the latest round of agreement lets all ranks reuse the bucket; ``None`` if this rank decides alone."""
        if base is None:
            self.shard = self._allocate_shard()
            self.shard_views = spec.layout.shard_views(self.rank, self.shard)
        else:
            index_of = {param.name: i for i, param in enumerate(base.spec.params)}
            self.shard = base.shard
            self.shard_views = tuple(base.shard_views[index_of[param.name]] for param in spec.params)
            self.params = tuple(base.params[index_of[param.name]] for param in spec.params)
        self.shard_pointers = tuple(map(address, self.shard_views))
        reference = weakref.ref(self)
        self.rows = tuple(
            Rows(torch.Size(placement.shape), placement.row_starts, ranks, param.name, (reference, index))
            for index, (placement, param) in enumerate(zip(spec.layout.placements, spec.params, strict=True))
        )
        if base is None:
            self.params = tuple(
                torch.nn.Parameter(RowDTensor.wrap(view, rows), param.requires_grad)
                for view, rows, param in zip(self.shard_views, self.rows, spec.params, strict=True)
            )
        self.all_reduce_hook: Callable[[str, torch.Tensor], None] | None = None
        """The user's function that is called with the name and the flat reduced gradients of the bucket."""
        self.defer: Callable[[Bucket, InFlight], tuple[torch.Tensor, ...] | None] | None = None
        """Returns gradients without waiting for their reduction, if it can: see ``extras.training.late_gradients``."""
        self.early: Any = None
        """The ``EarlyGathers`` of the model, if its optimizer's steps begin the gathers of the next forward."""
        self.control: Control | None = None
        """The agreement of the model's ranks on what runs next."""
        self.accumulation = accumulation(spec)
        if spec.comm.offload:
            self.source = load("extras.shard_offload:OffloadedShardSource")(spec, self.shard)
        elif spec.sends_copy:
            self.source = load("extras.low_precision.cast_source:CastShardSource")(
                spec, self.shard, self.allocate_sent, self.version
            )
        else:
            self.source = ShardSource(spec, self.shard)
        self.aliases: dict[Any, Bucket] = {}
        """Aliases of this bucket, gathered in another way; see ``bucket_aliases``."""

    def __repr__(self) -> str:
        return self.handle

    def temporary_slot(self, dtype: torch.dtype) -> Slot:
        """Return a slot in an arena of its own, for a collective that no trace contains."""
        return Arena(self.spec.device, self.arena).slot(0, slot_bytes(self.spec, dtype))

    @property
    def hook_name(self) -> str | None:
        """The name of :attr:`all_reduce_hook` in traces."""
        hook = self.base.all_reduce_hook
        return None if hook is None else getattr(hook, "__qualname__", type(hook).__qualname__)

    @property
    def is_on_all_ranks(self) -> bool:
        """Whether all ranks of the model have it; with ``process_group_for`` some may have other parameters."""
        control = self.base.control
        return control is None or self.ranks.averaged == control.group.size

    def failure(self, what: str, error: RuntimeError) -> RuntimeError:
        """Return the error for a failed collective. It names this rank, the bucket, the line of the trace and the
        cause.

        This reports the failure to the other ranks, and adds their reports to the message.
        """
        rank, control = self.ranks.group.global_ranks[self.rank], self.base.control
        traces = [frame for frame in traceback.extract_stack() if frame.filename.startswith("thunder.")]
        line = f"\nin line {traces[-1].lineno} of {traces[-1].name}: {traces[-1].line}" if traces else ""
        failure = coded_error(
            RuntimeError, "step.collective-failed", rank=rank, what=what, bucket=self.spec.name, error=error, line=line
        )
        return failure if control is None else control.explained(failure)

    def lost_shard(self, index: int) -> RuntimeError:
        """Return the error for a parameter whose memory is no longer in the shard buffer."""
        return coded_error(
            RuntimeError,
            "parameter.outside-shard-buffer",
            parameter=self.spec.params[index].name,
            bucket=self.spec.name,
        )

    def _allocate_shard(self) -> torch.Tensor:
        spec = self.spec
        if spec.sends_copy:
            shard = torch.zeros(spec.layout.shard_numel, dtype=spec.dtype, device=spec.shard_device)
        else:
            shard = self.allocate_sent()
        return shard.pin_memory() if spec.comm.pin_memory else shard

    def allocate_sent(self) -> torch.Tensor:
        """Allocate what gathers send: the flat shard, or memory for a cast or an encoding of it."""
        spec = self.spec
        if self.peer_memory is not None:
            return self.peer_memory.take(spec.name)
        return self.transport.allocate(*spec.sent_shard, spec.shard_device, self.ranks)

    @functools.cached_property
    def feedback(self) -> Any:
        """The rounding errors of this rank's last gradients, an ``ErrorFeedback``."""
        return load("extras.low_precision.encoded:ErrorFeedback")(self.spec, functools.partial(wanted, self.params))

    @property
    def scratch(self) -> dict[tuple[torch.dtype, int], list[torch.Tensor]]:
        """Idle temporary memory of transports, keyed by dtype and number of elements."""
        return self.arena.scratch

    def gather_into(self, unsharded: Views, sent: torch.Tensor) -> Sequence[Work]:
        """Issue a gather of ``sent``, which ``source.shard`` has just returned, and return its works.

        Keep ``sent`` alive until they finish.
        """
        if unsharded.flat is sent:  # see `is_whole_in`
            _ = self.ranks.group.process_group  # an error if it was destroyed, or belongs to a parent process
            return ()
        with self.source.send_context():
            return self.transport.all_gather(self, sent, unsharded)

    def is_whole_in(self, slot: Slot) -> bool:
        """Return whether the shard takes the place of a gather into ``slot``: it is the whole bucket, sent unchanged.

        Callers outside of traces get copies, which they may write.
        """
        spec = self.spec
        is_sent_unchanged = spec.comm.transport == "flat" and not (spec.sends_copy or spec.comm.offload)
        is_of_trace = slot is self.private_slot or slot.arena in (self.arena, self.arena.extension)
        has_secondary = self.primary is not self or spec.options.secondary_ranks is not None
        return self.ranks.group.size == 1 and is_sent_unchanged and is_of_trace and not has_secondary

    def version(self) -> tuple[int, ...]:
        """Return numbers that differ after each detectable write to the shard; see [Note: Reuse of casts]
        in ``extras.low_precision.cast_source``."""
        return (optimizer_steps(), self.shard._version, *(p._version for p in self.params))

    def ends_window(self) -> bool:
        """Return whether the running backward ends a ``no_sync`` window: whether it returns the accumulated gradients.

        It does not if it was called for other parameters: see [Note: Requested gradients] in ``autograd``.

        Raises:
            RuntimeError: it was called for some of the parameters with accumulated gradients.
        """
        if not (accumulated := self.accumulation.params):
            return False
        others = accumulated - requested(self.params)
        if others and others != accumulated:
            raise coded_error(
                RuntimeError,
                "step.backward-for-some-parameters",
                bucket=self.spec.name,
                parameter=self.spec.params[min(others)].name,
            )
        return not others

    def is_resident(self, slot: Slot, *, in_window: bool) -> bool:
        """Return whether the bucket is resident in ``slot``, so that a gather need not send anything.

        Args:
            in_window: whether it is for a forward in a window; otherwise it is for the running backward.
        """
        contents = slot.arena.contents.get(slot)
        if contents is None and in_window and (flight := slot.arena.gather_in(slot)) is not None:
            contents = flight.contents
        if contents is None or contents.bucket is not self.primary:
            return False
        if in_window:
            return contents.version is not None and contents.version == self.version()
        return contents.is_for_running_backward()

    def sharded_grads(self, reduced: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradient of each shard, in dtype and on device of shards.

        Args:
            reduced: the flat mean of the gradients over ranks, which this may modify and keep.
        """
        spec = self.spec
        if (hook := self.base.all_reduce_hook) is not None and (answer := hook(spec.name, reduced)) is not None:
            raise coded_error(
                TypeError,
                "gradient.hook-returned-value",
                hook=self.hook_name,
                bucket=spec.name,
                got=type(answer).__name__,
            )
        if (divisor := self.divisor) is not None:
            reduced.div_(divisor)
        flat = reduced if reduced.dtype is spec.dtype else reduced.to(spec.dtype)
        if spec.comm.offload:
            # The copy blocks the host: autograd may add it to a gradient at once, and the optimizer reads it.
            on_host = torch.empty_like(flat, device="cpu", pin_memory=spec.comm.pin_memory)
            flat = on_host.copy_(flat)
        return self.as_gradients(flat, RowDTensor.of_spec)

    @property
    def divisor(self) -> float | None:
        """The number by which reduced gradients are still to be divided; ``None`` if the mean over ranks is wanted.

        Transports return that mean: they divide by the number of ranks as they send or add up. If the number of ranks is a
        power of two, dividing the mean gives the same bits as dividing the sum.
        """
        factor = self.base.spec.options.gradient_divide_factor  # may change after compiling
        return None if factor is None or factor == self.ranks.averaged else factor / self.ranks.averaged

    def as_gradients(self, flat: torch.Tensor, wrap: Callable[..., RowDTensor]) -> tuple[RowDTensor, ...]:
        """Return the gradient of each shard as a view of ``flat``; ``wrap`` is called with the rows and their spec."""
        assert flat.storage_offset() == 0
        *layout, specs = self._grads_in_shard
        return tuple(map(wrap, map(flat.as_strided, *layout), specs))

    @functools.cached_property
    def _grads_in_shard(self) -> tuple[list[Any], ...]:
        """The shapes, strides and offsets of the rows in a flat shard, and their specs; a step only looks them up."""
        views, spec = self.shard_views, self.spec
        return (
            [view.shape for view in views],
            [view.stride() for view in views],
            [view.storage_offset() - self.shard.storage_offset() for view in views],
            [rows.spec(spec.dtype, spec.shard_device.type) for rows in self.rows],
        )

    @functools.cached_property
    def local_slices(self) -> list[tuple[slice, slice]]:
        """Pairs of slices: elements of the shard, and the same elements in the unsharded buffer."""
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

    def sum_to_param(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Return an unsharded gradient, summed to the shape of its parameter as autograd does for the unsharded model.

        Thunder leaves the gradient of a 0-dim parameter broadcast, and after some operators a gradient's shape in the
        trace differs from its shape at run time.

        Raises:
            RuntimeError: it is not a broadcast of that shape.
        """
        param = self.spec.params[index]
        if grad.shape == param.shape:
            return grad
        try:
            return grad.sum_to_size(param.shape)
        except RuntimeError as error:
            raise coded_error(
                RuntimeError,
                "gradient.shape-does-not-fit",
                name=param.name,
                got=tuple(grad.shape),
                expected=param.shape,
            ) from error

    def write_rows(self, index: int, rows: torch.Tensor) -> None:
        """Copy ``rows`` into the shard of parameter ``index``, so that autograd sees the change in saved tensors."""
        self.shard_views[index].copy_(rows)
        torch.autograd.graph.increment_version(self.params[index])


def handle_name(bucket_name: str) -> str:
    """Return a Python identifier for a bucket's name: ``transformer.h.0`` -> ``bucket_transformer_h_0``."""
    return "bucket_" + re.sub(r"\W", "_", bucket_name)
