"""The schedule of a compiled trace, as a value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from thunder.core.prims import PrimIDs
from thunder.core.trace import TraceCtx

from .symbols import ISSUES, WAITS, fsdp_accumulate_grads
from .traces import args_of, outs_of

__all__ = ["CommOp", "Schedule", "read_schedule"]


@dataclass(frozen=True)
class CommOp:
    """One communication op of a trace.

    Attributes:
        position: index of its bound symbol in the trace (without ``del`` statements).
        kind: name of its symbol.
        bucket: name of its bucket.
        nbytes: bytes of the unsharded bucket, padding included.
        dtype: in which it travels.
        group: name of the process group.
        slot: the memory of the unsharded bucket, for the issue and its wait.
        first_consumer: of a wait: position of the first bound symbol that reads what it gives, ``None`` if none does.
    """

    position: int
    kind: str
    bucket: str
    nbytes: int
    dtype: torch.dtype
    group: str
    slot: str
    first_consumer: int | None


@dataclass(frozen=True)
class Schedule:
    """The communication of one trace, in order."""

    ops: tuple[CommOp, ...]

    def __iter__(self) -> Iterator[CommOp]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    def of(self, kind: str) -> tuple[CommOp, ...]:
        """The ops of one kind, in order."""
        return tuple(op for op in self.ops if op.kind == kind)

    def __str__(self) -> str:
        lines = []
        for op in self.ops:
            consumer = f" first read at {op.first_consumer}" if op.first_consumer is not None else ""
            lines.append(f"{op.position:5d} {op.kind:21s} {op.bucket:24s} {op.nbytes:>13,} B  {op.slot}{consumer}")
        return "\n".join(lines)


def read_schedule(trace: TraceCtx) -> Schedule:
    """Reads the schedule off a trace with slots."""
    first_read: dict[str, int] = {}
    for position, bsym in enumerate(trace.bound_symbols):
        if bsym.sym.id is not PrimIDs.DEL:
            for arg in args_of(bsym):
                first_read.setdefault(arg, position)
    ops = []
    slots: dict[str, str] = {}
    for position, bsym in enumerate(trace.bound_symbols):
        kind = bsym.sym.name
        if kind not in ISSUES and kind not in WAITS and bsym.sym is not fsdp_accumulate_grads:
            continue
        bucket = bsym.args[0]
        slot, consumer = "", None
        if kind in ISSUES:
            slot = slots[bsym.output.name] = str(bsym.args[1])
        elif kind in WAITS:
            slot = slots[bsym.args[1].name]
            consumer = min((first_read[o] for o in outs_of(bsym) if o in first_read), default=None)
        spec = bucket.spec
        ops.append(
            CommOp(position, kind, spec.name, spec.unsharded_bytes, spec.dtype, bucket.group.group_name, slot, consumer)
        )
    return Schedule(tuple(ops))
