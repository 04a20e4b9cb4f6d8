"""Read the schedule of a trace: its communication, in order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from thunder.core.symbol import BoundSymbol

from .effects import effects
from .schedule import THEN_HOOK, CommOp, Schedule
from .statements import Statement
from .symbols import reduction_of


def schedule_of(statements: Sequence[Statement]) -> Schedule:
    """Return the schedule of a trace with slots."""
    ops = []
    for statement in statements:
        e, issues = statement.effects, statement.issue is not None
        if not e.in_schedule or e.bucket is None:
            continue
        # Its own issue, else the one that it waits for. Accumulated gradients count as the reduction that they replace.
        issue = statement.issue or (statement.waits_for and statement.waits_for.issue) or reduction_of(e.bucket)
        assert issue.group is not None
        hook = "" if e.hook is None else f"{THEN_HOOK}{e.hook}"
        ops.append(
            CommOp(
                statement.position,
                statement.bsym.sym.name,
                e.bucket.spec.name,
                issue.nbytes,
                str(issue.dtype).removeprefix("torch."),
                issue.group.description,
                issue.sent_by,
                str((issue.region.slot if issue.region is not None else None) or ""),
                statement.first_read if statement.waits_for is not None and not issues else None,
                str(statement.bsym.header) + hook,
                not (issues and issue.resident),
            )
        )
    return Schedule(tuple(ops), len(statements), compute_digest(statement.bsym for statement in statements))


def is_communication(bsym: BoundSymbol) -> bool:
    """Return whether ``bsym`` appears in a schedule."""
    return effects(bsym).in_schedule


def compute_digest(bsyms: Iterable[BoundSymbol]) -> str:
    """Return a digest of the names, in order, of all bound symbols that are not communication."""
    names = [b.sym.name for b in bsyms if not is_communication(b)]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
