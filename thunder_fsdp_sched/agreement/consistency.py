"""Check that all ranks shard alike and compile matching schedules; otherwise all raise an error, and none hangs.

[Note: Agreement through the store]
All ranks must issue the collectives of one process group in the same order. Ranks that compile differently (other
shapes, another parameter order) would wait for each other in a collective forever, without a message. So whenever a
rank compiles a program that the ranks have not agreed on yet, it meets the others on the control channel, which detects
at once a rank that does something else. Then it writes the lines of its program to the group's *store*. Rank 0 of the
group compares the programs and writes its verdict to the store. The last rank to read the verdict deletes the keys.

Ranks with equal programs must also compute the same. Otherwise a different activation on one rank, for example, would
go unnoticed (see [Note: Equal computations] in ``computation``).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store

from ..distributed.process_groups import ProcessGroupRef
from ..ir.computation import NOTHING, Computation, digest_of
from ..ir.deadlock import Action, find_fault
from .channel import ScheduleDisagreement
from .control import Agreed, Control, number_of

__all__ = ["Agreement", "ScheduleDisagreement"]

_SLACK = timedelta(seconds=30)
"""How long rank 0 may take for the comparison once all ranks have arrived."""


class Agreement:
    """The comparison of the programs that ranks have compiled for one module.

    Args:
        group: all ranks that share a process group with this one, directly or indirectly. With the backend "fake" there
            is nothing to compare.
        name: a unique name of the module, the same on all ranks.
        timeout: how long to wait for the other ranks.
        compares_computation: whether ranks with equal programs must have equal computations.

    Attributes:
        control: the control of the module, once it exists.
    """

    def __init__(
        self, group: ProcessGroupRef, name: str, timeout: timedelta, *, compares_computation: bool = True
    ) -> None:
        self.group = group
        self.name = name
        self.timeout = timeout
        self.compares_computation = compares_computation
        self.number = 0
        self.agreed: dict[str, Agreed] = {}
        self.control: Control | None = None
        self._numbers: dict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)
        self.is_single_rank = group.size == 1 or group.is_fake

    def check(self, what: str, program: Sequence[Action], computation: Computation = NOTHING) -> Agreed:
        """Prove that the programs of all ranks together finish; see [Note: The deadlock proof] in ``deadlock``.

        Programs that the ranks have already agreed on are not compared again. So a rank whose batch has another shape
        can compile alone, with traces that match those in the caches of the others.

        Args:
            what: the name of the trace.
            program: what this rank issues and waits for.
            computation: the computation of the trace.

        Raises:
            ScheduleDisagreement: on every rank. It names the first line that differs and the ranks, or where they would
                block each other, or the ranks that do something else or did not arrive.
        """
        if self.is_single_rank:
            return Agreed(0, False, False)
        content = json.dumps([what, program])
        digest = hashlib.sha256(content.encode()).hexdigest()
        if digest not in self.agreed:
            if self.control is not None:
                self.control.rendezvous(f"compiling the {what}")
            try:
                self.agreed[digest] = self._ask(what, content, computation)
            except DistNetworkError as error:
                raise ScheduleDisagreement(
                    f"fsdp: rank {self.group.rank} has compiled {what} and cannot tell the other ranks of process group "
                    f"{self.group.description!r}: its store is gone ({error})"
                ) from error
        return self.agreed[digest]

    def _ask(self, what: str, content: str, computation: Computation) -> Agreed:
        prefix = f"thunder_fsdp_sched/{self.name}/{self.number}"
        self.number += 1
        found = self._compare(
            prefix,
            json.dumps([content, computation.digests]),
            {"exact": computation.lines, "comparable": computation.comparable},
            judge=lambda texts: self._judge(texts, what),
            absent=lambda ranks, seconds: (
                f"{ranks} has compiled nothing within {seconds:g} s while rank {self._me} compiled {what}: it found its "
                f"inputs in the cache or is somewhere else in the program. Do all ranks get inputs of the same shapes and "
                f"flags?"
            ),
            of=f"{what}: the collectives agree but the computations differ (if they are meant to, give "
            "fsdp(allow_different_computation=True))",
        )
        return Agreed(*found)

    def check_same(
        self, what: str, lines: Sequence[str], *, at: str = "thunder.jit(..., transforms=[fsdp(...)])"
    ) -> None:
        """Raise an error unless all ranks have the same text.

        Args:
            what: the subject of the text.
            lines: the text. Ranks send only its digest unless the texts differ.
            at: the call in which all ranks meet.

        Raises:
            ScheduleDisagreement: on every rank. It names the first line that differs and the ranks, or the ranks that
                did not arrive within the timeout.
        """
        if self.is_single_rank:
            return

        def judge(digests: Sequence[str]) -> dict[str, Any]:
            other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
            return {"lines": None if other is None else [0, other], "kind": "exact"}

        self._compare(
            f"thunder_fsdp_sched/{self.name}/same",
            digest_of(lines),
            {"exact": lines},
            judge=judge,
            absent=lambda ranks, seconds: f"{ranks} did not come to {at} within {seconds:g} s of rank {self._me}",
            of=what,
        )

    @property
    def _me(self) -> int:
        return self.group.global_ranks[self.group.rank]

    def _compare(
        self,
        prefix: str,
        own: str,
        lines: Mapping[str, Sequence[str]],
        *,
        judge: Callable[[list[str]], dict[str, Any]],
        absent: Callable[[str, float], str],
        of: str,
    ) -> list[Any]:
        """Compare the texts of all ranks on rank 0, and return its result on every rank.

        Args:
            own: this rank's text.
            lines: this rank's lines by kind, to be shown if they differ from another rank's.
            judge: a function of the texts of all ranks. It returns ``fault``, or ``lines`` for the two ranks whose
                lines of ``kind`` differ, or ``result``.
            absent: formats the message for ranks that did not arrive within a number of seconds.
            of: the subject of the lines.

        Returns:
            The judge's result.

        Raises:
            ScheduleDisagreement: there is a fault; on all ranks, including those that arrive too late.
        """
        store, rank, size = self.group.process_group.get_group_store(), self.group.rank, self.group.size
        keys, verdict_key = [f"{prefix}/{r}" for r in range(size)], f"{prefix}/verdict"
        store.set(keys[rank], own)
        if rank == 0:
            missing = _wait(store, keys, self.timeout)
            verdict = self._missing(missing, absent) if missing else judge([store.get(key).decode() for key in keys])
            verdict = json.loads(store.compare_set(verdict_key, "", json.dumps(verdict)))
        else:
            if _wait(store, [verdict_key], self.timeout):
                missing = [key for key in keys if not store.check([key])]
                if not missing and _wait(store, [verdict_key], _SLACK):  # rank 0 was still comparing
                    missing = keys[:1]
                if missing:
                    store.compare_set(verdict_key, "", json.dumps(self._missing(missing, absent)))
            verdict = json.loads(store.get(verdict_key))
        shown: list[str] = []
        fault = verdict.get("fault", "")
        if verdict.get("lines"):
            shown = [f"{prefix}/lines/{r}" for r in verdict["lines"]]
            if rank in verdict["lines"]:
                store.set(f"{prefix}/lines/{rank}", json.dumps(list(lines[verdict["kind"]])))
            if missing := _wait(store, shown, self.timeout):
                fault = f"{of}; {', '.join(missing)} has not come"
            else:
                texts = {
                    self.group.global_ranks[r]: json.loads(store.get(f"{prefix}/lines/{r}")) for r in verdict["lines"]
                }
                fault = f"{of}, {_difference(texts)}"
        if store.add(f"{prefix}/read", 1) == size:
            for key in (*keys, verdict_key, *shown, f"{prefix}/read"):
                store.delete_key(key)
        if fault:
            raise ScheduleDisagreement(f"fsdp: the ranks of process group {self.group.description!r} disagree: {fault}")
        return verdict.get("result") or []

    def _missing(self, keys: Sequence[str], absent: Callable[[str, float], str]) -> dict[str, Any]:
        ranks = sorted(self.group.global_ranks[int(key.rpartition("/")[2])] for key in keys)
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"each of ranks {ranks}"
        return {"fault": absent(named, self.timeout.total_seconds())}

    def _judge(self, texts: Sequence[str], what: str) -> dict[str, Any]:
        programs: dict[int, list[Action]] = {}
        contents, computations = zip(*(json.loads(text) for text in texts), strict=True)
        for rank, content in zip(self.group.global_ranks, contents, strict=True):
            other_what, program = json.loads(content)
            if other_what != what:
                return {"fault": f"rank {self._me} compiled {what}, rank {rank} compiled {other_what}"}
            programs[rank] = [Action(line, group, tuple(ranks), *rest) for line, group, ranks, *rest in program]
        fault = find_fault(programs)
        if fault:
            return {"fault": f"{what}, {fault}"}
        if self.compares_computation:
            first: dict[tuple[str, ...], int] = {}  # of the ranks with a program, and of those with inputs
            for rank, (content, (comparable, inputs, exact)) in enumerate(zip(contents, computations, strict=True)):
                like = first.setdefault((content,), rank)
                if computations[like][0] != comparable:
                    return {"lines": [like, rank], "kind": "comparable"}
                like = first.setdefault((content, inputs), rank)
                if computations[like][2] != exact:
                    return {"lines": [like, rank], "kind": "exact"}
        alike = len(set(contents)) == 1
        return {"result": [number_of("\n".join(contents)), any(programs.values()), self.compares_computation and alike]}

    def about(self, what: str, group: ProcessGroupRef) -> Agreement:
        """Return a new, separate agreement among the ranks of ``group`` for the same module.

        Modules are numbered per group of all their ranks, and two such groups may share the store of ``group``.
        """
        number = next(self._numbers[what, group.name])
        return Agreement(group, f"{self.group.name} {self.name} {what} {number}", self.timeout)

    @contextlib.contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Wrap work that each rank does alone, so that all ranks raise an error if it fails on any of them.

        Raises:
            ScheduleDisagreement: it failed on another rank; the message has that rank's error.
        """
        done = self.about(what, self.group)
        try:
            yield
        except Exception as error:
            with contextlib.suppress(ScheduleDisagreement):
                done.check_same(what, [f"{type(error).__name__}: {error}"])
            raise
        done.check_same(what, ["it can"])


def _wait(store: Store, keys: Sequence[str], timeout: timedelta) -> list[str]:
    """Wait until all keys are set, and return those that are missing after the timeout."""
    try:
        store.wait(list(keys), timeout)
    except DistNetworkError:
        raise
    except RuntimeError:  # each kind of store raises another type
        return [key for key in keys if not store.check([key])]
    return []


def _difference(texts: dict[int, list[str]]) -> str:
    """Return the first line that differs between two ranks' texts."""
    (first, ours), (other, theirs) = texts.items()
    number = next(i for i, (a, b) in enumerate(itertools.zip_longest(ours, theirs)) if a != b)
    a, b = (text[number] if number < len(text) else "(nothing)" for text in (ours, theirs))
    return f"line {number + 1}:\n    rank {first}: {a}\n    rank {other}: {b}"
