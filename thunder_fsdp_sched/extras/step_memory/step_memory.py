"""The memory of a whole step as a value: at each position, by kind; printed, compared, asserted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ...ir.analysis import BEFORE_TRACE, NO_PENDING_GRADS, Lifetime, PendingGrads, bytes_at
from ...ir.inspection import source_of, statement
from ...plan.layout import round_up
from ...runtime.bucket import Bucket
from ...runtime.row_dtensor import local_rows
from .rows import StepRows, declared_rows
from .value_memory import arena_allocations, memory_of, memory_of_communication, slots_in_use

KINDS = (
    "shards",
    "optimizer state",
    "unsharded buckets",
    "communication",
    "inputs",
    "gradients",
    "saved for backward",
    "outputs",
    "temporaries",
)
"""The kinds of memory; those that are allocated during the whole step come first."""

_FIXED = ("shards", "unsharded buckets", "communication")
"""The kinds of memory that may be allocated during the whole step."""

OPTIMIZER_STEP = "optimizer.step"
"""The statement of the position after backward, of a step with an optimizer."""

_CUDA_BLOCK = 512
"""Bytes to a multiple of which CUDA's caching allocator rounds each allocation."""


class TensorMemory(NamedTuple):
    """The memory of one tensor of a step.

    Attributes:
        kind: one of :data:`KINDS`.
        name: the name of the tensor in the traces.
        nbytes: bytes of its elements; views of it have none of their own.
        start: position of the bound symbol that defines it, -1 if it exists before the step.
        end: position of the last bound symbol that uses it or a view of it.
        source: the line of the model that made it, ``"model.py:70"``; empty if none is known.
    """

    kind: str
    name: str
    nbytes: int
    start: int
    end: int
    source: str


class MemoryPeak(NamedTuple):
    """The position at which a step uses most memory.

    Attributes:
        position: a schedule position (see :func:`~.inspection.statements`); those of backward follow those of forward.
        nbytes: bytes of all kinds.
        by_kind: bytes of each kind.
        phase: the trace, ``"forward"`` or ``"backward"``, or ``"optimizer.step"``.
        statement: the bound symbol as it is printed in the trace.
        largest: the largest tensors at that position, of the kinds that traces create.
    """

    position: int
    nbytes: int
    by_kind: Mapping[str, int]
    phase: str
    statement: str
    largest: tuple[TensorMemory, ...]


@dataclass(frozen=True)
class StepMemory:
    """The memory of one step on this rank, forward and backward, predicted from the traces that run.

    It counts what the step allocates or keeps: shards, slots of unsharded buckets as they are allocated, inputs,
    gradients, what forward saves for backward, outputs, temporaries, and what communication allocates. On CUDA each
    allocation counts as the caching allocator rounds it, to 512 bytes. See [Note: Bytes of values] and
    [Note: Memory of communication] for the rules. It does not count what traces do not show: memory that fusions and
    kernels allocate internally, or that libraries (cuBLAS, NCCL) keep, copies by gloo, and fragmentation.

    Only the devices of the buckets count, so host memory does not if they are on GPUs. The first step allocates part of
    this memory as it runs; its peak is not higher.

    Attributes:
        fixed: bytes that are allocated during the whole step, by kind.
        tensors: the memory of all other tensors.
        backward: position of the first bound symbol of backward; the number of positions if there is no backward.
        length: the number of positions.
        step: the rows of the traces.
    """

    fixed: Mapping[str, int]
    tensors: tuple[TensorMemory, ...]
    backward: int
    length: int
    step: StepRows = field(repr=False, compare=False)

    @classmethod
    def of(
        cls,
        traces: Sequence[TraceCtx] | StepRows,
        buckets: Iterable[Bucket],
        *,
        device: str | None = None,
        accumulated: PendingGrads = NO_PENDING_GRADS,
        others: Iterable[Iterable[BoundSymbol | None]] = (),
    ) -> StepMemory:
        """Return the memory of a forward trace, or of a forward and a backward trace, over all buckets of a module.

        Args:
            traces: the traces, or their rows.
            device: the type of device (``"cuda"``, ``"cpu"``) whose allocator and kernels the step uses; by default that
                of the buckets. A plan on the meta device or on a CPU passes that of the cluster.
            accumulated: the unreduced gradients of earlier backwards under ``no_sync``.
            others: the bound symbols of other steps that have run, at least those of this package; memory that they
                keep allocated counts.
        """
        buckets = tuple(buckets)
        types = {bucket.spec.device.type for bucket in buckets}
        device = device or ("cuda" if "cuda" in types else min(types, default="cpu"))
        unit = _CUDA_BLOCK if device == "cuda" else 1
        plans_device = device != "cpu"  # on a CPU that plans for a GPU, devices do not tell what is in host memory
        step = traces if isinstance(traces, StepRows) else StepRows(*traces)
        of_others = list(map(declared_rows, others))
        rows, backward = step.rows, step.rows_of_forward
        counted, end = len(step.statements), len(rows) - 1

        def tensor(kind: str, name: str, nbytes: int, first: int, last: int, source: str = "") -> TensorMemory:
            begin = rows[first].position if first >= 0 else -1
            return TensorMemory(kind, name, round_up(nbytes, unit), begin, rows[last].position, source)

        issues = [row.effects for row in rows if row.effects.issues is not None]
        names = {e.uses.arena: str(e.uses) for e in reversed(issues) if e.uses is not None}
        found = [
            tensor("unsharded buckets", names.get(arena, ""), arena.nbytes, first or BEFORE_TRACE, last)
            for arena, spans in arena_allocations(rows, of_others).items()
            for first, last in spans
        ]
        found += [
            tensor("shards", bucket.spec.name, bucket.shard.nbytes, BEFORE_TRACE, end)
            for bucket in buckets
            if bucket.spec.shard_device.type in types and not (bucket.spec.comm.offload and plans_device)
        ]
        shards = {name for row in rows for name in row.costs.shards}
        memory = [m for m in memory_of(rows, step.values) if m.name not in shards]
        memory += memory_of_communication(rows, accumulated, of_others)
        for m in memory:
            if (not types or m.device in types) and not (m.on_host and plans_device):
                source = source_of(rows[m.first].bsym) if m.proxy is not None and m.first >= 0 else ""
                found.append(tensor(_kind(m, backward, len(rows)), m.name, m.nbytes, m.first, m.last, source))
        fixed = dict.fromkeys(_FIXED, 0)
        tensors = []
        for each in found:
            if each.kind in fixed and each.start <= 0 and each.end == counted - 1:
                fixed[each.kind] += each.nbytes
            else:
                tensors.append(each)

        before = rows[backward].position if backward < len(rows) else counted
        return cls(fixed, tuple(tensors), before, counted, step)

    def with_optimizer_state(self, nbytes: int, step_bytes: int = 0) -> StepMemory:
        """Return the memory of a step with an optimizer.

        Args:
            nbytes: bytes of its state on this rank.
            step_bytes: bytes that ``optimizer.step`` allocates and frees. If there are some, a position for it follows the
                last one, with everything that still exists at the end of backward.
        """
        memory = replace(self, fixed={**self.fixed, "optimizer state": nbytes})
        if not step_bytes:
            return memory
        end = self.length
        tensors = [t._replace(end=end) if t.end == end - 1 else t for t in self.tensors]
        tensors.append(TensorMemory("temporaries", OPTIMIZER_STEP, step_bytes, end, end, ""))
        return replace(memory, tensors=tuple(tensors), length=end + 1)

    @cached_property
    def statements(self) -> Sequence[str]:
        """Each bound symbol as it is printed in its trace, and :data:`OPTIMIZER_STEP` if it has a position."""
        return tuple(map(self._statement, range(self.length)))

    def _statement(self, position: int) -> str:  # printing all takes longer than the analysis
        rows = self.step.statements
        return statement(rows[position].bsym) if position < len(rows) else OPTIMIZER_STEP

    def bytes_at(self, position: int) -> dict[str, int]:
        """Return the bytes of each kind while the bound symbol at ``position`` runs, its inputs and outputs included."""
        return {kind: nbytes[position] for kind, nbytes in self._by_kind.items()}

    def bytes_of(self, kind: str) -> tuple[int, ...]:
        """Return the bytes of one of :data:`KINDS` at each position."""
        return self._by_kind[kind]

    @cached_property
    def _by_kind(self) -> dict[str, tuple[int, ...]]:
        spans: dict[str, list[tuple[int, int, int]]] = {kind: [] for kind in KINDS}
        for tensor in self.tensors:
            spans[tensor.kind].append((tensor.start, tensor.end, tensor.nbytes))
        return {
            kind: tuple(self.fixed.get(kind, 0) + nbytes for nbytes in bytes_at(spans[kind], self.length))
            for kind in KINDS
        }

    @cached_property
    def wasted(self) -> tuple[int, ...]:
        """The bytes of unsharded buckets at each position that are allocated and hold nothing that is used again."""
        pairs = itertools.zip_longest(self.bytes_of("unsharded buckets"), slots_in_use(self.step), fillvalue=0)
        return tuple(allocated - in_use for allocated, in_use in pairs)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """The bytes of all kinds at each position."""
        return tuple(map(sum, zip(*self._by_kind.values(), strict=True)))

    def alive_at(self, position: int) -> tuple[TensorMemory, ...]:
        """Return the tensors in use at ``position``, without memory that is allocated during the whole step."""
        return tuple(tensor for tensor in self.tensors if tensor.start <= position <= tensor.end)

    @cached_property
    def peak(self) -> MemoryPeak:
        """The first position at which the step uses most memory, and its five largest tensors."""
        position = max(range(len(self.totals)), key=self.totals.__getitem__)
        largest = tuple(sorted(self.alive_at(position), key=lambda tensor: -tensor.nbytes)[:5])
        line = self._statement(position)
        phase = "forward" if position < self.backward else OPTIMIZER_STEP if line == OPTIMIZER_STEP else "backward"
        return MemoryPeak(position, self.totals[position], self.bytes_at(position), phase, line, largest)

    def __str__(self) -> str:
        peak = self.peak
        lines = [f"peak {peak.nbytes:,} bytes in {peak.phase}, position {peak.position}: {peak.statement}"]
        lines += [f"  {kind:20s} {nbytes:>17,}" for kind, nbytes in peak.by_kind.items() if nbytes]
        lines += ["largest tensors there:"]
        lines += [f"  {t.name:20s} {t.nbytes:>17,}  {t.kind:20s} {t.source}".rstrip() for t in peak.largest]
        if allocated := peak.by_kind["unsharded buckets"]:
            wasted = self.wasted[peak.position]
            lines.append(f"unsharded buckets: {allocated:,} allocated, {allocated - wasted:,} live, {wasted:,} wasted")
        lines.append("not counted: memory inside of fusions, workspaces of kernels, and what libraries allocate")
        return "\n".join(lines)


def _kind(memory: Lifetime, backward: int, length: int) -> str:
    """Return the kind of memory; for values, it depends on when they are used."""
    if memory.kind != "values":
        return memory.kind
    is_returned = memory.last == length - 1
    if memory.first < backward:
        if is_returned:
            return "outputs"
        return "saved for backward" if memory.last >= backward else "temporaries"
    return "gradients" if is_returned else "temporaries"


def optimizer_state_bytes(buckets: Iterable[Bucket], per_element: float | None = None) -> int:
    """Return the bytes of optimizer state on this rank's device.

    The state of shards that ``CPUOffloadPolicy`` keeps on the host is there, too, so it does not count.

    Args:
        per_element: bytes for each element that trains. By default those of Adam and AdamW: two values in the dtype of
            the shards.
    """
    shards = [b.shard for b in _trained_on_device(buckets)]
    return sum(2 * s.nbytes if per_element is None else int(per_element * s.numel()) for s in shards)


def optimizer_step_bytes(buckets: Iterable[Bucket], per_element: float | None = None, *, foreach: bool = True) -> int:
    """Return the bytes that ``optimizer.step`` allocates and frees on this rank's device.

    Args:
        per_element: bytes for each element that trains; 0 with ``fused=True``. By default those of Adam and AdamW: with
            ``foreach`` the roots of all second moments exist at once, in a loop two results for one parameter.
        foreach: whether the optimizer updates all parameters at once, torch's default on GPUs but not on CPUs.
    """
    trained = _trained_on_device(buckets)
    if per_element is not None:
        return sum(int(per_element * b.shard.numel()) for b in trained)
    rows = [local_rows(param).nbytes for b in trained for param in b.params]
    return sum(rows) if foreach else 2 * max(rows, default=0)


def _trained_on_device(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Return the buckets whose shards an optimizer updates on the device, not on the host."""
    return [b for b in buckets if b.spec.requires_grad and not b.spec.comm.offload]
