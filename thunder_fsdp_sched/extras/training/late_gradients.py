"""Gradients whose reduction nobody has waited for yet.

[Note: Late gradients]
A backward waits for each reduction before it returns, so nothing hides the last ones. With ``overlap_step`` it returns
:class:`LateRows` instead, over memory that the reduction fills. Whoever reads them waits first: operators, ``to_local`` and
everything else take the rows from one attribute, ``_local_tensor``. Then they are gradients like all others, of the class
``RowDTensor``. Only autograd's ``detach``, by which it stores a gradient, does not wait.

This moves a wait, and nothing else. Traces, proofs, what is sent and what ranks agree on are the same. The reduction stays
in flight in its arena, so the next use of its slot waits for it, as for one that an exception has left: see [Note: State
after an exception] in ``runtime.memory``. A gradient that is dropped unread leaves the rest to the arena.

A wait is put off until the next wait in the trace that follows another collective. So in the middle of a backward no more
reductions are in flight than planned, and at its end the last ones are late.

These are waited for at once: the end of a ``no_sync`` window, which adds to the result; all-reduces across replicas, which
use no slot; ``all_reduce_hook``, which may communicate, in the same order on all ranks; and shards on the CPU, to which a
copy blocks the host.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...errors import coded_error
from ...private_torch import register_foreach_type
from ...runtime.bucket import Bucket
from ...runtime.memory import InFlight
from ...runtime.moments import moment
from ...runtime.row_dtensor import DETACH, RowDTensor, construct


class LateGradients:
    """Gradients of one bucket that may not have arrived yet.

    They do not keep the bucket alive: the garbage collector does not see that a parameter refers to its gradient.

    Attributes:
        number: larger than that of each earlier one.
        has_arrived: whether somebody has waited for them.
    """

    def __init__(self, reduction: _LateReduction) -> None:
        self.number, self.has_arrived = moment(), False
        self._reduction = weakref.ref(reduction)

    def arrive(self) -> None:
        """Wait for them.

        Raises:
            RuntimeError: the reduction failed; the model is gone; or this is a forked process.
        """
        if self.has_arrived:
            return
        if (reduction := self._reduction()) is None:
            raise coded_error(RuntimeError, "gradient.model-gone-before-wait")
        reduction.finish()


class _LateReduction:
    """A reduction that somebody has to wait for.

    Args:
        bucket: the bucket.
        flight: the reduction, in a slot.
    """

    def __init__(self, bucket: Bucket, flight: InFlight) -> None:
        assert flight.output is not None and flight.slot is not None
        self._bucket, self._flight, self._lock = bucket, flight, threading.Lock()
        self._divisor, self._issued = bucket.divisor, bucket.issue_counts.issued
        is_cast = flight.output.dtype is not bucket.spec.dtype
        self._flat = torch.empty_like(flight.output, dtype=bucket.spec.dtype) if is_cast else flight.output
        self.gradients = LateGradients(self)

    def rows(self) -> tuple[RowDTensor, ...]:
        """Return a gradient for each shard."""
        return self._bucket.as_gradients(self._flat, partial(LateRows.over, self.gradients))

    @property
    def is_followed(self) -> bool:
        """Whether the model has issued another collective since backward should have waited for this one."""
        return self._bucket.issue_counts.issued > self._issued

    def finish(self) -> None:
        """Wait for it, and compute the gradients from its result."""
        with self._lock:
            if self.gradients.has_arrived:
                return
            flight = self._flight
            assert flight.output is not None and flight.slot is not None
            _ = self._bucket.ranks.group.process_group  # an error in a process that has none of its threads
            if flight.slot.arena.has_in_flight(flight):
                flight.slot.arena.finish(flight)
            if self._divisor is not None:
                flight.output.div_(self._divisor)
            if self._flat is not flight.output:
                self._flat.copy_(flight.output)
            self.gradients.has_arrived = True
            del self._flight, self._flat  # the next backward drops this object


_ROWS: Any = RowDTensor._local_tensor  # a descriptor


class LateRows(RowDTensor):
    """A gradient that waits for its reduction when its rows are first read: see [Note: Late gradients]."""

    late: LateGradients

    @classmethod
    def over(cls, late: LateGradients, local: torch.Tensor, spec: Any) -> LateRows:
        """Return a gradient with the rows ``local``, which ``late`` fills."""
        made: LateRows = construct(cls, local, spec, requires_grad=False)
        made.late = late
        return made

    @property
    def _local_tensor(self) -> torch.Tensor:
        self.arrive()
        rows: torch.Tensor = _ROWS.__get__(self)
        return rows

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:
        _ROWS.__set__(self, local)

    def arrive(self) -> LateRows:
        """Wait for the reduction and become a ``RowDTensor``."""
        if (late := late_of(self)) is not None:
            late.arrive()
        self.__class__ = RowDTensor  # type: ignore[assignment]
        vars(self).pop("late", None)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DETACH and (late := late_of(args[0])) is not None:
            return cls.over(late, _ROWS.__get__(args[0]), args[0]._spec)
        args, kwargs = tree_map_only(LateRows, LateRows.arrive, (args, kwargs or {}))
        return RowDTensor.__torch_dispatch__(func, types, args, kwargs)


register_foreach_type(LateRows)


def late_of(grad: RowDTensor) -> LateGradients | None:
    """Return what a gradient waits for, if nobody has waited for it yet."""
    late: LateGradients | None = vars(grad).get("late")
    return None if late is None or late.has_arrived else late


class Deferral:
    """What the buckets of one model call in place of the wait for a reduction."""

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
        self._open.append(reduction := _LateReduction(bucket, flight))
        return reduction.rows()
