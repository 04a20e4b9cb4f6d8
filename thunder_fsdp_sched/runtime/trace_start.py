"""The start of a compiled trace, as ranks announce it: see [Note: Agreement of ranks] in ``ranks.control``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from ..private_torch import backward_number
from ..ranks.channel import TOKEN, RoundAction
from ..ranks.control import AgreedProgram, Computation, Control, after_excess, hash64
from .bucket import Bucket

_BITS = 60
"""How many bits of a token's integers stand for buckets. Buckets whose numbers differ by a multiple of this share one."""

_FAILURE = 1 << 61
"""The bit of a rank that has an error to raise. It is raised when all ranks have it, so that all raise it at once."""


class TraceStart(RoundAction):
    """A compiled trace on the control channel: the opaque argument of ``fsdp_agree``, which prints its name.

    Args:
        name: the name that it prints.
        agreed: the result of comparing the programs of all ranks.
        text: a description of the trace: its inputs and flags.
        computation: the computation of the trace.
        issues: the number of collectives that it issues.
    """

    def __init__(
        self, control: Control, name: str, agreed: AgreedProgram, text: str, computation: Computation, issues: int
    ) -> None:
        self.control = control
        self.name = name
        self.text = text
        self._lines = computation.trace_lines
        self.issues = 2 * issues  # each collective counts twice
        self.left_over: list[weakref.ref[Bucket]] = []
        """Buckets whose unreduced gradients from ``no_sync`` the trace reduces if there are any."""
        self.ending: list[tuple[weakref.ref[Bucket], frozenset[int]]] = []
        """Buckets that the trace reduces, each with the parameters of which it computes no gradient itself."""
        self.guarded: list[weakref.ref[Bucket]] = []
        """Buckets that the trace gathers again if their private slots have been overwritten."""
        self.reusing: list[weakref.ref[Bucket]] = []
        """Buckets that the trace does not gather if an earlier micro-batch has, on all ranks; see :meth:`take`."""
        comparable, self._inputs, self._exact = computation.hashes if agreed.compares_computation else (0, 0, 0)
        self._program = agreed.number, comparable
        self._usual = self._token(0, 0, 0, "", offers=0)
        self._excess, self._reduced, self._begun = 0, 0, 0
        self._deferred = ""  # the parameters whose gradients only earlier micro-batches of the window have

    def __repr__(self) -> str:
        return self.name

    def post(self) -> None:
        """Announce to the other ranks that this trace starts."""
        issue_counts = self.control.issue_counts
        self._excess = excess = issue_counts.excess
        self._begun = self.issues
        self._reduced = again = 0
        for bit, bucket in _with_bits(self.guarded):
            if not bucket.is_kept_for_this_backward():
                again |= bit * self.control.is_on_all_ranks(bucket)
                self._begun += 2
        for bit, bucket in _with_bits(self.left_over):
            bucket.accumulation.check_complete()
            if bucket.ends_window():
                collectives = (bucket.accumulation.unsharded is not None) + (bucket.ranks.replicas is not None)
                self._reduced |= bit * (self.control.is_on_all_ranks(bucket) and collectives > 0)
                self._begun += 2 * collectives
        self._deferred = self._describe_deferred()
        offers = self._offered()
        if self.control.failure is not None and backward_number() < 0:
            offers |= _FAILURE
        state = excess, self._reduced, again, self._deferred
        token = self._token(*state, offers=offers) if offers or any(state) else self._usual
        assert self.control.channel is not None
        self.control.channel.post(token, self)
        issue_counts.expected += self._begun

    def settle(self) -> None:
        """Wait until all ranks have announced it."""
        self.control.settle()

    def describe(self) -> str:
        reduced = ", which also reduces gradients of no_sync," if self._reduced else ""
        deferred = f", with gradients that only no_sync has left for {self._deferred}" if self._deferred else ""
        return f"the {self.text} of {self.control.title}{reduced}{deferred}{after_excess(self._excess)}"

    def details(self) -> Sequence[str]:
        return self._lines

    def cancel(self) -> None:
        self.control.issue_counts.expected -= self._begun
        self._begun = 0

    def _describe_deferred(self) -> str:
        """Return the parameters that get a gradient although neither this backward nor autograd has one for them.

        A rank on which no micro-batch had such a gradient would drop its rows, so the ranks compare them.
        """
        texts = []
        for reference, missing in self.ending:
            bucket = reference()
            if bucket is None or not bucket.accumulation.params or not self.control.is_on_all_ranks(bucket):
                continue
            bucket.accumulation.check_complete()
            if (late := bucket.accumulation.params & missing) and bucket.ends_window():
                names = ", ".join(bucket.spec.params[index].name for index in sorted(late))
                texts.append(f"{names} of bucket {bucket.spec.name}")
        return "; ".join(texts)

    def _offered(self) -> int:
        """Return a bit for each bucket that this rank could reuse; those that share a bit are reused together."""
        offered, missing = 0, 0
        for bit, bucket in _with_bits(self.reusing):
            bucket.is_reuse_agreed = False
            if bucket.offers_reuse() and self.control.is_on_all_ranks(bucket):
                offered |= bit
            else:
                missing |= bit
        return offered & ~missing

    def take(self, offers: int) -> None:
        """Let the buckets be reused that all ranks have offered; raise the error of a save that all ranks know."""
        if offers & _FAILURE and self.control.failure is not None:
            self.cancel()
            self.control.failure()
        for bit, bucket in _with_bits(self.reusing):
            bucket.is_reuse_agreed = bool(offers & bit)

    def _token(self, excess: int, reduced: int, again: int, deferred: str, *, offers: int) -> bytes:
        same = hash64("trace", self.control.number, *self._program, excess, int(reduced), int(again), deferred)
        return TOKEN.pack(same, self._inputs, self._exact, offers)


def _with_bits(references: Sequence[weakref.ref[Bucket]]) -> Iterator[tuple[int, Bucket]]:
    """Yield the buckets that still exist, each with its bit of a token's integers."""
    for place, reference in enumerate(references):
        if (bucket := reference()) is not None:
            yield 1 << place % _BITS, bucket
