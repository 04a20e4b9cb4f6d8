"""The values that forward saves for backward, what it takes to compute them again, and where forward can be divided.

[Note: Segments]
If backward recomputes a value from another one that it recomputes, all of them are in memory at once. Were nothing
saved at all, backward would begin with a whole forward. So forward is divided into *segments*, at gaps that few bytes
cross, such as the residual stream between two blocks. Values that cross a gap are saved if backward needs them, and
recomputation never reaches back across a gap. Within a segment any pure operator may run again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.analysis import BEFORE_TRACE, Analysis, Lifetime, bytes_at
from ..ir.effects import is_declared
from ..ir.operator_facts import is_pure


class Span(NamedTuple):
    """Bytes that are in use between two positions, first and last included."""

    start: int
    end: int
    nbytes: int


class Operator(NamedTuple):
    """A bound symbol of forward.

    Attributes:
        position: its position in forward.
        seconds: the time that it takes to run again.
        repeatable: whether backward may run it again.
        inputs: the values of forward that it reads, without arguments of forward and parameters.
        outputs: the values that it defines.
    """

    position: int
    seconds: float
    repeatable: bool
    inputs: tuple[Lifetime, ...]
    outputs: tuple[Lifetime, ...]


@dataclass(eq=False)
class Segment:
    """Operators of forward between two gaps; see [Note: Segments].

    Attributes:
        operators: in the order of forward.
        crossing: values that later segments read.
    """

    operators: list[Operator] = field(default_factory=list)
    crossing: set[Lifetime] = field(default_factory=set)


class SavedValues:
    """The values of a joint trace that backward reads from forward.

    Args:
        halves: forward and backward, as :func:`~.inspection.split_joint` returns them, with backward's gathers.
        seconds: the time of each bound symbol of forward.

    Attributes:
        operators: those of forward that define a tensor.
        owner: the value whose memory a value is in.
        reads: positions at which backward reads a value of forward, ascending; positions of backward follow those of
            forward.
        last_in_forward: the last use of each owner in forward.
        free: values that backward can read at no cost: arguments and outputs of forward, and what is in slots.
        memory: the memory of all values if everything is saved.
        begin: the position at which backward begins.
        length: the number of positions.
    """

    def __init__(self, halves: Sequence[TraceCtx], seconds: Sequence[float]) -> None:
        live = self._live = Analysis(*halves)
        self.begin, self.length = len(halves[0].bound_symbols), len(live.bsyms)
        self.memory = live.memory
        self.owner = {v: max(v.owners, key=lambda owner: owner.nbytes) for v in live.values if v.owners}
        self.reads: dict[Lifetime, list[int]] = {}
        self.last_in_forward: dict[Lifetime, int] = {}
        for value in live.values:
            if value.first >= self.begin:
                continue
            if later := [p for p in value.reads if p >= self.begin]:
                self.reads[value] = later
            if (owner := self.owner.get(value)) is not None:
                last = max([value.first, *(p for p in value.reads if p < self.begin - 1)])  # the last one returns
                self.last_in_forward[owner] = max(self.last_in_forward.get(owner, BEFORE_TRACE), last)
        outputs = {memory.name for memory in self.memory if memory.last == self.length - 1}
        self.free = {
            value
            for value, owner in self.owner.items()
            if owner.first == BEFORE_TRACE or not owner.nbytes or owner.name in outputs
        }
        written = {
            self.owner.get(value, value)
            for args, e in zip(live.args, live.effects, strict=True)
            for value in args
            if value.name in e.writes
        }
        self.operators = [
            self._operator(position, bsym, seconds[position], written)
            for position, bsym in enumerate(halves[0].bound_symbols[:-1])
            if live.outs[position] and all(isinstance(out.proxy, TensorProxy) for out in live.outs[position])
        ]

    def _operator(self, position: int, bsym: BoundSymbol, seconds: float, written: set[Lifetime]) -> Operator:
        args, e = self._live.args[position], self._live.effects[position]
        repeatable = is_pure(bsym) and not e.communicates and not is_declared(bsym.sym)
        repeatable = repeatable and written.isdisjoint(self.owner[value] for value in args)
        inputs = tuple(dict.fromkeys(value for value in args if value not in self.free))
        return Operator(position, seconds, repeatable, inputs, self._live.outs[position])

    def owned(self, value: Lifetime) -> bool:
        """Return whether a value is in memory that forward allocates and that backward does not find for free."""
        return value not in self.free and value in self.owner and self.owner[value].first >= 0

    def segments(self, number: int) -> list[Segment]:
        """Return at most ``number`` segments that save about the same bytes; see [Note: Segments]."""
        gaps = self._gaps(number - 1)
        segments = [Segment() for _ in range(len(gaps) + 1)]
        of_value: dict[Lifetime, Segment] = {}
        for operator in self.operators:
            segment = segments[bisect_right(gaps, operator.position)]
            segment.operators.append(operator)
            for value in operator.inputs:
                if of_value.get(value, segment) is not segment:
                    of_value[value].crossing.add(value)
            of_value.update(dict.fromkeys(operator.outputs, segment))
        return [segment for segment in segments if segment.operators]

    def _gaps(self, number: int) -> list[int]:
        """Return where to divide forward: each gap is before the position that the fewest bytes cross, nearby."""
        spans = [
            Span(owner.first + 1, last, owner.nbytes)
            for owner, last in self.last_in_forward.items()
            if owner.first >= 0 and owner not in self.free
        ]
        crossing = timeline(self.begin, spans)
        saved = {self.owner[value] for value in self.reads if value not in self.free}
        before = timeline(self.begin, [Span(owner.first + 1, self.begin - 1, owner.nbytes) for owner in saved])
        total = sum(owner.nbytes for owner in saved)
        found = set()
        for index in range(1, number + 1):
            low, high = ((index - 0.5) / (number + 1) * total, (index + 0.5) / (number + 1) * total)
            near = 1 + numpy.flatnonzero((low <= before[1:-1]) & (before[1:-1] <= high))
            if near.size:
                found.add(int(near[crossing[near].argmin()]))
        return sorted(found)


def timeline(length: int, spans: Iterable[Span]) -> numpy.ndarray:
    """Return the bytes at each position."""
    return numpy.array(bytes_at(spans, length), dtype=numpy.int64)
