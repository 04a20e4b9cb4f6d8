"""Liveness: where each value of a trace is defined and read, and from where to where each slot is in use.

[Note: Liveness]
Every pass that moves communication, assigns memory or predicts times asks the same questions, and this analysis answers
them for all. ``transforms.verify`` and ``testing`` do not use it: they check its results by walks of their own.

*Positions* count the analyzed bound symbols from 0, over all traces that run one after the other. ``BEFORE_TRACE``
stands for everything earlier. ``del`` statements have positions and read nothing.

*Views* keep the memory of others in use. The ``roots`` of a value are the values whose memory it may share, by the facts
about operators (``operator_facts``), and reading a view also uses its roots.

*Names* may appear in several traces. Backward unpacks by the same name what forward has saved; that is one value. If a
bound symbol computes a name again, as in two traces of the same step, that is a new value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol

from ..runtime.bucket import Bucket
from ..runtime.memory import Slot, slot_bytes
from .inspection import UNPACKING, aliased_inputs, defined_by
from .operands import Issue, Reduction, bucket_of
from .symbols import (
    GRAD_WAITS,
    GRAD_WRITERS,
    fsdp_all_gather,
    fsdp_all_reduce,
    fsdp_reduce_scatter,
    fsdp_wait_params,
    is_resident,
    payload,
)

__all__ = ["BEFORE_TRACE", "Liveness", "SlotRange", "Value", "peak_bytes", "slot_bytes_of"]

BEFORE_TRACE = -1
"""The position of what exists when the trace begins, and the start of a slot that is resident then."""


@dataclass(eq=False, slots=True)
class Value:
    """A value of a trace, and where it is used.

    Attributes:
        proxy: its proxy.
        defined: position of the bound symbol that defines it, ``BEFORE_TRACE`` if none does.
        last_use: position of the last bound symbol that reads it or, unless it is a view itself, a view of it. If there
            is none, ``defined``.
        reads: positions of the bound symbols that read it, ascending, one for each operand.
        roots: the values whose memory it may share; itself if it is not a view.
    """

    proxy: Proxy
    defined: int
    last_use: int
    reads: list[int] = field(default_factory=list)
    roots: tuple[Value, ...] = ()


@dataclass(frozen=True, eq=False)
class SlotRange:
    """The positions, first and last included, between which the slot of a gather or a reduction is in use.

    Attributes:
        bucket: the bucket that it holds.
        kind: name of the symbol that issues the collective.
        slot: the slot, ``None`` before ``assign_slots``.
        nbytes: bytes of the slot, including alignment and staging.
        issue: position of the issue.
        start: position of the first write. For a gather that is its issue, or ``BEFORE_TRACE`` if the bucket is resident
            from an earlier trace. For a reduction it is the first gradient that is written in place, or the issue.
        end: position of the last use. For a gather that is the last read of a parameter or a view, or the wait. For a
            reduction it is the wait, or the issue of the all-reduce across replicas.
        grads: positions of the bound symbols that write gradients into the slot, in the order of parameters.
        last_access: a position for each index in the bucket. For a gather, the last read of the parameter, or the wait
            if nothing reads it. For a reduction, the write of the gradient, if it is written in place.
    """

    bucket: Bucket
    kind: str
    slot: Slot | None
    nbytes: int
    issue: int
    start: int
    end: int
    grads: tuple[int, ...] = ()
    last_access: dict[int, int] = field(default_factory=dict)

    @property
    def is_gather(self) -> bool:
        return self.kind == fsdp_all_gather.name


class Liveness:
    """The values and slots of traces that run one after the other; see [Note: Liveness].

    The cost is linear in the number of bound symbols.

    Args:
        *traces: the bound symbols of each trace, or any part of them in order. A value that none of them defines counts
            as defined before.

    Attributes:
        values: all values, in the order in which they appear.
        args: for each position, the values that the bound symbol reads, one for each operand.
        outs: for each position, the values that it defines.
    """

    def __init__(self, *traces: Sequence[BoundSymbol]) -> None:
        self.values: list[Value] = []
        self.args: list[tuple[Value, ...]] = []
        self.outs: list[tuple[Value, ...]] = []
        self._bsyms: list[BoundSymbol] = [bsym for trace in traces for bsym in trace]
        self._latest: dict[str, Value] = {}
        for position, bsym in enumerate(self._bsyms):
            reads = bsym.sym.id is not PrimIDs.DEL
            self.args.append(tuple(self._read(p, position) for p in bsym.flat_proxy_args) if reads else ())
            self.outs.append(tuple(self._define(bsym, position)))

    def _read(self, proxy: Proxy, position: int) -> Value:
        value = self._latest.get(proxy.name) or self._add(proxy, BEFORE_TRACE)
        value.reads.append(position)
        value.last_use = position
        for root in value.roots:
            root.last_use = position
        return value

    def _define(self, bsym: BoundSymbol, position: int) -> Iterator[Value]:
        aliases = aliased_inputs(bsym)
        for proxy in defined_by(bsym):
            if bsym.sym.id in UNPACKING and proxy.name in self._latest:
                continue  # saved by an earlier trace
            shared = {root: None for name in aliases.get(proxy.name, ()) for root in self._latest[name].roots}
            yield self._add(proxy, position, tuple(shared))

    def _add(self, proxy: Proxy, position: int, roots: tuple[Value, ...] = ()) -> Value:
        value = self._latest[proxy.name] = Value(proxy, position, position)
        value.roots = roots or (value,)
        self.values.append(value)
        return value

    def value(self, name: str) -> Value | None:
        """Return the value with this name, the latest if there are several; ``None`` if it does not appear."""
        return self._latest.get(name)

    def roots(self, names: Iterable[str]) -> set[str]:
        """Return the names of the values whose memory the named values may share, their own if they are no views."""
        found: set[str] = set()
        for name in names:
            value = self._latest.get(name)
            found.update((root.proxy.name for root in value.roots) if value is not None else (name,))
        return found

    def defined(self, names: Iterable[str]) -> int:
        """Return the position at which the last of the named values is defined."""
        return max((value.defined for value in self._known(names)), default=BEFORE_TRACE)

    def first_read(self, names: Iterable[str]) -> int | None:
        """Return the position of the first bound symbol that reads one of the named values; ``None`` if none does."""
        return min((value.reads[0] for value in self._known(names) if value.reads), default=None)

    def last_use(self, names: Iterable[str]) -> int:
        """Return the position of the last bound symbol that reads one of the named values or a view of one."""
        return max((value.last_use for value in self._known(names)), default=BEFORE_TRACE)

    def _known(self, names: Iterable[str]) -> Iterator[Value]:
        return (self._latest[name] for name in names if name in self._latest)

    @cached_property
    def slots(self) -> dict[int, SlotRange]:
        """The range of each slot, keyed by the position of the issue, ascending.

        A gather whose bucket is resident from an earlier one of these traces has no range of its own: it continues that
        of the earlier gather.
        """
        ranges: dict[int, SlotRange] = {}
        issue_of: dict[Value, int] = {}  # by the value of the future
        gathers: dict[tuple[Bucket, Slot | None], int] = {}
        for position, bsym in enumerate(self._bsyms):
            if bsym.sym in (fsdp_all_gather, fsdp_reduce_scatter):
                live = self._slot_range(bsym, position)
                issue = position
                if is_resident(bsym):
                    issue = gathers.get((live.bucket.primary, live.slot), position)
                if issue == position:
                    ranges[position] = live
                if live.is_gather:
                    gathers[live.bucket.primary, live.slot] = issue
                issue_of[self.outs[position][0]] = issue
            elif bsym.sym in (fsdp_wait_params, fsdp_all_reduce, *GRAD_WAITS):
                issue = issue_of.get(self.args[position][0], BEFORE_TRACE)
                if issue == BEFORE_TRACE:  # it waits for an all-reduce, which holds no slot
                    continue
                if bsym.sym is fsdp_wait_params:
                    reads = {index: param.last_use for index, param in enumerate(self.outs[position])}
                    end = max(position, *reads.values())
                    ranges[issue] = replace(ranges[issue], end=end, last_access=reads)
                else:
                    ranges[issue] = replace(ranges[issue], end=position)
        return ranges

    def _slot_range(self, issue: BoundSymbol, position: int) -> SlotRange:
        """Return the range of an issue, up to the issue itself."""
        written: dict[int, int] = {}
        if issue.sym is fsdp_reduce_scatter:
            indices = [index for index, grad in enumerate(Reduction(issue).grads) if grad is not None]
            for index, grad in zip(indices, self.args[position], strict=True):
                if grad.defined >= 0 and self._bsyms[grad.defined].sym.name in GRAD_WRITERS:
                    written[index] = grad.defined
        start = BEFORE_TRACE if is_resident(issue) else min([*written.values(), position])
        slot, nbytes = Issue(issue).planned_slot, slot_bytes_of(issue)
        return SlotRange(
            bucket_of(issue),
            issue.sym.name,
            slot,
            nbytes,
            issue=position,
            start=start,
            end=position,
            grads=tuple(written.values()),
            last_access=written,
        )


def slot_bytes_of(issue: BoundSymbol) -> int:
    """Return the bytes of the slot that a gather or a reduction needs, including alignment and staging."""
    spec = bucket_of(issue).spec
    return slot_bytes(spec, payload(issue.sym.name, spec)[1])


def peak_bytes(spans: Iterable[tuple[int, int, int]]) -> int:
    """Return the most bytes at one position, of spans ``(start, end, bytes)`` with both ends included."""
    changes: dict[int, int] = {}
    for start, end, nbytes in spans:
        changes[start] = changes.get(start, 0) + nbytes
        changes[end + 1] = changes.get(end + 1, 0) - nbytes
    return max(itertools.accumulate((changes[position] for position in sorted(changes)), initial=0))
