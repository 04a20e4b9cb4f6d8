"""The schedule of a compiled trace as a value: printed and compared; ``extras.replay`` saves and loads it."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from ..extensions import load

# Names of symbols, as schedules have them. An extra adds its own when it registers them (``registry.register``).

GATHERS = {"fsdp_all_gather"}
"""The symbols that issue a gather of a bucket."""

ISSUES = GATHERS | {"fsdp_reduce_scatter"}
"""The symbols that issue a collective of a bucket."""

GATHER_WAITS = {"fsdp_wait_params"}
"""The symbols that wait for a gather."""

WAITS = GATHER_WAITS | {"fsdp_wait_grads"}
"""The symbols that only wait for a collective."""

MAX_REDUCTIONS_IN_FLIGHT = 2
"""How many equally large reductions of one process group may be in flight. Each holds a slot of unsharded gradients. A
third one would not improve overlap, because the reductions of one process group run one after the other. Meanwhile the
next bucket's slot may fill with gradients that are written in place; copied gradients would need as much memory of
their own."""

_REGISTERING = ("extras.replicas", "extras.no_sync", "extras.ranks_differ.symbols")
"""The extras that add names."""

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

    def __post_init__(self) -> None:
        if self.kind not in ISSUES | WAITS:  # it comes from a file or from another process
            for module in _REGISTERING:
                load(module)

    def __reduce__(self) -> Any:
        return CommOp, tuple(getattr(self, field.name) for field in fields(self))

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
