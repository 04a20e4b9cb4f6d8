"""The order of passes in the compilation of one set of input shapes and flags; see [Note: The pipeline] in ``transform``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from thunder.core.trace import TraceCtx
from thunder.extend import Executor, FusionExecutor

from . import passes
from .capture.traced_computation import TracedComputation, needs_backward, without_computation
from .ir.analysis import NO_PENDING_GRADS
from .ir.computation import computation_of
from .ir.inspection import is_backward_trace, snapshot, split_joint
from .ir.registry import with_caches
from .ir.schedule import Schedule, read_program, read_schedule
from .options import Options
from .passes import Context
from .pipeline import CompiledTraces, JointPasses
from .proof.audit import audited
from .runtime.module_hooks import TracedHooks
from .runtime.trace_start import TraceStart
from .sharding.sharded_module import ShardedModule
from .transforms.offload_activations import offloaded_values
from .transforms.shard_prologue import shard_prologue, unpacked_parameters

Fingerprint = Callable[[TraceCtx, Mapping[str, str]], TracedComputation | None]


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
        planner: the module ``planning.choosing``, if the options ask for a search; a default step does not load it.

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
        planner: Any = None,
    ) -> None:
        self.traces = traces
        self._compiled = compiled
        self._pending_grads = NO_PENDING_GRADS
        self.is_finished = False
        self._sharded = sharded
        self._options = options
        self._executors = executors
        self._fusions = [e for e in executors if isinstance(e, FusionExecutor) and not isinstance(e, JointPasses)]
        self._stats = stats
        self._agrees = agrees
        self._planner = planner
        self._same: CompiledTraces | None = None
        self._traced: TraceCtx | None = None
        self._computation: TraceCtx | None = None  # that Thunder does not see
        self._copy_times: Mapping[str, Any] = {}  # if the search offloads values

    def shard(
        self,
        prologue: TraceCtx,
        computation: TraceCtx,
        fingerprint: Fingerprint | None = None,
        *,
        defers_autograd: bool = False,
    ) -> tuple[TraceCtx, TraceCtx]:
        """Let the prologue unpack shards, and unshard each parameter at its first use.

        Args:
            fingerprint: returns a key of the computation, given the names of parameters by those of arguments. If an
                earlier compilation had an equal one, its joint trace is used again, and the returned computation is empty;
                see [Note: Modes share a joint trace] in ``capture.traced_computation``.
            defers_autograd: whether ``differentiate`` takes the place of Thunder's autograd, so that the returned
                computation is empty in any case; see [Note: Blocks are differentiated once] in ``transforms.differentiate``.
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
        if fingerprint is not None:
            traces.traced = fingerprint(computation, inputs)
            self._same = next((e for e in self._compiled if e.traced is not None and e.traced == traces.traced), None)
        hooks = TracedHooks(self._sharded.module)
        prologue = with_caches(run(prologue, shard_prologue, shards=shards, no_sync=traces.no_sync, hooks=hooks))
        if self._same is not None:
            traces.traced, traces.parameters = self._same.traced, self._same.parameters
            traces.shares = self._same.number
            return prologue, without_computation(computation)
        computation = with_caches(computation)
        computation = self._run("computation", computation, inputs=inputs, locations=locations, shards=shards)
        if defers_autograd:
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
        else:
            hidden = self._computation
            has_gradients = None if hidden is None else needs_backward(hidden)
            joint = self._run("autograd", joint if hidden is None else hidden, has_gradients=has_gradients)
        traces.differentiated = snapshot(joint)
        joint = snapshot(joint)
        log(f"{done}, %d bound symbols in the joint trace", len(joint.bound_symbols), stage="bucketing and fusing")
        traces.joint = self._run("bucketed", self._choose(joint))
        return traces.joint

    def after_fusion(self, joint: TraceCtx) -> TraceCtx:
        """Remove from the joint trace what only kept fusions apart, and offload the chosen activations."""
        traces = self.traces
        assert traces.joint is not None, "passes have run before fusion"
        joint = self._run("fused", joint)
        if traces.offloaded and self._fusions:  # one may have taken in a value that was to be offloaded
            traces.offloaded = frozenset(offloaded_values(joint))
        return joint

    def schedule(self, unscheduled: TraceCtx) -> TraceCtx:
        """Return the forward or backward trace that runs: sorted, with slots, verified, and agreed on by all ranks."""
        backward = is_backward_trace(unscheduled)
        traces = self.traces
        name, size = "backward" if backward else "forward", len(unscheduled.bound_symbols)
        self._sharded.progress.log_phase("scheduling %s, %d bound symbols", name, size, stage=f"scheduling {name}")
        forward = traces.forward if backward else None
        assert traces.joint is not None
        trains = backward or len(split_joint(traces.joint)) == 2
        forward_schedule = traces.forward_schedule if backward else None
        run = partial(self._run, forward=forward, forward_schedule=forward_schedule, trains=trains)
        sorted_trace = run("scheduled", run("split", unscheduled))
        schedule = read_schedule(sorted_trace)
        trace = run("finished", sorted_trace, agreement=self._agree(sorted_trace, schedule, name))
        if backward:
            traces.backward_before, traces.backward, traces.backward_schedule = unscheduled, trace, schedule
        else:
            traces.forward_before, traces.forward, traces.forward_schedule = unscheduled, trace, schedule
        self.is_finished = backward or not trains
        if self.is_finished and self._options.max_memory is not None:
            limit, pending = self._options.max_memory, self._pending_grads
            self._planner.check_memory(traces, limit=limit, pending_grads=pending, compiled=self._compiled)
        if self._options.audit:
            trace = audited(trace, forward=forward, former_memory=self._sharded.former_memory, stats=self._stats)
        return with_caches(trace)

    def _choose(self, joint: TraceCtx) -> TraceCtx:
        """Return the joint trace with bucketed communication, with the settings for it chosen."""
        options, sharded, traces = self._options, self._sharded, self.traces
        if not options.needs_search:
            assert options.prefetch != "auto"
            traces.prefetch = options.prefetch
            return self._run("joint", joint)
        context, compiled = self._context(), self._compiled
        chooser = self._planner.Chooser(joint, traces, context, sharded=sharded, options=options, compiled=compiled)
        settings = chooser.choose()
        self._pending_grads, self._copy_times = settings.pending_grads, settings.copy_times
        traces.choice, chosen = settings.choice, settings.choice.chosen
        traces.prefetch, traces.reductions_in_flight = chosen.prefetch, chosen.reductions
        traces.extends = chosen.extends
        traces.recomputed, traces.offloaded = chosen.recomputed, chosen.offloaded
        if settings.kept is not None:
            sharded.set_kept_buckets(settings.kept)
            sharded.kept_is_final = True
        return settings.bucketed

    def _run(self, phase: passes.Phase, trace: TraceCtx, **more: Any) -> TraceCtx:
        """Run the passes of a phase; ``more`` are further fields of their context."""
        return passes.run(phase, trace, self._context(**more), record=self.traces.run)

    def _context(self, **more: Any) -> Context:
        """Return the context of the next passes."""
        traces, options, sharded = self.traces, self._options, self._sharded
        context = Context(
            sharded.buckets,
            sharded.kept,
            no_sync=traces.no_sync,
            accumulate=options.accumulate or "unsharded",
            max_unsharded_bytes=options.max_unsharded_bytes,
            max_gathers_in_flight=options.max_gathers_in_flight,
            release=options.release,
            pinned=options.schedule,
            reuse=not options.reshard_after_backward,
            prefetch=traces.prefetch,
            max_reductions_in_flight=traces.reductions_in_flight,
            extends=traces.extends,
            recomputed=traces.recomputed,
            offloaded=traces.offloaded,
            copy_times=self._copy_times,
            executors=self._executors,
            fusions=self._fusions,
            before_fusion=traces.joint,
            computation=self._traced,
        )
        return replace(context, **more)

    def _agree(self, trace: TraceCtx, schedule: Schedule, name: str) -> dict[str, Any]:
        """Compare what the ranks have compiled, and return how they agree at run time; empty if they need not."""
        traces, control = self.traces, self._sharded.control
        if control.is_single_rank:
            return {}
        computation = computation_of(trace, traces.call.inputs)
        what = f"{name} of a {'no_sync ' if traces.no_sync else ''}trace"
        agreed = control.check_program(what, read_program(trace), computation)
        if not agreed.communicates or not self._agrees:
            return {}
        run = TraceStart(
            control,
            f"{name}_{traces.number}",
            agreed,
            f"{name} for {traces.call}",
            computation,
            sum(op.issues for op in schedule),
        )
        on_device = all(b.ranks.group.backend_for(b.spec.device) == "nccl" for b in self._sharded.buckets)
        return {"run": run, "before_issue": not on_device}
