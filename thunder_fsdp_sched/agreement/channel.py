"""The control channel: a separate gloo group on which ranks announce what they are about to do.

[Note: Rounds]
Traffic on the channel is a sequence of *rounds*. In each round every rank posts a token of a few integers with an
asynchronous all-gather, which costs the host some tens of microseconds. Later it settles the round: it waits for all
tokens and compares them. All ranks see all tokens, so tokens that do not match raise ``ScheduleDisagreement`` on every
rank. Only then do the ranks exchange descriptions, through the group's store, so that each message names all sides.

A settled round leaves the channel consistent, whatever its result, because every rank has taken part in the same number
of rounds. Ranks that catch the disagreement can continue if nothing else was issued. A round that cannot be settled,
because a rank does not arrive or is gone, closes the channel permanently.

The group uses gloo, whatever the backend of the training group, and tokens are in host memory, so the device is never
synchronized. One channel serves all models of a process that the same ranks share. The channel does not keep its group
alive: see [Note: Weak references to process groups] in ``process_groups``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ..distributed.group_creation import new_group
from ..distributed.process_groups import ProcessGroupRef
from ..private_api import all_gather_on_host, timeout_of

__all__ = ["TOKEN", "Channel", "ScheduleDisagreement", "Subject", "announce", "ranks_by_text"]

TOKEN = struct.Struct("<8q")
"""The format of a token: the action, the model, the program, the comparable computation, the state; then the inputs and
the exact computation; then the offers. The first five must be equal on all ranks, the computation only on ranks with
equal inputs. Offers are bits that may differ: what counts are those that all ranks have set."""

_SAME_ON_ALL = 5

_PATIENCE = timedelta(seconds=5)
"""How long ranks that disagree wait for each other's descriptions."""

_FAILURE_PATIENCE = timedelta(seconds=2)
"""How long a rank whose collective failed waits for the reports of the others."""


class ScheduleDisagreement(RuntimeError):
    """The error that ranks of a process group do different things: other schedules, other traces, or some did not come."""


class Subject(Protocol):
    """The action that a rank announces in a round."""

    def describe(self) -> str:
        """Return one line for the message of a disagreement."""

    def details(self) -> Sequence[str]:
        """Return lines to compare if the descriptions of ranks are equal; may be empty."""

    def cancel(self) -> None:
        """Record that the action will not be performed."""

    def take(self, offers: int) -> None:
        """Take the bits that all ranks have offered, once the round is settled."""


class Channel:
    """The channel among the ranks of a group; see [Note: Rounds].

    Args:
        world_group: the ranks.
        timeout: how long a rank waits for the others in a round.

    Attributes:
        rounds: the number of settled rounds, the same on all ranks.
        pending: the action that was posted and is not settled yet.
    """

    def __init__(self, world_group: ProcessGroupRef, timeout: timedelta) -> None:
        ranks = list(world_group.global_ranks)
        made = new_group(ranks, world_group.process_group, "fsdp_control", backend="gloo", timeout=timeout)
        self.group = dataclasses.replace(made, description=world_group.description)
        self.size = made.size
        self._issue: Callable[[Any, Any], Any] | None = all_gather_on_host(made.process_group)
        # The method keeps the group's backend and threads alive, so it must be dropped with the group.
        channel = weakref.ref(self)

        def release(_: object) -> None:
            if (self := channel()) is not None:
                self._issue = None

        self._end = weakref.ref(made.process_group, release)
        self.rounds = 0
        self.pending: Subject | None = None
        self.last: Subject | None = None
        self.closed = ""  # why no further round is possible
        # Tensors that share memory with Python buffers, so comparing needs no tensor operation.
        self._sent, self._received = bytearray(TOKEN.size), bytearray(TOKEN.size * self.size)
        self._send = torch.frombuffer(self._sent, dtype=torch.int64)
        self._receive = torch.frombuffer(self._received, dtype=torch.int64)
        self._work: Any = None
        self._posted = 0.0

    @property
    def is_open(self) -> bool:
        """Whether its group still exists and every rank has taken part in every round."""
        return not self.closed and self.group.is_alive

    @property
    def global_rank(self) -> int:
        """This process's global rank."""
        return self.group.global_ranks[self.group.rank]

    def post(self, token: bytes, subject: Subject) -> None:
        """Start a round; the previous one is settled first.

        Raises:
            ScheduleDisagreement: in a round that an exception left unsettled; or the channel is closed.
        """
        if self.pending is not None:
            self.settle()
        if self.closed:
            raise ScheduleDisagreement(f"{self.closed}\nrank {self.global_rank} has come to {subject.describe()} since")
        issue = self._issue
        if issue is None:
            raise RuntimeError(
                f"fsdp: process group {self.group.description!r}, over which parameters are sharded, has been destroyed"
            )
        self._sent[:] = token
        self.pending = subject
        self._posted = time.monotonic()
        try:
            self._work = issue(self._receive, self._send)
        except RuntimeError as error:
            raise self._close(error) from error

    def settle(self) -> None:
        """End the round, if one is pending.

        Raises:
            ScheduleDisagreement: the ranks do different things, or one did not come.
        """
        subject, work = self.pending, self._work
        if subject is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise self._close(error) from error
        self.pending = self._work = None
        self.rounds += 1
        if self._received != self._sent * self.size and (mismatch := self._first_mismatch()) is not None:
            raise self._disagreement(subject, *mismatch)
        self.last = subject
        subject.take(self._common_offers())

    def gather(self, value: Any) -> list[Any]:
        """Exchange a picklable object with every rank, after a round."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group.process_group)
        return values

    def explain(self, text: str) -> str:
        """Publish the failure of this rank, wait shortly for those of the others, and return them."""
        key = f"failure/{self.group.rank}"
        reported: dict[int, str] = {}
        with contextlib.suppress(Exception):  # the store may be gone with the rank that held it
            store = self._store()
            store.set(key, json.dumps([self.rounds, text]))
            deadline = time.monotonic() + _FAILURE_PATIENCE.total_seconds()
            waiting = [r for r in range(self.size) if r != self.group.rank]
            while waiting and time.monotonic() < deadline:
                for rank in list(waiting):
                    if store.check([f"failure/{rank}"]):
                        rounds, theirs = json.loads(store.get(f"failure/{rank}"))
                        if rounds >= self.rounds - 1:  # not an old failure
                            reported[self.group.global_ranks[rank]] = theirs
                            waiting.remove(rank)
                if waiting:
                    time.sleep(0.05)
        lines = [f"    rank {rank}: {_first_line(theirs)}" for rank, theirs in reported.items()]
        silent = [r for r in self.group.global_ranks if r != self.global_rank and r not in reported]
        if silent:
            lines.append(f"    {_named(silent)} reported nothing within {_FAILURE_PATIENCE.total_seconds():g} s")
        agreed = f"All ranks had agreed on {self.last.describe()}. " if self.last is not None else ""
        return "\n".join([f"{agreed}The other ranks:", *lines])

    def _store(self) -> Store:
        return self.group.process_group.get_group_store()

    def _close(self, error: RuntimeError) -> ScheduleDisagreement:
        """Find the missing ranks from what the others have published, and close the channel."""
        waited = time.monotonic() - self._posted
        subject = self.pending
        assert subject is not None
        what = subject.describe()
        subject.cancel()
        self.pending = self._work = None
        came: dict[int, str] = {}
        with contextlib.suppress(Exception):
            store = self._store()
            prefix = f"absent/{self.rounds}"
            store.set(f"{prefix}/{self.group.rank}", what)
            came = self._collect(store, prefix, _FAILURE_PATIENCE)
        came[self.global_rank] = what
        missing = [rank for rank in self.group.global_ranks if rank not in came]
        timed_out = "timed out" in str(error).lower()
        who = f"{_named(missing)} did not come" if missing else "the ranks did not come together"
        when = f"within {waited:.1f} s" if timed_out else "and a connection was closed"
        causes = "stopped, failed, hung, or busy with something else" if timed_out else "stopped or failed"
        absent = f"\n    {_named(missing)}: {causes}" if missing else ""
        self.closed = (
            f"fsdp: the ranks of process group {self.group.description!r} disagree: {who} {when}:\n"
            f"{_sides(came)}{absent}\n({_first_line(str(error))})"
        )
        return ScheduleDisagreement(self.closed)

    def _disagreement(self, subject: Subject, first: int, other: int) -> ScheduleDisagreement:
        """Exchange descriptions; ``first`` and ``other`` are the global ranks whose lines are compared."""
        own = json.dumps([subject.describe(), list(subject.details())])
        subject.cancel()
        texts: dict[int, str] = {}
        with contextlib.suppress(Exception):  # the store may be gone; the disagreement is certain
            store = self._store()
            prefix = f"differ/{self.rounds}"
            store.set(f"{prefix}/{self.group.rank}", own)
            texts = self._collect(store, prefix, _PATIENCE)
            if store.add(f"{prefix}/read", 1) == self.size:
                for rank in range(self.size):
                    store.delete_key(f"{prefix}/{rank}")
                store.delete_key(f"{prefix}/read")
        texts[self.global_rank] = own
        what = {rank: json.loads(texts[rank]) for rank in sorted(texts)}
        sides = {rank: text for rank, (text, _) in what.items()}
        for rank in self.group.global_ranks:
            sides.setdefault(rank, "(it has not said what it does)")
        message = f"fsdp: the ranks of process group {self.group.description!r} disagree:\n{_sides(sides)}"
        if first in what and other in what and what[first][0] == what[other][0]:
            message += "\n" + _first_difference({rank: what[rank][1] for rank in (first, other)})
        return ScheduleDisagreement(message)

    def _common_offers(self) -> int:
        """Return the offers that the tokens of all ranks have in common."""
        common = -1
        for token in TOKEN.iter_unpack(self._received):
            common &= token[-1]
        return common

    def _first_mismatch(self) -> tuple[int, int] | None:
        """Return the global ranks of the first two tokens that do not match, if any."""
        first: dict[tuple[int, ...], int] = {}
        tokens = list(TOKEN.iter_unpack(self._received))
        for number, token in enumerate(tokens):
            if token[:_SAME_ON_ALL] != tokens[0][:_SAME_ON_ALL]:
                return self.group.global_ranks[0], self.group.global_ranks[number]
            if token[:-1] != tokens[like := first.setdefault(token[:-2], number)][:-1]:
                return self.group.global_ranks[like], self.group.global_ranks[number]
        return None

    def _collect(self, store: Store, prefix: str, patience: timedelta) -> dict[int, str]:
        """Return the texts that ranks have published under ``prefix`` in time, keyed by global rank."""
        keys = {f"{prefix}/{i}": rank for i, rank in enumerate(self.group.global_ranks)}
        with contextlib.suppress(RuntimeError):
            store.wait(list(keys), patience)
        return {rank: store.get(key).decode() for key, rank in keys.items() if store.check([key])}


_channels: dict[tuple[tuple[int, ...], timedelta], Channel] = {}


def announce(world_group: ProcessGroupRef, name: str) -> Callable[[], Channel]:
    """Announce to the other ranks whether this one lacks an open channel.

    Args:
        name: unique to this call, the same on all ranks.

    Returns:
        A function that returns the channel of these ranks and creates one if any of them lacks it. It is a collective,
        to be called once all ranks have announced.
    """
    timeout = timeout_of(world_group.process_group)
    key = tuple(world_group.global_ranks), timeout
    known = _channels.get(key)
    store = world_group.process_group.get_group_store()
    lacking = f"thunder_fsdp_sched/{name}/lacking"
    store.add(lacking, int(known is None or not known.is_open))

    def find() -> Channel:
        if store.add(lacking, 0):
            _channels[key] = Channel(world_group, timeout)
        if store.add(f"{lacking}/read", 1) == world_group.size:
            store.delete_key(lacking)
            store.delete_key(f"{lacking}/read")
        return _channels[key]

    return find


def ranks_by_text(texts: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Group ranks by their texts, in order of appearance."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks_of.setdefault(text, []).append(rank)
    return ranks_of


def _sides(texts: dict[int, str]) -> str:
    """Return one line for each distinct action, with the ranks that perform it."""
    return "\n".join(f"    {_named(ranks)}: {text}" for text, ranks in ranks_by_text(sorted(texts.items())).items())


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]


def _first_difference(lines: dict[int, list[str]]) -> str:
    (first, ours), (other, theirs) = lines.items()
    for number in range(max(len(ours), len(theirs))):
        a, b = (text[number] if number < len(text) else "(nothing)" for text in (ours, theirs))
        if a != b:
            return f"Line {number + 1} of their traces differs:\n    rank {first}: {a}\n    rank {other}: {b}"
    return "(their tokens differ, their descriptions do not)"
