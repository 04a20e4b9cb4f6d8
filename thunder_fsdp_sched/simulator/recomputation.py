"""Choose which values backward computes again, so that the memory of a step stays within a limit at the least time.

[Note: Cheapest recomputation]
For one segment of forward and a price of a saved byte, the cheapest choice is a minimum cut of a graph. Its source side
is what only forward computes, its sink side what backward needs. An operator on the sink side runs again, which costs its
time; a value whose operator is on the source side, but which is needed, is saved at the price of its bytes; what an
operator reads must be on its side. (A formulation of this kind is in AOTAutograd's partitioner, after Shah's proposal
of 2022 in PyTorch's forum; there time is not part of the cut.) All prices together give the convex hull of time over
bytes: about ten choices per segment. Segments of equal structure have equal choices.

Then memory is followed position by position. As long as the peak exceeds the limit, the segment changes its choice that
frees the most bytes *at the peak* for its time. A value that is not alive at the peak need not go, and what recomputation
itself keeps in memory counts. At the end, each segment that can go back to a cheaper choice does so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import networkx
import numpy
from networkx.algorithms.flow import boykov_kolmogorov
from thunder.core.trace import TraceCtx

from ..trace.liveness import Value
from ..trace.symbols import fsdp_all_gather
from .cost import CostModel
from .saved_values import Operator, SavedValues, Segment, Span

__all__ = ["Recomputation", "Recomputations"]

_UNIT = 1e15
"""Units of a capacity in one second. Capacities are integers, because a cut of rounded floats may not be minimal."""

_FINE = 0.01
"""Choices for one segment that differ by a smaller share of its saved bytes are not told apart."""

_Timeline = numpy.ndarray
"""Bytes at each position."""


class Recomputation(NamedTuple):
    """What backward computes again.

    Attributes:
        names: the values.
        seconds: the time that it takes.
        peak: the estimated peak of values (bytes), without slots.
        position: the position of this peak.
    """

    names: frozenset[str]
    seconds: float
    peak: int
    position: int


class _Choice(NamedTuple):
    """One choice for a segment: the operators that run again, by index, their time, and the bytes that it saves."""

    again: frozenset[int]
    seconds: float
    nbytes: int


class _Choices:
    """The segments of a forward at given gaps, each with its choices, from the fastest to the one that saves least.

    Args:
        saved: the values.
        gaps: where segments begin.
    """

    def __init__(self, saved: SavedValues, gaps: Iterable[int]) -> None:
        self.saved = saved
        self.segments = saved.segments(gaps)
        known: dict[object, list[_Choice]] = {}
        self.of: list[list[_Choice]] = []
        for segment in self.segments:
            cut = _Cut(saved, segment)
            key = cut.structure()
            if key not in known:
                known[key] = cut.hull()
            self.of.append(known[key])
        self.memory = [
            [_timeline(saved.length, _spans(saved, segment, choice.again)) for choice in choices]
            for segment, choices in zip(self.segments, self.of, strict=True)
        ]
        followed = {
            saved.owner[out].proxy.name for s in self.segments for o in s.operators for out in _followed(saved, o)
        }
        self.others = _timeline(
            saved.length,
            [Span(max(i.start, 0), i.end, i.nbytes) for i in saved.intervals if i.name not in followed],
        )

    def within(self, limit: int | None) -> Recomputation:
        """Return the choice whose estimated peak is at most ``limit`` bytes, or the one with the least peak found."""
        chosen = [0] * len(self.segments)
        total = self.others + sum(memory[0] for memory in self.memory)
        best = self._result(chosen, total)
        if limit is None:
            return best
        while (peak := int(total.max())) > limit:
            position = int(total.argmax())
            moves = []
            for number, (choices, memory) in enumerate(zip(self.of, self.memory, strict=True)):
                now = chosen[number]
                for other in range(now + 1, len(choices)):
                    freed = int(memory[now][position] - memory[other][position])
                    if freed > 0:
                        moves.append((freed / (choices[other].seconds - choices[now].seconds + 1e-12), number, other))
            if not moves:
                break
            _, number, other = max(moves)
            total = total + self.memory[number][other] - self.memory[number][chosen[number]]
            chosen[number] = other
            if int(total.max()) < min(peak, best.peak):
                best = self._result(chosen, total)
        if best.peak > limit:
            return best
        for number in sorted(range(len(chosen)), key=lambda n: -self.of[n][chosen[n]].seconds):
            for other in range(chosen[number]):
                cheaper = total + self.memory[number][other] - self.memory[number][chosen[number]]
                if int(cheaper.max()) <= limit:
                    total, chosen[number] = cheaper, other
                    break
        return self._result(chosen, total)

    def _result(self, chosen: Sequence[int], total: _Timeline) -> Recomputation:
        again: set[str] = set()
        seconds = 0.0
        for segment, choices, number in zip(self.segments, self.of, chosen, strict=True):
            seconds += choices[number].seconds
            for index in choices[number].again:
                again.update(out.proxy.name for out in segment.operators[index].outputs)
        return Recomputation(frozenset(again), seconds, int(total.max()), int(total.argmax()))


class Recomputations:
    """All that backward may compute again in one step, for any limit on its memory.

    Args:
        halves: forward and backward, as :func:`~..trace.inspection.split_joint` returns them, with backward's gathers.
        cost: gives the time of operators.
    """

    def __init__(self, halves: Sequence[TraceCtx], cost: CostModel) -> None:
        forward = halves[0]
        seconds = {
            id(bsym): max(seconds) for bsym, seconds in zip(forward.bound_symbols, cost.seconds(forward), strict=True)
        }
        saved = SavedValues(halves, seconds)
        blocks = sum(bsym.sym is fsdp_all_gather for bsym in forward.bound_symbols)
        numbers = {blocks, *(2**power for power in range((2 * blocks).bit_length()))}
        self._divisions = [_Choices(saved, saved.gaps(number - 1)) for number in sorted(numbers)]
        self.unchanged = self._divisions[0].within(None)

    def within(self, limit: int) -> Recomputation:
        """Return the fastest choice whose estimated peak is at most ``limit`` bytes, else that of the least peak found.

        Args:
            limit: bytes of all values together, without slots.
        """
        found = [division.within(limit) for division in self._divisions]
        return min(found, key=lambda r: (max(r.peak - limit, 0), r.seconds, r.peak))


class _Cut:
    """The graph of one segment; see [Note: Cheapest recomputation]."""

    def __init__(self, saved: SavedValues, segment: Segment) -> None:
        self.operators = segment.operators
        self.saved = saved
        available = {v for o in segment.operators for v in o.outputs if v in saved.free}
        available |= {value for value in segment.crossing if value in saved.reads}
        self.available = available
        self.numbers = {v: n for n, v in enumerate(v for o in segment.operators for v in o.outputs)}
        self.owned = {saved.owner[value] for value in available}
        self.repeatable = [
            o.repeatable and segment.crossing.isdisjoint(o.outputs) and available.isdisjoint(o.outputs)
            for o in segment.operators
        ]

    def price(self, value: Value) -> int:
        """Return the bytes that saving ``value`` costs."""
        owner = self.saved.owner[value]
        return 0 if owner in self.owned or owner in self.saved.free else self.saved.nbytes[owner]

    def structure(self) -> tuple[object, ...]:
        """Return a value that is equal for segments whose choices are equal."""
        parts: list[object] = []
        for operator, repeatable in zip(self.operators, self.repeatable, strict=True):
            inputs = tuple(self.numbers.get(v, -1) for v in operator.inputs if v not in self.available)
            outs = tuple(
                (self.price(v), v in self.saved.reads, v in self.available, self.numbers.get(self.saved.owner[v], -1))
                for v in operator.outputs
            )
            parts.append((repeatable, operator.seconds, inputs, outs))
        return tuple(parts)

    def hull(self) -> list[_Choice]:
        """Return the choices, each with more time and fewer bytes than the one before."""
        everything = self._cut(0.0)
        seconds = sum(o.seconds for o in self.operators) + 1e-9
        least = self._cut(seconds)  # one byte is worth more than any time
        choices = {everything.nbytes: everything, least.nbytes: least}
        pending = [(everything, least)]
        while pending:
            fast, small = pending.pop()
            if fast.nbytes - small.nbytes <= _FINE * everything.nbytes or small.seconds <= fast.seconds:
                continue
            price = (small.seconds - fast.seconds) / (fast.nbytes - small.nbytes)
            between = self._cut(price)
            cost = between.seconds + price * between.nbytes
            if cost < (fast.seconds + price * fast.nbytes) * (1 - 1e-9) and small.nbytes < between.nbytes < fast.nbytes:
                choices[between.nbytes] = between
                pending += [(fast, between), (between, small)]
        return sorted(choices.values(), key=lambda c: -c.nbytes)

    def _cut(self, price: float) -> _Choice:
        graph = networkx.DiGraph()
        graph.add_nodes_from(["forward", "backward"])
        for index, operator in enumerate(self.operators):
            if self.repeatable[index]:
                graph.add_edge("forward", index, capacity=max(int(operator.seconds * _UNIT), 1))
            else:
                graph.add_edge("forward", index)  # infinite
            for value in operator.inputs:
                if value in self.numbers and value not in self.available:
                    graph.add_edge(value, index)
            for value in operator.outputs:
                if value not in self.available:
                    graph.add_edge(index, value, capacity=int(price * self.price(value) * _UNIT))
                    if value in self.saved.reads:
                        graph.add_edge(value, "backward")
        _, (_, needed) = networkx.minimum_cut(graph, "forward", "backward", flow_func=boykov_kolmogorov)
        again = frozenset(node for node in needed if isinstance(node, int))
        kept = {
            self.saved.owner[v]
            for index, operator in enumerate(self.operators)
            if index not in again
            for v in operator.outputs
            if v in needed and self.price(v)
        }
        seconds = sum(self.operators[index].seconds for index in again)
        return _Choice(again, seconds, sum(self.saved.nbytes[owner] for owner in kept))


def _followed(saved: SavedValues, operator: Operator) -> list[Value]:
    return [value for value in operator.outputs if value not in saved.free and saved.owner[value].defined >= 0]


def _spans(saved: SavedValues, segment: Segment, again: frozenset[int]) -> list[Span]:
    """Return when the values of a segment are in memory if some of its operators run again in backward.

    It includes for how much longer values of earlier segments are.
    """
    uses: dict[Value, tuple[int, int]] = {}  # first and last in backward
    for operator in segment.operators:
        for value in operator.outputs:
            if reads := saved.reads.get(value):
                uses[value] = reads[0], reads[-1]
    for index in range(len(segment.operators) - 1, -1, -1):
        operator = segment.operators[index]
        starts = [uses[value][0] for value in operator.outputs if value in uses]
        if index in again and starts:
            for value in operator.inputs:
                first, last = uses.get(value, (min(starts), -1))
                uses[value] = min(first, *starts), max(last, *starts)
    ends: dict[Value, int] = {}  # of owners that forward made
    repeated: dict[Value, tuple[int, int]] = {}  # of owners that backward makes again
    made_again = {value for index in again for value in segment.operators[index].outputs}
    inside = set()
    for operator in segment.operators:
        for value in _followed(saved, operator):
            owner = saved.owner[value]
            inside.add(owner)
            ends.setdefault(owner, saved.last_in_forward[owner])
            if value not in uses:
                continue
            first, last = uses[value]
            if owner in made_again:
                before = repeated.get(owner, (first, last))
                repeated[owner] = min(first, before[0]), max(last, before[1])
            else:
                ends[owner] = max(ends[owner], last)
    spans = [Span(owner.defined, end, saved.nbytes[owner]) for owner, end in ends.items()]
    spans += [Span(first, last, saved.nbytes[owner]) for owner, (first, last) in repeated.items() if first < last]
    for value, (_, last) in uses.items():
        if saved.owner.get(value) not in inside and value not in saved.free and saved.owner[value].defined >= 0:
            before = max([saved.last_in_forward[saved.owner[value]], *saved.reads.get(value, ())])
            if last > before:
                spans.append(Span(before + 1, last, saved.nbytes[saved.owner[value]]))
    return spans


def _timeline(length: int, spans: Iterable[Span]) -> _Timeline:
    changes = numpy.zeros(length + 1, dtype=numpy.int64)
    for span in spans:
        changes[max(span.start, 0)] += span.nbytes
        changes[span.end + 1] -= span.nbytes
    return numpy.cumsum(changes)[:-1]
