"""The agreement of several ranks; loaded only if there are several. See [Note: Agreement of ranks] in ``control``."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import coded_error
from ..private_distributed import timeout_of
from .channel import Channel
from .control import Agreement, Control, hash64
from .messages import first_line, named, without_remarks
from .new_groups import ARRIVAL_TIMEOUT, let_belong, new_group
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
from .store_texts import exchange_texts


class AgreedProgram(NamedTuple):
    """The result of comparing a program among the ranks: see :func:`~.compare_programs.check_program`."""

    number: int  # identifies the program on the control channel, the same on all ranks whose programs match
    communicates: bool  # whether any rank issues a collective, or may do so
    compares_computation: bool  # whether the computations of the ranks must be equal
    is_alike: bool  # whether the n-th collective is the same on all ranks, each in its own process group


class JointControl(Control):
    """The agreement of several ranks that share one model.

    Args:
        channel: the channel of these ranks.
        group, name, title, agreement: see :class:`Control`.
    """

    def __init__(
        self, channel: Channel, group: ProcessGroupRef, name: str, title: str, *, agreement: Agreement = "step"
    ) -> None:
        super().__init__(group, name, title, agreement=agreement)
        self.channel = channel
        self.issue_counts = IssueCounts(channel.settle, logs=agreement == "step")
        self.agreed: dict[int, AgreedProgram] = {}  # programs that the ranks have compared, by a hash

    @property
    def is_single_rank(self) -> bool:
        return False

    @property
    def agrees_in_steps(self) -> bool:
        return self.agreement == "step"

    @property
    def is_alike(self) -> bool:
        return self.channel.is_alike

    @property
    def _surplus_issues(self) -> int:
        """See :class:`IssueCounts`. Only traces that start with a round count how many collectives they contain."""
        return self.issue_counts.surplus_issues if self.agrees_in_steps else 0

    def process_group(self, otherwise: ProcessGroupRef) -> dist.ProcessGroup:
        return self.channel.group.process_group

    #
    # Rounds
    #

    def rendezvous(self, what: str, *details: str) -> None:
        """Wait until all ranks have reached the same call; one round.

        Args:
            what: a description of the call.
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
        surplus_issues = self._surplus_issues
        same = hash64("call", self.number, what, details, surplus_issues)
        text = f"{' '.join((what, *details))} of {self.title}{after_surplus(surplus_issues)}"
        self._post(same, text, digest, advice)

    def rendezvous_in_step(self, what: str, *details: str) -> None:
        """Do the same as :meth:`rendezvous` for a call that is part of each step, if the ranks agree in steps."""
        if self.agrees_in_steps:
            self.rendezvous(what, *details)

    def all_have(self, what: str, digest: int, advice: str = "") -> bool:
        """Meet the other ranks and return whether all have the same hash; one round."""
        self.begin(what, digest=digest, advice=advice)
        self.settle()
        return self.channel.is_alike

    def _post(self, same: int, text: str, digest: int = 0, advice: str = "") -> None:
        """Start a round in which all ranks must have the same hash ``same``."""
        self.channel.post(TOKEN.pack(same, 0, 0, 0, digest), RoundAction(text, advice))

    def settle(self) -> None:
        """Settle the latest round if it is still pending."""
        self.channel.settle()

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Meet the other ranks and return the objects of all ranks, in the order of ranks; a round and two all-gathers."""
        self.rendezvous(what)
        return self._gather(what, value)

    def reduce(self, what: str, values: Sequence[float], op: Any) -> list[float]:
        """Meet the other ranks and reduce numbers over all ranks, on the host; a round, and a ring of 2 (W - 1) hops."""
        self.rendezvous(what)
        tensor = torch.tensor(values, dtype=torch.float64)
        with self.doing(f"the reduction of {what}"):
            dist.all_reduce(tensor, op=op, group=self.channel.group.process_group)
        return tensor.tolist()

    def gather_settled(self, what: str, value: Any) -> dict[int, Any]:
        """Return the objects of all ranks, by global rank, after a round in which all ranks learned that they do this."""
        return dict(zip(self.group.global_ranks, self._gather(what, value), strict=True))

    def _gather(self, what: str, value: Any) -> list[Any]:
        with self.doing(f"the exchange of {what}"):
            return self.channel.gather(value)

    def explained(self, failure: RuntimeError) -> RuntimeError:
        """Report a failure to the other ranks, and add their reports to its message."""
        unagreed = ""
        if not self.agrees_in_steps:
            unagreed = f"With agree={self.agreement!r}, ranks may be in different steps; "
            unagreed += "agree='step' names the one that differs. "
        reports = self.channel.explain(str(failure), unagreed)
        failure.args = (f"{failure}\n{reports}".rstrip(),)
        return failure

    def report(self, what: str, failure: Exception | None, digest: int = 0) -> None:
        """Tell the other ranks whether this rank's work has failed, and learn whether theirs has; one round.

        A rank whose work failed raises its own error.

        Args:
            digest: a hash for the ranks to compare: see :meth:`all_have`.

        Raises:
            ScheduleDisagreement: the work failed on another rank, or a rank does something else.
        """
        with contextlib.nullcontext() if failure is None else contextlib.suppress(RuntimeError):
            self._tell(what, failure, digest)
        if failure is not None:
            raise known_to_all(failure)

    def _tell(self, what: str, failure: Exception | None, digest: int = 0) -> None:
        text = f"{what} of {self.title}"
        if failure is not None:
            text += f", which failed: {type(failure).__name__}: {first_line(str(failure))}"
        self._post(hash64("report", self.number, what, failure is None), text, digest)
        self.settle()

    def announce(self, what: str, failure: Exception) -> None:
        """Make the other ranks raise an error in their next round, unless all ranks know of this failure already.

        Ranks that failed as well meet in this round, and each raises its own error.

        Args:
            what: a description of the work that has failed, for messages.
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
            met: whether a round has just been settled, from which all ranks know that they compare.

        Raises:
            ScheduleDisagreement: as :meth:`check_same`.
        """
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
        with self.doing("the exchange of lines that differ"):
            return self.channel.difference_of_lines(first, other, lines)

    def disagreement(self, text: str) -> ScheduleDisagreement:
        """Return the error for something in which the ranks differ."""
        return coded_error(ScheduleDisagreement, "ranks.ranks-disagree", group=self.group.description, difference=text)

    @contextlib.contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Wrap work that each rank does alone, so that all ranks raise an error if it fails on any of them.

        Raises:
            ScheduleDisagreement: the work failed on another rank; the message has that rank's error.
        """
        try:
            yield
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # this error is the one to raise
                self.check_same(what, [f"{type(error).__name__}: {error}"])
            known_to_all(error)
            raise
        self.check_same(what, ["it can"])


def joint(control: Control) -> JointControl:
    """Return ``control``, which must be that of several ranks, with its precise type."""
    assert isinstance(control, JointControl)
    return control


_channels: dict[tuple[tuple[int, ...], timedelta], Channel] = {}


def open_joint_control(group: ProcessGroupRef, name: str, title: str, agreement: Agreement) -> Control:
    """Return the control of a module that several ranks shard; a collective, see :func:`open_channel`."""
    return JointControl(open_channel(group, name), group, name, title, agreement=agreement)


def open_channel(group: ProcessGroupRef, name: str) -> Channel:
    """Return the channel of several ranks, and create one if any of them lacks it.

    It is a collective at the start of ``thunder.jit``, for which the ranks meet at the group's store, with 6 requests
    each. Creating a channel takes 12 more, besides those with which gloo connects each rank to all others.

    Args:
        name: unique to this call, the same on all ranks.

    Raises:
        ScheduleDisagreement: a rank does not come in time. A rank that comes too late waits in vain for as long.
    """
    timeout = timeout_of(group.process_group)
    key = tuple(group.global_ranks), timeout
    known = _channels.get(key)
    state = "open" if known is not None and known.is_open else ""
    store, patience = group.process_group.get_group_store(), min(timeout, ARRIVAL_TIMEOUT)
    states = exchange_texts(store, f"thunder_fsdp_sched/{name}", group.global_ranks, state, patience)
    if missing := [rank for rank in group.global_ranks if rank not in states]:
        raise coded_error(
            ScheduleDisagreement,
            "ranks.missing-at-jit",
            group=group.description,
            missing=named(missing),
            seconds=patience.total_seconds(),
            rank=group.global_ranks[group.rank],
        )
    if not all(states.values()):
        ranks = list(group.global_ranks)
        made = new_group(ranks, group.process_group, "fsdp_control", backend="gloo", timeout=timeout)
        _channels[key] = Channel(replace(made, description=group.description), timeout)
    channel = _channels[key]
    let_belong(channel.group, group.process_group)
    return channel
