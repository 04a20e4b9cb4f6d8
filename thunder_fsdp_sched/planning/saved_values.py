"""The values that forward saves for backward, what it takes to compute them again, and where forward can be divided.

[Note: Segments]
If backward recomputes a value from another one that it recomputes, all of them are in memory at once. Were nothing
saved at all, backward would begin with a whole forward. So forward is divided into *segments*, at gaps that few bytes
cross, such as the residual stream between two blocks. Values that cross a gap are saved if backward needs them, and
recomputation never reaches back across a gap. Within a segment any pure operator may run again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from ..ir.analysis import BEFORE_TRACE, Analysis, Lifetime, bytes_at
from ..ir.inspection import communicates, return_of
from ..ir.operator_facts import facts_of, is_pure


class Span(NamedTuple):
    """Bytes that are in use between two positions, first and last included."""

    start: int
    end: int
    nbytes: int


@dataclass(eq=False, slots=True)
class Operator:
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
        seconds: the time of bound symbols of forward, by ``id``.

    Attributes:
        operators: those of forward that define a tensor.
        reads: positions at which backward reads a value of forward, ascending; positions of backward follow those of
            forward.
        owner: the value whose memory a value is in.
        nbytes: the bytes of each owner.
        free: values that backward can read at no cost: arguments and outputs of forward, and what is in slots.
        length: the number of positions.
    """

    def __init__(self, halves: Sequence[TraceCtx], seconds: Mapping[int, float]) -> None:
        forward = halves[0].bound_symbols
        memory = Analysis(*halves)
        bsyms, live = memory.bsyms, memory
        self.begin, self.length = len(forward), len(bsyms)
        self.live = live
        self.intervals = memory.memory
        self.owner: dict[Lifetime, Lifetime] = {}
        self.nbytes: dict[Lifetime, int] = {}
        for value in memory.values:
            if owners := memory.owners_of(value):
                owner = max(owners, key=lambda o: o.nbytes)
                self.owner[value] = owner
                self.nbytes[owner] = owner.nbytes
        returns = len(forward) - 1
        self.reads = {
            value: [p for p in value.reads if p >= self.begin]
            for value in live.values
            if value.first < self.begin and value.reads and value.reads[-1] >= self.begin
        }
        self.last_in_forward: dict[Lifetime, int] = {}  # by owner
        for value in live.values:
            if value.first < self.begin and value in self.owner:
                last = max([value.first, *(p for p in value.reads if p < returns)])
                owner = self.owner[value]
                self.last_in_forward[owner] = max(self.last_in_forward.get(owner, BEFORE_TRACE), last)
        outputs = {interval.name for interval in self.intervals if interval.last == self.length - 1}
        self.free = {
            value
            for value in self.owner
            if self.owner[value].first == BEFORE_TRACE
            or not self.nbytes[self.owner[value]]
            or self.owner[value].proxy.name in outputs
        }
        written = {
            self.owner.get(value, value)
            for position, bsym in enumerate(bsyms)
            for value in live.args[position]
            if value.proxy.name in _writes(bsym)
        }
        self.operators = [
            self._operator(position, bsym, seconds.get(id(bsym), 0.0), written)
            for position, bsym in enumerate(forward[:-1])
            if live.outs[position] and all(isinstance(out.proxy, TensorProxy) for out in live.outs[position])
        ]
        assert return_of(halves[0]) is forward[-1]

    def _operator(self, position: int, bsym: BoundSymbol, seconds: float, written: set[Lifetime]) -> Operator:
        args = self.live.args[position]
        repeatable = is_pure(bsym) and not communicates(bsym) and not bsym.sym.name.startswith("fsdp_")
        repeatable = repeatable and written.isdisjoint(self.owner[value] for value in args)
        inputs = tuple(dict.fromkeys(value for value in args if value not in self.free))
        return Operator(position, seconds, repeatable, inputs, self.live.outs[position])

    def segments(self, gaps: Iterable[int]) -> list[Segment]:
        """Return the segments between gaps, each given by the position of the bound symbol after it."""
        bounds = sorted(set(gaps))
        segments = [Segment() for _ in range(len(bounds) + 1)]
        of_value: dict[Lifetime, Segment] = {}
        current = 0
        for operator in self.operators:
            while current < len(bounds) and operator.position >= bounds[current]:
                current += 1
            segments[current].operators.append(operator)
            for value in operator.inputs:
                if value in of_value and of_value[value] is not segments[current]:
                    of_value[value].crossing.add(value)
            of_value.update(dict.fromkeys(operator.outputs, segments[current]))
        return [segment for segment in segments if segment.operators]

    def gaps(self, number: int) -> list[int]:
        """Return at most ``number`` gaps that divide forward into segments that save about the same bytes.

        Each is where the fewest bytes cross, nearby.
        """
        computed = [o for o in self.last_in_forward if o.first >= 0 and o not in self.free]
        spans = (Span(owner.first + 1, self.last_in_forward[owner], self.nbytes[owner]) for owner in computed)
        crossing = bytes_at(spans, self.begin + 1)
        saved = [0] * (self.begin + 1)
        for owner in {self.owner[value] for value in self.reads if value not in self.free}:
            saved[owner.first] += self.nbytes[owner]
        before = list(itertools.accumulate(saved))
        total = before[-1]
        found = []
        for index in range(1, number + 1):
            low, high = ((index - 0.5) / (number + 1) * total, (index + 0.5) / (number + 1) * total)
            near = [p for p in range(1, self.begin - 1) if low <= before[p - 1] <= high]
            if near:
                found.append(min(near, key=lambda p: crossing[p]))
        return sorted(set(found))


def _writes(bsym: BoundSymbol) -> frozenset[str]:
    """Return the names of the inputs that ``bsym`` may write."""
    facts = facts_of(bsym)
    copied = frozenset({bsym.args[1].name}) if bsym.sym.name == "copy_" else frozenset()
    if facts.known or bsym.sym.name.startswith("fsdp_"):
        return facts.writes | copied
    return frozenset(p.name for p in bsym.flat_proxy_args)
