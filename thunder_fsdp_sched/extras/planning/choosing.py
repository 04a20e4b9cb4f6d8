"""Choose the settings of one compilation: the mode to accumulate, the buckets that stay unsharded, and the schedule.

[Note: Planning for the end of a window]
A step that ends an accumulation window needs more memory than the micro-batches before it: it reduces gradients while
their unreduced gradients are still in memory. But it is compiled after them, when it is settled which buckets stay
unsharded. So with ``max_memory``, a trace under ``no_sync`` first plans the step that will end its window, from the
same joint trace and with these gradients, and that plan decides which buckets stay unsharded. The micro-batches may
then keep no more slots from step to step than that step, because all traces of a module share their memory. For the
same reason, a trace that is compiled later must not let the arena grow so much that an earlier one exceeds the limit.
Both ways to accumulate are planned unless one is given, and the one that fits and is faster for one micro-batch and one
last step is chosen.

[Note: One rank searches]
The result of a search depends on the names of GPUs, the sizes of a rank's batch and shards, and how ties are broken. So
among all ranks with one computation (equal up to numbers that may stem from a size), the one with the largest values
searches, and the others take its :class:`Decision`. It contains everything that a search decides: the mode to
accumulate, the candidate with its prefetch distance, kept buckets, reductions in flight, and recomputed values. Values
are identified by their positions in the trace, because names may differ.

The ranks meet before one of them searches. A later trace with the same computation and other sizes reuses the decision
without a meeting, unless it would exceed ``max_memory`` there. So a rank whose batch has another length can still
compile alone; if that needs a new search, all ranks raise an error, because the others do something else.

Ranks with other computations (``process_group_for``) search separately, and their programs are compared when they
compile. With ``ranks_may_differ`` each rank searches for itself, because it may compile alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import torch.distributed as dist
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

from ... import pipeline
from ...compiled_traces import CompiledTraces, StepSettings
from ...errors import coded_error
from ...ir.analysis import NO_PENDING_GRADS, PendingGrads
from ...ir.computation import computation_of
from ...ir.effects import effects
from ...ir.inspection import names, nbytes_of, split_joint
from ...ir.statements import read_statements
from ...logs import LOGGER
from ...passes import Context
from ...ranks.control import Control, hash64
from ...ranks.joint_control import joint
from ...ranks.messages import sides
from ...ranks.rounds import known_to_all
from ...runtime.accumulation import AccumulationMode
from ...runtime.bucket import Bucket
from ...sharding.sharded_module import ShardedModule
from ..step_memory.step_memory import StepMemory
from ..step_memory.value_memory import pending_grads_of
from .clusters import ClusterSpec, cluster_of_this_process
from .cost import AnalyticCost
from .search import Choice, Limits, MemoryLimitError, Search

_SEARCH = "the search for the schedule of a trace"

_PLAN_TOGETHER = (
    "\nWith the gradients that no_sync accumulates: allow more, use accumulate='sharded', or run a window before any other "
    "step, so that both are planned together"
)


class Decision(NamedTuple):
    """The outcome of a search as the ranks exchange it; see [Note: One rank searches].

    Attributes:
        accumulate: how gradients accumulate.
        choice: the candidates.
        kept_buckets: names of the buckets that stay unsharded from now on; ``None`` if that was decided earlier.
        positions: the positions in the trace of all values that candidates name.
        cluster: the simulated machine.
    """

    accumulate: AccumulationMode
    choice: Choice
    kept_buckets: Sequence[str] | None
    positions: Mapping[str, int]
    cluster: ClusterSpec


class Chosen(NamedTuple):
    """The settings that the search has chosen for one compilation.

    Attributes:
        accumulate: how gradients accumulate.
        bucketed: the joint trace with bucketed communication.
        pending_grads: the gradients of earlier micro-batches that the step finds in memory.
        choice: the outcome of the search.
        kept_buckets: names of the buckets that stay unsharded from now on; ``None`` if that was decided earlier.
        seconds: the simulated time by which the two ways to accumulate are compared.
    """

    accumulate: AccumulationMode
    bucketed: TraceCtx
    pending_grads: PendingGrads
    choice: Choice
    kept_buckets: Sequence[str] | None
    seconds: float

    def settings(self, kept_buckets: Iterable[Bucket]) -> StepSettings:
        """Return the settings of the step, with the buckets that the module keeps now."""
        return self.choice.chosen.settings(frozenset(kept_buckets), self.accumulate)


def check_memory(
    traces: CompiledTraces,
    *,
    limit: int,
    pending_grads: PendingGrads,
    compiled: Sequence[CompiledTraces] = (),
    advice: str = "",
) -> None:
    """Raise an error if the compiled traces need more than ``limit`` bytes at any position.

    Args:
        limit: ``max_memory``.
        pending_grads: the gradients of earlier micro-batches that the step finds in memory.
        compiled: the traces of the module that were compiled before. Memory that they keep allocated counts.
        advice: advice for the user.

    Raises:
        MemoryLimitError: names the position of the peak.
    """
    others = [other.bsyms for other in compiled]
    peak = StepMemory.of(traces.traces, traces.buckets, accumulated=pending_grads, others=others).peak
    if peak.nbytes <= limit:
        return
    if any(bsym.sym.is_fusion for trace in traces.traces for bsym in trace.bound_symbols):
        advice += (
            f"\nWhat to recompute is chosen before operators are fused, and a fusion may keep other values: set a lower "
            f"limit, such as max_memory={2 * limit - peak.nbytes:,}"
        )
    raise coded_error(
        MemoryLimitError,
        "plan.traces-exceed-max-memory",
        peak.nbytes,
        limit=limit,
        call=traces.call,
        nbytes=peak.nbytes,
        position=peak.position,
        phase=peak.phase,
        statement=peak.statement,
        advice=advice,
    )


class Chooser:
    """Buckets the communication of a joint trace, and chooses the settings of its compilation.

    Args:
        joint: the joint trace with one ``fsdp_unshard`` for each parameter.
        context: the context of the next passes; its traces record the time of passes and of the search.
        compiled: the traces of the module that were compiled before.

    Attributes:
        limits: the limits that the options set.
        plans_window: whether the end of the window is planned; see [Note: Planning for the end of a window].
        decides_kept_buckets: whether this compilation decides which buckets stay unsharded; one does so for the module.
    """

    def __init__(
        self, joint: TraceCtx, context: Context, *, sharded: ShardedModule, compiled: Sequence[CompiledTraces]
    ) -> None:
        self.joint, self.sharded, self.compiled = joint, sharded, compiled
        self.traces, self.options = traces, options = context.traces, context.options
        kept_allocated = options.sharding_strategy.with_kept(release=False)
        searched = options.with_kept(schedule=None, sharding_strategy=kept_allocated)
        self.context = replace(context, fusions=(), options=searched)
        self.limits = Limits(
            options.max_memory,
            largest_peak=max((one.choice.chosen.largest_peak for one in compiled if one.choice), default=0),
        )
        self._own: Chosen | None = None
        has_choice = self.limits.memory is not None and len(split_joint(joint)) == 2
        self.plans_window = has_choice and traces.no_sync
        self.decides_kept_buckets = has_choice and not sharded.kept_buckets_are_final

    def choose(self) -> Chosen:
        """Return the settings; a collective unless they are known, see [Note: One rank searches].

        Raises:
            MemoryLimitError, ValueError: the limits are too low.
            ScheduleDisagreement: a rank does something else.
        """
        control = self.sharded.control
        found: dict[int, Any] = self.sharded.attached.setdefault("outcomes of searches", {})
        if control.is_single_rank or self.options.ranks_may_differ:  # ranks may compile alone
            with control.announcing_failure(_SEARCH):
                return self._search_all()
        computation = computation_of(read_statements(self.joint), self.joint.args, ()).comparable
        kind = hash64(self.traces.no_sync, *computation)
        if kind not in found or not self._allows(found[kind]):
            outputs = (p for bsym in self.joint.bound_symbols for p in bsym.flat_proxy_outs)
            size = sum(nbytes_of(p) for p in outputs if isinstance(p, TensorProxy))
            decided = decide_once(control, kind, size, self._decide)
            if errors := {of: error for of, error in decided.items() if isinstance(error, ValueError)}:
                if kind in errors:
                    raise known_to_all(errors[kind])
                raise joint(control).disagreement(f"{_SEARCH} failed: {next(iter(errors.values()))}")
            found.update(decided)
        if self._own is not None:
            return self._own
        with control.announcing_failure(f"taking the outcome of {_SEARCH}"):
            return self._taken(found[kind])

    def _decide(self) -> Decision | ValueError:
        """Search, and return the decision for the other ranks, or the error that they raise as well."""
        try:
            own = self._own = self._search_all()
        except ValueError as error:
            return error
        named = {name for candidate in own.choice.considered for name in candidate.recomputed}
        positions = {name: at for at, name in enumerate(_values(own.bucketed)) if name in named}
        return Decision(own.accumulate, own.choice, own.kept_buckets, positions, self._cluster)

    def _taken(self, decision: Decision) -> Chosen:
        """Return the settings that another rank's decision gives for this rank's trace."""
        self._simulate(decision.cluster)
        bucketed = self._bucketed(decision.accumulate, no_sync=self.traces.no_sync)
        values = _values(bucketed)
        names = {name: values[at] for name, at in decision.positions.items()}
        chosen, considered = decision.choice
        choice = Choice(chosen.renamed(names), tuple(candidate.renamed(names) for candidate in considered))
        pending_grads = self._pending_grads(bucketed)
        return Chosen(decision.accumulate, bucketed, pending_grads, choice, decision.kept_buckets, 0.0)

    def _allows(self, decision: Decision) -> bool:
        """Return whether the limits allow a known decision for this trace, too. Without ``max_memory`` they do."""
        if self.limits.memory is None:
            return True
        try:
            settings = self._taken(decision)
        except MemoryLimitError:
            return False
        search = self._searching(settings.bucketed, settings.pending_grads, self.limits, self.sharded.kept_buckets)
        return self.limits.allow(search.run(settings.choice.chosen))

    def _simulate(self, cluster: ClusterSpec) -> None:
        """Use the times of a machine from now on."""
        self._cluster, self.cost = cluster, AnalyticCost(cluster)

    def _search_all(self) -> Chosen:
        self._simulate(self.options.cluster or cluster_of_this_process())
        given, found, errors = self.options.accumulate, [], []
        both = self.plans_window and given is None
        for mode in get_args(AccumulationMode) if both else (given or "unsharded",):
            try:
                found.append(self._search_for(mode))
            except MemoryLimitError as error:
                errors.append(error)
        if not found:
            raise min(errors, key=lambda error: error.least_bytes)
        return min(found, key=lambda settings: settings.seconds)

    def _search_for(self, mode: AccumulationMode) -> Chosen:
        """Return the settings with one way to accumulate; see [Note: Planning for the end of a window]."""
        bucketed = self._bucketed(mode, no_sync=self.traces.no_sync)
        pending_grads, limits = self._pending_grads(bucketed), self.limits
        last = None
        if self.plans_window:
            last = self._search(self._bucketed(mode, no_sync=False), pending_grads, limits)
            limits = limits._replace(persistent_bytes=last.chosen.persistent_bytes)
        kept_buckets = None if last is None else last.chosen.kept_buckets
        choice = self._search(bucketed, pending_grads, limits, kept_buckets=kept_buckets)
        decided = (last or choice).chosen
        seconds = decided.step_seconds + choice.chosen.step_seconds
        return Chosen(
            mode, bucketed, pending_grads, choice, decided.kept_buckets if self.decides_kept_buckets else None, seconds
        )

    def _pending_grads(self, bucketed: TraceCtx) -> PendingGrads:
        """Return the unreduced gradients in memory during the step, or during the step that will end its window.

        Raises:
            MemoryLimitError: with the latter, a step that was compiled before exceeds the limit.
        """
        limit = self.limits.memory
        if not self.plans_window or limit is None:
            earlier = (one for one in self.compiled if one.no_sync and not self.traces.no_sync)
            return NO_PENDING_GRADS.union(*(one.pending_grads for one in earlier))
        pending_grads = pending_grads_of(bucketed.bound_symbols)
        for step in self.compiled:
            if not step.no_sync and step.backward is not None:
                check_memory(step, limit=limit, pending_grads=pending_grads, advice=_PLAN_TOGETHER)
        return pending_grads

    def _bucketed(self, mode: AccumulationMode, *, no_sync: bool) -> TraceCtx:
        settings = replace(self.context.settings, accumulate=mode)
        return pipeline.joint(self.joint, replace(self.context, no_sync=no_sync, settings=settings))

    def _search(
        self,
        bucketed: TraceCtx,
        pending_grads: PendingGrads,
        limits: Limits,
        *,
        kept_buckets: Collection[str] | None = None,
    ) -> Choice:
        """Search for the settings of a trace; ``kept_buckets`` stay unsharded if they are already decided."""
        started = time.process_time()
        always = (
            self.sharded.kept_buckets
            if kept_buckets is None
            else [b for b in self.sharded.buckets if b.spec.name in kept_buckets]
        )
        search = self._searching(bucketed, pending_grads, limits, always)
        prefetch = None if self.options.prefetch == "auto" else self.options.prefetch
        choice = search.choose(prefetch=prefetch, may_keep=self.decides_kept_buckets and kept_buckets is None)
        seconds = time.process_time() - started
        self.traces.pass_seconds["choose"] += seconds
        LOGGER.debug("choose: %d candidates, %.1f ms\n%s", len(choice.considered), 1e3 * seconds, choice)
        return choice

    def _searching(
        self, bucketed: TraceCtx, pending_grads: PendingGrads, limits: Limits, always_kept: Iterable[Bucket]
    ) -> Search:
        no_sync = any(effects(bsym).leaves for bsym in bucketed.bound_symbols)
        settings = replace(self.context.settings, kept_buckets=frozenset(always_kept))
        context = replace(self.context, no_sync=no_sync, settings=settings)
        return Search(bucketed, self.cost, limits, context, pending_grads)


def decide_once(
    control: Control, kind: int, size: int, decide: Callable[[], Decision | ValueError]
) -> dict[int, Decision | ValueError]:
    """Meet the other ranks, and let one rank of each kind decide for all ranks of its kind; a collective.

    No rank waits for a decision before all ranks have come to this call. Of each kind, the rank with the largest size
    decides, the first among equals, and sends its decision to all ranks: O(log W) messages for each kind.

    Args:
        kind: a number that is equal on the ranks that share a decision.
        size: the size of the work for which this rank needs the decision.
        decide: returns a decision or an error, which can be pickled.

    Returns:
        The decisions, keyed by kind.

    Raises:
        ScheduleDisagreement: a rank does something else or does not come, or ``decide`` failed on another rank.
    """
    if control.is_single_rank:
        return {kind: decide()}
    control = joint(control)
    ranks = control.group.global_ranks
    deciding: dict[int, tuple[int, int]] = {}  # for each kind, the largest size, and the negative rank that has it
    for rank, (of, its_size) in zip(ranks, control.exchange(_SEARCH, (kind, size)), strict=True):
        deciding[of] = max(deciding.get(of, (its_size, -rank)), (its_size, -rank))
    failure: Exception | None = None
    own: tuple[Decision | ValueError | None, str] = None, ""
    if deciding[kind][1] == -control.global_rank:
        try:
            own = decide(), ""
        except Exception as error:
            failure, own = error, (None, f"{type(error).__name__}: {error}")
    decisions: dict[int, Any] = {}
    failed: dict[int, str] = {}
    with control.doing(f"the exchange of {_SEARCH}"):
        for of, (_, negative) in deciding.items():
            sent = [own if -negative == control.global_rank else None]
            dist.broadcast_object_list(sent, -negative, group=control.channel.group.process_group)
            assert sent[0] is not None
            decisions[of], error_text = sent[0]
            if error_text:
                failed[-negative] = error_text
    if failure is not None:
        raise known_to_all(failure)
    if failed:
        raise control.disagreement(f"{_SEARCH} failed:\n{sides(failed)}")
    return decisions


def _values(trace: TraceCtx) -> list[str]:
    """Return the names of all results of a trace, in order: equally many for equal computations."""
    return [name for bsym in trace.bound_symbols for name in names(bsym.flat_proxy_outs)]
