"""Choose which saved values backward computes again, so that a step fits into memory.

[Note: Plans for activations]
Forward is divided into segments, as many as it has gathers. If no plan fits, it is divided into half as many, and so
on, because values that cross from one segment to the next are always saved. A segment has several options: a choice of
operators that run again (``recomputation``), and the values that are then saved. Memory is followed position by
position. As long as its peak exceeds the limit, one segment takes another option: the one that frees the most bytes *at
the peak* for its time. So a value that is not in memory at the peak need not be recomputed, and the memory of
recomputation itself counts. At the end, recomputation that is no longer needed is undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy

from ...ir.analysis import Lifetime
from ..step_memory.rows import StepRows
from .cost import AnalyticCost
from .recomputation import ForwardSegment, SavedValues, Span, choices_of, timeline


class ActivationPlan(NamedTuple):
    """The recomputed values of a step.

    Attributes:
        recomputed: names of the values that backward computes again.
        peak: the estimated peak of values (bytes), without slots.
    """

    recomputed: frozenset[str]
    peak: int


class _SegmentOption(NamedTuple):
    """An option of a segment.

    Attributes:
        recomputed: names of values.
        seconds: the time of recomputation.
        memory: bytes at each position, in addition to those of forward alone.
    """

    recomputed: frozenset[str]
    seconds: float
    memory: numpy.ndarray


class _Division(NamedTuple):
    """Forward divided into segments: the options of each, the cheapest first, and the bytes of all other memory."""

    options: list[list[_SegmentOption]]
    others: numpy.ndarray

    def total(self, chosen: Sequence[_SegmentOption]) -> numpy.ndarray:
        """Return the bytes at each position with the chosen options."""
        return self.others + sum(option.memory for option in chosen)

    def take_back(self, chosen: list[_SegmentOption], limit: int) -> None:
        """Let each segment take its cheapest option with which the step still fits, the most expensive segment first."""
        total = self.total(chosen)
        for number in sorted(range(len(chosen)), key=lambda number: -chosen[number].seconds):
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
        step: forward and backward, as :func:`~..ir.inspection.split_joint` returns them, with backward's gathers.
        cost: the cost model of operators.

    Attributes:
        peak: the estimated peak of values (bytes) if everything is saved.
    """

    def __init__(self, step: StepRows, cost: AnalyticCost) -> None:
        self._saved = SavedValues(step, cost)
        self._gathers = max(sum(row.effects.is_gather for row in step.rows[: self._saved.begin]), 1)
        self._divisions: dict[int, _Division] = {}
        unchanged = self._division(self._gathers)
        self.peak = int(unchanged.total([options[0] for options in unchanged.options]).max())

    def within(self, limit: int) -> ActivationPlan:
        """Return a fast plan whose estimated peak is at most ``limit`` bytes, else the plan with the lowest peak found.

        Args:
            limit: bytes of all values together, without slots.
        """
        number = self._gathers
        least = self._within(self._division(number), limit)
        while least.peak > limit and number > 1:
            number //= 2
            plan = self._within(self._division(number), limit)
            least = min(least, plan, key=lambda plan: plan.peak)
        return least

    def _division(self, number: int) -> _Division:
        """Return forward divided into ``number`` segments."""
        if number not in self._divisions:
            saved = self._saved
            segments = saved.segments(number)
            options = [sorted(self._options_of(s), key=lambda option: option.seconds) for s in segments]
            outs = [out for s in segments for o in s.operators for out in o.outputs if saved.owned(out)]
            made = dict.fromkeys(saved.owner[out] for out in outs)
            names = {owner.name for owner in made}
            spans = [(owner.first, saved.last_in_forward[owner], owner.nbytes) for owner in made]
            spans += [(max(m.first, 0), m.last, m.nbytes) for m in saved.memory if m.name not in names]
            self._divisions[number] = _Division(options, timeline(saved.length, spans))
        return self._divisions[number]

    def _within(self, division: _Division, limit: int) -> ActivationPlan:
        options = division.options
        chosen = [of_one[0] for of_one in options]
        total = division.total(chosen)
        best, least = list(chosen), int(total.max())
        while int(total.max()) > limit:
            position = int(total.argmax())
            moves = []
            for number, now in enumerate(chosen):
                at = next(index for index, option in enumerate(options[number]) if option is now)
                for other in options[number][at + 1 :]:
                    freed = int(now.memory[position] - other.memory[position])
                    if freed > 0:
                        moves.append((freed / (other.seconds - now.seconds + 1e-12), number, other))
            if not moves:
                break
            _, number, other = max(moves, key=lambda move: move[0])
            total = total + other.memory - chosen[number].memory
            chosen[number] = other
            if int(total.max()) < least:
                best, least = list(chosen), int(total.max())
        if least <= limit:
            division.take_back(best, limit)
        recomputed = frozenset(name for option in best for name in option.recomputed)
        return ActivationPlan(recomputed, int(division.total(best).max()))

    def _options_of(self, segment: ForwardSegment) -> Iterator[_SegmentOption]:
        saved = self._saved
        for choice in choices_of(saved, segment):
            recomputed = {out for index in choice.recomputed_operators for out in segment.operators[index].outputs}
            memory = timeline(saved.length, _uses(saved, segment, choice.recomputed_operators))
            yield _SegmentOption(frozenset(value.name for value in recomputed), choice.seconds, memory)


def _uses(saved: SavedValues, segment: ForwardSegment, recomputed_operators: frozenset[int]) -> list[Span]:
    """Return the memory that backward needs if some operators of a segment, given by index, run again.

    It covers the time after forward's last use of each value, including values of earlier segments.
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
    before: dict[Lifetime, int] = {}  # up to which position values of earlier segments are in memory in any case
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
    spans = []
    for owner, (first, last) in needed.items():
        if owner in recomputed:
            if first < last:  # otherwise it is recomputed where it is read
                spans.append((first, last, owner.nbytes))
        elif owner in inside:
            spans.append((saved.last_in_forward[owner] + 1, last, owner.nbytes))
        elif last > before[owner]:
            spans.append((before[owner] + 1, last, owner.nbytes))
    return spans
