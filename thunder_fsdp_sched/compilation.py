"""The order of passes in the compilation of one set of input shapes and flags; see [Note: The pipeline] in ``transform``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from thunder.core.trace import TraceCtx
from thunder.executors.passes import del_last_used
from thunder.extend import Executor, FusionExecutor

from .capture import TracedComputation, needs_backward, without_computation
from .ir.analysis import NOTHING_LEFT
from .ir.caching import with_caches
from .ir.computation import computation_of
from .ir.descriptions import count_issues
from .ir.inspection import is_backward_trace, snapshot, split_joint, statements
from .ir.schedule import StepSchedule, compute_digest, read_program, read_schedule
from .options import Options
from .pipeline import CompiledTraces, JointPasses, Pass, can_fuse_any
from .proof.audit import audited
from .runtime.module_hooks import TracedHooks
from .runtime.trace_start import TraceStart
from .sharding.sharded_module import ShardedModule
from .transforms import (
    ScheduleMismatch,
    assign_slots,
    bucket_communication,
    claim_operators,
    differentiate,
    draw_once,
    end_backward,
    fuse_downcast,
    gather_from_secondary,
    guard_first,
    guard_kept,
    insert_agreement,
    insert_unshard,
    keep_fusions_apart,
    mark_draws,
    mark_retained_by_forward,
    offload_activations,
    offloadable,
    refuse_merged_draws,
    refuse_redrawn_gradients,
    regather_for_backward,
    release_extension,
    release_slots,
    remove_cuts,
    replay_schedule,
    reuse_from_forward,
    reuse_in_window,
    shard_prologue,
    sort_communication,
    sort_within_budget,
    unpacked_parameters,
    verify,
    write_grads_in_place,
)
from .transforms.sort_within_budget import shared_budget

__all__ = ["Compilation", "Describe"]

Describe = Callable[[TraceCtx, Mapping[str, str]], TracedComputation | None]


class Compilation:
    """The passes that turn what Thunder has traced once into the traces that run.

    Thunder calls :meth:`shard`, then :meth:`before_fusion` and :meth:`after_fusion` with the joint trace, then
    :meth:`schedule` with the forward trace and, if there are gradients, with the backward trace.

    Args:
        traces: takes the results.
        sharded: the module's shards.
        options: those of ``fsdp``.
        executors: those that claim operators, in order of priority.
        stats: Thunder's statistics of the jitted modules that may run the traces.
        compiled: the traces of the module that were compiled before, whose joint trace this compilation may share.
        agrees: whether the ranks agree before each run; ``False`` only to measure the cost of that.

    Attributes:
        is_finished: whether the last trace has been scheduled.
    """

    def __init__(
        self,
        traces: CompiledTraces,
        sharded: ShardedModule,
        options: Options,
        executors: Sequence[Executor],
        stats: Iterable[Any],
        *,
        compiled: Sequence[CompiledTraces] = (),
        agrees: bool = True,
    ) -> None:
        self.traces = traces
        self._compiled = compiled
        self._left = NOTHING_LEFT
        self.is_finished = False
        self._sharded = sharded
        self._options = options
        self._executors = executors
        self._fusions = [e for e in executors if isinstance(e, FusionExecutor) and not isinstance(e, JointPasses)]
        self._stats = stats
        self._agrees = agrees
        self._same: CompiledTraces | None = None
        self._traced: TraceCtx | None = None
        self._computation: TraceCtx | None = None  # that Thunder does not see
        self._pinned: StepSchedule | None = None
        self._sort_copies: Pass | None = None  # to and from host memory, if the search offloads values

    def shard(
        self, prologue: TraceCtx, computation: TraceCtx, describe: Describe | None = None, *, hides: bool = False
    ) -> tuple[TraceCtx, TraceCtx]:
        """Let the prologue unpack shards, and unshard each parameter at its first use.

        Args:
            describe: returns tokens of the computation, given the names of parameters by those of arguments. If an
                earlier compilation had the same, its joint trace is used again, and the returned computation is empty;
                see [Note: Modes share a joint trace] in ``capture.traced_computation``.
            hides: whether ``differentiate`` takes the place of Thunder's autograd, so that the returned computation is
                empty in any case; see [Note: Blocks are differentiated once] in ``transforms.differentiate``.
        """
        locations, shards = self._sharded.locations, self._sharded.shards
        unpacked = unpacked_parameters(prologue)
        inputs = {
            argument.name: unpacked[value.name]
            for value, argument in zip(prologue.output[0], computation.args, strict=True)
            if getattr(value, "name", None) in unpacked
        }
        traces, run = self.traces, self.traces.run
        traces.parameters, self._traced = inputs, computation
        if describe is not None:
            traces.traced = describe(computation, inputs)
            self._same = next((e for e in self._compiled if e.traced is not None and e.traced == traces.traced), None)
        hooks = TracedHooks(self._sharded.module)
        prologue = run([partial(shard_prologue, shards=shards, no_sync=traces.no_sync, hooks=hooks)], prologue)
        prologue = with_caches(prologue)
        if self._same is not None:
            traces.traced, traces.parameters = self._same.traced, self._same.parameters
            traces.shares = self._same.number
            return prologue, without_computation(computation)
        computation = with_caches(computation)
        insert = partial(insert_unshard, inputs=inputs, buckets=locations, shards=shards)
        computation = run([draw_once, insert], computation)
        if hides:
            self._computation = computation
            computation = without_computation(computation)
        return prologue, computation

    def before_fusion(self, joint: TraceCtx) -> TraceCtx:
        """Bucket the communication of the joint trace and choose what stays unsharded, before operators are fused."""
        traces, log = self.traces, self._sharded.progress.log_phase
        done = "differentiated"
        if self._same is not None:
            assert self._same.differentiated is not None, "compilations that have finished keep their joint trace"
            joint, done = self._same.differentiated, f"shares the joint trace of compilation {self._same.number}"
        elif self._computation is not None:
            backward = needs_backward(self._computation)
            passes: list[Pass] = [partial(differentiate, executors=self._executors, has_gradients=backward)]
            joint = traces.run(passes, self._computation)
        else:
            once = self._options.trace_modules_once
            joint = traces.run([partial(claim_operators, executors=self._executors, once=once)], joint)
        traces.differentiated = snapshot(joint)
        joint = snapshot(joint)
        log(f"{done}, %d bound symbols in the joint trace", len(joint.bound_symbols), stage="bucketing and fusing")
        bucketed = self._choose(joint)
        kept = self._sharded.kept
        again = partial(regather_for_backward, kept=kept, recomputed=traces.recomputed)
        passes = [again, partial(guard_kept, kept=kept)]
        if self._fusions:
            can_fuse = partial(can_fuse_any, self._fusions)
            passes += [partial(keep_fusions_apart, can_fuse=can_fuse), mark_draws]
        traces.joint = traces.run(passes, bucketed)
        return traces.joint

    def after_fusion(self, joint: TraceCtx) -> TraceCtx:
        """Remove from the joint trace what only kept fusions apart, and offload the chosen activations."""
        passes: list[Pass] = []
        assert self.traces.joint is not None, "passes have run before fusion"
        if self._fusions:
            passes.append(partial(refuse_merged_draws, before=self.traces.joint))
            passes += [remove_cuts, partial(regather_for_backward, kept=self._sharded.kept)]
        joint = self.traces.run([*passes, gather_from_secondary], joint)
        if self.traces.offloaded:
            if self._fusions:  # a fusion may have taken a value in
                self.traces.offloaded = frozenset(self.traces.offloaded & offloadable(joint, min_bytes=0).keys())
            joint = self.traces.run([partial(offload_activations, offloaded=self.traces.offloaded)], joint)
        return joint

    def schedule(self, unscheduled: TraceCtx) -> TraceCtx:
        """Return the forward or backward trace that runs: sorted, with slots, verified, and agreed on by all ranks."""
        backward = is_backward_trace(unscheduled)
        traces, kept = self.traces, self._sharded.kept
        name, size = "backward" if backward else "forward", len(unscheduled.bound_symbols)
        self._sharded.progress.log_phase("scheduling %s, %d bound symbols", name, size, stage=f"scheduling {name}")
        checks: list[Pass] = []
        if backward and self._traced is not None:  # a step that is planned again was checked when it was traced
            assert traces.forward is not None
            checks.append(partial(refuse_redrawn_gradients, forward=traces.forward, computation=self._traced))
        copies: list[Pass] = []
        if traces.offloaded:
            assert self._sort_copies is not None, "the search that offloads gives it"
            copies.append(self._sort_copies)
        unsorted = traces.run([*checks, write_grads_in_place, guard_first, *copies], unscheduled)
        forward = traces.forward if backward else None
        release = self._options.release
        assert traces.joint is not None
        trains = backward or len(split_joint(traces.joint)) == 2
        if release != "never" and not trains:
            kept = set()  # a forward that waits for its backward may have kept buckets in their private slots
        room = shared_budget(unsorted, budget=self._options.max_unsharded_bytes, kept=kept)
        passes: list[Pass] = [
            self._order(unsorted, forward, backward),
            partial(
                assign_slots,
                kept=kept,
                forward=forward,
                max_bytes=room,
                separate=release == "bucket",
                extend=traces.extends,
            ),
        ]
        if release == "never" or (release == "step" and trains):
            passes.append(mark_retained_by_forward if forward is None else partial(reuse_from_forward, forward=forward))
        if release != "never":
            waits = trains and not backward
            passes.append(partial(release_slots, when=release, forward=forward, waits_for_backward=waits))
        elif traces.extends:
            arenas = {bucket.arena: None for bucket in self._sharded.buckets}
            passes.append(partial(release_extension, arenas=arenas))
        if trains and not backward and not self._options.reshard_after_backward:
            passes.append(partial(reuse_in_window, no_sync=traces.no_sync))
        passes.append(partial(verify, forward=forward, max_gathers_in_flight=self._options.max_gathers_in_flight))
        sorted_trace = traces.run(passes, unsorted)
        schedule = read_schedule(sorted_trace)
        finish = self._agree(sorted_trace, name)
        if backward:
            finish.append(partial(end_backward, no_sync=traces.no_sync))
        finish.append(partial(del_last_used, clear_mutable_collections=backward))
        trace = traces.run(finish, sorted_trace)
        if backward:
            traces.backward_before, traces.backward, traces.backward_schedule = unscheduled, trace, schedule
        else:
            traces.forward_before, traces.forward, traces.forward_schedule = unscheduled, trace, schedule
        self.is_finished = backward or not trains
        if self.is_finished and self._options.max_memory is not None:
            from .planning.choosing import check_memory  # here, because a default step needs no planner

            check_memory(traces, limit=self._options.max_memory, left=self._left, compiled=self._compiled)
        if self._options.audit:
            trace = audited(trace, forward=forward, former_memory=self._sharded.former_memory, stats=self._stats)
        return with_caches(trace)

    def _choose(self, joint: TraceCtx) -> TraceCtx:
        """Return the joint trace with bucketed communication, with the settings for it chosen."""
        options, sharded, traces = self._options, self._sharded, self.traces
        if not options.needs_search:
            assert options.prefetch != "auto"
            traces.prefetch = options.prefetch
            way = options.accumulate or "unsharded"
            bucket = partial(bucket_communication, buckets=sharded.buckets, no_sync=traces.no_sync, accumulate=way)
            return traces.run([bucket, fuse_downcast], joint)
        from .planning.choosing import choose_settings  # here, because a default step needs no planner

        settings = choose_settings(joint, traces, sharded=sharded, options=options, compiled=self._compiled)
        self._left, self._sort_copies = settings.left, settings.sort_copies
        traces.choice, chosen = settings.choice, settings.choice.chosen
        traces.prefetch, traces.reductions_in_flight = chosen.prefetch, chosen.reductions
        traces.extends = chosen.extends
        traces.recomputed, traces.offloaded = chosen.recomputed, chosen.offloaded
        if settings.kept is not None:
            sharded.set_kept_buckets(settings.kept)
            sharded.kept_is_final = True
        return settings.bucketed

    def _order(self, trace: TraceCtx, forward: TraceCtx | None, backward: bool) -> Pass:
        """Return the pass that orders communication: the sorting pass, or the replay of a pinned schedule."""
        if self._options.schedule is None:
            budget, most = self._options.max_unsharded_bytes, self._options.max_gathers_in_flight
            reductions = self.traces.reductions_in_flight
            sort = partial(
                sort_communication,
                prefetch=self.traces.prefetch,
                max_gathers_in_flight=most,
                max_reductions_in_flight=reductions,
            )
            if budget is None:
                return sort
            return partial(
                sort_within_budget,
                sort=sort,
                max_unsharded_bytes=budget,
                max_reductions_in_flight=reductions,
                kept=self._sharded.kept,
                forward=forward,
            )
        no_sync = self.traces.no_sync
        if not backward:
            digest = compute_digest(statements(trace))
            pinned = [s for s in self._options.schedule if s.no_sync is no_sync]
            fitting = [s for s in pinned if s.forward.compute == digest] or pinned
            if not fitting:
                raise ScheduleMismatch(f"schedule: the file has no schedule for no_sync={no_sync}")
            self._pinned = fitting[0]
        assert self._pinned is not None, "forward is scheduled before backward"
        schedule = self._pinned.backward if backward else self._pinned.forward
        if schedule is None:
            raise ScheduleMismatch("schedule: it has no backward schedule, but this model has a backward trace")
        return partial(replay_schedule, schedule=schedule)

    def _agree(self, trace: TraceCtx, name: str) -> list[Pass]:
        """Compare what the ranks have compiled, and return the pass that makes them agree at run time, if needed."""
        traces, control = self.traces, self._sharded.control
        if control.is_single_rank:
            return []
        computation = computation_of(trace, traces.call.inputs)
        what = f"{name} of a {'no_sync ' if traces.no_sync else ''}trace"
        agreed = control.check_program(what, read_program(trace), computation)
        if not agreed.communicates or not self._agrees:
            return []
        run = TraceStart(
            control,
            f"{name}_{traces.number}",
            agreed,
            f"{name} for {traces.call}",
            computation,
            count_issues(trace.bound_symbols),
        )
        on_device = all(b.ranks.group.backend_for(b.spec.device) == "nccl" for b in self._sharded.buckets)
        return [partial(insert_agreement, run=run, before_issue=not on_device)]
