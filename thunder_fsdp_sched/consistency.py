"""All ranks shard the same module alike and compile schedules that fit, or all say where they differ; none hangs.

[Note: Agreement through the store]
Collectives on one process group have to be issued in the same order by every rank. Ranks that compile differently (other
shapes, another parameter order) would wait for each other inside a collective without a word. So whenever a rank compiles
a program that the ranks have not agreed on, it meets the others on the control channel, where a rank that does something
else is found at once, and puts the lines of its program into the group's *store*. Rank 0 of the group compares them and
puts its verdict beside them. The last rank that has read the verdict deletes the keys.

Ranks whose programs are equal must compute the same, too: another activation on one rank would otherwise train on without
a word (see [Note: When computations are the same] in ``computation``).
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

from .channel import ScheduleDisagreement
from .computation import NOTHING, Computation
from .control import Agreed, Control, number_of
from .deadlock import Step, find_fault
from .groups import Group

__all__ = ["Agreement", "ScheduleDisagreement"]

_SLACK = timedelta(seconds=30)
"""How long rank 0 may take to compare once all ranks have come."""


class Agreement:
    """Compares what ranks have compiled for one module.

    Args:
        group: all ranks that the module shares a process group with, or that these do; with the backend "fake" there is
            nobody to compare with.
        name: what is compared, the same on all ranks and different for each module.
        timeout: how long to wait for the other ranks.
        compares_computation: whether computations have to be equal where programs are.

    Attributes:
        control: the control channel of the module, once there is one.
    """

    def __init__(self, group: Group, name: str, timeout: timedelta, *, compares_computation: bool = True) -> None:
        self.group = group
        self.name = name
        self.timeout = timeout
        self.compares_computation = compares_computation
        self.number = 0
        self.agreed: dict[str, Agreed] = {}
        self.control: Control | None = None
        self._numbers: dict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)
        self.alone = group.size == 1 or group.is_fake

    def check(self, what: str, program: Sequence[Step], computation: Computation = NOTHING) -> Agreed:
        """Looks at the programs of all ranks together; returns when they end (see [Note: What is proved] in ``deadlock``).

        What the ranks have agreed on before is not compared again: a rank whose batch has another shape compiles alone,
        and its traces fit those that the others have in their caches.

        Args:
            what: which trace the program is.
            program: what this rank issues and waits for.
            computation: what it computes.

        Raises:
            ScheduleDisagreement: on every rank, naming the first line that differs and the ranks, where they would hold
                each other up, or the ranks that do something else or did not come.
        """
        if self.alone:
            return Agreed(0, False, False)
        content = json.dumps([what, program])
        digest = hashlib.sha256(content.encode()).hexdigest()
        if digest not in self.agreed:
            if self.control is not None:
                self.control.meet(f"compiling the {what}")
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
        """Looks whether all ranks have the same text; returns when they do.

        Args:
            what: what the text is about.
            lines: the text; ranks send no more than its digest as long as it is the same.
            at: the call in which all ranks are to meet.

        Raises:
            ScheduleDisagreement: on every rank, naming the first line that differs and the ranks, or those that have sent
                none within the timeout.
        """
        if self.alone:
            return

        def judge(digests: Sequence[str]) -> dict[str, Any]:
            other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
            return {"lines": None if other is None else [0, other], "kind": "exact"}

        self._compare(
            f"thunder_fsdp_sched/{self.name}/same",
            hashlib.sha256("\n".join(lines).encode()).hexdigest(),
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
        """Lets rank 0 judge the texts of all ranks.

        Args:
            own: this rank's text.
            lines: what to show of this rank if its lines are asked for, by their kinds.
            judge: takes the texts of all ranks; gives ``fault``, or ``lines`` for the two ranks whose lines of ``kind``
                differ, or ``result``.
            absent: says which ranks did not come within how many seconds.
            of: what the lines are about.

        Returns:
            The judge's result.

        Raises:
            ScheduleDisagreement: there is a fault, on all ranks, also those that come too late.
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
                if not missing and _wait(store, [verdict_key], _SLACK):  # rank 0 was comparing
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
        programs: dict[int, list[Step]] = {}
        contents, computations = zip(*(json.loads(text) for text in texts), strict=True)
        for rank, content in zip(self.group.global_ranks, contents, strict=True):
            other_what, program = json.loads(content)
            if other_what != what:
                return {"fault": f"rank {self._me} compiled {what}, rank {rank} compiled {other_what}"}
            programs[rank] = [Step(line, group, tuple(ranks), *rest) for line, group, ranks, *rest in program]
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

    def about(self, what: str, group: Group) -> Agreement:
        """An agreement of its own among the ranks of ``group``, for the same module; a new one each time.

        Modules are numbered for each group of all their ranks, and two of these may share the store of ``group``.
        """
        number = next(self._numbers[what, group.name])
        return Agreement(group, f"{self.group.name} {self.name} {what} {number}", self.timeout)

    @contextlib.contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Around what a rank does by itself and may refuse; if one refuses, no other goes on to wait for it.

        Raises:
            ScheduleDisagreement: another rank has refused; its message says why.
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
    """Wait until all keys are set; those that are not within the timeout."""
    try:
        store.wait(list(keys), timeout)
    except DistNetworkError:
        raise
    except RuntimeError:  # each kind of store raises another
        return [key for key in keys if not store.check([key])]
    return []


def _difference(texts: dict[int, list[str]]) -> str:
    """The first line that differs between two ranks' texts."""
    (first, ours), (other, theirs) = texts.items()
    number = next(i for i, (a, b) in enumerate(itertools.zip_longest(ours, theirs)) if a != b)
    a, b = (text[number] if number < len(text) else "(nothing)" for text in (ours, theirs))
    return f"line {number + 1}:\n    rank {first}: {a}\n    rank {other}: {b}"
