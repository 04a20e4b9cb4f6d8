"""One order of collectives for programs that differ, and the positions of those collectives in a rank's own trace.

A *program* is the communication of one trace: a sequence of :class:`Step`. Ranks whose programs differ still have to
issue the collectives of a process group in the same order, and each of them on all members. So they merge their programs
into one order, and a rank *serves* the collectives that only other ranks need: it takes part in them without any use for
their results.

[Note: The merged order]
The merged order contains each collective of the programs once, which is the fewest that can be served. It depends on the set
of programs alone, so that ranks that know the same programs compute the same order without asking each other.

1. An order on which programs agree is kept. Draw an arrow from each collective of a program to the next. Two
   collectives that are not on a cycle of arrows keep their order in all programs that have both. In particular, each
   program keeps its order if some order keeps that of all programs.
2. Collectives that no program orders are taken by *share*: the fraction of its program that precedes a collective.
   Programs without a common bucket (two towers) thus progress side by side. If one program came after the other, the
   second rank would have to wait until the first one is done.
3. The collectives on a cycle form a *knot*. Most knots are a gather and a reduction that cross, because prefetching
   shifts gathers against reductions. So a knot has two *lanes*: its gathers in the order of their first consumers, and
   its reductions in the order of their last gradients, if programs agree on these orders. Of the next collectives of
   both lanes it takes the one that overtakes the fewest, and among equals the one with the lowest share.
4. If the programs order the gathers of a knot in a cycle, too, the gather with the lowest share is next; likewise for
   reductions. So ranks that run blocks in opposite orders alternate, and neither has to gather all blocks before it can
   start.
5. In every case a collective follows those on which its data depend: a reduction follows the gathers that its program
   has waited for before it, an all-reduce its reduction, and any collective the earlier ones of its kind and bucket.
   Gathers depend on no reduction, so dependences form no cycle, and there is always a collective to take.

Every execution finishes. Each rank issues the collectives in which it takes part in the merged order, and waits for a
collective only after it has issued it. Suppose that all ranks are blocked, and consider the unfinished collective that
is first in the order. Each of its members has either finished its trace or waits for an unfinished collective, which is
the same one or a later one. In both cases the member has issued this one. Collectives before it have finished, so no
member has anything else to run first: it runs, a contradiction. The argument holds with one stream for all groups, too.
Neither the compute between collectives nor the positions of the waits matter, and a collective may be left out if all
of its members leave it out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import networkx

GATHER = "gather"
REDUCE = "reduce"
ALL_REDUCE = "all_reduce"

SERVED_IN_FLIGHT = 2
"""How many served collectives of a rank may run at once, each with memory for a bucket. With one, a rank that serves a
gather and a reduction at the end of a block waits for the gather there: two towers take 13 % longer than one, not 2 %
(``tests/differ/test_latency.py``)."""

BucketKey = tuple[str, str, tuple[int, ...]]
"""A key of a bucket on all ranks: the name of the base bucket; the dtype of an alias, ``""`` for the bucket itself; the
indices of the parameters of an alias of some parameters, else ``()``."""
Key = tuple[str, BucketKey, int]
"""A key of a collective on all ranks: its kind, its bucket, and the number of earlier ones of both in the trace."""


class Step(NamedTuple):
    """The issue of a collective, or the wait for it."""

    key: Key
    waits: bool


class Own(NamedTuple):
    """A collective of a rank's own trace. Position ``p`` is right before operation number ``p`` of its compute.

    Attributes:
        planned: the position at which the rank would issue it in its own trace.
        waited: the position at which it would wait for it.
        limit: for a gather, the last position for its issue: its first consumer. For a reduction, the first one, after
            its last gradient.
    """

    key: Key
    planned: int
    waited: int
    limit: int


class Placed(NamedTuple):
    """A collective of a merged trace. Issues at a position precede waits at that position.

    Attributes:
        issue: the position of its issue.
        wait: the last position for its wait.
        served: whether the rank takes part for others only.
    """

    key: Key
    issue: int
    wait: int
    served: bool


def merge(programs: Iterable[Sequence[Step]]) -> list[Key]:
    """Return the order of all collectives of all programs, each once. See [Note: The merged order].

    The time is linear in the steps of all programs, apart from the sort of the result.
    """
    programs = list(dict.fromkeys(map(tuple, programs)))
    arrows = networkx.DiGraph()
    share: dict[Key, float] = {}
    for program in programs:
        issued = [step.key for step in program if not step.waits]
        networkx.add_path(arrows, issued)
        for position, key in enumerate(issued):
            share[key] = min(position / len(issued), share.get(key, 1.0))

    def by_share(key: Key) -> tuple[float, Key]:
        return share[key], key

    knots = list(networkx.strongly_connected_components(arrows))
    knot_of = {key: number for number, knot in enumerate(knots) for key in knot}
    pieces: dict[int, dict[int, _Piece]] = defaultdict(dict)
    for number, program in enumerate(programs):
        for key, waits in program:
            if len(knots[knot_of[key]]) > 1:
                pieces[knot_of[key]].setdefault(number, _Piece()).add(key, waits)
    paths = [_untangle(list(pieces[n].values()), by_share) if n in pieces else [*knot] for n, knot in enumerate(knots)]

    order = networkx.DiGraph()
    for path in paths:
        networkx.add_path(order, path)
    between = ((knot_of[before], knot_of[after]) for before, after in arrows.edges)
    order.add_edges_from((paths[before][-1], paths[after][0]) for before, after in between if before != after)
    return list(networkx.lexicographical_topological_sort(order, by_share))


class _Piece:
    """The part of a program in a knot. It is contiguous: collectives between two of the knot are in it as well."""

    def __init__(self) -> None:
        self.gathers: list[Key] = []
        self.reductions: list[Key] = []  # and all-reduces
        self.placed = {True: 0, False: 0}
        """The numbers of gathers and of reductions that are placed, up to the first that is not."""
        self.before: dict[Key, int] = {}
        """The number of collectives of the other lane that precede each one."""
        self.needed: dict[Key, int] = {}
        """The number of gathers that must precede each collective because of its data."""
        self._number: dict[Key, int] = {}  # the position of each collective in its lane
        self._waited = 0

    def add(self, key: Key, waits: bool) -> None:
        gathers = key[0] == GATHER
        if waits:
            if gathers:
                self._waited = max(self._waited, self._number[key] + 1)
            return
        lane, other = (self.gathers, self.reductions) if gathers else (self.reductions, self.gathers)
        self._number[key] = len(lane)
        self.before[key] = len(other)
        self.needed[key] = 0 if gathers else self._waited
        lane.append(key)

    def heads(self, placed: Collection[Key]) -> list[Key]:
        """Return the next gather and the next reduction, if any."""
        heads = []
        for gathers, lane in (True, self.gathers), (False, self.reductions):
            while self.placed[gathers] < len(lane) and lane[self.placed[gathers]] in placed:
                self.placed[gathers] += 1
            heads += lane[self.placed[gathers] : self.placed[gathers] + 1]
        return heads

    def overtaken(self, key: Key) -> int:
        """Return the number of collectives of the other lane that ``key`` overtakes if it is next."""
        return max(self.before[key] - self.placed[key[0] != GATHER], 0)

    def is_ready(self, key: Key) -> bool:
        return self.needed[key] <= self.placed[True]


def _untangle(pieces: Sequence[_Piece], by_share: Callable[[Key], tuple[float, Key]]) -> list[Key]:
    """Return the order of the collectives of a knot, by rules 3 and 4 of [Note: The merged order]."""
    pieces_of: dict[Key, list[_Piece]] = defaultdict(list)
    for piece in pieces:
        for key in piece.before:
            pieces_of[key].append(piece)
    placed: dict[Key, None] = {}
    while len(placed) < len(pieces_of):
        heads = Counter(key for piece in pieces for key in piece.heads(placed))
        kept = [
            key
            for key, count in heads.items()
            if count == len(pieces_of[key]) and all(piece.is_ready(key) for piece in pieces_of[key])
        ]
        if kept:
            overtaken = {key: sum(piece.overtaken(key) for piece in pieces_of[key]) for key in kept}
            key = min(kept, key=lambda key: (overtaken[key], by_share(key)))
        else:
            key = min([key for key in heads if key[0] == GATHER] or heads, key=by_share)
        placed[key] = None
    return list(placed)


def place(order: Sequence[Key], own: Sequence[Own], takes_part: Collection[Key], length: int) -> list[Placed]:
    """Return the positions of the collectives in which a rank takes part, in the merged order.

    Own collectives stay where they are planned unless the order forces them to move: then a gather moves to an earlier
    position rather than delaying later gathers, and collectives after a reduction are issued after its last gradient.
    Served ones are issued as early as the order allows, because others may be waiting for them, and nothing waits for
    them here.

    Args:
        order: the merged order.
        own: the collectives of the rank's own trace.
        takes_part: the collectives in which the rank takes part, including those of ``own``.
        length: the number of operations of the rank's compute.
    """
    mine = {o.key: o for o in own}
    keys = [key for key in order if key in takes_part]
    cap, caps = length, []
    for key in reversed(keys):
        if key in mine and key[0] == GATHER:
            cap = min(cap, mine[key].planned)
        caps.append(cap)
    planned = ready = issue = 0
    found = []
    for key, cap in zip(keys, reversed(caps), strict=True):
        if key not in mine:
            found.append(Placed(key, issue, length, True))
            continue
        of_trace = mine[key]
        planned = max(planned, of_trace.planned)
        if key[0] != GATHER:
            ready = max(ready, of_trace.limit)
        issue = max(ready, min(planned, cap))
        assert issue <= of_trace.limit or key[0] != GATHER, (of_trace, issue)
        found.append(Placed(key, issue, max(of_trace.waited, issue), False))
    return found
