"""Choose which saved values backward computes again and which wait in host memory, so that a step fits into memory.

[Note: Plans for activations]
Memory is followed position by position. As long as its peak exceeds the limit, one move is made, the one that frees the
most bytes *at the peak* for its time: a segment of forward changes to a choice that computes more again
(``recomputation``), or a value moves to host memory. A value that is not in memory at the peak need not go, and what
recomputation itself needs counts. At the end, each move is undone that is not needed any more.

A copy to host memory costs nearly nothing while compute hides it. That is assumed up to a share of forward's time
(``_HIDDEN_SHARE``); further copies cost their full time in both directions. The simulator then tells the real time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy
from thunder.core.trace import TraceCtx

from ..ir.analysis import Lifetime as Value
from ..ir.analysis import bytes_at
from ..ir.effects import effects
from .cost import CostModel
from .recomputation import Cut, SegmentChoice
from .saved_values import Operator, SavedValues, Segment, Span

_HIDDEN_SHARE = 0.7
"""Share of forward's compute time that copies to host memory may take and still count as hidden."""

_HIDDEN_COST = 0.02
"""Cost of a hidden copy, as a share of its time, so that nothing is copied for no gain."""

_COPIES_IN_FLIGHT = 4
"""How many copies of its size a value may have to wait for in host memory's queue, for the estimate of its lifetime."""

_Timeline = numpy.ndarray
"""Bytes at each position."""


class ActivationPlan(NamedTuple):
    """The recomputed and offloaded values of a step, with their estimated cost.

    Attributes:
        recomputed: names of the values that backward computes again.
        offloaded: names of the values that wait in host memory.
        seconds: the estimated cost.
        peak: the estimated peak of values (bytes), without slots.
    """

    recomputed: frozenset[str]
    offloaded: frozenset[str]
    seconds: float
    peak: int


class ActivationPlans:
    """All plans for the activations of one step.

    Args:
        halves: forward and backward, as :func:`~..ir.inspection.split_joint` returns them, with backward's gathers.
        cost: gives the time of operators and copies.
        offloadable: names of the values that may move to host memory.

    Attributes:
        peak: the estimated peak of values (bytes) if everything is saved.
    """

    def __init__(self, halves: Sequence[TraceCtx], cost: CostModel, offloadable: Iterable[str] = ()) -> None:
        forward = halves[0]
        seconds = {
            id(bsym): max(seconds) for bsym, seconds in zip(forward.bound_symbols, cost.seconds(forward), strict=True)
        }
        self._saved = SavedValues(halves, seconds)
        self._copies = _Copies(self._saved, cost, frozenset(offloadable))
        self._gathers = max(sum(effects(bsym).is_gather for bsym in forward.bound_symbols), 1)
        self._divisions: dict[int, _Division] = {}
        self.peak = self._division(self._gathers).unchanged().peak

    def within(self, limit: int, *, offload: bool) -> ActivationPlan:
        """Return a fast plan whose estimated peak is at most ``limit`` bytes, else that of the least peak found.

        Forward is divided into as many segments as it has gathers; if no plan fits, into half as many, and so on.

        Args:
            limit: bytes of all values together, without slots.
            offload: whether values may move to host memory.
        """
        number = self._gathers
        least = self._division(number).within(limit, offload=offload)
        while least.peak > limit and number > 1:
            number //= 2
            plan = self._division(number).within(limit, offload=offload)
            least = min(least, plan, key=lambda plan: plan.peak)
        return least

    def _division(self, number: int) -> _Division:
        if number not in self._divisions:
            self._divisions[number] = _Division(self._saved, self._saved.gaps(number - 1), self._copies)
        return self._divisions[number]


class _Copies:
    """Copies of values to host memory and back: which are possible, how long each takes, and how much is hidden."""

    def __init__(self, saved: SavedValues, cost: CostModel, names: frozenset[str]) -> None:
        self.cost = cost
        self.names = names
        computing = sum(operator.seconds for operator in saved.operators)
        self.hidden_seconds = _HIDDEN_SHARE * computing
        self.positions_per_second = saved.begin / computing if computing else 0.0

    def delay(self, nbytes: int) -> int:
        """Return for how many positions a value stays in memory while it is copied in one direction."""
        return 1 + math.ceil(_COPIES_IN_FLIGHT * self.cost.host_copy_seconds(nbytes) * self.positions_per_second)


class _Move(NamedTuple):
    """A change of the plan: segment ``number`` takes ``choice``, or the value ``offloaded`` moves."""

    freed_per_second: float
    number: int
    choice: int
    offloaded: Value | None = None


class _State:
    """A plan while it is made: the choice of each segment, the values that move, and memory at each position."""

    def __init__(self, chosen: list[int], total: _Timeline) -> None:
        self.chosen = chosen
        self.total = total
        self.offloaded: dict[Value, int] = {}  # with the number of the segment
        self.copying = 0.0


class _Division:
    """Forward divided into segments, each with its choices, from the fastest to the one that saves least.

    Segments of equal structure have equal choices.

    Args:
        saved: the values.
        gaps: where segments begin.
        copies: those to host memory.
    """

    def __init__(self, saved: SavedValues, gaps: Iterable[int], copies: _Copies) -> None:
        self.saved = saved
        self.copies = copies
        self.segments = saved.segments(gaps)
        known: dict[object, list[SegmentChoice]] = {}
        self.choices: list[list[SegmentChoice]] = []
        for segment in self.segments:
            cut = Cut(saved, segment)
            key = cut.structure()
            if key not in known:
                known[key] = cut.hull()
            self.choices.append(known[key])
        uses = [[_Uses(saved, s, c.again) for c in cs] for s, cs in zip(self.segments, self.choices, strict=True)]
        self.memory = [[numpy.array(bytes_at(u.spans, saved.length)) for u in of_segment] for of_segment in uses]
        self.absent = [[self._absences(u.kept) for u in of_segment] for of_segment in uses]
        followed = {
            saved.owner[out].proxy.name for s in self.segments for o in s.operators for out in _followed(saved, o)
        }
        rest = [Span(max(i.first, 0), i.last, i.nbytes) for i in saved.intervals if i.name not in followed]
        self.others = numpy.array(bytes_at(rest, saved.length))

    def unchanged(self) -> ActivationPlan:
        """Return the plan that saves everything."""
        return self._result(self._start())

    def within(self, limit: int, *, offload: bool) -> ActivationPlan:
        """Return the plan whose estimated peak is at most ``limit`` bytes, or the one with the least peak found."""
        state = self._start()
        best = self._result(state)
        while (peak := int(state.total.max())) > limit:
            moves = self._moves(state, int(state.total.argmax()), offload)
            if not moves:
                break
            self._make(state, max(moves, key=lambda move: move.freed_per_second))
            if int(state.total.max()) < min(peak, best.peak):
                best = self._result(state)
        if best.peak > limit:
            return best
        self._undo(state, limit)
        return self._result(state)

    def _start(self) -> _State:
        chosen = [0] * len(self.segments)
        return _State(chosen, self.others + sum(memory[0] for memory in self.memory))

    def _moves(self, state: _State, position: int, offload: bool) -> list[_Move]:
        """Return the moves that free memory at a position."""
        moves = []
        for number, (choices, memory) in enumerate(zip(self.choices, self.memory, strict=True)):
            now = state.chosen[number]
            for other in range(now + 1, len(choices)):
                freed = int(memory[now][position] - memory[other][position])
                freed -= sum(
                    span.nbytes
                    for value, of in state.offloaded.items()
                    if of == number and _contains(span := self.absent[number][now][value], position)
                )
                if freed > 0:
                    seconds = choices[other].seconds - choices[now].seconds
                    moves.append(_Move(freed / (seconds + 1e-12), number, other))
            for value, span in self.absent[number][now].items() if offload else ():
                if value not in state.offloaded and _contains(span, position):
                    seconds = self._seconds_of_copy(state, span.nbytes)
                    moves.append(_Move(span.nbytes / (seconds + 1e-12), number, now, value))
        return moves

    def _seconds_of_copy(self, state: _State, nbytes: int) -> float:
        seconds = self.copies.cost.host_copy_seconds(nbytes)
        return seconds * (_HIDDEN_COST if state.copying + seconds <= self.copies.hidden_seconds else 2)

    def _make(self, state: _State, move: _Move) -> None:
        number, now = move.number, state.chosen[move.number]
        if move.offloaded is not None:
            self._offload(state, number, move.offloaded, 1)
            return
        offloaded = [value for value, of in state.offloaded.items() if of == number]
        for value in offloaded:
            self._offload(state, number, value, -1)
        state.total = state.total + self.memory[number][move.choice] - self.memory[number][now]
        state.chosen[number] = move.choice
        for value in offloaded:
            if value in self.absent[number][move.choice]:
                self._offload(state, number, value, 1)

    def _offload(self, state: _State, number: int, value: Value, sign: int) -> None:
        """Let a value of a segment move to host memory (``sign=1``), or stay after all (-1)."""
        span = self.absent[number][state.chosen[number]][value]
        total = state.total.copy()
        total[span.start : span.end + 1] -= sign * span.nbytes
        state.total = total
        state.copying += sign * self.copies.cost.host_copy_seconds(span.nbytes)
        if sign > 0:
            state.offloaded[value] = number
        else:
            del state.offloaded[value]

    def _undo(self, state: _State, limit: int) -> None:
        """Take back what is not needed, first the copies, which need host memory, then the most expensive choices."""
        for value, number in sorted(state.offloaded.items(), key=lambda item: item[0].first, reverse=True):
            self._offload(state, number, value, -1)
            if int(state.total.max()) > limit:
                self._offload(state, number, value, 1)
        order = sorted(range(len(state.chosen)), key=lambda n: -self.choices[n][state.chosen[n]].seconds)
        for number in order:
            if number in state.offloaded.values():
                continue
            for other in range(state.chosen[number]):
                cheaper = state.total + self.memory[number][other] - self.memory[number][state.chosen[number]]
                if int(cheaper.max()) <= limit:
                    state.total, state.chosen[number] = cheaper, other
                    break

    def _absences(self, kept: Mapping[Value, tuple[int, int]]) -> dict[Value, Span]:
        """Return between which positions each value that may be offloaded would not be in memory."""
        found = {}
        for value, (last, first) in kept.items():
            if value.proxy.name in self.copies.names:
                nbytes = self.saved.nbytes[value]
                delay = self.copies.delay(nbytes)
                if last + delay < first - delay:
                    found[value] = Span(last + delay, first - delay, nbytes)
        return found

    def _result(self, state: _State) -> ActivationPlan:
        again: set[str] = set()
        seconds = 2 * max(state.copying - self.copies.hidden_seconds, 0.0) + _HIDDEN_COST * state.copying
        for segment, choices, number in zip(self.segments, self.choices, state.chosen, strict=True):
            seconds += choices[number].seconds
            for index in choices[number].again:
                again.update(out.proxy.name for out in segment.operators[index].outputs)
        offloaded = frozenset(value.proxy.name for value in state.offloaded)
        return ActivationPlan(frozenset(again), offloaded, seconds, int(state.total.max()))


def _followed(saved: SavedValues, operator: Operator) -> list[Value]:
    return [value for value in operator.outputs if value not in saved.free and saved.owner[value].first >= 0]


class _Uses:
    """When the values of a segment are in memory if some of its operators run again in backward.

    Attributes:
        spans: that, including for how much longer values of earlier segments are in memory.
        kept: the last use in forward and the first in backward of each value that owns memory and is saved.
    """

    def __init__(self, saved: SavedValues, segment: Segment, again: frozenset[int]) -> None:
        self.kept: dict[Value, tuple[int, int]] = {}
        self.spans = self._spans(saved, segment, again)

    def _spans(self, saved: SavedValues, segment: Segment, again: frozenset[int]) -> list[Span]:
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
                    before = self.kept.get(owner, (saved.last_in_forward[owner], first))
                    self.kept[owner] = before[0], min(before[1], first)
        spans = [Span(owner.first, end, saved.nbytes[owner]) for owner, end in ends.items()]
        spans += [Span(first, last, saved.nbytes[owner]) for owner, (first, last) in repeated.items() if first < last]
        for value, (_, last) in uses.items():
            if saved.owner.get(value) not in inside and value not in saved.free and saved.owner[value].first >= 0:
                before = max([saved.last_in_forward[saved.owner[value]], *saved.reads.get(value, ())])
                if last > before:
                    spans.append(Span(before + 1, last, saved.nbytes[saved.owner[value]]))
        return spans


def _contains(span: Span, position: int) -> bool:
    return span.start <= position <= span.end
