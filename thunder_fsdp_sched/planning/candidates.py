"""The candidates of the search in ``search``: the traces that their settings would compile, with bytes and time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from thunder.core.trace import TraceCtx, from_trace

from .. import passes
from ..ir.analysis import NOTHING_LEFT, LeftGradients
from ..ir.effects import bucket_of, effects
from ..ir.inspection import split_joint
from ..ir.step_memory import StepMemory
from ..passes import Context
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena
from ..transforms.offload_activations import offloadable
from ..transforms.sort_communication import MAX_REDUCTIONS_IN_FLIGHT, sort_communication
from ..transforms.sort_within_budget import private_bytes
from .activation_plan import ActivationPlans
from .cost import CostModel, compute_seconds
from .simulate import simulate


class Limits(NamedTuple):
    """Limits of a search; ``None`` where there is none.

    Attributes:
        unsharded_bytes: bytes of all slots together.
        memory: bytes of all memory of the step, without optimizer state.
        lasting_bytes: bytes of the slots that a planned step of the same module keeps from step to step anyway.
        largest_peak: bytes of all memory of the largest step of the module that was compiled before.
    """

    unsharded_bytes: int | None = None
    memory: int | None = None
    lasting_bytes: int | None = None
    largest_peak: int = 0

    @property
    def any_bytes(self) -> bool:
        """Whether bytes are limited."""
        return self.unsharded_bytes is not None or self.memory is not None

    def allow(self, candidate: Candidate) -> bool:
        """Return whether a candidate keeps all limits on bytes."""
        peak = max(candidate.peak_bytes or 0, candidate.largest_peak)
        found = (candidate.unsharded_bytes, candidate.lasting_bytes, peak)
        limits = (self.unsharded_bytes, self.lasting_bytes, self.memory)
        return all(limit is None or nbytes <= limit for nbytes, limit in zip(found, limits, strict=True))


@dataclass(frozen=True)
class Candidate:
    """Settings of a step, and the bytes and the simulated time of the step that they would compile.

    Attributes:
        prefetch: how many prefetch steps gathers are issued ahead of their waits.
        kept: names of the buckets that stay unsharded from forward to backward.
        reductions: how many equally large reductions of one process group may be in flight.
        extends: whether backward allocates the memory of slots that only backward needs.
        recomputed: names of the values that backward computes again.
        offloaded: names of the values that wait in host memory between forward and backward.
        unsharded_bytes: bytes of all slots: kept buckets, gathered ones, and unsharded gradients.
        lasting_bytes: bytes of the slots that stay allocated from step to step.
        step_seconds: simulated time of forward and backward.
        peak_bytes: peak of all memory of the step; ``None`` without ``max_memory``.
        largest_peak: the larger of that and of the peaks of the steps that were compiled before, whose arena may grow.
    """

    prefetch: int
    kept: tuple[str, ...] = ()
    reductions: int = MAX_REDUCTIONS_IN_FLIGHT
    extends: bool = False
    recomputed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    unsharded_bytes: int = 0
    lasting_bytes: int = 0
    step_seconds: float = math.inf
    peak_bytes: int | None = None
    largest_peak: int = 0

    def __str__(self) -> str:
        text = f"prefetch {self.prefetch}  {len(self.kept):3d} buckets kept  {self.unsharded_bytes:>15,} bytes"
        if self.peak_bytes is not None:
            text += f"  {self.reductions} reductions in flight"
            text += f"  {len(self.recomputed):5d} values recomputed  {len(self.offloaded):4d} offloaded"
            text += f"  {self.peak_bytes:>17,} bytes in all{', extended in backward' if self.extends else ''}"
        return f"{text}  {self.step_seconds * 1e3:10.3f} ms"


def copy_times(cost: CostModel) -> Mapping[str, Any]:
    """Return the arguments of ``sort_host_copies``: the times of compute and of copies."""
    return {"seconds": partial(compute_seconds, cost), "copy_seconds": cost.host_copy_seconds}


@dataclass(eq=False)
class Candidates:
    """Runs the passes of a compilation on one joint trace with the settings of candidates, in unused arenas.

    It leaves out guards and releases, which neither allocate nor move communication, and fusions: with a fusion executor,
    bytes and time are those of the operators by themselves.

    Attributes:
        joint: the joint trace with bucketed communication, before ``regather_for_backward``.
        cost: the cost model.
        limits: the memory of a step is predicted only if it is limited.
        context: that of the compilation; its ``kept`` are the buckets that stay unsharded in any case.
        left: the gradients that earlier micro-batches under ``no_sync`` have left, which count as memory of the step.
    """

    joint: TraceCtx
    cost: CostModel
    limits: Limits
    context: Context = field(default_factory=Context)
    left: LeftGradients = NOTHING_LEFT
    _halves: dict[tuple[str, ...], list[TraceCtx]] = field(default_factory=dict, init=False)

    @cached_property
    def regathered(self) -> list[Bucket]:
        """The buckets that backward gathers again, in the order of their first consumers."""
        halves = split_joint(self._unchanged)
        if len(halves) == 1:
            return []
        ordered = sort_communication(halves[1], prefetch=0)
        return list(dict.fromkeys(bucket_of(b).base for b in ordered.bound_symbols if effects(b).is_gather))

    def names_kept(self, number: int) -> tuple[str, ...]:
        """Return the buckets that stay unsharded if that many do besides those that do in any case."""
        more = self.regathered[:number] if number else []
        return tuple(sorted(bucket.spec.name for bucket in (*self.context.kept, *more)))

    @cached_property
    def has_backward(self) -> bool:
        """Whether the trace computes gradients."""
        return len(split_joint(self.joint)) == 2

    @cached_property
    def offloadable(self) -> frozenset[str]:
        """The values that may move to host memory. On a CPU that would free nothing."""
        return frozenset() if self.cost.synchronous else frozenset(offloadable(self._unchanged))

    @cached_property
    def activations(self) -> ActivationPlans:
        """The plans for activations if no further bucket is kept; further ones hardly change them."""
        return ActivationPlans(split_joint(self._unchanged), self.cost, self.offloadable)

    def run(self, candidate: Candidate) -> Candidate:
        """Return a candidate with its bytes and its time.

        The time stays infinite for a candidate that recomputes or offloads and still exceeds ``max_memory``.
        """
        scratch: dict[Arena, Arena] = {}

        def arena_of(bucket: Bucket) -> Arena:
            return scratch.setdefault(bucket.arena, Arena(bucket.arena.device))

        unsorted = self._split(candidate)
        context = replace(self._context(candidate), arena_of=arena_of, trains=len(unsorted) == 2)
        halves: list[TraceCtx] = []
        for half in unsorted:
            forward = halves[0] if halves else None
            halves.append(passes.run("scheduled", half, replace(context, forward=forward), search=True))
        lasting = private_bytes(halves[0], context.kept) + sum(arena.nbytes for arena in scratch.values())
        nbytes = lasting + sum(arena.extension.nbytes for arena in scratch.values())
        found = replace(candidate, unsharded_bytes=nbytes, lasting_bytes=lasting, step_seconds=math.inf)
        if self.limits.memory is not None:
            # Other sets of shapes and flags may have needed a larger arena, which is one for all.
            pairs = [(arena, new) for arena, new in scratch.items()]
            pairs += [(arena.extension, new.extension) for arena, new in pairs if new.extension.nbytes]
            larger = sum(max(arena.nbytes - new.nbytes, 0) for arena, new in pairs)
            peak = StepMemory.of(halves, self.context.buckets, accumulated=self.left).peak.nbytes + larger
            growth = sum(max(new.nbytes - arena.nbytes, 0) for arena, new in pairs)
            found = replace(found, peak_bytes=peak, largest_peak=max(peak, self.limits.largest_peak + growth))
            if peak > self.limits.memory and (candidate.recomputed or candidate.offloaded):
                return found
        return replace(found, step_seconds=simulate(halves, None, self.cost).step_seconds)

    def _kept(self, candidate: Candidate) -> frozenset[Bucket]:
        always = frozenset(self.context.kept)
        if len(candidate.kept) <= len(always):
            return always
        return always | frozenset(b for b in self.regathered if b.spec.name in candidate.kept)

    def _context(self, candidate: Candidate) -> Context:
        return replace(
            self.context,
            kept=self._kept(candidate),
            prefetch=candidate.prefetch,
            max_reductions_in_flight=candidate.reductions,
            extends=candidate.extends,
            recomputed=candidate.recomputed,
            offloaded=candidate.offloaded,
        )

    @cached_property
    def _unchanged(self) -> TraceCtx:
        """The joint trace with backward's gathers if no further bucket is kept and nothing is recomputed."""
        return self._with_gathers(replace(self.context, recomputed=frozenset(), offloaded=frozenset()))

    def _with_gathers(self, context: Context) -> TraceCtx:
        joint = from_trace(self.joint)
        joint.bound_symbols = self.joint.bound_symbols
        joint.names = set(self.joint.names)  # rejected candidates must not reserve names
        return passes.run("fused", passes.run("bucketed", joint, context, search=True), context, search=True)

    def _split(self, candidate: Candidate) -> list[TraceCtx]:
        """Return forward and backward; those of candidates that keep the same and change no values are made once."""
        changes_values = bool(candidate.recomputed or candidate.offloaded)
        if not changes_values and candidate.kept in self._halves:
            return self._halves[candidate.kept]
        context = self._context(candidate)
        halves = [passes.run("split", half, context, search=True) for half in split_joint(self._with_gathers(context))]
        if not changes_values:
            self._halves[candidate.kept] = halves
        return halves
