"""Runs of bound symbols that repeat in a trace, such as those of the blocks of a transformer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from ..ir.inspection import args_of, defined_by, outs_of
from .trace_tokens import Indescribable, Parameter, TraceTokens

__all__ = ["Run", "find_repeated_runs"]

_MOST_PERIODS = 8
"""How many distances between equal bound symbols are tried as the length of a run, the most frequent first."""


class Run(NamedTuple):
    """Consecutive bound symbols with one result that later ones read.

    Attributes:
        start, stop: the positions of the first bound symbol, and of the one after the last.
        proxies: all that appear, in order of appearance.
        parameters: those that are unsharded, in order of appearance.
        inputs: positions in ``proxies`` of what the run reads and does not define.
        output: the position in ``proxies`` of the result.
    """

    start: int
    stop: int
    proxies: tuple[Proxy, ...]
    parameters: tuple[Parameter, ...]
    inputs: tuple[int, ...]
    output: int


def find_repeated_runs(
    bsyms: Sequence[BoundSymbol], outputs: Collection[str], may_repeat: Callable[[BoundSymbol], bool]
) -> list[list[Run]]:
    """Return runs that do not overlap, in lists of at least two that differ in their proxies and parameters only.

    The runs of a list have equal tokens: their bound symbols are the same in the same order, with the same flow of data
    between them. They need not follow one another directly.

    Args:
        bsyms: of a trace, without its return.
        outputs: names of what the trace returns.
        may_repeat: whether a bound symbol may be part of a run.
    """
    search = _Search(bsyms, outputs, may_repeat)
    return list(search.find(0, len(bsyms)))


class _Search:
    """A search for repeated runs.

    It compares bound symbols by numbers, which are equal if their own tokens are. A run that repeats ``n`` times has
    equal numbers at ``n - 1`` distances of its length, so the most frequent distances are its possible lengths.
    """

    def __init__(
        self, bsyms: Sequence[BoundSymbol], outputs: Collection[str], may_repeat: Callable[[BoundSymbol], bool]
    ) -> None:
        self._bsyms = bsyms
        self._tokens = TraceTokens()
        known: dict[Any, int] = {}
        self._numbers: list[int] = []
        for position, bsym in enumerate(bsyms):
            own = self._own_tokens(bsym) if may_repeat(bsym) else None
            self._numbers.append(-1 - position if own is None else known.setdefault(own, len(known)))
        self._last_use: dict[str, int] = {}
        for position, bsym in enumerate(bsyms):
            self._last_use.update(dict.fromkeys(args_of(bsym), position))
        self._last_use.update(dict.fromkeys(outputs, len(bsyms)))

    def find(self, start: int, stop: int) -> Iterator[list[Run]]:
        """Yield the repeated runs between two positions: those that save the most work, then those around them."""
        best: tuple[int, list[Run]] = 0, []
        for period in self._periods(start, stop):
            for first, last in self._stretches(start, stop, period):
                if (last - first) // period * period - period > best[0]:
                    runs = self._runs(first, last, period)
                    best = max(best, ((len(runs) - 1) * period, runs), key=lambda found: found[0])
        saved, runs = best
        if not saved:
            return
        yield from self.find(start, runs[0].start)
        yield runs
        yield from self.find(runs[-1].stop, stop)

    def _own_tokens(self, bsym: BoundSymbol) -> Any:
        self._tokens.begin()
        try:
            self._tokens.add_bsym(bsym)
        except Indescribable:
            return None
        return tuple(self._tokens.tokens)

    def _periods(self, start: int, stop: int) -> list[int]:
        """Return the most frequent distances from a bound symbol to the next that is equal."""
        previous: dict[int, int] = {}
        distances: Counter[int] = Counter()
        for position in range(start, stop):
            number = self._numbers[position]
            if number in previous:
                distances[position - previous[number]] += 1
            previous[number] = position
        return [period for period, _ in distances.most_common(_MOST_PERIODS)]

    def _stretches(self, start: int, stop: int, period: int) -> Iterator[tuple[int, int]]:
        """Yield the longest ranges in which each bound symbol equals the one ``period`` before it, if there is one."""
        numbers = self._numbers
        first = start
        for position in range(start, stop - period + 1):
            if position < stop - period and numbers[position] == numbers[position + period]:
                continue
            if position - first >= period:
                yield first, position + period
            first = position + 1

    def _runs(self, start: int, stop: int, period: int) -> list[Run]:
        """Return the most runs of a length that fit between two positions, and have equal tokens and one result each."""
        best: list[Run] = []
        for first in range(start, min(start + period, stop)):
            if (stop - first) // period <= len(best):
                break
            alike: dict[Any, list[Run]] = defaultdict(list)
            for begin in range(first, stop - period + 1, period):
                tokens, run = self._run(begin, begin + period)
                if run is None:
                    break
                alike[tokens].append(run)
            else:
                best = max(best, *alike.values(), key=len)
        return best if len(best) > 1 else []

    def _run(self, start: int, stop: int) -> tuple[Any, Run | None]:
        """Return the run between two positions with its tokens; no run if it has another number of results than one."""
        results = [
            out
            for bsym in self._bsyms[start:stop]
            for out in defined_by(bsym)
            if self._last_use.get(out.name, -1) >= stop
        ]
        if len(results) != 1 or not isinstance(results[0], TensorProxy):
            return None, None
        self._tokens.begin()
        for bsym in self._bsyms[start:stop]:
            self._tokens.add_bsym(bsym)
        defined: set[str] = set()
        inputs: dict[str, int] = {}
        places = {name: place for place, name in enumerate(self._tokens.proxies)}
        for bsym in self._bsyms[start:stop]:
            inputs.update((name, places[name]) for name in args_of(bsym) if name not in defined)
            defined.update(outs_of(bsym))
        proxies, parameters = tuple(self._tokens.proxies.values()), tuple(self._tokens.parameters)
        run = Run(start, stop, proxies, parameters, tuple(inputs.values()), places[results[0].name])
        return (*self._tokens.tokens, run.inputs, run.output), run
