"""Choose together what stays unsharded, how far ahead the rest is gathered, and what backward computes again.

[Note: The search]
A kept bucket is not gathered again in backward, but it occupies memory that gathers further ahead could use, and it
changes which of them overlap. So more kept buckets, or a larger prefetch distance, can make a step slower. The search
tries distances with nothing kept first. At the fastest it tries to keep all buckets, then bisects the number that fits.
Kept are the buckets that backward reads first, because forward gathers them last and so they occupy memory for the
shortest time.

With ``max_memory``, a candidate whose step exceeds it computes values again in backward: those that cost the least time
(``activations``). Their effect on memory is estimated first. The passes then give the real peak, and the estimate is
corrected by the difference. That takes several runs of the passes, so it is left out for a candidate that would not win
even if recomputation took no time. Distance 1 comes first then, because it is usually the fastest, and a shorter one is
rarely worth that. Values also move to host memory if recomputation alone does not suffice or makes the step slower by more
than 1 %, which is then what there is to gain.

If nothing fits, all distances are tried again with settings that need less memory (``_THRIFT``): with an extension, see
[Note: Memory that only backward needs] in ``transforms.release_slots``; then also with one large reduction in flight
instead of two; then with no reduction beside compute. If something fits, but activations slow it down by more than 1 %,
the first two are tried at the fastest distance and the next one.

The candidate with the shortest simulated step wins; among equals, the one that keeps more buckets, because it sends
less, and then the one with fewer bytes. The default, ``prefetch=1`` with nothing kept, is always tried. If it fits the
budget, nothing slower is chosen.

Each candidate runs through the passes of a compilation, so its bytes are those that will be allocated and its order is
the real one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..ir.effects import effects
from ..transforms.sort_communication import MAX_REDUCTIONS_IN_FLIGHT
from .candidates import Candidate, Candidates

__all__ = ["Candidate", "Choice", "MemoryLimitError", "choose"]

_MAX_PREFETCH = 8
"""The largest prefetch distance that is tried; communication still exposed then cannot be hidden in the step."""

_PATIENCE = 2
"""How many distances without an improvement end the search."""

_WORTHWHILE = 5e-3
"""Relative improvement of the step time below which larger distances are not tried, because each takes compile time."""

_SLOWDOWN = 0.01
"""By how much changes of activations may slow a step down before other ways to save memory are tried."""

_CORRECTIONS = 4
"""How often the estimate of memory is corrected by the real peak."""

_SAME = 1e-3
"""Relative difference below which step times count as equal, because the cost model is not more accurate."""

_THRIFT = ((MAX_REDUCTIONS_IN_FLIGHT, False), (MAX_REDUCTIONS_IN_FLIGHT, True), (1, True), (0, True))
"""Reductions in flight and whether backward extends its arena, from the fastest to the smallest."""


class MemoryLimitError(ValueError):
    """``max_memory`` is too little for a step.

    Attributes:
        least_bytes: what the step needs with all that lowers its peak.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen, and all that were considered."""

    chosen: Candidate
    considered: tuple[Candidate, ...]

    def __str__(self) -> str:
        return "\n".join(f"{'>' if c == self.chosen else ' '} {c}" for c in self.considered)


def choose(candidates: Candidates, *, prefetch: int | None, may_keep: bool) -> Choice:
    """Search for the shortest simulated step within the limits.

    Args:
        candidates: the joint trace and the limits.
        prefetch: a fixed prefetch distance; ``None`` tries several.
        may_keep: whether more buckets may be kept than those that are in any case.

    Raises:
        MemoryLimitError, ValueError: nothing fits; the message has the bytes of the smallest candidate.
    """
    search = _Search(candidates)
    search.try_settings(prefetch)
    if not search.fitting:
        raise _error(search.unfit, prefetch, candidates)
    if may_keep and candidates.limits.any_bytes:
        search.keep_more()
    default = search.considered.get((candidates.names_kept(0), 1 if prefetch is None else prefetch, *_THRIFT[0]))
    longest = search.fastest.step_seconds * (1 + _SAME)
    if default is not None and default in search.fitting:
        longest = min(longest, default.step_seconds)
    good = [c for c in search.fitting if c.step_seconds <= longest]
    chosen = min(good, key=lambda c: (-len(c.kept), c.unsharded_bytes, c.prefetch))
    in_order = sorted(search.fitting, key=lambda c: (c.prefetch, len(c.kept), c.reductions, c.extends))
    return Choice(chosen, tuple(in_order))


class _Search:
    """The candidates that were considered.

    Attributes:
        considered: all candidates, keyed by kept buckets, distance, reductions and extension.
        fitting: those that keep the limits.
        unfit: those that keep no further bucket and exceed the limits.
    """

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        self.limits = candidates.limits
        self.considered: dict[tuple[object, ...], Candidate] = {}
        self.fitting: list[Candidate] = []
        self.unfit: list[Candidate] = []
        self._unchanged_seconds = float("inf")  # of the fastest step that recomputes nothing, whether it fits or not

    @property
    def fastest(self) -> Candidate:
        """The fastest candidate that fits."""
        return min(self.fitting, key=lambda candidate: candidate.step_seconds)

    def try_settings(self, prefetch: int | None) -> None:
        """Consider distances and thrift with no further bucket kept; see [Note: The search]."""
        gathers = sum(effects(bsym).is_gather for bsym in self.candidates.joint.bound_symbols)
        distances = list(range(min(_MAX_PREFETCH, gathers) + 1)) if prefetch is None else [prefetch]
        if prefetch is None and self.limits.memory is not None:
            distances = [*distances[1:2], 0, *distances[2:]]
        for reductions, extends in _THRIFT if self.limits.memory is not None else _THRIFT[:1]:
            near = distances
            if self.fitting:
                fastest = self.fastest
                if not reductions or fastest.step_seconds <= self._unchanged_seconds * (1 + _SLOWDOWN):
                    return
                near = [d for d in (fastest.prefetch, fastest.prefetch + 1) if d in distances]
            self._try_distances(near, reductions, extends)

    def _try_distances(self, distances: Iterable[int], reductions: int, extends: bool) -> None:
        """Consider distances until larger ones do not fit or gain little."""
        kept = self.candidates.names_kept(0)
        times: list[float] = []
        least_unfit = _MAX_PREFETCH + 1
        for distance in distances:
            if distance > least_unfit:
                return
            candidate = self._consider(Candidate(distance, kept, reductions, extends))
            if candidate is None:
                least_unfit = distance if distance > 0 else least_unfit
                continue
            times.append(candidate.step_seconds)
            if len(times) > _PATIENCE and min(times[-_PATIENCE:]) > min(times[:-_PATIENCE]) * (1 - _WORTHWHILE):
                return

    def keep_more(self) -> None:
        """Consider candidates that keep further buckets besides the settings of the fastest, up to the most that fit."""
        fastest = self.fastest
        number = high = len(self.candidates.regathered)
        low = 0  # fits
        while low < high:
            kept = self.candidates.names_kept(number)
            fits = self._consider(replace(fastest, kept=kept)) is not None
            low, high = (number, high) if fits else (low, number - 1)
            number = (low + high + 1) // 2

    def _consider(self, settings: Candidate) -> Candidate | None:
        """Return the candidate with these settings if it fits. If it keeps nothing more, it recomputes what helps."""
        key = settings.kept, settings.prefetch, settings.reductions, settings.extends
        if key not in self.considered:
            candidate = self.candidates.run(settings)
            keeps = settings.kept != self.candidates.names_kept(0)
            if not keeps:
                self._unchanged_seconds = min(self._unchanged_seconds, candidate.step_seconds)
                candidate = self._within_memory(candidate)
            self.considered[key] = candidate
            if self.limits.allow(candidate):
                self.fitting.append(candidate)
            elif not keeps:
                self.unfit.append(candidate)
        candidate = self.considered[key]
        return candidate if candidate in self.fitting else None

    def _exceeds_memory(self, candidate: Candidate) -> bool:
        limit, peak = self.limits.memory, candidate.peak_bytes
        return limit is not None and peak is not None and peak > limit

    def _within_memory(self, candidate: Candidate) -> Candidate:
        """Return the fastest step found that recomputes or offloads to keep the limit; else the smallest found.

        A candidate that fits or could not win stays as it is.
        """
        could_win = not self.fitting or candidate.step_seconds < self.fastest.step_seconds
        if not self._exceeds_memory(candidate) or not self.candidates.has_backward or not could_win:
            return candidate
        best = self._corrected(candidate, offload=False)
        slow = best.step_seconds > candidate.step_seconds * (1 + _SLOWDOWN)
        if self.candidates.offloadable and (slow or self._exceeds_memory(best)):
            other = self._corrected(candidate, offload=True)
            found = [c for c in (best, other) if not self._exceeds_memory(c)]
            best = min(found or (best, other), key=lambda c: (c.step_seconds, c.peak_bytes or 0))
        return best

    def _corrected(self, unchanged: Candidate, *, offload: bool) -> Candidate:
        """Estimate what to recompute and to offload until the real peak is within the limit."""
        assert unchanged.peak_bytes is not None and self.limits.memory is not None
        plans = self.candidates.activations
        limit = self.limits.memory - (unchanged.peak_bytes - plans.peak)
        least = unchanged
        known: dict[tuple[frozenset[str], frozenset[str]], Candidate] = {}
        for correction in range(_CORRECTIONS + 1):
            plan = plans.within(limit if correction < _CORRECTIONS else 0, offload=offload)
            changes = plan.recomputed, plan.offloaded
            if changes not in known:
                settings = replace(unchanged, recomputed=plan.recomputed, offloaded=plan.offloaded)
                known[changes] = self.candidates.run(settings)
            candidate = known[changes]
            assert candidate.peak_bytes is not None and least.peak_bytes is not None
            if candidate.peak_bytes < least.peak_bytes:
                least = candidate
            if not self._exceeds_memory(candidate) or plan.peak > limit:  # the latter is the least by the estimate
                break
            limit = min(limit, plan.peak) - (candidate.peak_bytes - self.limits.memory)
        return least


def _error(unfit: list[Candidate], prefetch: int | None, candidates: Candidates) -> ValueError:
    """Return the error for limits that not even the smallest candidate keeps."""
    limits = candidates.limits
    least = min(unfit, key=lambda c: c.unsharded_bytes)
    if limits.unsharded_bytes is not None and least.unsharded_bytes > limits.unsharded_bytes:
        return ValueError(
            f"max_unsharded_bytes: {limits.unsharded_bytes:,} bytes are too few: with prefetch={least.prefetch} and "
            f"nothing kept for backward the slots need {least.unsharded_bytes:,} bytes. Allow more, or make smaller buckets "
            f"(bucketing_strategy)"
        )
    least = min(unfit, key=lambda c: c.peak_bytes or 0)
    less = "another prefetch distance (leave out prefetch=), " if prefetch else ""
    assert least.peak_bytes is not None
    needed = max(least.peak_bytes, least.largest_peak)
    return MemoryLimitError(
        f"max_memory: {limits.memory:,} bytes are too few: with prefetch={least.prefetch}, {least.reductions} large "
        f"reductions in flight and as much recomputed or offloaded as helps the step needs {needed:,} bytes. "
        f"Allow more, or use {less}smaller batches, more ranks, lower precision (mp_policy) or smaller buckets "
        f"(bucketing_strategy)",
        needed,
    )
