"""Find what one segment of forward may compute again in backward: how many bytes that saves, and what it costs.

[Note: Cheapest recomputation]
For one segment of forward and a price of a saved byte, the cheapest choice is a minimum cut of a graph. Its source side
is what only forward computes, its sink side what backward needs. An operator on the sink side runs again, which costs its
time; memory is saved at the price of its bytes if a value in it is needed whose operator is on the source side; what an
operator reads must be on its side. (AOTAutograd's partitioner cuts a similar graph, in which time has no price.) All
prices together give the convex hull of time over bytes: about ten choices per segment. ``activation_plan`` chooses among
those of all segments.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import NamedTuple

import networkx
from networkx.algorithms.flow import boykov_kolmogorov

from ..ir.analysis import Lifetime
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


class _Edge(NamedTuple):
    """An edge of the graph. Cutting it costs seconds and bytes; if it has no seconds, it must not be cut.

    The nodes of operators are their indices.
    """

    source: Hashable
    target: Hashable
    seconds: float | None = None
    nbytes: int = 0


def choices_of(saved: SavedValues, segment: Segment) -> tuple[SegmentChoice, ...]:
    """Return the choices for a segment, each with more time and fewer bytes than the one before.

    Segments of equal structure have equal choices, which are found once.
    """
    return _hull(tuple(_edges(saved, segment)))


def _edges(saved: SavedValues, segment: Segment) -> Iterator[_Edge]:
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
        # Without a capacity, an edge cannot be cut. To run an operator again always costs something.
        cost = {} if edge.seconds is None else {"capacity": int((edge.seconds + price * edge.nbytes) * _UNIT)}
        if edge.source == "forward" and cost:
            cost["capacity"] = max(cost["capacity"], 1)
        graph.add_edge(edge.source, edge.target, **cost)
    _, (_, needed) = networkx.minimum_cut(graph, "forward", "backward", flow_func=boykov_kolmogorov)
    cut = [edge for edge in edges if edge.source not in needed and edge.target in needed]
    again = frozenset(node for node in needed if isinstance(node, int))
    return SegmentChoice(again, sum(edge.seconds or 0.0 for edge in cut), sum(edge.nbytes for edge in cut))
