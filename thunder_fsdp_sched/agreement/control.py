"""Agreement of one model's ranks, before collectives, on the trace or call that they are about to run.

[Note: Agreement of ranks]
Before the collectives of a trace, a state dict, a checkpoint and so on, every rank announces which of these it is about
to run. That is a round of the channel (see [Note: Rounds] in ``channel``). In a trace, ``fsdp_agree`` posts the round
and ``fsdp_agreed`` settles it. With gloo it is settled before the first collective is issued, because gloo aborts the
process if sizes differ. With NCCL it is settled before the first result is waited for, so the round overlaps the first
collective.

A token identifies the *agreed program*, not the trace: ranks may run traces of different shapes whose collectives
match, and with ``process_group_for`` even different programs. ``Agreement.check`` compared the programs when they were
compiled and numbered those that match. Computations are compared as in [Note: Equal computations].

The token also contains how many more collectives this rank has issued than the traces that it started contain. That is
0 unless an exception interrupted a trace. Ranks that were interrupted at different collectives would otherwise match
collectives that do not belong together.
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

from ..distributed.process_groups import ProcessGroupRef
from ..runtime.bucket import Bucket
from ..runtime.coordination import IssueCounts
from ..transports.base import TransportedBucket
from .channel import TOKEN, Channel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..ir.computation import Computation

__all__ = ["Agreed", "Control", "Run", "control_of", "number_of"]

_BITS = 60
"""How many bits of a token's integers stand for buckets. Buckets whose numbers differ by a multiple of this share one."""


class Control:
    """One model's use of the control channel. Without other ranks it sends nothing.

    Args:
        group: the ranks that share the model.
        channel: their channel; ``None`` if there are no other ranks.
        name: the model's unique name, the same on all ranks.
        title: the model's name in messages.
    """

    def __init__(
        self, group: ProcessGroupRef, channel: Channel | None = None, name: str = "", title: str = "the model"
    ) -> None:
        self.channel = channel
        self.title = title
        self.issue_counts = IssueCounts()
        if channel is not None:
            self.issue_counts.settle = channel.settle
        self._size = group.size
        self._number = number_of(name)
        self._rank = group.global_ranks[group.rank] if group.global_ranks else 0
        _controls[group] = self

    @property
    def is_single_rank(self) -> bool:
        """Whether there are no other ranks to agree with."""
        return self.channel is None

    def is_on_all_ranks(self, bucket: TransportedBucket) -> bool:
        """Return whether all ranks have ``bucket``; with ``process_group_for`` some may have other parameters."""
        return bucket.ranks.group.size * bucket.spec.replicas == self._size

    def process_group(self, otherwise: ProcessGroupRef) -> ProcessGroup:
        """Return the process group for collectives of torch itself after a meeting; ``otherwise`` without other ranks."""
        return (otherwise if self.channel is None else self.channel.group).process_group

    def rendezvous(self, what: str, *details: str) -> None:
        """Wait until all ranks have reached the same call.

        Args:
            what: the call.
            details: values that must be the same on all ranks, such as the names of parameters.

        Raises:
            ScheduleDisagreement: a rank does something else, or does not arrive in time.
        """
        if self.channel is not None:
            self.begin(what, *details)
            self.channel.settle()

    def begin(self, what: str, *details: str) -> None:
        """Start a :meth:`meet` without waiting; ``settle`` completes it."""
        if self.channel is not None:
            excess = self.issue_counts.issued - self.issue_counts.expected
            call = _Call(" ".join((what, *details)), self.title, excess)
            token = TOKEN.pack(number_of(what), self._number, number_of("\n".join(details)), 0, excess, 0, 0, 0)
            self.channel.post(token, call)

    def settle(self) -> None:
        """Settle the latest round if it is still pending."""
        if self.channel is not None:
            self.channel.settle()

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Meet the other ranks and return the objects of all ranks, in the order of ranks."""
        if self.channel is None:
            return [value]
        self.rendezvous(what)
        with self.doing(f"the exchange of {what}"):
            return self.channel.gather(value)

    def reduce(self, what: str, values: Sequence[float], op: Any) -> list[float]:
        """Meet the other ranks and reduce numbers over all ranks, on the host."""
        if self.channel is None:
            return list(values)
        self.rendezvous(what)
        tensor = torch.tensor(values, dtype=torch.float64)
        with self.doing(f"the reduction of {what}"):
            dist.all_reduce(tensor, op=op, group=self.channel.group.process_group)
        return tensor.tolist()

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Wrap a collective so that its error names this rank, the collective, and what happened on the other ranks."""
        try:
            yield
        except RuntimeError as error:
            text = f"rank {self._rank}: {what} failed: {error}"
            raise RuntimeError(f"{text}\n{self.explain(text)}".rstrip()) from error

    def explain(self, text: str) -> str:
        """Report a failure to the other ranks and return their reports; empty without other ranks."""
        return self.channel.explain(text) if self.channel is not None else ""


class Agreed(NamedTuple):
    """The result of comparing a program among the ranks.

    Attributes:
        program: the program's number on the control channel, the same on all ranks whose programs match.
        communicates: whether any rank issues a collective.
        compares_computation: whether the computations of the ranks must be equal.
    """

    program: int
    communicates: bool
    compares_computation: bool


class Run:
    """A compiled trace on the control channel: the opaque argument of ``fsdp_agree``, which prints its name.

    Args:
        name: the name that it prints.
        agreed: the result of comparing the programs of all ranks.
        text: a description of the trace: its inputs and flags.
        computation: the computation of the trace.
        issues: the number of collectives that it issues.
    """

    def __init__(
        self,
        control: Control,
        name: str,
        agreed: Agreed,
        text: str,
        computation: Computation,
        issues: int,
    ) -> None:
        self.control = control
        self.name = name
        self.text = text
        self._lines = computation.trace_lines
        self.issues = 2 * issues  # each collective counts twice
        self.left_over: list[weakref.ref[Bucket]] = []
        """Buckets whose unreduced gradients from ``no_sync`` the trace reduces if there are any."""
        self.guarded: list[weakref.ref[Bucket]] = []
        """Buckets that the trace gathers again if their private slots have been overwritten."""
        self.reusing: list[weakref.ref[Bucket]] = []
        """Buckets that the trace does not gather if an earlier micro-batch has, on all ranks; see :meth:`take`."""
        self._program = agreed.program
        compared = computation.digests if agreed.compares_computation else ("", "", "")
        self._computation = [number_of(digest) for digest in compared]
        self._usual = self._token(0)
        self._excess, self._reduced, self._begun = 0, 0, 0

    def __repr__(self) -> str:
        return self.name

    def post(self) -> None:
        """Announce to the other ranks that this trace starts."""
        issue_counts = self.control.issue_counts
        self._excess = excess = issue_counts.issued - issue_counts.expected
        self._begun = self.issues
        self._reduced = again = 0
        for i, reference in enumerate(self.guarded):
            bucket = reference()
            if bucket is not None and not bucket.is_kept_for_this_backward():
                again |= self.control.is_on_all_ranks(bucket) << i % _BITS
                self._begun += 2
        for i, reference in enumerate(self.left_over):
            bucket = reference()
            if bucket is None:
                continue
            bucket.accumulation.check_complete()
            if not bucket.ends_window():
                continue
            collectives = (bucket.accumulation.unsharded is not None) + (bucket.ranks.replicas is not None)
            self._reduced |= (self.control.is_on_all_ranks(bucket) and collectives > 0) << i % _BITS
            self._begun += 2 * collectives
        offers = self._offered()
        state = excess, self._reduced, again
        token = self._token(hash(state), offers) if offers or any(state) else self._usual
        assert self.control.channel is not None
        self.control.channel.post(token, self)
        issue_counts.expected += self._begun

    def settle(self) -> None:
        """Wait until all ranks have announced it."""
        self.control.settle()

    def describe(self) -> str:
        reduced = ", which also reduces gradients of no_sync," if self._reduced else ""
        return f"the {self.text} of {self.control.title}{reduced}{_after(self._excess)}"

    def details(self) -> Sequence[str]:
        return self._lines

    def cancel(self) -> None:
        self.control.issue_counts.expected -= self._begun
        self._begun = 0

    def _offered(self) -> int:
        """Return a bit for each bucket that this rank could reuse; those that share a bit are reused together."""
        offered, missing = 0, 0
        for i, reference in enumerate(self.reusing):
            bucket = reference()
            if bucket is not None:
                bucket.window.is_agreed = False
                if bucket.offers_reuse() and self.control.is_on_all_ranks(bucket):
                    offered |= 1 << i % _BITS
                    continue
            missing |= 1 << i % _BITS
        return offered & ~missing

    def take(self, offers: int) -> None:
        """Let the buckets be reused that all ranks have offered."""
        for i, reference in enumerate(self.reusing):
            bucket = reference()
            if bucket is not None:
                bucket.window.is_agreed = bool(offers >> i % _BITS & 1)

    def _token(self, state: int, offers: int = 0) -> bytes:
        comparable, inputs, exact = self._computation
        return TOKEN.pack(_TRACE, self.control._number, self._program, comparable, state, inputs, exact, offers)


class _Call:
    """A call that communicates outside of traces."""

    def __init__(self, what: str, title: str, excess: int) -> None:
        self._what, self._title, self._excess = what, title, excess

    def describe(self) -> str:
        return f"{self._what} of {self._title}{_after(self._excess)}"

    def details(self) -> Sequence[str]:
        return ()

    def cancel(self) -> None:
        pass

    def take(self, offers: int) -> None:
        pass


def _after(excess: int) -> str:
    if not excess:
        return ""
    return f", after an exception or the like {abs(excess) / 2:g} collectives {'short' if excess < 0 else 'ahead'}"


@lru_cache(maxsize=4096)
def number_of(text: str) -> int:
    """Return the hash of a text as an integer for a token."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


_TRACE = number_of("trace")

_controls: weakref.WeakKeyDictionary[ProcessGroupRef, Control] = weakref.WeakKeyDictionary()


def control_of(group: ProcessGroupRef) -> Control:
    """Return the control of the model that ``group`` shares, or one without other ranks if there is none."""
    return _controls.get(group) or Control(group)
