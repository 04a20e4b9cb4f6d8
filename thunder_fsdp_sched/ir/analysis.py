"""Lifetimes of values, slots and other memory in traces that run one after the other.

[Note: Lifetimes]
Every pass that moves communication, assigns memory or predicts times and bytes asks the same questions, and
:class:`Analysis` answers them. ``proof`` does not use it, because it checks the results.

*Positions* count the analyzed bound symbols from 0, over all traces that run one after the other. ``BEFORE_TRACE``
stands for everything earlier. ``del`` statements have positions and read nothing.

*Views* keep the memory of others in use. The ``roots`` of a value are the values whose memory it may share, by the safe
facts about operators: reading a view also uses its roots. Its ``owners`` are those whose memory it does share, by
observation with the strides that values have: see ``extras.step_memory.value_memory.memory_of``. Both are values,
because a name may be computed again; ``operator_facts.Aliases`` follows the names of one trace that is made or run.

*Names* may appear in several traces. A value that forward saves and backward unpacks by the same name is one value. If
a bound symbol computes a name again, as in two traces of the same step, that is a new value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..runtime.bucket import Bucket
from ..runtime.memory import Slot
from .effects import Effects, SlotRegion, effects
from .inspection import UNPACKING, defined_by

BEFORE_TRACE = -1
"""The position of values that exist when the trace begins, and the start of slots that are resident then."""


@dataclass(eq=False, slots=True)
class Lifetime:
    """When a value, a slot or other memory is in use, from position to position, both included.

    Attributes:
        name: the name of the value, or a description of other memory.
        first: the position that defines, writes or allocates it; ``BEFORE_TRACE`` for what exists earlier. For a reduction
            that is the first gradient that is written in place, for a gather of a resident bucket ``BEFORE_TRACE``.
        used: the last read of a value or, unless it is a view, of a possible view of it; ``first`` without reads.
        last: the last position at which it occupies bytes.
        nbytes: the bytes that it owns; 0 for a view or a value in a slot. For a slot, including alignment.
        device: the type of its device.
        kind: ``"inputs"``, ``"values"``, ``"temporaries"``, ``"communication"``, ``"gradients"`` or ``"slot"``.
        on_host: whether it is in host memory, also in a plan on a CPU for a GPU.
        proxy: the proxy of a value.
        reads: positions of the bound symbols that read it, ascending, one for each operand.
        roots: the values whose memory it may share; itself if it is not a view.
        owners: the values whose memory it shares; itself if it owns some. ``memory_of`` sets them.
        region: the bytes of a slot.
        issue: position of the issue that uses the slot.
        writes: positions of the bound symbols that write gradients into the slot, in the order of parameters.
        accesses: a position for each parameter of the bucket in the slot. For a gather, the last read of the parameter, or
            the wait if nothing reads it. For a reduction, the write of its gradient, if it is written in place.
    """

    name: str
    first: int
    used: int
    last: int
    nbytes: int = 0
    device: str = "cpu"
    kind: str = "values"
    on_host: bool = False
    proxy: Any = None
    reads: list[int] = field(default_factory=list)
    roots: tuple[Lifetime, ...] = ()
    owners: tuple[Lifetime, ...] = ()
    region: SlotRegion | None = None
    issue: int = BEFORE_TRACE
    writes: tuple[int, ...] = ()
    accesses: dict[int, int] = field(default_factory=dict)
    is_gather: bool = False

    @property
    def bucket(self) -> Bucket:
        """The bucket that is in the slot."""
        assert self.region is not None
        return self.region.bucket

    @property
    def slot(self) -> Slot | None:
        """The slot, ``None`` before ``assign_slots``."""
        assert self.region is not None
        return self.region.slot

    def may_be_replaced_by(self, reduction: Lifetime) -> bool:
        """Return whether each gradient is written after the last read of its parameter here, and can take its place."""
        spec = reduction.bucket.spec
        writes = [reduction.accesses.get(index, reduction.issue) for index in self.accesses]
        return spec.param_dtype == spec.reduce_dtype and all(
            read < write for read, write in zip(self.accesses.values(), writes, strict=True)
        )


PendingGrads = frozenset[Any]
"""The memory of the gradients that backwards under ``no_sync`` have left, unsharded or reduced: each an ``Allocation`` of
``extras.step_memory.costs``."""

NO_PENDING_GRADS: PendingGrads = frozenset()


class Analysis:
    """The lifetimes in traces that run one after the other; see [Note: Lifetimes].

    The cost is linear in the number of bound symbols. Slots and memory are computed when they are first asked for.

    Args:
        *traces: the bound symbols of each trace, or any part of them in order. A value that none of them defines counts
            as defined before.

    Attributes:
        bsyms: the bound symbols of all traces, which positions count.
        effects: the effects of each bound symbol.
        values: all values, in the order in which they appear.
        args: for each position, the values that the bound symbol reads, one for each operand.
        outs: for each position, the values that it defines.
    """

    def __init__(self, *traces: Sequence[BoundSymbol] | TraceCtx) -> None:
        parts = [trace.bound_symbols if isinstance(trace, TraceCtx) else trace for trace in traces]
        self.bsyms: list[BoundSymbol] = list(itertools.chain(*parts))
        self.effects: list[Effects] = list(map(effects, self.bsyms))
        self.values: list[Lifetime] = []
        self.args: list[tuple[Lifetime, ...]] = []
        self.outs: list[tuple[Lifetime, ...]] = []
        self._latest: dict[str, Lifetime] = {}
        for position, bsym in enumerate(self.bsyms):
            reads = bsym.sym.id is not PrimIDs.DEL
            self.args.append(tuple([self._read(p, position) for p in bsym.flat_proxy_args]) if reads else ())
            self.outs.append(tuple(self._define(bsym, position)))

    def _read(self, proxy: Any, position: int) -> Lifetime:
        value = self._latest.get(proxy.name) or self._add(proxy, BEFORE_TRACE)
        value.reads.append(position)
        value.used = position
        for root in value.roots:
            root.used = position
        return value

    def _define(self, bsym: BoundSymbol, position: int) -> Iterator[Lifetime]:
        aliases = self.effects[position].aliases
        for proxy in defined_by(bsym):
            if bsym.sym.id in UNPACKING and proxy.name in self._latest:
                continue  # saved by an earlier trace
            shared = {root: None for name in aliases.get(proxy.name, ()) for root in self._latest[name].roots}
            yield self._add(proxy, position, tuple(shared))

    def _add(self, proxy: Any, position: int, roots: tuple[Lifetime, ...] = ()) -> Lifetime:
        value = self._latest[proxy.name] = Lifetime(proxy.name, position, position, position, proxy=proxy)
        value.roots = roots or (value,)
        self.values.append(value)
        return value

    def value(self, name: str) -> Lifetime | None:
        """Return the value with this name, the latest if there are several; ``None`` if it does not appear."""
        return self._latest.get(name)

    def roots(self, names: Iterable[str]) -> set[str]:
        """Return the names of the values whose memory the named values may share, their own if they are no views."""
        found: set[str] = set()
        for name in names:
            value = self._latest.get(name)
            found.update((root.name for root in value.roots) if value is not None else (name,))
        return found

    def defined(self, names: Iterable[str]) -> int:
        """Return the position at which the last of the named values is defined."""
        return max((value.first for value in self._known(names)), default=BEFORE_TRACE)

    def first_read(self, names: Iterable[str]) -> int | None:
        """Return the position of the first bound symbol that reads one of the named values; ``None`` if none does."""
        return min((value.reads[0] for value in self._known(names) if value.reads), default=None)

    def last_use(self, names: Iterable[str]) -> int:
        """Return the position of the last bound symbol that reads one of the named values or a view of one."""
        return max((value.used for value in self._known(names)), default=BEFORE_TRACE)

    def _known(self, names: Iterable[str]) -> Iterator[Lifetime]:
        return (self._latest[name] for name in names if name in self._latest)

    @cached_property
    def slots(self) -> dict[int, Lifetime]:
        """The lifetime of each slot, keyed by the position of the issue, ascending.

        A gather whose bucket is resident from an earlier one of these traces extends the lifetime of that gather.
        """
        found: dict[int, Lifetime] = {}
        of_future: dict[Lifetime, Lifetime] = {}
        gathers: dict[tuple[Bucket, Slot | None], Lifetime] = {}
        for position, e in enumerate(self.effects):
            if e.waits is not None and (used := of_future.get(self.args[position][0])) is not None:
                used.last = position
                if used.is_gather:
                    used.accesses = {index: param.used for index, param in enumerate(self.outs[position])}
                    used.last = max(position, *used.accesses.values())
            if e.issues is None or e.issues.region is None:
                continue
            region = e.issues.region
            key = region.bucket.primary, region.slot
            if e.issues.resident and key in gathers:
                used = gathers[key]
            else:
                used = found[position] = self._slot(position, e, region)
            if used.is_gather:
                gathers[key] = used
            of_future[self.outs[position][0]] = used
        return found

    def _slot(self, position: int, e: Effects, region: SlotRegion) -> Lifetime:
        """Return the lifetime of the slot of an issue, up to the issue itself."""
        assert e.issues is not None
        written: dict[int, int] = {}
        for value in self.args[position]:
            grad = e.collects.get(value.name)
            if grad is not None and grad.param is not None and value.first >= 0:
                if self.effects[value.first].fills is not None:
                    written[grad.param] = value.first
        first = BEFORE_TRACE if e.issues.resident else min([*written.values(), position])
        return Lifetime(
            str(region.slot or ""),
            first,
            position,
            position,
            region.nbytes,
            region.bucket.spec.device.type,
            "slot",
            region=region,
            issue=position,
            writes=tuple(written.values()),
            accesses=written,
            is_gather=e.issues.gathers,
        )


def peak_bytes(spans: Iterable[tuple[int, int, int]]) -> int:
    """Return the most bytes at one position, of spans ``(first, last, bytes)`` with both ends included."""
    spans = list(spans)
    length = 1 + max((last for _, last, _ in spans), default=0)
    return max(bytes_at(spans, length))


def bytes_at(spans: Iterable[tuple[int, int, int]], length: int) -> list[int]:
    """Return the bytes at each position, of spans ``(first, last, bytes)`` with both ends included."""
    changes = [0] * (length + 1)
    for first, last, nbytes in spans:
        changes[max(first, 0)] += nbytes
        changes[last + 1] -= nbytes
    return list(itertools.accumulate(changes[:-1]))
