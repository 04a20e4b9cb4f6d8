"""Choose which saved values backward computes again and which wait in host memory, so that a step fits into memory.

[Note: Plans for activations]
Forward is divided into segments, as many as it has gathers; if that is not enough, into half as many, and so on, because
what crosses from one segment to the next is always saved. A segment has several options: each choice of operators that run
again (``recomputation``), with what it then saves in the device's memory or in the host's. Memory is followed position by
position. As long as its peak exceeds the limit, one segment takes another option, the one that frees the most bytes *at the
peak* for its time. A value that is not in memory at the peak need not go, and what recomputation itself needs counts. At the
end, each segment takes back what is not needed any more.

A copy to host memory costs nearly nothing while compute hides it. That is assumed up to a share of forward's time
(``_HIDDEN_SHARE``); further copies cost their full time in both directions. The simulator then tells the real time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy
from thunder.core.trace import TraceCtx

from ...ir.analysis import Lifetime
from ...ir.effects import effects
from .cost import AnalyticCost
from .recomputation import ForwardSegment, SavedValues, Span, choices_of, timeline

_HIDDEN_SHARE = 0.7
"""Share of forward's compute time that copies to host memory may take and still count as hidden."""

_HIDDEN_COST = 0.02
"""Cost of a hidden copy, as a share of its time, so that nothing is copied for no gain."""

_COPIES_IN_FLIGHT = 4
"""How many copies of its size a value may have to wait for in host memory's queue, for the estimate of its lifetime."""


class ActivationPlan(NamedTuple):
    """The recomputed and offloaded values of a step.

    Attributes:
        recomputed: names of the values that backward computes again.
        offloaded: names of the values that wait in host memory.
        peak: the estimated peak of values (bytes), without slots.
    """

    recomputed: frozenset[str]
    offloaded: frozenset[str]
    peak: int


class _Option(NamedTuple):
    """An option of a segment.

    Attributes:
        recomputed, offloaded: names of values.
        seconds: the time of recomputation.
        copying: the time of copies in one direction.
        memory: bytes at each position, besides what forward alone needs.
    """

    recomputed: frozenset[str]
    offloaded: frozenset[str]
    seconds: float
    copying: float
    memory: numpy.ndarray

    @property
    def cost(self) -> float:
        """Seconds if copies are hidden."""
        return self.seconds + _HIDDEN_COST * self.copying


class _Division(NamedTuple):
    """Forward divided into segments: the options of each, the cheapest first, and the bytes of all other memory."""

    options: list[list[_Option]]
    others: numpy.ndarray

    def total(self, chosen: Sequence[_Option]) -> numpy.ndarray:
        """Return the bytes at each position with the chosen options."""
        return self.others + sum(option.memory for option in chosen)

    def take_back(self, chosen: list[_Option], limit: int) -> None:
        """Let each segment take its cheapest option with which the step still fits, the most expensive segment first."""
        total = self.total(chosen)
        for number in sorted(range(len(chosen)), key=lambda number: -chosen[number].cost):
            for option in self.options[number]:
                if option is chosen[number]:
                    break
                cheaper = total + option.memory - chosen[number].memory
                if int(cheaper.max()) <= limit:
                    total, chosen[number] = cheaper, option
                    break


class ActivationPlans:
    """All plans for the activations of one step; see [Note: Plans for activations].

    Args:
        halves: forward and backward, as :func:`~..ir.inspection.split_joint` returns them, with backward's gathers.
        cost: gives the time of operators and copies.
        offloadable: names of the values that may move to host memory.

    Attributes:
        peak: the estimated peak of values (bytes) if everything is saved.
    """

    def __init__(self, halves: Sequence[TraceCtx], cost: AnalyticCost, offloadable: Iterable[str] = ()) -> None:
        self._cost, self._offloadable = cost, frozenset(offloadable)
        saved = self._saved = SavedValues(halves, [max(seconds) for seconds in cost.seconds(halves[0])])
        computing = sum(operator.seconds for operator in saved.operators)
        self._hidden_seconds = _HIDDEN_SHARE * computing
        self._positions_per_second = saved.begin / computing if computing else 0.0
        self._gathers = max(sum(effects(bsym).is_gather for bsym in halves[0].bound_symbols), 1)
        self._divisions: dict[int, _Division] = {}
        unchanged = self._division(self._gathers)
        self.peak = int(unchanged.total([options[0] for options in unchanged.options]).max())

    def within(self, limit: int, *, offload: bool) -> ActivationPlan:
        """Return a fast plan whose estimated peak is at most ``limit`` bytes, else that of the least peak found.

        Args:
            limit: bytes of all values together, without slots.
            offload: whether values may move to host memory.
        """
        number = self._gathers
        least = self._within(self._division(number), limit, offload)
        while least.peak > limit and number > 1:
            number //= 2
            plan = self._within(self._division(number), limit, offload)
            least = min(least, plan, key=lambda plan: plan.peak)
        return least

    def _division(self, number: int) -> _Division:
        """Return forward divided into so many segments."""
        if number not in self._divisions:
            saved = self._saved
            segments = saved.segments(number)
            options = [sorted(self._options_of(s), key=lambda option: option.cost) for s in segments]
            outs = [out for s in segments for o in s.operators for out in o.outputs if saved.owned(out)]
            made = dict.fromkeys(saved.owner[out] for out in outs)
            names = {owner.name for owner in made}
            spans = [(owner.first, saved.last_in_forward[owner], owner.nbytes) for owner in made]
            spans += [(max(m.first, 0), m.last, m.nbytes) for m in saved.memory if m.name not in names]
            self._divisions[number] = _Division(options, timeline(saved.length, spans))
        return self._divisions[number]

    def _within(self, division: _Division, limit: int, offload: bool) -> ActivationPlan:
        options = [[option for option in of_one if offload or not option.offloaded] for of_one in division.options]
        chosen = [of_one[0] for of_one in options]
        total = division.total(chosen)
        best, least = list(chosen), int(total.max())
        while int(total.max()) > limit:
            position = int(total.argmax())
            copying = sum(option.copying for option in chosen)
            moves = []
            for number, now in enumerate(chosen):
                at = next(index for index, option in enumerate(options[number]) if option is now)
                for other in options[number][at + 1 :]:
                    freed = int(now.memory[position] - other.memory[position])
                    if freed > 0:
                        seconds = other.seconds - now.seconds
                        seconds += self._copy_cost(copying + other.copying - now.copying) - self._copy_cost(copying)
                        moves.append((freed / (seconds + 1e-12), number, other))
            if not moves:
                break
            _, number, other = max(moves, key=lambda move: move[0])
            total = total + other.memory - chosen[number].memory
            chosen[number] = other
            if int(total.max()) < least:
                best, least = list(chosen), int(total.max())
        if least <= limit:
            division._replace(options=options).take_back(best, limit)
        recomputed = frozenset(name for option in best for name in option.recomputed)
        offloaded = frozenset(name for option in best for name in option.offloaded)
        return ActivationPlan(recomputed, offloaded, int(division.total(best).max()))

    def _copy_cost(self, copying: float) -> float:
        return _HIDDEN_COST * copying + 2 * max(copying - self._hidden_seconds, 0.0)

    def _options_of(self, segment: ForwardSegment) -> Iterator[_Option]:
        saved = self._saved
        for choice in choices_of(saved, segment):
            recomputed = {out for index in choice.recomputed_operators for out in segment.operators[index].outputs}
            spans, kept = _uses(saved, segment, choice.recomputed_operators)
            memory, names = timeline(saved.length, spans), frozenset(value.name for value in recomputed)
            yield _Option(names, frozenset(), choice.seconds, 0.0, memory)
            away = {o: span for o, (last, first) in kept.items() if (span := self._absence(o, last, first)) is not None}
            if away:
                copying = sum(self._cost.host_copy_seconds(owner.nbytes) for owner in away)
                offloaded = frozenset(owner.name for owner in away)
                yield _Option(names, offloaded, choice.seconds, copying, memory - timeline(saved.length, away.values()))

    def _absence(self, owner: Lifetime, last: int, first: int) -> Span | None:
        """Return when a value would not be in memory that forward uses last and backward first at these positions."""
        if owner.name not in self._offloadable:
            return None
        seconds = _COPIES_IN_FLIGHT * self._cost.host_copy_seconds(owner.nbytes)
        delay = 1 + math.ceil(seconds * self._positions_per_second)
        return (last + delay, first - delay, owner.nbytes) if last + delay < first - delay else None


def _uses(
    saved: SavedValues, segment: ForwardSegment, recomputed_operators: frozenset[int]
) -> tuple[list[Span], dict[Lifetime, tuple[int, int]]]:
    """Return what backward needs if some operators of a segment, given by index, run again.

    Returns:
        The memory after forward's last use, also of values of earlier segments; and the last use in forward and the first in
        backward of each value that owns memory and is saved.
    """
    uses: dict[Lifetime, tuple[int, int]] = {}  # first and last in backward
    for operator in segment.operators:
        for value in operator.outputs:
            if reads := saved.reads.get(value):
                uses[value] = reads[0], reads[-1]
    for index in sorted(recomputed_operators, reverse=True):
        starts = [uses[value][0] for value in segment.operators[index].outputs if value in uses]
        for value in segment.operators[index].inputs if starts else ():
            first, last = uses.get(value, (min(starts), -1))
            uses[value] = min(first, *starts), max(last, *starts)
    needed: dict[Lifetime, tuple[int, int]] = {}
    before: dict[Lifetime, int] = {}  # until when values of earlier segments are in memory in any case
    for value, (first, last) in uses.items():
        if saved.owned(value):
            owner = saved.owner[value]
            known = needed.get(owner, (first, last))
            needed[owner] = min(first, known[0]), max(last, known[1])
            before[owner] = max(before.get(owner, -1), saved.last_in_forward[owner], *saved.reads.get(value, ()))
    recomputed = {value for index in recomputed_operators for value in segment.operators[index].outputs}
    inside = {
        saved.owner[value] for operator in segment.operators for value in operator.outputs if value in saved.owner
    }
    spans, kept = [], {}
    for owner, (first, last) in needed.items():
        if owner in recomputed:
            if first < last:  # otherwise it is made where it is read
                spans.append((first, last, owner.nbytes))
        elif owner in inside:
            kept[owner] = saved.last_in_forward[owner], first
            spans.append((saved.last_in_forward[owner] + 1, last, owner.nbytes))
        elif last > before[owner]:
            spans.append((before[owner] + 1, last, owner.nbytes))
    return spans, kept
