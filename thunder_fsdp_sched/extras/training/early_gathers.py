"""Begin the first gathers of the next forward in the step of the optimizer.

[Note: Gathers that a step begins]
Nothing in a forward hides its first gathers, but the optimizer can: once it has stepped on all parameters of a bucket,
the bucket may be gathered for the next forward. Such a gather is the forward's own, issued earlier. The arena knows
that it is in flight, and which version of the bucket it sends, so the forward takes it over and sends nothing: see
[Note: Contents of slots] in ``runtime.memory``. A step begins the gathers that the first forward after the previous
step issued before its first wait.

All ranks must issue the same collectives in the same order, even if one of them acts alone:

* A step that begins gathers posts a round of agreement before its first piece, and settles it before the first gather.
  The ranks compare the buckets; if these differ, none is gathered. If a rank does not step, its next round differs,
  which is an error on all ranks. A step that needs all gradients posts the round at its end.
* If an exception stops a rank in between, it has issued fewer collectives than it has announced. The next round detects
  that (``IssueCounts``), and ``discard_unreduced`` issues the missing ones.
* Whether the forward takes over a gather is agreed as in a window: each rank offers the gathers that it has
  (``TraceStart``), and if one rank has lost a gather, all ranks gather the bucket again. It is lost if a parameter of
  the bucket has been written since, in any way that a window recognizes (see [Note: Gathered once in a window] in
  ``runtime.bucket``), or by the step of another optimizer. It is also lost if something else has used the slot, such as
  an evaluation.

A forward in between that does not take over gathers, or a collective of the user, comes after them on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from thunder.core.trace import TraceCtx

from ...ir.analysis import Analysis
from ...ir.effects import effects
from ...ir.inspection import with_marks
from ...ir.slots import is_used_before
from ...ranks.control import Control, hash64
from ...ranks.joint_control import joint
from ...ranks.rounds import TOKEN, RoundAction, after_surplus
from ...runtime.bucket import WINDOW_FIRST, Bucket
from ...runtime.memory import InFlight, Slot
from ...runtime.ops import start_gather


def take_over_first(trace: TraceCtx) -> TraceCtx:
    """Mark the first gathers of a forward trace, which the step of an optimizer may have begun.

    Runs on the forward trace after ``reuse_in_window`` and before ``verify``, if ``overlap_step(gather_early=True)`` was
    called. It marks the gathers before the first wait, unless they are already marked or an earlier statement uses
    their slot. Before::

        ft146 = ...(bucket_blocks_0, slot_0, t_blocks_0_weight)  # 16,384 bytes float32

    After::

        ft146 = ...(bucket_blocks_0, slot_0, t_blocks_0_weight, window='first')  # 16,384 bytes float32

    See [Note: Gathers that a step begins].
    """
    of_all = list(map(effects, trace.bound_symbols))
    end = next((position for position, e in enumerate(of_all) if e.unshards), 0)
    uses = Analysis(trace).slots
    marks = {}
    for position, e in enumerate(of_all[:end]):
        is_unmarked = e.is_gather and e.issues is not None and not e.issues.marks
        if is_unmarked and _can_begin(uses[position].bucket) and not is_used_before(uses, position):
            marks[position] = {"window": WINDOW_FIRST}
    return with_marks(trace, marks, "fsdp: take over what the step has gathered")


def _can_begin(bucket: Bucket) -> bool:
    """Return whether a step can gather a bucket as forward does."""
    return not bucket.spec.comm.offload and bucket.secondary_ranks is None and bucket.primary is bucket


class _FirstGather(NamedTuple):
    """A gather at the beginning of a forward."""

    bucket: Bucket
    slot: Slot


class EarlyGathers:
    """The gathers that the steps of an optimizer begin for one model.

    Args:
        control: the agreement of the model's ranks.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._begun: dict[Bucket, InFlight] = {}
        self._first: list[_FirstGather] = []  # of the first forward since the last step
        self._is_complete = False

    def note(self, bucket: Bucket, slot: Slot, *, may_find: bool) -> None:
        """Record a gather before it is issued.

        Args:
            may_find: whether it may take over a gather that a step has begun. Any other gather first waits for that
                one, because it may write the cast that is being sent.
        """
        if (begun := self._begun.pop(bucket, None)) is not None:
            assert begun.slot is not None
            is_wanted = may_find and begun.slot is slot
            if not is_wanted and begun is begun.slot.arena.gather_in(begun.slot):
                begun.slot.arena.finish(begun)
        if not may_find:
            return
        gather = _FirstGather(bucket, slot)
        if self._first:
            slot_of_first = self._first[0].slot
            self._is_complete |= slot_of_first.arena.gather_in(slot_of_first) is None or gather in self._first
        if not self._is_complete and _can_begin(bucket):
            self._first.append(gather)

    def begin(self, params: Iterable[torch.Tensor]) -> EarlyStep:
        """Announce a step on these parameters to the other ranks."""
        first, self._first, self._is_complete = self._first, [], False
        return EarlyStep(self._control, first, params, self._begun)


class EarlyStep(RoundAction):
    """A step that begins gathers, as a round of the control channel.

    Args:
        gathers: the gathers that it begins if all ranks do, in the order of forward.
        params: the parameters that it writes.
        begun: the dictionary to which it adds the gathers that it has issued.
    """

    def __init__(
        self,
        control: Control,
        gathers: Sequence[_FirstGather],
        params: Iterable[torch.Tensor],
        begun: dict[Bucket, InFlight],
    ) -> None:
        issue_counts = control.issue_counts
        surplus = issue_counts.surplus_issues
        super().__init__(f"a step of an optimizer that begins to gather {control.title}{after_surplus(surplus)}")
        self._control, self._gathers, self._begun = control, list(gathers), begun
        self._open = set(map(id, params))  # the parameters that the step has yet to write
        self._is_settled = False
        names = [gather.bucket.handle for gather in gathers]
        joint(control).channel.post(TOKEN.pack(hash64("step", control.number, surplus), 0, 0, 0, hash64(names)), self)
        issue_counts.expected += 2 * len(names)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that it gathers, if all ranks do."""
        return [gather.bucket.base for gather in self._gathers]

    @property
    def remembered(self) -> RoundAction:
        return RoundAction(self.text)

    def cancel(self) -> None:
        self._control.issue_counts.expected -= 2 * len(self._gathers)
        self._gathers.clear()

    def apply_agreement(self, offered_bits: int, *, alike: bool) -> None:
        if not alike:
            self.cancel()

    def stepped(self, params: Iterable[torch.Tensor]) -> None:
        """Gather the next buckets, in the order of forward, whose parameters the step has all written.

        Raises:
            ScheduleDisagreement: another rank does not step.
        """
        self._open.difference_update(map(id, params))
        while self._gathers and self._open.isdisjoint(map(id, self._gathers[0].bucket.params)):
            if not self._is_settled:
                self._control.settle()
                self._is_settled = True
                continue
            bucket, slot = self._gathers.pop(0)
            steps, *writes = bucket.version()
            self._begun[bucket] = start_gather(bucket, slot, (steps + 1, *writes))  # this step counts once it has ended
