"""All ranks compile the same schedule, or all of them say where they differ; none hangs.

[Note: Agreement through the store]
Collectives on one process group have to be issued in the same order by every rank. Ranks that compile differently (other
shapes, another parameter order, a cache hit here and a miss there) would wait for each other inside a collective without
a word. So whenever a rank compiles, it puts the lines of its schedule into the group's *store*, which needs no
collective and has timeouts. Rank 0 of the group compares them and puts its verdict beside them. A rank that does not
compile does not look: it learns of a verdict when its own collective fails (``explain``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import timedelta

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
        except Exception as error:
            verdict = f"rank 0 has compiled nothing within {self.timeout} while rank {rank} compiled {what} ({error})"
        if verdict:
            store.set(f"thunder_fsdp_sched/{self.name}/disagreement", verdict)
            raise ScheduleDisagreement(
                f"fsdp: the ranks of process group {self.group.description!r} disagree: {verdict}"
            )
        self.agreed.add(digest)

    def _judge(self, prefix: str, what: str) -> str:
        """What is wrong, for all ranks to read; empty if nothing is."""
        store = self.group.process_group.get_group_store()
        programs: dict[int, list[Step]] = {}
        for rank, global_rank in enumerate(self.group.global_ranks):
            try:
                store.wait([f"{prefix}/program/{rank}"], self.timeout)
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
