"""The traces of one candidate of the search in ``autotune``: those that its settings would compile, with their cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from thunder.core.trace import TraceCtx, from_trace

from ..ir.analysis import LeftGradients
from ..ir.inspection import split_joint
from ..ir.operands import bucket_of
from ..ir.step_memory import StepMemory
from ..ir.symbols import ACCUMULATORS, fsdp_all_gather
from ..runtime.bucket import Bucket
from ..runtime.memory import Arena
from ..transforms import (
    assign_slots,
    gather_from_secondary,
    mark_retained_by_forward,
    offload_activations,
    offloadable,
    regather_for_backward,
    release_extension,
    reuse_from_forward,
    reuse_in_window,
    sort_communication,
    sort_host_copies,
    sort_within_budget,
    write_grads_in_place,
)
from ..transforms.sort_communication import MAX_REDUCTIONS_IN_FLIGHT
from ..transforms.sort_within_budget import private_bytes, shared_budget
from .activation_plan import ActivationPlan, ActivationPlans
from .cost import CostModel, compute_seconds
from .limits import Limits
from .simulate import simulate

__all__ = ["CandidateStep", "CandidateTraces", "Setting", "copy_times"]


def copy_times(cost: CostModel) -> Mapping[str, Any]:
    """Return the arguments of ``sort_host_copies``: the times of compute and of copies."""
    return {"seconds": partial(compute_seconds, cost), "copy_seconds": cost.host_copy_seconds}


class Setting(NamedTuple):
    """The settings of a candidate, without the values that it recomputes and offloads.

    Attributes:
        prefetch: how many prefetch steps gathers are issued ahead of their waits.
        kept: how many buckets stay unsharded besides those that do in any case.
        reductions: how many equally large reductions of one process group may be in flight.
        extends: whether backward allocates the memory of slots that only backward needs.
    """

    prefetch: int
    kept: int = 0
    reductions: int = MAX_REDUCTIONS_IN_FLIGHT
    extends: bool = False


@dataclass(frozen=True, eq=False)
class CandidateStep:
    """The step that one candidate would run.

    Attributes:
        halves: its forward and backward traces.
        unsharded_bytes: bytes of all slots.
        lasting_bytes: bytes of the slots that stay allocated from step to step.
        cost: the cost model of the simulator.
        recomputed: names of the values that backward computes again.
        offloaded: names of the values that wait in host memory.
        peak_bytes: peak of all memory; ``None`` if it is not limited.
        largest_peak: the larger of that and of the peaks of the steps that were compiled before, whose arena may grow.
    """

    halves: Sequence[TraceCtx] = field(repr=False)
    unsharded_bytes: int
    lasting_bytes: int
    cost: CostModel
    recomputed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    peak_bytes: int | None = None
    largest_peak: int = 0

    @cached_property
    def step_seconds(self) -> float:
        """Simulated time of forward and backward, simulated when it is first read."""
        return simulate(self.halves, None, self.cost).step_seconds


@dataclass(eq=False)
class CandidateTraces:
    """The traces of all candidates: runs the passes for them, in unused arenas.

    Attributes:
        joint: the joint trace with bucketed communication, before ``regather_for_backward``.
        cost: the cost model of the simulator.
        always_kept: buckets that stay unsharded in any case.
        limits: the memory of a step is predicted only if it is limited.
        buckets: all buckets of the module, whose shards count as memory of the step.
        left: the gradients that earlier micro-batches under ``no_sync`` have left.
        reuse: whether later micro-batches may reuse what is gathered.
    """

    joint: TraceCtx
    cost: CostModel
    always_kept: frozenset[Bucket]
    limits: Limits
    buckets: Sequence[Bucket]
    left: LeftGradients
    reuse: bool
    _halves: dict[int, list[TraceCtx]] = field(default_factory=dict, init=False)

    @cached_property
    def first_in_backward(self) -> list[Bucket]:
        """Return the buckets that backward gathers again, in the order of their first consumers."""
        halves = split_joint(self._unchanged)
        if len(halves) == 1:
            return []
        ordered = sort_communication(halves[1], prefetch=0)
        return list(dict.fromkeys(bucket_of(b).base for b in ordered.bound_symbols if b.sym is fsdp_all_gather))

    def kept(self, number: int) -> frozenset[Bucket]:
        """Return the buckets that stay unsharded if that many do besides those that do in any case."""
        return self.always_kept | frozenset(self.first_in_backward[:number]) if number else self.always_kept

    @cached_property
    def offloadable(self) -> frozenset[str]:
        """The values that may move to host memory. On a CPU that would free nothing."""
        if self.cost.synchronous:
            return frozenset()
        return frozenset(offloadable(self._unchanged))

    @cached_property
    def activations(self) -> ActivationPlans:
        """The plans for activations if no further bucket is kept; further ones hardly change them."""
        return ActivationPlans(split_joint(self._unchanged), self.cost, self.offloadable)

    def run(self, setting: Setting, activations: ActivationPlan | None = None) -> CandidateStep:
        """Return the step of a setting and a plan for activations."""
        scratch: dict[Arena, Arena] = {}

        def arena_of(bucket: Bucket) -> Arena:
            return scratch.setdefault(bucket.arena, Arena(bucket.arena.device))

        kept, budget, reductions = self.kept(setting.kept), self.limits.unsharded_bytes, setting.reductions
        sort = partial(
            sort_communication,
            prefetch=setting.prefetch,
            max_gathers_in_flight=self.limits.gathers_in_flight,
            max_reductions_in_flight=reductions,
        )
        within = partial(sort_within_budget, sort=sort, max_reductions_in_flight=reductions, kept=kept)
        halves: list[TraceCtx] = []
        for half in self._unsorted(setting.kept, activations):
            forward = halves[0] if halves else None
            left = shared_budget(half, budget=budget, kept=kept)
            half = sort(half) if budget is None else within(half, max_unsharded_bytes=budget, forward=forward)
            half = assign_slots(
                half, kept=kept, arena_of=arena_of, forward=forward, max_bytes=left, extend=setting.extends
            )
            half = mark_retained_by_forward(half) if forward is None else reuse_from_forward(half, forward=forward)
            if setting.extends:
                half = release_extension(half, arenas={arena_of(bucket): None for bucket in self.buckets})
            if self.reuse and forward is None:
                half = reuse_in_window(half, no_sync=self._no_sync)
            halves.append(half)
        lasting = private_bytes(halves[0], kept) + sum(arena.nbytes for arena in scratch.values())
        nbytes = lasting + sum(arena.extension.nbytes for arena in scratch.values())
        if self.limits.memory is None:
            return CandidateStep(halves, nbytes, lasting, self.cost)
        changes = (activations.recomputed, activations.offloaded) if activations else (frozenset(), frozenset())
        # Other sets of shapes and flags may have needed a larger arena, which is one for all.
        pairs = [(arena, new) for arena, new in scratch.items()]
        pairs += [(arena.extension, new.extension) for arena, new in pairs if new.extension.nbytes]
        larger = sum(max(arena.nbytes - new.nbytes, 0) for arena, new in pairs)
        peak = StepMemory.of(halves, self.buckets, accumulated=self.left).peak.nbytes + larger
        growth = sum(max(new.nbytes - arena.nbytes, 0) for arena, new in pairs)
        largest = max(peak, self.limits.largest_peak + growth)
        return CandidateStep(halves, nbytes, lasting, self.cost, *changes, peak, largest)

    @cached_property
    def _no_sync(self) -> bool:
        return any(bsym.sym in ACCUMULATORS for bsym in self.joint.bound_symbols)

    @cached_property
    def _unchanged(self) -> TraceCtx:
        """The joint trace with backward's gathers if no further bucket is kept and nothing is recomputed."""
        return self._regathered(0)

    def _regathered(self, number: int, recomputed: frozenset[str] = frozenset()) -> TraceCtx:
        joint = from_trace(self.joint)
        joint.bound_symbols = self.joint.bound_symbols
        joint.names = set(self.joint.names)  # those of a candidate that is not chosen stay free
        joint = regather_for_backward(joint, kept=self.kept(number), recomputed=recomputed)
        return gather_from_secondary(joint)

    def _unsorted(self, number: int, activations: ActivationPlan | None) -> list[TraceCtx]:
        if activations is None:
            if number not in self._halves:
                halves = split_joint(self._regathered(number) if number else self._unchanged)
                self._halves[number] = [write_grads_in_place(half) for half in halves]
            return self._halves[number]
        joint = self._regathered(number, activations.recomputed)
        joint = offload_activations(joint, offloaded=activations.offloaded)
        times = copy_times(self.cost)
        return [sort_host_copies(write_grads_in_place(half), **times) for half in split_joint(joint)]
