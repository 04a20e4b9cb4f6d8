"""Agreement of one model's ranks: on what they shard and compile, and before collectives on what they are about to run.

[Note: Agreement of ranks]
Before the collectives of a trace, a state dict, a checkpoint and so on, every rank announces which of these it is about
to run. That is a round of the channel (see [Note: Rounds] in ``channel``). In a trace, ``fsdp_agree`` posts the round
and ``fsdp_agreed`` settles it. With gloo it is settled before the first collective is issued, because gloo aborts the
process if sizes differ. With NCCL a forward settles it before the first result is waited for, so the round overlaps the
first gather; a backward, before it sends anything.

A token identifies the *agreed program*, not the trace: ranks may run traces of different shapes whose collectives
match, and with ``process_group_for`` even different programs. ``check_program`` compared the programs when they
were compiled and numbered those that match.

The token also says, as bits, what this rank has of buckets that need not be gathered: see [Note: Decisions of one rank].
In a forward that may find what an earlier micro-batch has gathered, that decides what it gathers first, so a rank that has
it waits for the round at once. A backward expects buckets that forward has kept or left. A rank that has all of them
computes with them before the round has ended, without a hop. It settles the round before it sends anything, and takes part
in the gathers of what another rank has lost. A rank that has lost some waits at once, and gathers them first.

The token also contains how many more collectives this rank has issued than the traces that it started contain. That is
0 unless an exception interrupted a trace. Ranks that were interrupted at different collectives would otherwise match
collectives that do not belong together.

[Note: Decisions of one rank]
Nothing that one rank decides alone changes what it sends. Whatever could make ranks issue other collectives, or reduce other
gradients, is compared in the token's hash, so that all ranks raise an error, or offered in its bits, and then only what all
ranks offer is left out. A wrong answer of one rank costs all a gather.

=================================================  ============================================================
decision                                           where the ranks agree on it
=================================================  ============================================================
how a module is sharded, with which options        ``check_same`` in ``thunder.jit``
whether a trace is compiled for new inputs         a round that a rank in a cached trace does not join: error
its collectives, marks and computation             ``check_program``, when it is compiled
that a call fails before its trace runs            ``Control.announce``: a round that the others do not join
which compiled trace runs                          the hash: the number of the agreed program
what an exception has left out                     the hash: ``IssueCounts.surplus_issues``
which gradients of ``no_sync`` are reduced         the hash; by process group if not all ranks share the bucket
that backward leaves such gradients (``inputs``)   the hash, of buckets that all ranks share
that such gradients are discarded                  ``discard_unreduced``, which is a round
that a failed backward has left no such gradients  the hash: ``Accumulation.dropped``
whether backward has what forward kept or left     offered (``TraceStart.expected``): else all gather it again
whether a window has left a bucket for forward     offered (``TraceStart.reusable_gathers``): else all gather it
whether an optimizer's step has gathered for it    the same; whether it gathers: a round (``EarlyStep``)
which parameters have no gradient                  the last hash; if it differs, names: those that no rank has used
whether a save beside training has failed          offered: the error is raised once all ranks know of it
what a search for settings finds                   one rank searches for all: ``choosing.decide_once``
whether the first run of its trace is audited      offered: then all ranks end the run with ``report``
that its traces exceed ``max_memory``, or a later
transform has broken them                          an error here, of which ``announcing_failure`` tells the others
any other call that communicates                   ``rendezvous`` with its name and arguments
=================================================  ============================================================

With ``agree="compile"`` or ``"never"`` there is no round in a step, so nothing is offered, and each of these is the same in
all steps: no gather is marked as one that may be left out, a kept bucket that backward no longer has is an error, and a
parameter has a gradient whether or not it was used.

With ``ranks_may_differ``, programs, gradients of ``no_sync`` and lost buckets may differ, and nothing is compared when a
trace is compiled: see [Note: Ranks that differ] in ``extras.ranks_differ.programs``.

These are decided alone, because they change nothing that is sent: whether a cast of a shard is made again, which memory is
freed, when the host waits.

[Note: Comparing texts]
Whatever ranks compare when they shard or compile, they meet in a round, which detects at once a rank that does something
else. Its tokens contain a digest of what they compare. If all are the same, nothing more is exchanged, for any number of
ranks. Otherwise they exchange what the digest is of, in two all-gathers, because other shapes and other process groups may
be right. If they are not, two ranks broadcast their texts, in which every rank finds the same first difference. So all ranks
raise the same error, and none hangs.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from ..errors import coded_error
from .process_groups import ProcessGroupRef
from .rounds import (
    TOKEN,
    IssueCounts,
    RoundAction,
    ScheduleDisagreement,
    after_surplus,
    begin_work,
    is_known_to_all,
    known_to_all,
)

if TYPE_CHECKING:
    from .channel import Channel

Agreement = Literal["step", "compile", "never"]
"""How often ranks agree: before each compiled trace runs, when they compile it, or not at all."""


class AgreedProgram(NamedTuple):
    """The result of comparing a program among the ranks: see ``compare_programs``."""

    number: int  # identifies the program on the control channel, the same on all ranks whose programs match
    communicates: bool  # whether any rank issues a collective, or may do so
    compares_computation: bool  # whether the computations of the ranks must be equal
    is_alike: bool  # whether the n-th collective is the same on all ranks, each in its own process group


class Control:
    """The agreement of the ranks that share one model. Without other ranks it sends nothing.

    Args:
        group: the ranks.
        channel: their channel; ``None`` if there are no other ranks.
        name: the model's unique name, the same on all ranks.
        title: the model's name in messages.
        agreement: how often they agree.
    """

    def __init__(
        self,
        group: ProcessGroupRef,
        channel: Channel | None = None,
        name: str = "",
        title: str = "the model",
        *,
        agreement: Agreement = "step",
    ) -> None:
        self.group = group = replace(group)  # models given one `Ranks` object, or one mesh, share `group`
        self.channel = channel
        self.title = title
        self.number = hash64(name)
        self.failure: Callable[[], object] | None = None  # raises the error of a save beside training
        self.issue_counts = IssueCounts() if channel is None else IssueCounts(channel.settle, logs=agreement == "step")
        self.agreement = agreement
        self.agreed: dict[int, AgreedProgram] = {}  # programs that the ranks have compared, by a hash
        _controls[group] = weakref.ref(self)

    @property
    def global_rank(self) -> int:
        """This process's global rank."""
        return self.group.global_ranks[self.group.rank]

    @property
    def is_single_rank(self) -> bool:
        """Whether there are no other ranks to agree with."""
        return self.channel is None

    @property
    def agrees_in_steps(self) -> bool:
        """Whether the ranks agree before each compiled trace runs; one that is alone decides for all."""
        return self.channel is None or self.agreement == "step"

    @property
    def _surplus_issues(self) -> int:
        """See :class:`IssueCounts`. Only traces that the ranks agree on say how many collectives they contain."""
        return self.issue_counts.surplus_issues if self.agrees_in_steps else 0

    def process_group(self, otherwise: ProcessGroupRef) -> dist.ProcessGroup:
        """Return the process group for collectives of torch itself after a meeting; ``otherwise`` without other ranks."""
        return (otherwise if self.channel is None else self.channel.group).process_group

    #
    # Rounds
    #

    def rendezvous(self, what: str, *details: str) -> None:
        """Wait until all ranks have reached the same call; one round.

        Args:
            what: the call.
            details: values that must be the same on all ranks, such as the names of parameters.

        Raises:
            ScheduleDisagreement: a rank does something else, or does not arrive in time.
        """
        self.begin(what, *details)
        self.settle()
        if self.issue_counts.log is not None:
            self.issue_counts.log.clear()

    def begin(self, what: str, *details: str, digest: int = 0, advice: str = "") -> None:
        """Start a :meth:`rendezvous` without waiting; ``settle`` completes it.

        Args:
            digest: a hash for the ranks to compare: see :meth:`all_have`.
            advice: see :class:`RoundAction`.
        """
        if self.channel is not None:
            surplus_issues = self._surplus_issues
            same = hash64("call", self.number, what, details, surplus_issues)
            text = f"{' '.join((what, *details))} of {self.title}{after_surplus(surplus_issues)}"
            self._post(same, text, digest, advice)

    def rendezvous_in_step(self, what: str, *details: str) -> None:
        """Meet as :meth:`rendezvous` for a call that steps repeat, if the ranks agree in steps."""
        if self.agrees_in_steps:
            self.rendezvous(what, *details)

    def all_have(self, what: str, digest: int, advice: str = "") -> bool:
        """Meet the other ranks and return whether all have the same hash; one round."""
        assert self.channel is not None
        self.begin(what, digest=digest, advice=advice)
        self.settle()
        return self.channel.is_alike

    def _post(self, same: int, text: str, digest: int = 0, advice: str = "") -> None:
        """Start a round in which all ranks must have the same hash ``same``."""
        assert self.channel is not None
        self.channel.post(TOKEN.pack(same, 0, 0, 0, digest), RoundAction(text, advice))

    def settle(self) -> None:
        """Settle the latest round if it is still pending."""
        if self.channel is not None:
            self.channel.settle()

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Meet the other ranks and return the objects of all ranks, in the order of ranks; a round and two all-gathers."""
        if self.channel is None:
            return [value]
        self.rendezvous(what)
        return self._gather(what, value)

    def reduce(self, what: str, values: Sequence[float], op: Any) -> list[float]:
        """Meet the other ranks and reduce numbers over all ranks, on the host; a round, and a ring of 2 (W - 1) hops."""
        if self.channel is None:
            return list(values)
        self.rendezvous(what)
        tensor = torch.tensor(values, dtype=torch.float64)
        with self.doing(f"the reduction of {what}"):
            dist.all_reduce(tensor, op=op, group=self.channel.group.process_group)
        return tensor.tolist()

    def gather_settled(self, what: str, value: Any) -> dict[int, Any]:
        """Return the objects of all ranks, by global rank, after a round in which all of them learned to exchange them."""
        return dict(zip(self.group.global_ranks, self._gather(what, value), strict=True))

    def _gather(self, what: str, value: Any) -> list[Any]:
        assert self.channel is not None
        with self.doing(f"the exchange of {what}"):
            return self.channel.gather(value)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Wrap a collective so that its error names this rank, the collective, and what happened on the other ranks."""
        try:
            yield
        except RuntimeError as error:
            failure = coded_error(
                RuntimeError, "ranks.collective-failed", rank=self.global_rank, what=what, error=error
            )
            raise self.explained(failure) from error

    def explained(self, failure: RuntimeError) -> RuntimeError:
        """Report a failure to the other ranks, and add their reports to its message."""
        if self.channel is not None:
            unagreed = ""
            if not self.agrees_in_steps:
                unagreed = f"With agree={self.agreement!r}, ranks may be in different steps; "
                unagreed += "agree='step' names the one that differs. "
            reports = self.channel.explain(str(failure), unagreed)
            failure.args = (f"{failure}\n{reports}".rstrip(),)
        return failure

    def report(self, what: str, failure: Exception | None, digest: int = 0) -> None:
        """Tell the other ranks whether work of this rank has failed, and learn the same of theirs; one round.

        A rank on which it failed raises that error.

        Args:
            digest: a hash for the ranks to compare: see :meth:`all_have`.

        Raises:
            ScheduleDisagreement: it failed on another rank, or a rank does something else.
        """
        with contextlib.nullcontext() if failure is None else contextlib.suppress(RuntimeError):
            self._tell(what, failure, digest)
        if failure is not None:
            raise known_to_all(failure)

    def _tell(self, what: str, failure: Exception | None, digest: int = 0) -> None:
        if self.channel is not None:
            text = f"{what} of {self.title}"
            if failure is not None:
                from .messages import first_line

                text += f", which failed: {type(failure).__name__}: {first_line(str(failure))}"
            self._post(hash64("report", self.number, what, failure is None), text, digest)
            self.settle()

    def announce(self, what: str, failure: Exception) -> None:
        """Let the others raise an error in their next round, unless all ranks know of this failure already.

        Ranks on which it failed as well meet in this round, and each raises its own error.

        Args:
            what: the work that has failed, for messages.
        """
        if self.agreement != "never" and not is_known_to_all(failure):
            with contextlib.suppress(RuntimeError):
                self._tell(what, known_to_all(failure))

    @contextlib.contextmanager
    def announcing_failure(self, what: str) -> Iterator[None]:
        """Wrap work that may fail on this rank alone; see :meth:`announce`."""
        begin_work()
        try:
            yield
        except Exception as error:
            self.announce(what, error)
            raise

    #
    # Comparisons
    #

    def check_same(self, what: str, lines: Iterable[str]) -> None:
        """Raise an error unless all ranks have the same lines; one round. See [Note: Comparing texts].

        Args:
            what: the subject of the lines.

        Raises:
            ScheduleDisagreement: on every rank. It names the first line that differs and the ranks.
        """
        self.check_same_in_groups(what, ((self.group, line) for line in lines))

    def check_same_in_groups(
        self, what: str, lines: Iterable[tuple[ProcessGroupRef, str]], *, met: bool = False
    ) -> None:
        """Raise an error unless the ranks of each group have the same lines of this group; a collective of all ranks.

        It is one round if all ranks have the same lines of the same groups; otherwise they also exchange digests.

        Args:
            met: whether a round has just been settled in which all ranks learned that they compare.

        Raises:
            ScheduleDisagreement: as :meth:`check_same`.
        """
        if self.channel is None:
            return
        from .messages import without_remarks

        own: dict[str, list[str]] = defaultdict(list)
        ranks_of = {}
        for group, line in lines:
            own[group.name].append(line)
            ranks_of[group.name] = group.global_ranks
        digests = {name: (ranks, hash64(*map(without_remarks, own[name]))) for name, ranks in ranks_of.items()}
        if not met and self.all_have(f"comparing {what}", hash64(digests)):
            return
        by_rank = self.gather_settled(f"comparing {what}", digests)
        compared: set[str] = set()
        for first, theirs in by_rank.items():
            for name in [name for name in theirs if name not in compared]:
                compared.add(name)
                for other in theirs[name][0]:
                    if by_rank[other].get(name) != theirs[name]:
                        raise self.disagreement(f"{what}, {self.difference(first, other, own[name])}")

    def difference(self, first: int, other: int, lines: Sequence[str]) -> str:
        """Exchange the lines of two ranks and return the first that differs, on all ranks."""
        assert self.channel is not None
        with self.doing("the exchange of lines that differ"):
            return self.channel.difference_of_lines(first, other, lines)

    def disagreement(self, text: str) -> ScheduleDisagreement:
        """Return the error for something in which the ranks differ."""
        return coded_error(ScheduleDisagreement, "ranks.ranks-disagree", group=self.group.description, difference=text)

    @contextlib.contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Wrap work that each rank does alone, so that all ranks raise an error if it fails on any of them.

        Raises:
            ScheduleDisagreement: it failed on another rank; the message has that rank's error.
        """
        try:
            yield
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # this error is the one to raise
                self.check_same(what, [f"{type(error).__name__}: {error}"])
            known_to_all(error)
            raise
        self.check_same(what, ["it can"])


def hash64(*parts: object) -> int:
    """Return a hash of values that print alike on all ranks, as an integer for a token."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little", signed=True)


_controls: weakref.WeakKeyDictionary[ProcessGroupRef, weakref.ref[Control]] = weakref.WeakKeyDictionary()
"""Weak both ways, because a control refers to its group."""


def control_of(group: ProcessGroupRef) -> Control:
    """Return the control whose ``group`` this is, hence of one model; one without other ranks if there is none."""
    known = _controls.get(group)
    return (known and known()) or Control(group)
