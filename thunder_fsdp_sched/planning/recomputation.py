"""Find what one segment of forward may compute again in backward: how many bytes that saves, and what it costs.

[Note: Cheapest recomputation]
For one segment of forward and a price of a saved byte, the cheapest choice is a minimum cut of a graph. Its source side
is what only forward computes, its sink side what backward needs. An operator on the sink side runs again, which costs its
time; a value whose operator is on the source side, but which is needed, is saved at the price of its bytes; what an
operator reads must be on its side. (AOTAutograd's partitioner cuts a similar graph, in which time has no price.) All
prices together give the convex hull of time over bytes: about ten choices per segment. ``activation_plan`` chooses among
those of all segments.
"""

from __future__ import annotations

from typing import NamedTuple

import networkx
from networkx.algorithms.flow import boykov_kolmogorov

from ..ir.analysis import Lifetime as Value
from .saved_values import SavedValues, Segment

_UNIT = 1e15
"""Units of a capacity in one second. Capacities are integers, because a cut of rounded floats may not be minimal."""

_FINE = 0.01
"""Choices for one segment that differ by a smaller share of its saved bytes are not told apart."""


class SegmentChoice(NamedTuple):
    """One choice for a segment: the operators that run again, by index, their time, and the bytes that it saves."""

    again: frozenset[int]
    seconds: float
    nbytes: int


class Cut:
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

    def hull(self) -> list[SegmentChoice]:
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

    def _cut(self, price: float) -> SegmentChoice:
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
        return SegmentChoice(again, seconds, sum(self.saved.nbytes[owner] for owner in kept))
