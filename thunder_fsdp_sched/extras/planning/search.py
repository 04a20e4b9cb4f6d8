"""Choose jointly the buckets that stay unsharded, the prefetch distance, and the values that backward recomputes.

[Note: The search]
A kept bucket is not gathered again in backward, but it occupies memory that gathers further ahead could use, and it
changes which of them overlap. So more kept buckets, or a larger prefetch distance, can make a step slower. The search
first tries distances with no bucket kept. With the fastest one it tries to keep all buckets, then bisects the number
that fits. It keeps the buckets that backward reads first, because forward gathers them last, so they occupy memory for
the shortest time.

With ``max_memory``, a candidate whose step exceeds it recomputes values in backward: those that cost the least time
(``activation_plan``). Their effect on memory is estimated first. The passes then give the real peak, and the estimate
is corrected by the difference. That takes several runs of the passes. Once a candidate fits, memory is predicted only
for candidates that may be faster. The least possible time is that without recomputation or, for a larger distance than
the fastest candidate's, that with its recomputation, which would not suffice. Distance 1 comes first, because it is
usually the fastest.

If nothing fits, all distances are tried again with settings that need less memory (``_REDUCTION_LIMITS``): first one
large reduction in flight instead of two, and an extension, see [Note: Memory that only backward needs] in
``transforms.release_slots``; then no reduction during compute. If something fits, but recomputation slows it down by
more than 1 %, the first of these is tried with the fastest distance, and with those that did not fit despite
recomputation.

The candidate with the shortest simulated step wins; among equals, the one that keeps more buckets, because it sends
less, and then the one with fewer bytes. The default, ``prefetch=1`` with nothing kept, is always tried. If it fits,
nothing slower is chosen.

Each candidate runs through the passes of a compilation, so its bytes are those that will be allocated and its order is
the real one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from thunder.core.trace import TraceCtx

from ... import pipeline
from ...compiled_traces import StepSettings
from ...errors import coded_error
from ...ir.analysis import NO_PENDING_GRADS, PendingGrads
from ...ir.effects import bucket_of, effects
from ...ir.inspection import snapshot, split_joint
from ...ir.schedule import MAX_REDUCTIONS_IN_FLIGHT
from ...passes import Context
from ...runtime.accumulation import AccumulationMode
from ...runtime.bucket import Bucket
from ...runtime.memory import Arena
from ...transforms.sort_communication import sort_communication
from ..step_memory.rows import StepRows
from ..step_memory.step_memory import StepMemory
from .activation_plan import ActivationPlans
from .cost import AnalyticCost
from .simulate import simulate_rows

_MAX_PREFETCH = 8
"""The largest prefetch distance that is tried; communication still exposed then cannot be hidden in the step."""

_PATIENCE = 2
"""The number of distances without an improvement that end the search."""

_WORTHWHILE = 5e-3
"""Relative improvement of the step time below which other settings are not tried, because each takes compile time."""

_SLOWDOWN = 0.01
"""Relative slowdown of a step by recomputation above which other ways to save memory are tried."""

_CORRECTIONS = 4
"""How often the estimate of memory is corrected by the real peak."""

_SAME = 1e-3
"""Relative difference below which step times count as equal, because the cost model is not more accurate."""

_REDUCTION_LIMITS = (MAX_REDUCTIONS_IN_FLIGHT, 1, 0)
"""Reductions in flight, from the fastest to the smallest."""


class MemoryLimitError(ValueError):
    """``max_memory`` is too small for a step.

    Attributes:
        least_bytes: the bytes that the step needs with all measures that lower its peak.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message, least_bytes)  # both, so that it can be pickled
        self.least_bytes = least_bytes

    def __str__(self) -> str:
        return str(self.args[0])


class Limits(NamedTuple):
    """Limits of a search; ``None`` where there is none.

    Attributes:
        memory: bytes of all memory of the step, without optimizer state.
        persistent_bytes: bytes of the slots that a planned step of the same module keeps from step to step anyway.
        largest_peak: bytes of all memory of the largest step of the module that was compiled before.
    """

    memory: int | None = None
    persistent_bytes: int | None = None
    largest_peak: int = 0

    def allow(self, candidate: Candidate) -> bool:
        """Return whether a candidate keeps all limits on bytes."""
        found = candidate.persistent_bytes, max(candidate.peak_bytes, candidate.largest_peak)
        limits = self.persistent_bytes, self.memory
        return all(limit is None or nbytes <= limit for nbytes, limit in zip(found, limits, strict=True))


class Candidate(NamedTuple):
    """Settings of a step, and the bytes and the simulated time of the step that they would compile.

    Attributes:
        prefetch: how many prefetch steps gathers are issued ahead of their waits.
        kept_buckets: names of the buckets that stay unsharded from forward to backward.
        reductions: how many equally large reductions of one process group may be in flight; see ``backward_arena``.
        recomputed: names of the values that backward computes again.
        unsharded_bytes: bytes of all slots: kept buckets, gathered ones, and unsharded gradients.
        persistent_bytes: bytes of the slots that stay allocated from step to step.
        step_seconds: simulated time of forward and backward.
        peak_bytes: peak of all memory of the step; 0 without ``max_memory``.
        largest_peak: the larger of that and of the peaks of the steps that were compiled before, whose arena may grow.
    """

    prefetch: int
    kept_buckets: tuple[str, ...] = ()
    reductions: int = MAX_REDUCTIONS_IN_FLIGHT
    recomputed: frozenset[str] = frozenset()
    unsharded_bytes: int = 0
    persistent_bytes: int = 0
    step_seconds: float = math.inf
    peak_bytes: int = 0
    largest_peak: int = 0

    @property
    def backward_arena(self) -> bool:
        """Whether backward allocates the memory of slots that only it needs; so with fewer reductions than usual."""
        return self.reductions < MAX_REDUCTIONS_IN_FLIGHT

    def __str__(self) -> str:
        text = f"prefetch {self.prefetch}  {len(self.kept_buckets):3d} buckets kept  {self.unsharded_bytes:>15,} bytes"
        if self.peak_bytes:
            text += f"  {self.reductions} reductions in flight"
            text += f"  {len(self.recomputed):5d} values recomputed"
            text += f"  {self.peak_bytes:>17,} bytes in all{', extended in backward' if self.backward_arena else ''}"
        return f"{text}  {self.step_seconds * 1e3:10.3f} ms"

    def settings(self, kept_buckets: frozenset[Bucket], accumulate: AccumulationMode) -> StepSettings:
        """Return the settings of a step that keeps ``kept_buckets``, the buckets that the candidate names."""
        return StepSettings(
            prefetch=self.prefetch,
            accumulate=accumulate,
            kept_buckets=kept_buckets,
            reductions_in_flight=self.reductions,
            backward_arena=self.backward_arena,
            recomputed=self.recomputed,
        )

    def renamed(self, names: Mapping[str, str]) -> Candidate:
        """Return the same settings for a trace whose values have other names."""
        return self._replace(recomputed=frozenset(names[v] for v in self.recomputed))


def _names_of(buckets: Iterable[Bucket]) -> tuple[str, ...]:
    return tuple(sorted(bucket.spec.name for bucket in buckets))


class Choice(NamedTuple):
    """The candidate that was chosen, and all that were considered."""

    chosen: Candidate
    considered: tuple[Candidate, ...]

    def __str__(self) -> str:
        return "\n".join(f"{'>' if c == self.chosen else ' '} {c}" for c in self.considered)


@dataclass(eq=False)
class Search:
    """The search for the settings of one joint trace; see [Note: The search].

    Attributes:
        joint: the joint trace with bucketed communication, before ``regather_for_backward``.
        cost: the cost model.
        limits: the limits; the memory of a step is predicted only if it is limited.
        context: the context of the compilation; its ``kept_buckets`` stay unsharded in any case.
        pending_grads: the gradients that earlier micro-batches under ``no_sync`` have left; they count as memory.
    """

    joint: TraceCtx
    cost: AnalyticCost
    limits: Limits
    context: Context
    pending_grads: PendingGrads = NO_PENDING_GRADS
    _fitting: list[Candidate] = field(default_factory=list, init=False)
    _unfit: list[Candidate] = field(default_factory=list, init=False)
    _found: dict[Any, Candidate] = field(default_factory=dict, init=False)  # by the first four fields: the settings
    _halves: dict[tuple[str, ...], list[TraceCtx]] = field(default_factory=dict, init=False)

    def choose(self, *, prefetch: int | None, may_keep: bool) -> Choice:
        """Search for the shortest simulated step within the limits.

        Args:
            prefetch: a fixed prefetch distance; ``None`` tries several.
            may_keep: whether more buckets may be kept than those of the context.

        Raises:
            MemoryLimitError, ValueError: nothing fits; the message has the bytes of the smallest candidate.
        """
        self._try_settings(prefetch)
        if not self._fitting:
            raise self._error(prefetch)
        default = [c for c in self._fitting if c.prefetch == (1 if prefetch is None else prefetch)][:1]
        if may_keep and self.limits.memory is not None:
            self._keep_more()
        longest = min([self._fastest.step_seconds * (1 + _SAME), *(c.step_seconds for c in default)])
        good = [c for c in self._fitting if c.step_seconds <= longest]
        chosen = min(good, key=lambda c: (-len(c.kept_buckets), c.unsharded_bytes, c.prefetch))
        in_order = sorted(self._fitting, key=lambda c: (c.prefetch, len(c.kept_buckets), c.reductions))
        return Choice(chosen, tuple(in_order))

    @property
    def _fastest(self) -> Candidate:
        """The fastest candidate that fits."""
        return min(self._fitting, key=lambda candidate: candidate.step_seconds)

    def _try_settings(self, prefetch: int | None) -> None:
        """Consider distances and limits of reductions, with no further bucket kept."""
        gathers = sum(effects(bsym).is_gather for bsym in self.joint.bound_symbols)
        distances = list(range(min(_MAX_PREFETCH, gathers) + 1)) if prefetch is None else [prefetch]
        is_limited = self.limits.memory is not None
        if prefetch is None and is_limited:
            distances = [*distances[1:2], 0, *distances[2:]]
        for reductions in _REDUCTION_LIMITS if is_limited else _REDUCTION_LIMITS[:1]:
            if self._fitting:
                unchanged = (c._replace(recomputed=frozenset()) for c in (*self._fitting, *self._unfit))
                tried = (self.run(candidate).step_seconds for candidate in unchanged)
                if not reductions or self._fastest.step_seconds <= min(tried) * (1 + _SLOWDOWN):
                    return
                unfit = {c.prefetch for c in self._unfit if c.recomputed}
                distances = [distance for distance in distances if distance in unfit | {self._fastest.prefetch}]
            self._try_distances(distances, reductions)

    def _try_distances(self, distances: Iterable[int], reductions: int) -> None:
        """Consider distances until larger ones do not fit or gain little."""
        times: list[float] = []
        least_unfit = _MAX_PREFETCH + 1
        for distance in distances:
            if distance > least_unfit:
                return
            candidate = self._within_memory(self.run(Candidate(distance, self._always_kept, reductions)))
            if not self._fits(candidate):
                least_unfit = distance or least_unfit
                continue
            times.append(candidate.step_seconds)
            if len(times) > _PATIENCE and min(times[-_PATIENCE:]) > min(times[:-_PATIENCE]) * (1 - _WORTHWHILE):
                return

    def _keep_more(self) -> None:
        """Consider candidates that keep further buckets with the settings of the fastest one, up to as many as fit."""
        fastest = self._fastest
        number = high = len(self._regathered)
        low = 0  # fits
        while low < high:
            kept_buckets = _names_of((*self.context.settings.kept_buckets, *self._regathered[:number]))
            fits = self._fits(self.run(fastest._replace(kept_buckets=kept_buckets)))
            low, high = (number, high) if fits else (low, number - 1)
            number = (low + high + 1) // 2

    def _fits(self, candidate: Candidate) -> bool:
        """Remember a candidate, and return whether it fits."""
        fits = self.limits.allow(candidate)
        (self._fitting if fits else self._unfit).append(candidate)
        return fits

    def _within_memory(self, candidate: Candidate) -> Candidate:
        """Return the fastest candidate found that keeps the limit by recomputation; else the smallest found.

        A candidate that fits is returned unchanged, and so is one that cannot become faster than those that fit.
        """
        limit = self.limits.memory
        if limit is None or candidate.peak_bytes <= limit or len(split_joint(self.joint)) == 1:
            return candidate
        if self._fitting:
            fastest = self._fastest
            best, most = candidate.step_seconds, fastest.step_seconds
            if candidate.prefetch > fastest.prefetch:
                best = self.run(candidate._replace(recomputed=fastest.recomputed)).step_seconds
                most *= 1 - _WORTHWHILE
            if best >= most:
                return candidate
        return self._corrected(candidate, limit)

    def _corrected(self, unchanged: Candidate, most: int) -> Candidate:
        """Return a candidate with a real peak of at most ``most`` bytes, by corrected estimates; else the smallest."""
        limit = most - (unchanged.peak_bytes - self._activations.peak)
        least = unchanged
        for correction in range(_CORRECTIONS + 1):
            plan = self._activations.within(limit if correction < _CORRECTIONS else 0)
            candidate = self.run(unchanged._replace(recomputed=plan.recomputed))
            least = min(least, candidate, key=lambda c: c.peak_bytes)
            if candidate.peak_bytes <= most or plan.peak > limit:  # in the latter case, no plan has a lower estimate
                break
            limit = min(limit, plan.peak) - (candidate.peak_bytes - most)
        return least

    def _error(self, prefetch: int | None) -> MemoryLimitError:
        """Return the error for limits that even the smallest candidate exceeds."""
        least = min(self._unfit, key=lambda c: c.peak_bytes)
        less = "another prefetch distance (leave out prefetch=), " if prefetch else ""
        needed = max(least.peak_bytes, least.largest_peak)
        return coded_error(
            MemoryLimitError,
            "plan.step-exceeds-max-memory",
            needed,
            limit=self.limits.memory,
            prefetch=least.prefetch,
            reductions=least.reductions,
            needed=needed,
            alternative=less,
        )

    @cached_property
    def _regathered(self) -> list[Bucket]:
        """The buckets that backward gathers again, in the order of their first consumers."""
        halves = split_joint(self._joint_with_gathers)
        if len(halves) == 1:
            return []
        ordered = sort_communication(halves[1], prefetch=0)
        return list(dict.fromkeys(bucket_of(b).base for b in ordered.bound_symbols if effects(b).is_gather))

    @cached_property
    def _always_kept(self) -> tuple[str, ...]:
        return _names_of(self.context.settings.kept_buckets)

    @cached_property
    def _activations(self) -> ActivationPlans:
        """The plans for activations with no further bucket kept; kept buckets hardly change them."""
        return ActivationPlans(StepRows(*split_joint(self._joint_with_gathers)), self.cost)

    def run(self, candidate: Candidate) -> Candidate:
        """Return a candidate with its bytes and its time, from the passes of a compilation in unused arenas.

        Guards and releases, which neither allocate nor move communication, are left out, and so are fusions: with a fusion
        executor, bytes and time are those of the unfused operators.
        """
        settings = candidate[:4]
        if settings not in self._found:
            self._found[settings] = self._run(Candidate(*settings))
        return self._found[settings]

    def _run(self, candidate: Candidate) -> Candidate:
        scratch: dict[Arena, Arena] = {}

        def arena_of(bucket: Bucket) -> Arena:
            return scratch.setdefault(bucket.arena, Arena(bucket.arena.device))

        unsorted = self._split(candidate)
        context = replace(self._context(candidate), arena_of=arena_of, trains=len(unsorted) == 2)
        halves: list[TraceCtx] = []
        for half in unsorted:
            context.forward = halves[0] if halves else None
            halves.append(pipeline.scheduled(half, context, search=True))
        step = StepRows(*halves)
        of_forward = (live for live in step.slots.values() if live.issue < step.rows_of_forward and live.is_gather)
        kept = sum(live.nbytes for live in of_forward if live.region is not None and live.region.is_private)
        lasting = kept + sum(arena.nbytes for arena in scratch.values())
        nbytes = lasting + sum(arena.extension.nbytes for arena in scratch.values())
        seconds = simulate_rows(step, self.cost).step_seconds
        found = candidate._replace(unsharded_bytes=nbytes, persistent_bytes=lasting, step_seconds=seconds)
        if self.limits.memory is not None:
            # Compilations for other shapes and flags share the arena, and may have needed a larger one.
            pairs = list(scratch.items())
            pairs += [(arena.extension, new.extension) for arena, new in pairs if new.extension.nbytes]
            larger = sum(max(arena.nbytes - new.nbytes, 0) for arena, new in pairs)
            peak = StepMemory.of(step, self.context.buckets, accumulated=self.pending_grads).peak.nbytes + larger
            growth = sum(max(new.nbytes - arena.nbytes, 0) for arena, new in pairs)
            found = found._replace(peak_bytes=peak, largest_peak=max(peak, self.limits.largest_peak + growth))
        return found

    def _context(self, candidate: Candidate) -> Context:
        further = [] if candidate.kept_buckets == self._always_kept else self._regathered
        kept_buckets = frozenset(
            b for b in (*self.context.settings.kept_buckets, *further) if b.spec.name in candidate.kept_buckets
        )
        return replace(self.context, settings=candidate.settings(kept_buckets, self.context.settings.accumulate))

    @cached_property
    def _joint_with_gathers(self) -> TraceCtx:
        """The joint trace with backward's gathers, with no further bucket kept and nothing recomputed."""
        return self._with_gathers(self.context)

    def _with_gathers(self, context: Context) -> TraceCtx:
        joint = snapshot(self.joint)  # rejected candidates must not reserve names
        return pipeline.fused(pipeline.bucketed(joint, context, search=True), context, search=True)

    def _split(self, candidate: Candidate) -> list[TraceCtx]:
        """Return forward and backward; candidates that keep the same buckets and recompute nothing share them."""
        changes_values = bool(candidate.recomputed)
        if not changes_values and candidate.kept_buckets in self._halves:
            return self._halves[candidate.kept_buckets]
        context = self._context(candidate)
        halves = [pipeline.split(half, context, search=True) for half in split_joint(self._with_gathers(context))]
        if not changes_values:
            self._halves[candidate.kept_buckets] = halves
        return halves
