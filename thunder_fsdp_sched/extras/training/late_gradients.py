"""Gradients whose reduction nobody has waited for yet.

[Note: Late gradients]
A backward waits for each reduction before it returns, so nothing hides the last ones. With ``overlap_step`` it returns
:class:`LateRows` instead, over memory that the reduction fills. Every reader waits first: operators, ``to_local`` and
all others take the rows from one attribute, ``_local_tensor``. Only autograd's ``detach``, with which it stores a
gradient, does not wait.

Only the time of the wait changes: traces, proofs, collectives and the agreement of ranks stay as they are. The reduction
remains in flight in its arena, so the next use of its slot waits for it, as for one that an exception has left in
flight: see [Note: State after an exception] in ``runtime.memory``. Readers do not change the arena, so they may run on
other threads.

On a GPU, the first reader makes backward's stream wait and compute the gradients, because their memory belongs to that
stream. Any other stream that reads them, or next uses the slot, waits once for an event after that.

A reduction is waited for at the first later wait of the trace before which another collective has been issued. So in
the middle of a backward no more reductions are in flight than planned, and at its end only the last ones are late.

These reductions are waited for at once: those that end a ``no_sync`` window, because their result is added to a sum;
all-reduces across replicas, which use no slot; those with an ``all_reduce_hook``, which may communicate, in the same
order on all ranks; and those of shards on the CPU, because the copy to the CPU blocks the host.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

import torch

from ...errors import coded_error
from ...private_torch import NO_CONTEXT, register_foreach_type
from ...runtime.autograd import moment
from ...runtime.bucket import Bucket
from ...runtime.memory import InFlight, InterruptedWork
from ...runtime.row_dtensor import DETACH, RowDTensor, construct


class LateGradients:
    """Gradients of one bucket that may not have arrived yet.

    They do not keep the bucket alive: the garbage collector does not see that a parameter refers to its gradient.

    Attributes:
        number: a number that increases from each reduction to the next.
        has_arrived: whether somebody has waited for them.
    """

    def __init__(self, reduction: _LateReduction) -> None:
        self.number, self.has_arrived = moment(), False
        self._reduction = weakref.ref(reduction)
        self._event: torch.cuda.Event | None = None
        self._following: list[torch.cuda.Stream] = []  # the streams that need not wait for the event

    def arrive(self) -> None:
        """Wait for them.

        Raises:
            RuntimeError: the reduction failed; the model is gone; or this is a forked process.
        """
        if self.has_arrived:
            self.follow()
        elif (reduction := self._reduction()) is None:
            raise coded_error(RuntimeError, "gradient.model-gone-before-wait")
        else:
            reduction.finish()

    def arrived(self, stream: torch.cuda.Stream | None) -> None:
        """Record that ``stream`` has computed them."""
        if stream is not None:
            self._event, self._following = stream.record_event(), [stream]
        self.has_arrived = True

    def follow(self) -> None:
        """Let the current stream wait until they are computed, once."""
        if self._event is not None:
            current = torch.cuda.current_stream(self._following[0].device)
            if current not in self._following:
                current.wait_event(self._event)
                self._following.append(current)


class _LateReduction:
    """A reduction that nobody has waited for yet, in place of the works of its flight.

    Args:
        bucket: the bucket.
        flight: the reduction, in flight in its arena.
    """

    def __init__(self, bucket: Bucket, flight: InFlight) -> None:
        assert flight.output is not None
        self._bucket, self._flight, self._lock = bucket, flight, threading.Lock()
        self._divisor, self._issued = bucket.divisor, bucket.issue_counts.issued
        device, is_cast = flight.output.device, flight.output.dtype is not bucket.spec.dtype
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        flat = torch.empty_like(flight.output, dtype=bucket.spec.dtype) if is_cast else flight.output
        self._flat: torch.Tensor | None = flat
        self.gradients = LateGradients(self)

    @property
    def flight(self) -> InFlight:
        """The entry that replaces the reduction in its arena: waiting for it also computes the gradients."""
        return self._flight._replace(works=(self,), output=None)

    def rows(self) -> tuple[RowDTensor, ...]:
        """Return a gradient for each shard."""
        assert self._flat is not None
        return self._bucket.as_gradients(self._flat, partial(LateRows.over, self.gradients))

    @property
    def is_followed(self) -> bool:
        """Whether the model has issued another collective since backward should have waited for this one."""
        return self._bucket.issue_counts.issued > self._issued

    def finish(self) -> None:
        """Wait for it as the arena does."""
        _ = self._bucket.ranks.group.process_group  # raises in a forked process
        self.flight.wait()

    def wait(self) -> None:
        """Wait for it, and compute the gradients from its result."""
        with self._lock:
            if self._flat is not None:
                with NO_CONTEXT if self._stream is None else torch.cuda.stream(self._stream):
                    self._compute(self._flat)
                self.gradients.arrived(self._stream)
                self._flight, self._flat = self._flight._replace(works=(), output=None), None
        self.gradients.follow()

    def _compute(self, flat: torch.Tensor) -> None:
        output, works = self._flight.output, self._flight.works
        assert output is not None
        for work in works:
            work.wait()
        self._flight = self._flight._replace(works=(InterruptedWork(),))  # an in-place division must not be repeated
        if self._divisor is not None:
            output.div_(self._divisor)
        if flat is not output:
            flat.copy_(output)


_ROWS: Any = RowDTensor._local_tensor  # a descriptor


class LateRows(RowDTensor):
    """A gradient that waits for its reduction whenever its rows are read: see [Note: Late gradients]."""

    late: LateGradients

    @classmethod
    def over(cls, late: LateGradients, local: torch.Tensor, spec: Any) -> LateRows:
        """Return a gradient with the rows ``local``, which ``late`` fills."""
        made: LateRows = construct(cls, local, spec, requires_grad=False)
        made.late = late
        return made

    @property
    def _local_tensor(self) -> torch.Tensor:
        self.late.arrive()
        rows: torch.Tensor = _ROWS.__get__(self)
        return rows

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:
        _ROWS.__set__(self, local)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DETACH:
            return cls.over(args[0].late, _ROWS.__get__(args[0]), args[0]._spec)
        return cls.run_operator(func, args, kwargs or {})


register_foreach_type(LateRows)


def late_of(grad: RowDTensor) -> LateGradients | None:
    """Return the late gradients of which ``grad`` is one, if nobody has waited for them yet."""
    return grad.late if isinstance(grad, LateRows) and not grad.late.has_arrived else None


class Deferral:
    """A function for the buckets of one model that defers the wait for a reduction, and returns late gradients."""

    def __init__(self) -> None:
        self._open: list[_LateReduction] = []

    def __call__(self, bucket: Bucket, flight: InFlight) -> tuple[torch.Tensor, ...] | None:
        """Return gradients without waiting for them; ``None`` if they cannot be late."""
        for reduction in self._open:
            if reduction.is_followed:
                reduction.finish()
        self._open = [reduction for reduction in self._open if not reduction.gradients.has_arrived]
        if flight.slot is None or bucket.base.all_reduce_hook is not None or bucket.spec.comm.offload:
            return None
        if not any(flight is other for other in flight.slot.arena.in_flight):  # a hook has used the slot
            return None
        self._open.append(reduction := _LateReduction(bucket, flight))
        flight.slot.arena.replace(reduction.flight)
        return reduction.rows()
