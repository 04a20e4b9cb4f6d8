"""The values that forward saves for backward, the segments of forward, and the choices of what a segment recomputes.

[Note: Segments]
If backward recomputes a value from another one that it recomputes, both are in memory at once. If nothing were saved,
backward would begin with a whole forward. So forward is divided into *segments*, at gaps that few bytes cross, such as
the residual stream between two blocks. Values that cross a gap are saved if backward needs them, and recomputation
never reaches back across a gap. Within a segment any pure operator may run again.

[Note: Cheapest recomputation]
For one segment of forward and a price of a saved byte, the cheapest choice is a minimum cut of a graph. The operators
on its source side run only in forward. Those on its sink side run again in backward, which costs their time, and
everything that they read is on the sink side, too. Memory is saved, at the price of its bytes, if it holds a value that
is needed on the sink side and whose operator is on the source side. (AOTAutograd's partitioner cuts a similar graph, in
which time has no price.) All prices together give the convex hull of time over bytes: about ten choices per segment.
``activation_plan`` chooses among those of all segments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import networkx
import numpy
from networkx.algorithms.flow import boykov_kolmogorov
from thunder.core.proxies import TensorProxy

from ...ir.analysis import BEFORE_TRACE, Lifetime, bytes_at
from ...ir.effects import is_declared
from ...ir.operator_facts import is_pure
from ..step_memory.rows import StepRows
from ..step_memory.value_memory import memory_of
from .cost import AnalyticCost

_UNIT = 1e15
"""Units of a capacity in one second. Capacities are integers, because a cut of rounded floats may not be minimal."""

_FINE = 0.01
"""Choices for one segment that differ by a smaller share of its saved bytes are not distinguished."""


Span = tuple[int, int, int]
"""Two positions, and the bytes that are in use between them, both included."""


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
class ForwardSegment:
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
        step: forward and backward, as :func:`~.inspection.split_joint` returns them, with backward's gathers.
        cost: the cost model of operators.

    Attributes:
        operators: the operators of forward that define a tensor.
        owner: for each value, the one that owns its memory.
        reads: positions at which backward reads a value of forward, ascending; positions of backward follow those of
            forward.
        last_in_forward: the last use of each owner in forward.
        free: values that backward can read at no cost: arguments and outputs of forward, and values in slots.
        memory: the memory of all values if everything is saved.
        begin: the position at which backward begins.
        length: the number of positions.
    """

    def __init__(self, step: StepRows, cost: AnalyticCost) -> None:
        rows, begin = step.rows, step.rows_of_forward
        self.begin, self.length = begin, len(rows)
        self.memory = memory_of(rows, step.values)
        self.owner = {v: max(v.owners, key=lambda owner: owner.nbytes) for v in step.values if v.owners}
        self.reads: dict[Lifetime, list[int]] = {}
        self.last_in_forward: dict[Lifetime, int] = {}
        for value in step.values:
            if value.first >= begin:
                continue
            if later := [p for p in value.reads if p >= begin]:
                self.reads[value] = later
            if (owner := self.owner.get(value)) is not None:
                last = max([value.first, *(p for p in value.reads if p < begin - 1)])  # the last position is the return
                self.last_in_forward[owner] = max(self.last_in_forward.get(owner, BEFORE_TRACE), last)
        outputs = {memory.name for memory in self.memory if memory.last == self.length - 1}
        self.free = {
            value
            for value, owner in self.owner.items()
            if owner.first == BEFORE_TRACE or not owner.nbytes or owner.name in outputs
        }
        written = {self.owner.get(v, v) for row in rows for v in row.args if v.name in row.effects.writes}
        self.operators = []
        for position, row in enumerate(rows[: begin - 1]):
            if row.outs and all(isinstance(out.proxy, TensorProxy) for out in row.outs):
                repeatable = is_pure(row.bsym) and not row.effects.communicates and not is_declared(row.bsym.sym)
                repeatable = repeatable and written.isdisjoint(self.owner[value] for value in row.args)
                inputs = tuple(dict.fromkeys(value for value in row.args if value not in self.free))
                self.operators.append(Operator(position, max(cost.seconds(row)), repeatable, inputs, row.outs))

    def owned(self, value: Lifetime) -> bool:
        """Return whether a value is in memory that forward allocates and that backward does not find for free."""
        return value not in self.free and value in self.owner and self.owner[value].first >= 0

    def segments(self, number: int) -> list[ForwardSegment]:
        """Return at most ``number`` segments that save about the same bytes; see [Note: Segments]."""
        gaps = self._gaps(number - 1)
        segments = [ForwardSegment() for _ in range(len(gaps) + 1)]
        of_value: dict[Lifetime, ForwardSegment] = {}
        for operator in self.operators:
            segment = segments[bisect_right(gaps, operator.position)]
            segment.operators.append(operator)
            for value in operator.inputs:
                if of_value.get(value, segment) is not segment:
                    of_value[value].crossing.add(value)
            of_value.update(dict.fromkeys(operator.outputs, segment))
        return [segment for segment in segments if segment.operators]

    def _gaps(self, number: int) -> list[int]:
        """Return the positions before which forward is divided: each is the one nearby that the fewest bytes cross."""
        spans = [
            (owner.first + 1, last, owner.nbytes)
            for owner, last in self.last_in_forward.items()
            if owner.first >= 0 and owner not in self.free
        ]
        crossing = timeline(self.begin, spans)
        saved = {self.owner[value] for value in self.reads if value not in self.free}
        before = timeline(self.begin, [(owner.first + 1, self.begin - 1, owner.nbytes) for owner in saved])
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


class SegmentChoice(NamedTuple):
    """One choice for a segment: the operators that run again, by index, their time, and the bytes that it saves."""

    recomputed_operators: frozenset[int]
    seconds: float
    nbytes: int


class _Edge(NamedTuple):
    """An edge of the graph. Cutting it costs seconds and bytes; if it has no seconds, it must not be cut.

    The nodes of operators are their indices.
    """

    source: Hashable
    target: Hashable
    seconds: float | None = None
    nbytes: int = 0


def choices_of(saved: SavedValues, segment: ForwardSegment) -> tuple[SegmentChoice, ...]:
    """Return the choices for a segment, each with more time and fewer bytes than the one before.

    Segments of equal structure have equal choices, which are found once.
    """
    return _hull(tuple(_edges(saved, segment)))


def _edges(saved: SavedValues, segment: ForwardSegment) -> Iterator[_Edge]:
    """Return the graph of a segment; see [Note: Cheapest recomputation]."""
    numbers = {value: n for n, value in enumerate(v for o in segment.operators for v in o.outputs)}
    available = {value for value in numbers if value in saved.free}
    available |= {value for value in segment.crossing if value in saved.reads}
    owned = {saved.owner[value] for value in available} | saved.free
    owners: dict[Lifetime, int] = {}
    for index, operator in enumerate(segment.operators):
        repeatable = operator.repeatable and segment.crossing.union(available).isdisjoint(operator.outputs)
        yield _Edge("forward", index, operator.seconds if repeatable else None)
        for value in operator.inputs:
            if value in numbers and value not in available:
                yield _Edge(("value", numbers[value]), index)
        for value in operator.outputs:
            if value not in available:
                owner = saved.owner[value]
                if owner not in owners:
                    owners[owner] = len(owners)
                    price = 0 if owner in owned else owner.nbytes
                    yield _Edge(("made", owners[owner]), ("saved", owners[owner]), 0.0, price)
                yield _Edge(index, ("made", owners[owner]))
                yield _Edge(("saved", owners[owner]), ("value", numbers[value]))
                if value in saved.reads:
                    yield _Edge(("value", numbers[value]), "backward")


@lru_cache(maxsize=64)
def _hull(edges: tuple[_Edge, ...]) -> tuple[SegmentChoice, ...]:
    everything = _cut(edges, 0.0)
    least = _cut(edges, sum(edge.seconds or 0.0 for edge in edges) + 1e-9)  # one byte is worth more than any time
    choices = {everything.nbytes: everything, least.nbytes: least}
    pending = [(everything, least)]
    while pending:
        fast, small = pending.pop()
        if fast.nbytes - small.nbytes <= _FINE * everything.nbytes or small.seconds <= fast.seconds:
            continue
        price = (small.seconds - fast.seconds) / (fast.nbytes - small.nbytes)
        between = _cut(edges, price)
        cost = between.seconds + price * between.nbytes
        if cost < (fast.seconds + price * fast.nbytes) * (1 - 1e-9) and small.nbytes < between.nbytes < fast.nbytes:
            choices[between.nbytes] = between
            pending += [(fast, between), (between, small)]
    return tuple(sorted(choices.values(), key=lambda choice: -choice.nbytes))


def _cut(edges: tuple[_Edge, ...], price: float) -> SegmentChoice:
    """Return the cheapest choice if a saved byte costs ``price`` seconds."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(["forward", "backward"])
    for edge in edges:
        # Without a capacity, an edge cannot be cut. Running an operator again always costs something.
        cost = {} if edge.seconds is None else {"capacity": int((edge.seconds + price * edge.nbytes) * _UNIT)}
        if edge.source == "forward" and cost:
            cost["capacity"] = max(cost["capacity"], 1)
        graph.add_edge(edge.source, edge.target, **cost)
    _, (_, needed) = networkx.minimum_cut(graph, "forward", "backward", flow_func=boykov_kolmogorov)
    cut = [edge for edge in edges if edge.source not in needed and edge.target in needed]
    recomputed = frozenset(node for node in needed if isinstance(node, int))
    return SegmentChoice(recomputed, sum(edge.seconds or 0.0 for edge in cut), sum(edge.nbytes for edge in cut))
