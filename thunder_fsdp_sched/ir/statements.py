"""The statements of a trace, from which schedules, programs and lines to compare are made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from .effects import Effects, Issue, effects
from .inspection import args_of, outs_of, statements


class Statement(NamedTuple):
    """A statement of a trace.

    Attributes:
        position: its index among the statements.
        bsym: the bound symbol.
        effects: its effects.
        number: how many collectives of buckets are issued before it.
        waits_for: the statement that issues the collective of a bucket that it waits for.
        first_read: the position of the first statement that reads one of its results; ``None`` if none does.
    """

    position: int
    bsym: BoundSymbol
    effects: Effects
    number: int
    waits_for: Statement | None
    first_read: int | None

    @property
    def issue(self) -> Issue | None:
        """The collective of a bucket that it issues."""
        return self.effects.issues if self.effects.bucket is not None else None

    @property
    def operation(self) -> list[BoundSymbol]:
        """The bound symbols of the collective up to this one: its issue, an all-reduce after a reduce-scatter, its wait."""
        return [*(self.waits_for.operation if self.waits_for is not None else ()), self.bsym]


def read_statements(trace: TraceCtx | Iterable[BoundSymbol]) -> list[Statement]:
    """Return the statements of a trace, or of bound symbols that take the place of its statements."""
    bsyms = statements(trace) if isinstance(trace, TraceCtx) else list(trace)
    first_reads: dict[str, int] = {}
    for position, bsym in enumerate(bsyms):
        for name in args_of(bsym):
            first_reads.setdefault(name, position)
    found: list[Statement] = []
    issued: dict[str, Statement] = {}
    for position, bsym in enumerate(bsyms):
        e = effects(bsym)
        waits_for = issued[e.waits.future] if e.waits is not None and e.bucket is not None else None
        reads = [first_reads[name] for name in outs_of(bsym) if name in first_reads]
        statement = Statement(position, bsym, e, len(issued), waits_for, min(reads, default=None))
        if statement.issue is not None:
            issued[statement.issue.future] = statement
        found.append(statement)
    return found


def operations(read: Iterable[Statement]) -> tuple[list[BoundSymbol], list[list[BoundSymbol]]]:
    """Separate the collectives of buckets from all other bound symbols.

    Returns:
        The others, and for each collective the bound symbols that issue it, continue it and wait for it, in the order
        of the waits.
    """
    others: list[BoundSymbol] = []
    found: list[list[BoundSymbol]] = []
    for statement in read:
        if statement.issue is None and statement.waits_for is None:
            others.append(statement.bsym)
        elif statement.issue is None:
            found.append(statement.operation)
    return others, found
