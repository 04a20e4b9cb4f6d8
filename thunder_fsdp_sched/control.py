"""The control channel as one model uses it: which trace or call each rank is about to run.

[Note: When ranks agree]
Before the collectives of a trace, of a state dict, of a checkpoint and so on, every rank says which it is: a round of the
channel (see [Note: Rounds] in ``channel``). In a trace ``fsdp_agree`` posts the round and ``fsdp_agreed`` settles it:
with gloo before the first collective is issued, because gloo aborts the process where sizes differ; with NCCL before the
first result is waited for, so that the round overlaps with the first collective.

A token names the *agreed program*, not the trace: ranks may run traces of different shapes whose collectives fit
together, and with ``process_group_for`` even programs that differ. ``Agreement.check`` found out when they were compiled,
and numbered what fits. What the traces compute is compared as in [Note: When computations are the same]. The token also
counts the collectives that this rank has issued beyond those of the traces that it has begun. The count is 0 unless an
exception cut a trace short, and ranks that were cut short at different collectives would pair collectives that do not
belong together.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from .buffers import Bucket
from .channel import TOKEN, Channel
from .coordination import Tally
from .groups import Group
from .transports.base import TransportedBucket

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .computation import Computation

__all__ = ["Agreed", "Control", "Run", "control_of", "number_of"]


class Control:
    """One model's use of the channel. Without other ranks it says nothing.

    Args:
        group: the ranks that the model is shared among.
        channel: theirs; ``None`` if there is nobody to agree with.
        name: the model's, the same on all ranks, different from those of other models.
        title: the model's name for people.
    """

    def __init__(self, group: Group, channel: Channel | None = None, name: str = "", title: str = "the model") -> None:
        self.channel = channel
        self.title = title
        self.tally = Tally()
        if channel is not None:
            self.tally.settle = channel.settle
        self._size = group.size
        self._number = number_of(name)
        self._rank = group.global_ranks[group.rank] if group.global_ranks else 0
        _controls[group] = self

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.channel is None

    def concerns_all(self, bucket: TransportedBucket) -> bool:
        """Whether all ranks have ``bucket``: with ``process_group_for`` some may have other parameters."""
        return bucket.ranks.group.size * bucket.spec.replicas == self._size

    def process_group(self, otherwise: Group) -> ProcessGroup:
        """The process group for traffic of torch's own that all ranks have met for; ``otherwise`` if this is alone."""
        return (otherwise if self.channel is None else self.channel.group).process_group

    def meet(self, what: str, *details: str) -> None:
        """Wait until all ranks have come to the same call.

        Args:
            what: the call.
            details: what else has to be the same on all ranks, such as the names of parameters.

        Raises:
            ScheduleDisagreement: a rank does something else, or does not come.
        """
        if self.channel is not None:
            self.begin(what, *details)
            self.channel.settle()

    def begin(self, what: str, *details: str) -> None:
        """Begin to :meth:`meet`; ``settle`` ends it."""
        if self.channel is not None:
            excess = self.tally.issued - self.tally.expected
            call = _Call(" ".join((what, *details)), self.title, excess)
            token = TOKEN.pack(number_of(what), self._number, number_of("\n".join(details)), 0, excess, 0, 0)
            self.channel.post(token, call)

    def settle(self) -> None:
        """Settle the round that was begun last, if that has not been done."""
        if self.channel is not None:
            self.channel.settle()

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Exchange an object with every rank that has come to the same call; in the order of ranks."""
        if self.channel is None:
            return [value]
        self.meet(what)
        with self.doing(f"the exchange of {what}"):
            return self.channel.gather(value)

    def reduce(self, what: str, values: Sequence[float], op: Any) -> list[float]:
        """Reduce numbers over every rank that has come to the same call, on the host."""
        if self.channel is None:
            return list(values)
        self.meet(what)
        tensor = torch.tensor(values, dtype=torch.float64)
        with self.doing(f"the reduction of {what}"):
            dist.all_reduce(tensor, op=op, group=self.channel.group.process_group)
        return tensor.tolist()

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Around a collective: if it fails, the error names this rank, the collective and what happened to the others."""
        try:
            yield
        except RuntimeError as error:
            text = f"rank {self._rank}: {what} failed: {error}"
            raise RuntimeError(f"{text}\n{self.explain(text)}".rstrip()) from error

    def explain(self, text: str) -> str:
        """Tell the other ranks what failed here and return what they tell; nothing without other ranks."""
        return self.channel.explain(text) if self.channel is not None else ""


class Agreed(NamedTuple):
    """The result of comparing a program among the ranks.

    Attributes:
        program: the number under which it goes on the control channel, the same on all ranks whose programs fit together.
        communicates: whether any rank issues a collective.
        compares_computation: whether the computations of the ranks have to be equal.
    """

    program: int
    communicates: bool
    compares_computation: bool


class Run:
    """A compiled trace as the channel knows it; an opaque argument of ``fsdp_agree`` that prints under its name.

    Args:
        name: under which it prints.
        agreed: what the ranks found when they compared their programs.
        text: describes the trace: its inputs and flags.
        computation: what it computes.
        lines: all lines.
        issues: collectives that it issues.
    """

    def __init__(
        self,
        control: Control,
        name: str,
        agreed: Agreed,
        text: str,
        computation: Computation,
        lines: Sequence[str],
        issues: int,
    ) -> None:
        self.control = control
        self.name = name
        self.text = text
        self.lines = lines
        self.issues = 2 * issues  # each counts twice
        self.left_over: list[weakref.ref[Bucket]] = []
        """Buckets whose gradients of ``no_sync`` the trace reduces if there are any."""
        self.guarded: list[weakref.ref[Bucket]] = []
        """Buckets that the trace gathers again if something else has written their private slots."""
        self._program = agreed.program
        compared = computation.digests if agreed.compares_computation else ("", "", "")
        self._computation = [number_of(digest) for digest in compared]
        self._usual = self._token(0)
        self._excess, self._reduced, self._begun = 0, 0, 0

    def __repr__(self) -> str:
        return self.name

    def post(self) -> None:
        """Tell the other ranks that this trace begins."""
        tally = self.control.tally
        self._excess = excess = tally.issued - tally.expected
        self._begun = self.issues
        self._reduced = again = 0
        for i, reference in enumerate(self.guarded):
            bucket = reference()
            if bucket is not None and not bucket.is_kept_for_this_backward():
                again |= self.control.concerns_all(bucket) << i % 60
                self._begun += 2
        for i, reference in enumerate(self.left_over):
            bucket = reference()
            if bucket is not None and bucket.unreduced_grads()[0] is not None:
                self._reduced |= self.control.concerns_all(bucket) << i % 60
                self._begun += 2 if bucket.ranks.replicas is None else 4
        state = excess, self._reduced, again
        token = self._token(hash(state)) if any(state) else self._usual
        assert self.control.channel is not None
        self.control.channel.post(token, self)
        tally.expected += self._begun

    def settle(self) -> None:
        """Wait until all ranks have said that they run it."""
        self.control.settle()

    def describe(self) -> str:
        reduced = ", which also reduces gradients of no_sync," if self._reduced else ""
        return f"the {self.text} of {self.control.title}{reduced}{_after(self._excess)}"

    def details(self) -> Sequence[str]:
        return self.lines

    def cancel(self) -> None:
        self.control.tally.expected -= self._begun
        self._begun = 0

    def _token(self, state: int) -> bytes:
        comparable, inputs, exact = self._computation
        return TOKEN.pack(_TRACE, self.control._number, self._program, comparable, state, inputs, exact)


class _Call:
    """A call that communicates outside of a trace."""

    def __init__(self, what: str, title: str, excess: int) -> None:
        self._what, self._title, self._excess = what, title, excess

    def describe(self) -> str:
        return f"{self._what} of {self._title}{_after(self._excess)}"

    def details(self) -> Sequence[str]:
        return ()

    def cancel(self) -> None:
        pass


def _after(excess: int) -> str:
    if not excess:
        return ""
    return f", after an exception or the like {abs(excess) / 2:g} collectives {'short' if excess < 0 else 'ahead'}"


@lru_cache(maxsize=4096)
def number_of(text: str) -> int:
    """A text as an integer of a token."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


_TRACE = number_of("trace")

_controls: weakref.WeakKeyDictionary[Group, Control] = weakref.WeakKeyDictionary()


def control_of(group: Group) -> Control:
    """The control of the model that is shared among ``group``; one without other ranks if there is none."""
    return _controls.get(group) or Control(group)
