"""The start of a compiled trace, as ranks announce it: see [Note: Agreement of ranks] in ``ranks.control``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from ..private_torch import backward_number
from ..ranks.compare_programs import Computation
from ..ranks.control import hash64
from ..ranks.joint_control import AgreedProgram, JointControl
from ..ranks.messages import MAY_DIFFER
from ..ranks.process_groups import ProcessGroupRef
from ..ranks.rounds import TOKEN, RoundAction, after_surplus
from .bucket import Bucket
from .memory import Slot
from .ops import gather_again
from .unused_outputs import agree_on_unused, unused_gradients

_BITS = 30
"""The number of offered bits in a token for buckets that backward expects, and again for gathers that may be left out.
Buckets whose numbers differ by a multiple of this share a bit. If the ranks have different collectives, all buckets
share one, because a number then means different buckets."""

SHARED = 1 << 60
"""The bit that a rank offers if it reduces gradients of ``no_sync`` only in buckets that all ranks have. If a rank does
not offer it, the ranks of each process group compare their other buckets."""

_FAILURE = 1 << 61
"""The bit that a rank offers if it has an error to raise. It is raised once all ranks offer it, so all raise it at once."""

_UNAUDITED = 1 << 62
"""The bit that a rank offers if it does not audit this run. If a rank does audit it, all ranks learn at the end of the
trace whether it found an error. A rank that stopped earlier would leave the others waiting in their next collective."""

_ALL = (1 << 63) - 1

KEPT_BITS = (1 << _BITS) - 1
GATHER_BITS = KEPT_BITS << _BITS
"""The bits of buckets that backward expects, and of gathers that may be left out."""

T = TypeVar("T")


class SlotOfBucket(NamedTuple):
    """A slot in which a trace may find a bucket.

    Attributes:
        in_window: whether the trace is a forward in a window; otherwise it is a backward.
    """

    bucket: weakref.ref[Bucket]
    slot: weakref.ref[Slot]
    in_window: bool = False

    def name(self) -> str:
        """Return the name of the bucket."""
        bucket = self.bucket()
        return "" if bucket is None else bucket.spec.name

    def is_filled(self) -> bool:
        """Return whether this rank has the bucket there."""
        bucket, slot = self.bucket(), self.slot()
        return bucket is not None and slot is not None and bucket.is_resident(slot, in_window=self.in_window)

    def is_freed(self) -> bool:
        """Return whether its memory, which only this bucket has, was freed since the forward of the running backward."""
        bucket, slot = self.bucket(), self.slot()
        is_own = bucket is not None and slot is bucket.private_slot
        return slot is not None and is_own and not slot.arena.is_memory_of_running_backward()


class TraceStart(RoundAction):
    """A compiled trace on the control channel: the opaque argument of ``fsdp_agree``, which prints its name.

    Args:
        name: the name that it prints.
        agreed: the result of comparing the programs of all ranks.
        text: a description of the trace: its inputs and flags.
        computation: the computation of the trace.
        issues: the number of collectives that it issues.
    """

    advice = MAY_DIFFER

    def __init__(
        self, control: JointControl, name: str, agreed: AgreedProgram, text: str, computation: Computation, issues: int
    ) -> None:
        self.control = control
        self.name = name
        self.text = text
        self._lines = computation.trace_lines
        self.issues = 2 * issues  # each collective counts twice
        self.pending_grad_buckets: list[weakref.ref[Bucket]] = []
        """Buckets whose unreduced gradients from ``no_sync`` the trace reduces if there are any."""
        self.ending: list[tuple[weakref.ref[Bucket], frozenset[int]]] = []
        """Buckets whose gradients the trace returns, each with the parameters for which it computes none itself."""
        self.expected: list[SlotOfBucket] = []
        """The buckets that backward expects, in the same order on all ranks. All gather again a bucket that one has lost."""
        self.reusable_gathers: list[SlotOfBucket] = []
        """Gathers that are left out if their buckets are resident on all ranks; see :meth:`apply_agreement`."""
        self._bits = _BITS if agreed.is_alike else 1
        comparable, self._inputs, self._exact = computation.hashes if agreed.compares_computation else (0, 0, 0)
        self._program = agreed.number, comparable
        self._surplus_issues, self._begun, self._logged = 0, 0, 0
        self._issued: int | None = None  # the issues that this rank had counted when the round began
        self._reduced: list[str] = []  # a line for each bucket of `pending_grad_buckets` that it reduces
        self._reduced_in: list[tuple[ProcessGroupRef, str]] = []  # the same for buckets that not all ranks have
        self._unused: dict[Bucket, frozenset[int]] = {}  # the parameters that this rank has not used
        self._deferred = ""  # the parameters whose gradients only earlier micro-batches of the window have
        self._dropped = 0  # the number of failed backwards of the window whose gradients were dropped
        self._left = ""  # the buckets whose window it does not end, because it was called for other parameters
        self._lost: set[SlotOfBucket] = set()  # of `expected`, those that this rank has lost
        self._freed = ""  # of these, those whose memory was freed, with what forward has saved of it
        self._failure: Callable[[], object] | None = None
        self.auditing: set[object] = set()  # the auditors on this rank that have not seen a complete run
        self.audit_error: Exception | None = None  # the first error that the audit of this run has found
        self._ends_with_audit = False  # whether a rank audits this run
        self._hashed: tuple[object, int] = None, 0  # the latest state that was hashed, and its hash

    def __repr__(self) -> str:
        return self.name

    def post(self) -> None:
        """Announce to the other ranks that this trace starts; wait for them if its first gathers depend on them.

        Together with :meth:`settle` it is one round: ceil(log2 W) messages of each of W ranks, with 40 (W - 1) bytes in all.
        """
        control, issue_counts = self.control, self.control.issue_counts
        self._surplus_issues = issue_counts.surplus_issues
        self._begun, self._logged = self.issues, len(issue_counts.log or ())
        with control.announcing_failure(f"starting the {self.text}"):
            self._find_pending_grads()
            self._deferred, self._left = self._describe_windows()
        self._failure = control.failure if backward_number() < 0 else None
        missing, waits = self._missing()
        offered_bits = _ALL & ~missing
        if self._reduced_in:
            offered_bits &= ~SHARED
        if self._failure is None:
            offered_bits &= ~_FAILURE
        if self.auditing:
            offered_bits &= ~_UNAUDITED
        control.channel.post(
            TOKEN.pack(self._same(), self._inputs, self._exact, offered_bits, self._find_unused()), self
        )
        issue_counts.expected += self._begun
        self._issued = issue_counts.issued
        if waits:
            self.settle()

    def settle(self) -> None:
        """Wait until all ranks have announced it.

        Unless they have used the same parameters, it also takes two all-gathers of names.
        """
        self.control.settle()

    def end_audit(self) -> None:
        """Raise an error on all ranks if the audit of this run has found one on any rank."""
        if self._ends_with_audit:
            self._ends_with_audit = False
            error, self.audit_error = self.audit_error, None
            self.control.report("the audit of a trace", error)

    def describe(self) -> str:
        reduced = ", which also reduces gradients of no_sync," if self._reduced or self._reduced_in else ""
        deferred = f", with gradients that only no_sync has left for {self._deferred}" if self._deferred else ""
        left = f", which leaves gradients of no_sync in {self._left}" if self._left else ""
        dropped = f", after {self._dropped} failed backwards under no_sync were left out" if self._dropped else ""
        freed = f", after the memory of {self._freed} was freed" if self._freed else ""
        window = f"{reduced}{deferred}{left}{dropped}{freed}"
        return f"the {self.text} of {self.control.title}{window}{after_surplus(self._surplus_issues)}"

    def details(self) -> Sequence[str]:
        return self._lines

    def cancel(self) -> None:
        """Undo the counts of this trace: before the ranks agree, only gathers of resident buckets can have run."""
        self.control.issue_counts.expected -= self._begun
        self._begun = 0
        if self._issued is not None:
            self.control.issue_counts.issued, self._issued = self._issued, None

    def apply_agreement(self, offered_bits: int, *, alike: bool) -> None:
        """Act on the bits that all ranks have offered.

        Leave out gathers whose buckets are resident on all ranks. Gather again what backward expects but a rank has
        lost. Raise the error of a save that all ranks know of. Return no gradient for parameters that no rank has used.
        """
        if (log := self.control.issue_counts.log) is not None:
            del log[: self._logged]
        self._ends_with_audit = not offered_bits & _UNAUDITED
        if offered_bits & _FAILURE and self._failure is not None:
            self.cancel()
            self._failure()
        for gather, bit in self._numbered(self.reusable_gathers, _BITS):
            if (bucket := gather.bucket()) is not None:
                bucket.is_reuse_agreed = bool(offered_bits & bit)
        if not offered_bits & SHARED:
            self.control.check_same_in_groups("the gradients of no_sync to reduce", self._reduced_in, met=True)
        if self.ending or not alike:
            self._agree_on_unused(alike)
        for expected, bit in self._numbered(self.expected):
            if not offered_bits & bit and (bucket := expected.bucket()) is not None:
                gather_again(bucket.primary, expected.slot() if expected in self._lost else None)

    def _find_pending_grads(self) -> None:
        """Find the buckets of :attr:`pending_grad_buckets` that the trace reduces."""
        self._reduced, self._reduced_in = [], []
        for reference in self.pending_grad_buckets:
            if (bucket := reference()) is None:
                continue
            bucket.accumulation.check_complete()
            if bucket.ends_window():
                ranks = bucket.ranks
                collectives = (bucket.accumulation.unsharded is not None) + (ranks.replicas is not None)
                self._begun += 2 * collectives
                line = f"{bucket.spec.name} in {collectives} collectives"
                if bucket.is_on_all_ranks and collectives:
                    self._reduced.append(line)
                elif collectives:
                    self._reduced_in += [(group, line) for group in ranks.groups]

    def _describe_windows(self) -> tuple[str, str]:
        """Return the parameters that have only accumulated gradients, and the buckets whose accumulated gradients stay.

        The ranks compare both. A rank on which no micro-batch had a gradient of such a parameter would drop its rows,
        and another rank may add the gradients that this one leaves to what both reduce.
        """
        texts, left = [], []
        self._dropped = 0
        for reference, missing in self.ending:
            if (bucket := reference()) is None:
                continue
            bucket.accumulation.check_complete()
            self._dropped = max(self._dropped, bucket.accumulation.dropped)
            if not bucket.accumulation.params or not bucket.is_on_all_ranks:
                continue
            if not bucket.ends_window():
                left.append(bucket.spec.name)
            elif late := bucket.accumulation.params & missing:
                names = ", ".join(bucket.spec.params[index].name for index in sorted(late))
                texts.append(f"{names} of bucket {bucket.spec.name}")
        return "; ".join(texts), ", ".join(left)

    def _missing(self) -> tuple[int, bool]:
        """Return the bits of buckets that are not resident here, and whether this rank must wait for those of all ranks."""
        missing, waits = 0, False
        self._lost.clear()
        for gather, bit in self._numbered(self.reusable_gathers, _BITS):
            if (bucket := gather.bucket()) is not None:
                has, bucket.is_reuse_agreed = gather.is_filled(), False
                missing |= 0 if has else bit
                waits |= has
        for expected, bit in self._numbered(self.expected):
            if (bucket := expected.bucket()) is not None:
                bucket.is_reuse_agreed = True
                if not expected.is_filled():
                    self._lost.add(expected)
                    missing |= bit
                    waits = True
        self._freed = ", ".join(sorted(lost.name() for lost in self._lost if lost.is_freed()))
        return missing, waits

    def _find_unused(self) -> int:
        """Find the parameters that this rank has not used, and return a hash; 0 if there are none."""
        found = ((reference(), missing) for reference, missing in self.ending)
        self._unused = {b: unused_gradients(b, missing) for b, missing in found if b is not None}
        names = self._names_of_unused()
        return hash64(names) if names else 0

    def _names_of_unused(self) -> dict[str, list[str]]:
        return {
            bucket.spec.name: [bucket.spec.params[index].name for index in sorted(unused)]
            for bucket, unused in self._unused.items()
            if unused
        }

    def _agree_on_unused(self, alike: bool) -> None:
        """Let backward return no gradient for parameters that no rank has used; exchange names unless all are the same."""
        agreed = self._unused
        if not alike:
            what = f"names of parameters that the {self.text} of a rank has not used"
            theirs = self.control.gather_settled(what, self._names_of_unused())
            agreed = {
                b: frozenset(
                    index
                    for index in unused
                    if all(b.spec.params[index].name in theirs[r].get(b.spec.name, ()) for r in b.ranks.all_ranks)
                )
                for b, unused in self._unused.items()
            }
        agree_on_unused(agreed)
        self._unused = {}  # traces keep no buckets alive

    def _numbered(self, references: Sequence[T], first: int = 0) -> Iterator[tuple[T, int]]:
        """Yield each reference with its offered bit."""
        for number, reference in enumerate(references):
            yield reference, 1 << first + number % self._bits

    def _same(self) -> int:
        """Return the hash of all that must be the same on all ranks."""
        state = self._surplus_issues, tuple(self._reduced), self._deferred, self._left, self._dropped, self._freed
        if state != self._hashed[0]:
            self._hashed = state, hash64("trace", self.control.number, *self._program, *state)
        return self._hashed[1]
