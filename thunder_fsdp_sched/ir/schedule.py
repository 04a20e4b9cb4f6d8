"""The schedule of a compiled trace as a value: printed and compared; ``schedule_files`` saves and loads it."""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ranks.messages import Action
from .analysis import Analysis
from .effects import Issue, effects
from .inspection import outs_of, statements
from .symbols import GATHER_WAITS, GATHERS, ISSUES, reduction_of

THEN_HOOK = "; then all_reduce_hook "
"""The prefix of a hook's name in the reason of a wait that calls the hook."""


@dataclass(frozen=True)
class CommOp:
    """One communication op of a trace.

    Attributes:
        position: its schedule position: index among the statements of the trace, without ``del`` and agreement.
        kind: name of its symbol.
        bucket: name of its bucket.
        nbytes: bytes, padding included, of its data: the unsharded parameters or gradients, or for an all-reduce the
            sharded gradients.
        dtype: dtype of these data.
        group: description of the process group, or its name.
        transport: name of the transport; the bucket's plan has the reason for it.
        slot: the slot of the unsharded bucket, for an issue and its wait.
        first_consumer: for a wait, the position of the first bound symbol that reads an output; ``None`` if none does.
        reason: why it is at this position: first consumer, prefetch, producer, in-flight limit, ...
        travels: for a gather, false if its bucket is expected to be resident from forward.
    """

    position: int
    kind: str
    bucket: str
    nbytes: int
    dtype: str
    group: str
    transport: str
    slot: str
    first_consumer: int | None
    reason: str
    travels: bool = True

    @property
    def issues(self) -> bool:
        """Whether it issues a collective."""
        return self.kind in ISSUES

    def __str__(self) -> str:
        read = f"first read at {self.first_consumer}" if self.first_consumer is not None else ""
        return (
            f"{self.position:5d}  {self.kind:19s}  {self.bucket:20s} {self.nbytes:>13,} B {self.dtype:8s} "
            f"{self.slot:12s} {read:20s} {self.reason}{'' if self.travels else ', already resident'}"
        ).rstrip()


@dataclass(frozen=True)
class Schedule:
    """The communication of one trace, in order.

    Attributes:
        statements: number of statements of the trace, without ``del`` and agreement.
        compute: digest of the names of all compute, in order. A schedule fits only traces with the same digest.
    """

    ops: tuple[CommOp, ...]
    statements: int
    compute: str

    def __iter__(self) -> Iterator[CommOp]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    def __str__(self) -> str:
        return "\n".join(map(str, self.ops))

    def of(self, kind: str) -> tuple[CommOp, ...]:
        """Return the ops of one kind, in order."""
        return tuple(op for op in self.ops if op.kind == kind)

    def diff(self, other: Schedule) -> str:
        """Return a unified diff of the printed schedules; empty if they print alike."""
        return _diff(self, other)

    @property
    def gathers_in_flight(self) -> int:
        """The most gathers that are issued and not waited for at one position."""
        changes = [(op.kind in GATHERS) - (op.kind in GATHER_WAITS) for op in self]
        return max(itertools.accumulate(changes), default=0)

    def collectives(self) -> list[str]:
        """Return one line for each collective, in issue order; all ranks of a group must have the same lines."""
        return [f"{op.kind} {op.bucket} {op.nbytes} bytes {op.dtype} {op.transport}" for op in self.ops if op.issues]


def read_program(trace: TraceCtx) -> list[Action]:
    """Return the sequence of issues and waits of a trace, the input of ``deadlock.find_fault``.

    The line of a reduction names the parameters of the bucket that have no gradient in this trace. A rank that lacks a
    gradient returns none to autograd, whatever the others send for its rows, so ranks must lack the same.
    """
    actions: list[Action] = []
    issued: dict[str, Action] = {}
    hooks = 0
    for bsym in statements(trace):
        e = effects(bsym)
        if e.waits is not None and e.bucket is not None:
            actions.append(issued[e.waits.future]._replace(waits=True))
        if e.hook is not None and e.bucket is not None:
            # It may communicate on any group, so it counts as a collective of all ranks that share the bucket.
            bucket, hooks = e.bucket, hooks + 1
            ranks = bucket.ranks.all_ranks
            called = Action(
                f"all_reduce_hook {e.hook} {bucket.spec.name}", f"hook of ranks {ranks}", ranks, False, -hooks
            )
            actions += [called, called._replace(waits=True)]
        issue = e.issues
        if issue is not None and issue.bucket is not None and issue.group is not None:
            spec, group = issue.bucket.spec, issue.group
            line = f"{issue.kind} {spec.name} {issue.nbytes} bytes {issue.dtype} {issue.sent_by}"
            line += "".join(f" {name}={mark}" for name, mark in issue.marks.items())
            if missing := [spec.params[index].name for index in e.missing_gradients]:
                line += f" without gradients of {', '.join(missing)}"
            actions.append(Action(line, group.name or group.description, tuple(group.global_ranks), False, len(issued)))
            issued[issue.future] = actions[-1]
    return actions


@dataclass(frozen=True)
class StepSchedule:
    """The schedules of one compiled set of input shapes and flags."""

    forward: Schedule
    backward: Schedule | None
    no_sync: bool = False

    def __str__(self) -> str:
        parts = ["forward", str(self.forward)]
        if self.backward is not None:
            parts += ["backward", str(self.backward)]
        return "\n".join(parts)

    def diff(self, other: StepSchedule) -> str:
        """Return a unified diff of the printed schedules; empty if they print alike."""
        return _diff(self, other)


def _diff(one: object, other: object) -> str:
    return "\n".join(difflib.unified_diff(str(one).splitlines(), str(other).splitlines(), lineterm="", n=2))


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
