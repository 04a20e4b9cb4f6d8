"""All ranks shard the same module alike and compile the same schedule, or all say where they differ; none hangs.

[Note: Agreement through the store]
Collectives on one process group have to be issued in the same order by every rank. Ranks that compile differently (other
shapes, another parameter order, a cache hit here and a miss there) would wait for each other inside a collective without
a word. So whenever a rank compiles, it puts the lines of its schedule into the group's *store*, which needs no
collective and has timeouts. Rank 0 of the group compares them and puts its verdict beside them. A rank that does not
compile does not look: it learns of a verdict when its own collective fails (``explain``).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torch.distributed import DistNetworkError

from .deadlock import Step, find_fault
from .groups import Group

__all__ = ["Agreement", "ScheduleDisagreement"]


class ScheduleDisagreement(RuntimeError):
    """The ranks of a process group have compiled different schedules, or some have compiled and others have not."""


class Agreement:
    """Compares what ranks have compiled for one module.

    Args:
        group: all ranks that the module shares a process group with, or that these do; with the backend "fake" there is
            nobody to compare with.
        name: what is compared, the same on all ranks and different for each module.
        timeout: how long to wait for the other ranks.
    """

    def __init__(self, group: Group, name: str, timeout: timedelta) -> None:
        self.group = group
        self.name = name
        self.timeout = timeout
        self.number = 0
        self.agreed: set[str] = set()
        self._numbers: dict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)
        self.alone = group.size == 1 or group.backend == "fake"

    def check(self, what: str, program: Sequence[Step]) -> None:
        """Looks at the programs of all ranks together; returns when they end (see [Note: What is proved] in ``deadlock``).

        What the ranks have agreed on before is not compared again: a rank whose batch has another shape compiles alone,
        and its traces fit those that the others have in their caches.

        Args:
            what: which trace the program is.
            program: what this rank issues and waits for.

        Raises:
            ScheduleDisagreement: on every rank that compares, naming the first line that differs and the ranks, where
                they would hold each other up, or the ranks that compiled nothing within the timeout.
        """
        if self.alone:
            return
        content = json.dumps([what, program])
        digest = hashlib.sha256(content.encode()).hexdigest()
        if digest in self.agreed:
            return
        try:
            verdict = self._ask(what, content)
        except DistNetworkError as error:
            raise ScheduleDisagreement(
                f"fsdp: rank {self.group.rank} has compiled {what} and cannot tell the other ranks of process group "
                f"{self.group.description!r}: its store is gone ({error})"
            ) from error
        if verdict:
            raise ScheduleDisagreement(
                f"fsdp: the ranks of process group {self.group.description!r} disagree: {verdict}"
            )
        self.agreed.add(digest)

    def _ask(self, what: str, content: str) -> str:
        """Rank 0's verdict on what all ranks have compiled; empty if nothing is wrong."""
        prefix = f"thunder_fsdp_sched/{self.name}/{self.number}"
        self.number += 1
        store = self.group.process_group.get_group_store()
        rank = self.group.rank
        store.set(f"{prefix}/program/{rank}", content)
        if rank == 0:
            store.set(f"{prefix}/verdict", self._judge(prefix, what))
        try:
            # Rank 0 itself may wait that long for the others.
            store.wait([f"{prefix}/verdict"], self.timeout * 2)
            verdict = store.get(f"{prefix}/verdict").decode()
        except DistNetworkError:
            raise
        except Exception as error:
            verdict = f"rank 0 has compiled nothing within {self.timeout} while rank {rank} compiled {what} ({error})"
        if verdict:
            store.set(f"thunder_fsdp_sched/{self.name}/disagreement", verdict)
        return verdict

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
        store = self.group.process_group.get_group_store()
        rank, prefix = self.group.rank, f"thunder_fsdp_sched/{self.name}/same"
        store.set(f"{prefix}/digest/{rank}", hashlib.sha256("\n".join(lines).encode()).hexdigest())
        try:
            if rank == 0:
                store.set(f"{prefix}/other", self._first_other(prefix, at))
            store.wait([f"{prefix}/other"], self.timeout * 2)
            verdict = store.get(f"{prefix}/other").decode()
            if verdict.isdigit():
                other = int(verdict)
                if rank in (0, other):
                    store.set(f"{prefix}/lines/{rank}", json.dumps(list(lines)))
                store.wait([f"{prefix}/lines/{r}" for r in (0, other)], self.timeout)
                texts = {self.group.global_ranks[r]: json.loads(store.get(f"{prefix}/lines/{r}")) for r in (0, other)}
                verdict = f"{what}, {_difference(texts)}"
        except RuntimeError as error:  # of the store
            verdict = f"rank {rank} has waited {self.timeout * 2} for the others ({error})"
        if verdict:
            raise ScheduleDisagreement(
                f"fsdp: the ranks of process group {self.group.description!r} disagree: {verdict}"
            )

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

    def _first_other(self, prefix: str, at: str) -> str:
        """The first rank whose digest is not rank 0's, nothing if there is none, or what is wrong."""
        store = self.group.process_group.get_group_store()
        own = store.get(f"{prefix}/digest/0")
        for rank in range(1, self.group.size):
            try:
                store.wait([f"{prefix}/digest/{rank}"], self.timeout)
            except Exception:
                return (
                    f"rank {self.group.global_ranks[rank]} did not come to {at} within "
                    f"{self.timeout.total_seconds():g} s of rank {self.group.global_ranks[0]}"
                )
            if store.get(f"{prefix}/digest/{rank}") != own:
                return str(rank)
        return ""

    def _judge(self, prefix: str, what: str) -> str:
        """What is wrong, for all ranks to read; empty if nothing is."""
        store = self.group.process_group.get_group_store()
        programs: dict[int, list[Step]] = {}
        for rank, global_rank in enumerate(self.group.global_ranks):
            try:
                store.wait([f"{prefix}/program/{rank}"], self.timeout)
            except DistNetworkError:
                raise
            except Exception:
                return (
                    f"rank {rank} has compiled nothing within {self.timeout.total_seconds():g} s while rank 0 compiled "
                    f"{what}: it found its inputs in the cache or is somewhere else in the program. Do all ranks get "
                    f"inputs of the same shapes and flags?"
                )
            other_what, program = json.loads(store.get(f"{prefix}/program/{rank}"))
            if other_what != what:
                return f"rank 0 compiled {what}, rank {rank} compiled {other_what}"
            programs[global_rank] = [Step(line, group, tuple(ranks), *rest) for line, group, ranks, *rest in program]
        fault = find_fault(programs)
        return f"{what}, {fault}" if fault else ""

    def explain(self) -> str:
        """The verdict of ranks that compared and disagreed, if there is one: why a collective here may have failed."""
        if self.alone:
            return ""
        try:
            store = self.group.process_group.get_group_store()
            key = f"thunder_fsdp_sched/{self.name}/disagreement"
            return store.get(key).decode() if store.check([key]) else ""
        except Exception:  # the store may be gone with the rank that held it
            return ""


def _difference(texts: dict[int, list[str]]) -> str:
    """The first line that differs between two ranks' texts."""
    (first, ours), (other, theirs) = texts.items()
    number = next(i for i, (a, b) in enumerate(itertools.zip_longest(ours, theirs)) if a != b)
    a, b = (text[number] if number < len(text) else "(nothing)" for text in (ours, theirs))
    return f"line {number + 1}:\n    rank {first}: {a}\n    rank {other}: {b}"
