"""The control channel: a separate gloo group on which ranks announce what they are about to do.

[Note: Rounds]
Traffic on the channel is a sequence of *rounds*. In each round every rank posts a token of a few integers with an
asynchronous all-gather, which costs the host some tens of microseconds. Later it settles the round: it waits for all
tokens and compares them. All ranks see all tokens, so tokens that do not match raise ``ScheduleDisagreement`` on every
rank. Only then do the ranks exchange descriptions, through the group's store, so that each message names all sides.

Among W ranks a round takes ceil(log2 W) hops: see [Note: Hops of an all-gather] in ``all_gather``. A rank sends as many
messages, with 40 (W - 1) bytes in all. Posting sends the first message, settling sends the others.

A settled round leaves the channel consistent, whatever its result, because every rank has taken part in the same number
of rounds. Ranks that catch the disagreement can continue if nothing else was issued. A round that cannot be settled,
because a rank does not arrive or has exited, closes the channel permanently.

The group uses gloo, whatever the backend of the training group, and tokens are in host memory, so the device is never
synchronized. One channel serves all models of a process that the same ranks share. The channel does not keep its group
alive: see [Note: Weak references to process groups] in ``process_groups``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import pickle
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import coded_error
from ..private_distributed import host_backend
from ..private_torch import labelled
from .all_gather import HostAllGather
from .messages import first_difference, first_different, first_line, named, sides
from .process_groups import ProcessGroupRef
from .rounds import TOKEN, RoundAction, ScheduleDisagreement
from .store_texts import exchange_texts, publish_text

_PATIENCE = timedelta(seconds=5)
"""How long ranks that disagree wait for each other's descriptions."""

_FAILURE_PATIENCE = timedelta(seconds=2)
"""How long a rank whose collective or round failed waits for the reports of the others."""

_INSTANT = timedelta(milliseconds=1)


class Channel:
    """The channel among the ranks of a group; see [Note: Rounds].

    Args:
        group: a group of the backend gloo, used by nothing else.
        timeout: how long a rank waits for the others in a round.
    """

    def __init__(self, group: ProcessGroupRef, timeout: timedelta) -> None:
        self.group = group
        self.size = group.size
        self.global_rank = group.global_ranks[group.rank]
        self.rounds = 0  # settled, the same on all ranks
        self.pending: RoundAction | None = None  # posted and not settled yet
        self.last: RoundAction | None = None
        self.is_alike = True  # whether the last hash of the token was the same on all ranks in the last round
        self.tokens: Sequence[bytes] = ()  # those of the last round, in the order of ranks
        self.closed = ""  # why no further round is possible
        self._tokens = HostAllGather(group.rank, [TOKEN.size] * group.size)
        self._timeout = timeout
        self._started = 0  # all-gathers, the same on all ranks
        self._failures: Counter[int] = Counter()  # of this rank, by the number of the round
        self._posted = 0.0
        self._waits = threading.Lock()  # held by the thread that waits for the others

    @property
    def is_open(self) -> bool:
        """Whether its group still exists and every rank has taken part in every round."""
        return not self.closed and self.group.is_alive

    def post(self, token: bytes, action: RoundAction) -> None:
        """Start a round, after settling the previous one; it sends one message.

        Raises:
            ScheduleDisagreement: the previous round, which an exception left unsettled, failed; or the channel is
                closed.
        """
        if self.pending is not None:
            self.settle()
        if self.closed:
            raise coded_error(
                ScheduleDisagreement,
                "ranks.action-after-closed-channel",
                reason=self.closed,
                rank=self.global_rank,
                action=action.describe(),
            )
        backend = host_backend(self.group.process_group)
        self.pending = action
        self._posted = time.monotonic()
        try:
            with labelled("agreement"):
                self._tokens.start(token, backend, self._next_tag())
        except RuntimeError as error:
            raise self._close(action, error) from error

    def settle(self) -> None:
        """End the round, if one is pending. Of W ranks, each sends ceil(log2 W) - 1 messages.

        Raises:
            ScheduleDisagreement: the ranks do different things, or one did not come.
            RuntimeError: another thread waits for the others.
        """
        action = self.pending
        if action is None:
            return
        if not self._waits.acquire(blocking=False):
            raise coded_error(RuntimeError, "ranks.another-thread-waits", action=action.describe())
        try:
            with labelled("wait_agreement"):
                self._tokens.finish(self._timeout)
        except RuntimeError as error:
            action.cancel()
            raise self._close(action, error) from error
        finally:
            self._waits.release()
        self.pending = None
        self.rounds += 1
        self.tokens = self._tokens.gathered()
        same, inputs, exact, offered, exchanged = zip(*map(TOKEN.unpack, set(self.tokens)), strict=True)
        if len(set(same)) > 1 or len(set(zip(inputs, exact, strict=True))) > len(set(inputs)):
            raise self._disagreement(action, self.tokens)
        self.last, self.is_alike = action.remembered, len(set(exchanged)) == 1
        action.apply_agreement(functools.reduce(operator.and_, offered), alike=self.is_alike)

    def gather(self, value: Any) -> list[Any]:
        """Exchange a picklable object with every rank, after a round.

        It takes two all-gathers, of 8 bytes from each rank and of its own bytes, so an object that one rank has costs
        no more on more ranks.
        """
        data = pickle.dumps(value)
        sizes = self._all_gather(len(data).to_bytes(8, "little"), [8] * self.size)
        return [pickle.loads(theirs) for theirs in self._all_gather(data, [int.from_bytes(n, "little") for n in sizes])]

    def _all_gather(self, own: bytes, sizes: Sequence[int]) -> list[bytes]:
        gather = HostAllGather(self.group.rank, sizes)
        gather.start(own, host_backend(self.group.process_group), self._next_tag())
        gather.finish(self._timeout)
        return gather.gathered()

    def _next_tag(self) -> int:
        self._started = self._started % 0x7FFFFFFF + 1
        return self._started

    def explain(self, text: str, unagreed: str = "") -> str:
        """Publish the failure of this rank, wait shortly for those of the others, and return them.

        Args:
            unagreed: a sentence that replaces the one about the last round, if ranks may have diverged since.
        """
        reports = self._exchange_failures(text, self.rounds + (self.pending is not None))
        others = [rank for rank in self.group.global_ranks if rank != self.global_rank]
        lines = [f"    rank {rank}: {_brief(rank, reports[rank])}" for rank in others if rank in reports]
        if silent := [rank for rank in others if rank not in reports]:
            lines.append(f"    {named(silent)} reported nothing within {_FAILURE_PATIENCE.total_seconds():g} s")
        agreed = unagreed or (f"All ranks had agreed on {self.last.describe()}. " if self.last is not None else "")
        return "\n".join([f"{agreed}The other ranks:", *lines])

    def _close(self, action: RoundAction, error: RuntimeError) -> ScheduleDisagreement:
        """Find the missing ranks from what the others have published, and close the channel."""
        waited = time.monotonic() - self._posted
        self.pending = None
        self._tokens.close()
        # Others may have failed in a collective before this round, or have settled it and failed in one after it.
        came = self._exchange_failures(action.describe(), self.rounds, self.rounds + 1)
        missing = [rank for rank in self.group.global_ranks if rank not in came]
        timed_out = "timed out" in str(error).lower()
        who = f"{named(missing)} did not come" if missing else "the ranks did not come together"
        when = f"within {waited:.1f} s" if timed_out else "and a connection was closed"
        causes = "hung, or busy with something else" if timed_out else "or gave no answer in time"
        absent = f"\n    {named(missing)}: stopped, failed, {causes}" if missing else ""
        self.closed = (
            f"fsdp: the ranks of process group {self.group.description!r} disagree: {who} {when}:\n"
            f"{sides({rank: _brief(rank, text) for rank, text in came.items()})}{absent}\n({first_line(str(error))})"
        )
        return coded_error(ScheduleDisagreement, "ranks.rank-absent", report=self.closed)

    def _disagreement(self, action: RoundAction, tokens: Sequence[bytes]) -> ScheduleDisagreement:
        """Exchange descriptions, and the details of the first two ranks that differ; this rank's action is cancelled."""
        of_ranks = dict(zip(self.group.global_ranks, map(TOKEN.unpack, tokens), strict=True))
        different = first_different({rank: ((), same) for rank, (same, *_) in of_ranks.items()})
        different = different or first_different({rank: (of[1], of[2]) for rank, of in of_ranks.items()})
        assert different is not None
        first, other = different
        details = action.details() if self.global_rank in (first, other) else ()
        own = json.dumps([action.describe(), list(details), action.advice])
        action.cancel()
        texts: dict[int, str] = {}
        with contextlib.suppress(Exception):  # the store may be gone with the rank that held it
            store = self.group.process_group.get_group_store()
            texts = exchange_texts(store, f"differ/{self.rounds}", self.group.global_ranks, own, _PATIENCE)
        said = {rank: json.loads(text) for rank, text in (texts | {self.global_rank: own}).items()}
        lines = {rank: said[rank][0] if rank in said else "(no report)" for rank in self.group.global_ranks}
        message = f"fsdp: the ranks of process group {self.group.description!r} disagree:\n{sides(lines)}"
        if lines[first] == lines[other] and first in said and other in said:
            differs = first_difference(first, said[first][1], other, said[other][1])
            message += f"\nTheir traces differ in {differs}" if differs else "\n(no line of their traces differs)"
        advice = {said[rank][2] if rank in said else "" for rank in (first, other)}
        report = f"{message}\n{advice.pop()}".rstrip() if len(advice) == 1 else message
        return coded_error(ScheduleDisagreement, "ranks.actions-differ", report=report)

    def _exchange_failures(self, text: str, *numbers: int) -> dict[int, str]:
        """Publish the failure of this rank, and return those of the ranks that publish theirs in time, by global rank.

        Args:
            numbers: the numbers of the rounds after which it failed, or may have.
        """
        self._failures.update(numbers)
        reports: dict[int, str] = {}
        with contextlib.suppress(Exception):  # the store may be gone with the rank that held it
            store, ranks = self.group.process_group.get_group_store(), self.group.global_ranks
            prefixes = [f"failure/{number}/{self._failures[number]}" for number in numbers]
            for read in [publish_text(store, prefix, ranks, text) for prefix in prefixes]:
                reports |= read(_INSTANT if reports else _FAILURE_PATIENCE)
        return reports | {self.global_rank: text}

    def difference_of_lines(self, first: int, other: int, lines: Sequence[str]) -> str:
        """Exchange the lines of the ranks ``first`` and ``other``, and return the first that differs.

        A collective: four of gloo's broadcasts, of ceil(log2 W) hops each, and two all-gathers.
        """
        texts = {first: [list(lines)], other: [list(lines)]}
        for rank, text in texts.items():
            dist.broadcast_object_list(text, rank, group=self.group.process_group)
        differs = first_difference(first, texts[first][0], other, texts[other][0]) or "(no line differs)"
        if len(set(self.gather(hash("a string")))) > 1:
            differs += (
                "\nIf all ranks run the same code: Python orders sets of strings differently on each of them, and Thunder "
                "takes the order of einsum's labels from such a set. Start all ranks with PYTHONHASHSEED=0"
            )
        return differs


def _brief(rank: int, report: str) -> str:
    """Return the first line of a rank's report, which may begin with the rank."""
    return first_line(report).removeprefix(f"rank {rank}: ")
