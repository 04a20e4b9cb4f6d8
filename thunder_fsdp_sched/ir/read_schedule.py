"""Read from a trace what it communicates, and in which order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from .analysis import Analysis
from .effects import Issue, effects
from .inspection import outs_of, statements
from .schedule import THEN_HOOK, CommOp, Schedule
from .symbols import reduction_of


def read_schedule(trace: TraceCtx) -> Schedule:
    """Return the schedule of a trace with slots."""
    bsyms = statements(trace)
    live = Analysis(bsyms)
    ops = []
    issued: dict[str, Issue] = {}
    for position, (bsym, e) in enumerate(zip(bsyms, live.effects, strict=True)):
        if not e.in_schedule or e.bucket is None:
            continue
        # What it issues, else what it waits for; gradients that are accumulated count as what would reduce them.
        issue = e.issues or (issued[e.waits.future] if e.waits is not None else reduction_of(e.bucket))
        if e.issues is not None:
            issued[issue.future] = issue
        assert issue.group is not None
        hook = "" if e.hook is None else f"{THEN_HOOK}{e.hook}"
        ops.append(
            CommOp(
                position,
                bsym.sym.name,
                e.bucket.spec.name,
                issue.nbytes,
                str(issue.dtype).removeprefix("torch."),
                issue.group.description,
                issue.sent_by,
                str((issue.region.slot if issue.region is not None else None) or ""),
                live.first_read(outs_of(bsym)) if e.issues is None and e.waits is not None else None,
                str(bsym.header) + hook,
                not issue.resident or e.issues is None,
            )
        )
    return Schedule(tuple(ops), len(bsyms), compute_digest(bsyms))


def is_communication(bsym: BoundSymbol) -> bool:
    """Return whether ``bsym`` appears in a schedule."""
    return effects(bsym).in_schedule


def compute_digest(bsyms: Iterable[BoundSymbol]) -> str:
    """Return a digest of the names, in order, of all bound symbols that are not communication."""
    names = [b.sym.name for b in bsyms if not is_communication(b)]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
