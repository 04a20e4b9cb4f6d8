"""Choose together what stays unsharded, how far ahead the rest is gathered, and what backward computes again.

[Note: The search]
A kept bucket is not gathered again in backward, but it occupies memory that gathers further ahead could use, and it
changes which of them overlap. So more kept buckets, or a larger prefetch distance, can make a step slower. The search
tries distances with nothing kept first. At the fastest it tries as many kept buckets as fit, half as many, and ever
closer numbers around the fastest so far; then the neighbouring distances with that number. Kept are the buckets that
backward reads first, because forward gathers them last and so they occupy memory for the shortest time.

With ``max_memory``, a candidate whose step exceeds it computes values again in backward, or moves them to host memory:
those that cost the least time (``activation_plan``). Their effect on memory is estimated first. The passes then give the
real peak, and the estimate is corrected by the difference. That takes several runs of the passes, so it is left out for a
candidate that would not win even if recomputation took no time. Distance 1 comes first then, because it is usually the
fastest, and a shorter one is rarely worth that.

A reduction in flight holds a slot, and some transports receive into memory of their own. So if the fastest candidate
recomputes or offloads anything, its distance (and 1 if it is 0) is tried with one large reduction in flight instead of
two; if none fits, all distances with one, and if still none does, with no reduction beside compute.

Before that, if the fastest candidate recomputes or offloads anything or none fits, all distances are tried with an
extension: see [Note: Memory that only backward needs] in ``transforms.extend_arena``. Allocating it takes some time, which
is not simulated, so it is not tried otherwise.

The candidate with the shortest simulated step wins; among equals, the one that keeps more buckets, because it sends
less, and then the one with fewer bytes. The default, ``prefetch=1`` with nothing kept, is always tried. If it fits the
budget, nothing slower is chosen.

Each candidate runs through the same passes as the real trace, so its bytes are those that will be allocated and its
order is the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from thunder.core.trace import TraceCtx

from ..ir.analysis import NOTHING_LEFT, LeftGradients
from ..ir.symbols import fsdp_all_gather
from ..runtime.bucket import Bucket
from ..transforms.sort_communication import MAX_REDUCTIONS_IN_FLIGHT
from .activation_plan import ActivationPlan
from .candidate_traces import CandidateStep, CandidateTraces, Setting
from .cost import CostModel
from .limits import Limits

__all__ = ["Candidate", "Choice", "MemoryLimitError", "choose"]

_MAX_PREFETCH = 8
"""The largest prefetch distance that is tried; communication still exposed then cannot be hidden in the step."""

_PATIENCE = 2
"""How many distances without an improvement end the search."""

_WORTHWHILE = 5e-3
"""Relative improvement of the step time below which larger distances are not tried, because each takes compile time."""

_CORRECTIONS = 4
"""How often the estimate of memory is corrected by the real peak."""

_SAME = 1e-3
"""Relative difference below which step times count as equal, because the cost model is not more accurate."""


class MemoryLimitError(ValueError):
    """``max_memory`` is too little for a step.

    Attributes:
        least_bytes: what the step needs with all that lowers its peak.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class Candidate:
    """A setting of prefetch, kept buckets, reductions and recomputed values, with its simulated cost.

    Attributes:
        prefetch: how many prefetch steps gathers are issued ahead of their waits.
        kept: names of the buckets that stay unsharded from forward to backward.
        unsharded_bytes: bytes of all slots: kept buckets, gathered ones, and unsharded gradients.
        step_seconds: simulated time of forward and backward.
        recomputed: names of the values that backward computes again.
        offloaded: names of the values that wait in host memory between forward and backward.
        peak_bytes: peak of all memory of the step; ``None`` without ``max_memory``.
        largest_peak: the larger of that and of the peaks of the steps that were compiled before, whose arena may grow.
        reductions: how many equally large reductions of one process group may be in flight.
        extends: whether backward allocates the memory of slots that only backward needs.
        lasting_bytes: bytes of the slots that stay allocated from step to step.
    """

    prefetch: int
    kept: tuple[str, ...]
    unsharded_bytes: int
    step_seconds: float
    recomputed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    peak_bytes: int | None = None
    reductions: int = MAX_REDUCTIONS_IN_FLIGHT
    extends: bool = False
    lasting_bytes: int = 0
    largest_peak: int = 0

    def __str__(self) -> str:
        text = f"prefetch {self.prefetch}  {len(self.kept):3d} buckets kept  {self.unsharded_bytes:>15,} bytes"
        if self.peak_bytes is not None:
            text += f"  {self.reductions} reductions in flight"
            text += f"  {len(self.recomputed):5d} values recomputed  {len(self.offloaded):4d} offloaded"
            text += f"  {self.peak_bytes:>17,} bytes in all{', extended in backward' if self.extends else ''}"
        return f"{text}  {self.step_seconds * 1e3:10.3f} ms"


@dataclass(frozen=True)
class Choice:
    """The candidate that was chosen, and all that were considered."""

    chosen: Candidate
    considered: tuple[Candidate, ...]

    def __str__(self) -> str:
        return "\n".join(f"{'>' if c == self.chosen else ' '} {c}" for c in self.considered)


def choose(
    joint: TraceCtx,
    *,
    cost: CostModel,
    prefetch: int | None,
    kept: Collection[Bucket],
    may_keep: bool,
    limits: Limits,
    buckets: Sequence[Bucket] = (),
    left: LeftGradients = NOTHING_LEFT,
    reuse: bool = False,
) -> Choice:
    """Search for the shortest simulated step within the limits.

    Args:
        joint: the joint trace with bucketed communication, before ``regather_for_backward``.
        cost: the cost model of the simulator.
        prefetch: a fixed prefetch distance; ``None`` tries several.
        kept: buckets that stay unsharded in any case.
        may_keep: whether more buckets may be kept.
        limits: those on memory and on gathers in flight.
        buckets: all buckets of the module, whose shards count as memory of the step.
        left: the gradients that earlier micro-batches under ``no_sync`` have left, which count as well.
        reuse: whether later micro-batches under ``no_sync`` may reuse what is gathered.

    Raises:
        MemoryLimitError, ValueError: nothing fits; the message has the bytes of the smallest candidate.
    """
    search = _Search(CandidateTraces(joint, cost, frozenset(kept), limits, buckets, left, reuse))
    distances = [prefetch] if prefetch is not None else _distances(search.gathers, limits)
    _try_distances(search, distances)
    if limits.memory is not None:
        if limits.may_extend and (not search.candidates or search.changes_activations):
            _try_distances(search, distances, extends=True)
        _try_fewer_reductions(search, distances)
    if not search.candidates:
        raise _error(search, prefetch, limits)
    if may_keep and limits.any_bytes:
        _keep_more(search, distances)
    default = search.candidates.get(Setting(1 if prefetch is None else prefetch))
    longest = min(c.step_seconds for c in search.candidates.values()) * (1 + _SAME)
    if default is not None:
        longest = min(longest, default.step_seconds)
    good = [c for c in search.candidates.values() if c.step_seconds <= longest]
    considered = tuple(c for _, c in sorted(search.candidates.items()))
    return Choice(min(good, key=lambda c: (-len(c.kept), c.unsharded_bytes, c.prefetch)), considered)


def _distances(gathers: int, limits: Limits) -> list[int]:
    """Return the prefetch distances to try, in this order; see [Note: The search]."""
    distances = list(range(min(_MAX_PREFETCH, gathers) + 1))
    return [*distances[1:2], 0, *distances[2:]] if limits.memory is not None else distances


def _try_distances(
    search: _Search, distances: Iterable[int], reductions: int = MAX_REDUCTIONS_IN_FLIGHT, *, extends: bool = False
) -> None:
    """Consider candidates that keep no further bucket, until larger distances do not fit or gain little."""
    times: list[float] = []
    least_unfit = _MAX_PREFETCH + 1
    for distance in distances:
        if distance > least_unfit:
            return
        candidate = search.consider(Setting(distance, 0, reductions, extends))
        if candidate is None:
            least_unfit = distance if distance > 0 else least_unfit
            continue
        times.append(candidate.step_seconds)
        if len(times) > _PATIENCE and min(times[-_PATIENCE:]) > min(times[:-_PATIENCE]) * (1 - _WORTHWHILE):
            return


def _try_fewer_reductions(search: _Search, distances: Sequence[int]) -> None:
    """Consider candidates with fewer reductions in flight, if they may spare recomputation; see [Note: The search]."""
    for reductions in range(MAX_REDUCTIONS_IN_FLIGHT - 1, -1, -1):
        if not search.candidates:
            _try_distances(search, distances, reductions, extends=search.limits.may_extend)
        elif reductions > 0 and search.changes_activations:
            fastest = search.fastest()
            near = (max(fastest.prefetch, 1), fastest.prefetch)
            again = dict.fromkeys(distance for distance in near if distance in distances)
            _try_distances(search, again, reductions, extends=fastest.extends)


def _error(search: _Search, prefetch: int | None, limits: Limits) -> ValueError:
    """Return the error for limits that not even the smallest plan keeps."""
    setting, least = min(search.unfit, key=lambda found: found[1].unsharded_bytes)
    if limits.unsharded_bytes is not None and least.unsharded_bytes > limits.unsharded_bytes:
        return ValueError(
            f"max_unsharded_bytes: {limits.unsharded_bytes:,} bytes are too few: with prefetch={setting.prefetch} and "
            f"nothing kept for backward the slots need {least.unsharded_bytes:,} bytes. Allow more, or make smaller buckets "
            f"(bucketing_strategy)"
        )
    setting, least = min(search.unfit, key=lambda found: found[1].peak_bytes or 0)
    less = "another prefetch distance (leave out prefetch=), " if prefetch else ""
    assert least.peak_bytes is not None
    needed = max(least.peak_bytes, least.largest_peak)
    return MemoryLimitError(
        f"max_memory: {limits.memory:,} bytes are too few: with prefetch={setting.prefetch}, {setting.reductions} large "
        f"reductions in flight and as much recomputed or offloaded as helps the step needs {needed:,} bytes. "
        f"Allow more, or use {less}smaller batches, more ranks, lower precision (mp_policy) or smaller buckets "
        f"(bucketing_strategy)",
        needed,
    )


def _keep_more(search: _Search, distances: Collection[int]) -> None:
    """Consider candidates that keep further buckets: at the fastest distance so far, then at its neighbours."""
    fastest = search.fastest()
    distance = fastest.prefetch
    most = search.most(fastest)
    step = max(most // 2, 1)
    numbers = [step, most]
    while step:
        for number in numbers:
            if 0 <= number <= most:
                search.consider(fastest._replace(kept=number))
        step //= 2
        numbers = [search.fastest().kept + step * sign for sign in (-1, 1)]
    number = search.fastest().kept
    for other in (distance - 1, distance + 1):
        if other in distances:
            search.consider(fastest._replace(prefetch=other, kept=number))


class _Search:
    """The candidates by their settings. The passes run once for each setting.

    Attributes:
        candidates: those that fit.
    """

    def __init__(self, traces: CandidateTraces) -> None:
        self.limits = traces.limits
        self.gathers = sum(b.sym is fsdp_all_gather for b in traces.joint.bound_symbols)
        self.candidates: dict[Setting, Candidate] = {}
        self._traces = traces
        self._planned: dict[Setting, CandidateStep] = {}

    @property
    def unfit(self) -> list[tuple[Setting, CandidateStep]]:
        """The steps that keep no further bucket and do not fit, each with its setting."""
        return [(setting, step) for setting, step in self._planned.items() if setting.kept == 0]

    @property
    def changes_activations(self) -> bool:
        """Whether the fastest candidate recomputes or offloads anything."""
        fastest = self.candidates[self.fastest()]
        return bool(fastest.recomputed or fastest.offloaded)

    def most(self, setting: Setting) -> int:
        """Return the largest number of further buckets that fits in this setting; 0 if none does."""
        low, high = 0, len(self._traces.first_in_backward)
        if high == 0 or self._fits(setting._replace(kept=high)):
            return high
        while high - low > 1:  # `low` fits, `high` does not
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(setting._replace(kept=middle)) else (low, middle)
        return low

    def consider(self, setting: Setting) -> Candidate | None:
        """Return the candidate of a setting; ``None`` if it does not fit, or could not win."""
        if setting not in self.candidates and self._fits(setting):
            step = self._planned.pop(setting)
            self.candidates[setting] = Candidate(
                setting.prefetch,
                tuple(sorted(bucket.spec.name for bucket in self._traces.kept(setting.kept))),
                step.unsharded_bytes,
                step.step_seconds,
                step.recomputed,
                step.offloaded,
                step.peak_bytes,
                setting.reductions,
                setting.extends,
                step.lasting_bytes,
                step.largest_peak,
            )
        return self.candidates.get(setting)

    def fastest(self) -> Setting:
        """Return the setting of the fastest candidate."""
        return min(self.candidates, key=lambda setting: self.candidates[setting].step_seconds)

    def _fits(self, setting: Setting) -> bool:
        if setting in self.candidates:
            return True
        step, limits = self._step(setting), self.limits
        if limits.unsharded_bytes is not None and step.unsharded_bytes > limits.unsharded_bytes:
            return False
        if limits.slots is not None and step.lasting_bytes > limits.slots:
            return False
        return self._is_within_memory(step) and (limits.memory is None or step.largest_peak <= limits.memory)

    def _step(self, setting: Setting) -> CandidateStep:
        """Return the step of one candidate. If its memory is too much, it recomputes what helps, unless it is too slow."""
        if setting not in self._planned:
            step = self._traces.run(setting)
            if not self._is_within_memory(step) and len(step.halves) == 2 and not self._is_slower(step):
                step = self._with_less_memory(setting, step)
            self._planned[setting] = step
        return self._planned[setting]

    def _is_within_memory(self, step: CandidateStep) -> bool:
        return self.limits.memory is None or step.peak_bytes is None or step.peak_bytes <= self.limits.memory

    def _is_slower(self, step: CandidateStep) -> bool:
        """Return whether a step that recomputes nothing yet takes at least as long as the fastest that fits."""
        return bool(self.candidates) and step.step_seconds >= self.candidates[self.fastest()].step_seconds

    def _with_less_memory(self, setting: Setting, step: CandidateStep) -> CandidateStep:
        """Return the fastest step found that recomputes and offloads to keep the limit; else the smallest found."""
        known: dict[tuple[frozenset[str], frozenset[str]], CandidateStep] = {}

        def run(plan: ActivationPlan) -> CandidateStep:
            key = plan.recomputed, plan.offloaded
            if key not in known:
                known[key] = self._traces.run(setting, plan)
            return known[key]

        ways = (False, True) if self._traces.offloadable else (False,)
        found = [self._corrected(run, step, offload=offload) for offload in ways]
        fitting = [step for step in found if self._is_within_memory(step)]
        if len(fitting) > 1:
            return min(fitting, key=lambda step: step.step_seconds)
        return min(fitting or found, key=lambda step: step.peak_bytes or 0)

    def _corrected(
        self, run: Callable[[ActivationPlan], CandidateStep], step: CandidateStep, *, offload: bool
    ) -> CandidateStep:
        """Estimate what to recompute and to offload until the real peak is within the limit."""
        assert step.peak_bytes is not None and self.limits.memory is not None
        activations = self._traces.activations
        limit = self.limits.memory - (step.peak_bytes - activations.unchanged.peak)
        least, least_peak = step, step.peak_bytes
        for correction in range(_CORRECTIONS + 1):
            if correction == _CORRECTIONS:
                limit = 0
            plan = activations.within(limit, offload=offload)
            step = run(plan)
            assert step.peak_bytes is not None
            if step.peak_bytes < least_peak:
                least, least_peak = step, step.peak_bytes
            if self._is_within_memory(step) or plan.peak > limit:  # the latter is the least by the estimate
                break
            limit = min(limit, plan.peak) - (step.peak_bytes - self.limits.memory)
        return least
