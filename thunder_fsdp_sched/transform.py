"""The Thunder transform that shards a module, and the hooks through which Thunder calls it.

[Note: The pipeline]
``thunder.jit`` calls ``transform_module`` once. It plans buckets, allocates shard buffers and turns the module's
parameters into views of them. For each new set of shapes and flags, Thunder then calls
``transform_traces_pre_prologue``, the two ``PassExecutor`` around the fusion executors, and
``transform_trace_post_optimization``, first with the forward trace, then with the backward trace. These hooks run the
phases of ``pipeline``, which also says what happens in between. Finally Thunder calls the same hooks of later
transforms. ``FSDPTransform._take_entry`` verifies the traces again if they have changed, and the first run of a trace
is audited: see [Note: The audit] in ``proof.audit``.

Thunder itself may see an empty computation: see [Note: Blocks are differentiated once] in ``transforms.differentiate``
and [Note: Modes share a joint trace] in ``ir.traced_computation``.
"""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import thunder
from thunder.core.compile_data import get_cache_option
from thunder.core.module import ThunderModule
from thunder.core.options import CACHE_OPTIONS
from thunder.core.prims import PrimIDs
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform
from thunder.distributed import get_skip_data_parallel_grad_sync
from thunder.extend import Executor, FusionExecutor

from . import pipeline
from .capture.input_reads import InputReads
from .capture.module_calls import trace_module_calls
from .compiled_traces import CompiledTraces, OfCalls, StepSettings
from .errors import coded_error
from .extensions import Answer, load
from .ir.analysis import NO_PENDING_GRADS
from .ir.calls import CallSignature, read_call
from .ir.effects import is_declared
from .ir.gradients import mark_constants
from .ir.inspection import is_backward_trace, nested, runs_nothing, snapshot, split_joint
from .ir.read_schedule import schedule_of
from .ir.registry import executor as own_executor
from .ir.registry import with_caches
from .ir.schedule import StepSchedule
from .ir.statements import Statement, read_statements
from .ir.traced_computation import (
    can_compile_again,
    defers_autograd,
    fingerprint,
    needs_backward,
    transforms_after,
    without_computation,
)
from .kernels.functions import with_kernels
from .logs import Artifacts
from .options import Options
from .passes import Context, PassExecutor
from .plan.specs import Plan
from .private_cache import Acquired, compile_acquired
from .private_thunder import quiet_no_sync
from .proof.audit import Auditor
from .proof.verify import is_unchanged
from .runtime.traced_inputs import MemoryOfInputs
from .sharding.refusals import explain_foreign_use
from .sharding.shard_module import shard_module
from .sharding.sharded_module import ShardingTransform, find_sharding
from .sharding.state_dict import install_state_dict
from .transforms.shard_prologue import parameters_among, refuse_foreign_parameters

WARN_COMPILED = 32
"""How many sets of shapes and flags may be compiled for one module before a warning suggests alternatives."""

MAX_COMPILED = 128
"""How many sets of shapes and flags are kept for one module. A new one evicts the oldest, which is compiled again when
needed. Ranks need not evict the same one, because a program that they have agreed on is not compared again."""

RECENT = 4
"""How many of the latest compilations keep their traces, which take most of a compilation's memory."""

_UNCHANGED = Transform.transform_trace_post_optimization


class FSDPTransform(ShardingTransform):
    """The transform that shards a module's parameters and schedules their communication.

    :func:`thunder_fsdp_sched.fsdp` creates it. A transform belongs to one module. Attributes of interest to users:
    ``plan`` after ``thunder.jit``, and after a call ``compiled``, with one :class:`CompiledTraces` for each set of
    input shapes and flags, oldest first.
    """

    def __init__(self, options: Options, planner: Any = None) -> None:
        super().__init__()
        pipeline.check_skipped(options.debug.skip_passes)
        self.options = options
        self._planner = planner
        self.compiled: list[CompiledTraces] = OfCalls()
        self._compilations = itertools.count()
        self._compilation: Compilation | None = None
        # Entries of Thunder's cache whose traces may be compiled again for the other mode of no_sync.
        self._entries: deque[tuple[Any, CompiledTraces]] = deque(maxlen=RECENT)
        self._again: CompiledTraces | None = None  # the compilation whose trace is being compiled again
        self._executors = (
            PassExecutor(
                f"fsdp_sched_before_fusion_{id(self)}", lambda joint: self._current.before_fusion(joint), claims=True
            ),
            PassExecutor(f"fsdp_sched_after_fusion_{id(self)}", lambda joint: self._current.after_fusion(joint)),
        )
        self._claiming: tuple[Executor, ...] = ()
        self._reads = InputReads()
        self._stats: weakref.WeakSet[Any] = weakref.WeakSet()  # Thunder's compile statistics of the jitted modules

    def __repr__(self) -> str:
        return f"fsdp({self.options})"

    def __iter__(self) -> NoReturn:
        raise coded_error(TypeError, "option.transforms-not-a-list")

    @property
    def plan(self) -> Plan:
        """The buckets.

        Raises:
            RuntimeError: the transform has not been given to ``thunder.jit`` yet.
        """
        return self.sharded.plan

    def cast_inputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments cast as by a call of the jitted module, for callers that compile without a call."""
        from .sharding.casts import cast_inputs

        return cast_inputs(self.sharded.mp_policy, (args, kwargs))

    @property
    def schedules(self) -> list[StepSchedule]:
        """The schedule of each compiled set of shapes and flags, oldest first."""
        return OfCalls(c.schedule for c in self.compiled if c.forward_schedule is not None)

    def save_schedules(self, path: str | Path) -> None:
        """Write :attr:`schedules` to a file that ``fsdp(schedule=path)`` replays."""
        load("extras.replay:save_schedules")(self.schedules, path)

    def transform_module(self, model: ThunderModule) -> None:
        if any(isinstance(transform, FSDPTransform) for transform in model._lc_transforms):
            raise coded_error(ValueError, "module.second-fsdp-transform")
        if self.options.ranks_may_differ:
            load("extras.ranks_differ.conflicts:refuse_cache")(model)
        if self._sharded is None:
            self._sharded = shard_module(model, self.options)
            plan = self._sharded.plan
            sizes = sum(len(b.params) for b in plan), plan.param_bytes, len(plan), plan.world_size
            self._sharded.progress.say("%d parameters of %d bytes in %d buckets, sharded over %d ranks", *sizes)
        elif self._sharded.module is not model._model:
            raise coded_error(ValueError, "module.transform-of-another-module")
        explain_foreign_use(model)
        # Adding a transform to a jitted module creates a new ThunderModule, which gets the same shards.
        self._sharded.attach(model, self._take_entry, self._again_for)
        install_state_dict(model, self._sharded)
        policy = self._sharded.mp_policy
        if policy.param_dtype is not None or policy.output_dtype is not None:
            from .sharding.casts import attach_casts  # here, because by default nothing is cast

            attach_casts(model, policy)
        compile_data = thunder.compile_data(model)
        self._let_libraries_use(model, compile_data)
        quiet_no_sync(model)
        self._stats.add(thunder.compile_stats(model))
        self._reads.leaves = self._sharded.leaves
        trace_module_calls(compile_data, self._reads, self._sharded.leaves)
        first, last = self._executors
        others = [e for e in compile_data.executors_list if e not in (own_executor, first, last)]
        self._claiming = (own_executor, *with_kernels(others, {bucket.comm.computes_on for bucket in self.plan}))
        compile_data.executors_list = (first, *self._claiming, last)

    @staticmethod
    def _let_libraries_use(model: ThunderModule, compile_data: Any) -> None:
        """Prepare the model for Join (refused) and Hugging Face's libraries; accelerate may be imported later."""
        model.__dict__["join_hook"] = lambda **options: load("extras.ranks_differ.conflicts:refuse_join")(**options)
        model.__dict__["_is_accelerate_prepared"] = Answer("extras.huggingface_models:is_prepared_for_accelerate")
        if "transformers" in sys.modules or any(
            hasattr(module, "save_pretrained") for module in model._model.modules()
        ):
            load("extras.huggingface_models:prepare")(model._model, compile_data)

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        if self._sharded is None:  # Thunder calls transform_module only if a module is jitted
            raise coded_error(TypeError, "module.function-instead-of-module")
        if self._again is None:
            assert self._sharded.module_params.has_placeholders, (
                "Thunder has traced the module without asking its cache"
            )
            self._sharded.module_params.replace_placeholders()
        refuse_foreign_parameters(prologue_trace, self._sharded.module, self._sharded.shards, self._sharded.known())
        no_sync = get_skip_data_parallel_grad_sync()
        self._forget_oldest()
        call = read_call(prologue_trace, no_sync=no_sync)
        self._sharded.progress.log_phase(
            "traced for %s, %d bound symbols", call, len(computation_trace.bound_symbols), stage="differentiating"
        )
        original, memory = self._without_alias_updates(computation_trace), MemoryOfInputs()
        writes_in_place = any(bsym.sym.id is PrimIDs.COPY_ for bsym in nested(original.bound_symbols))
        compiles_again = not writes_in_place and can_compile_again(self)
        if writes_in_place:
            from .mends.write_out_of_place import write_out_of_place  # here, because most programs write nothing

            named = parameters_among(computation_trace.args, prologue_trace)
            sharded = {arg: name for arg, name in named.items() if name in self._sharded.locations}  # not ignored
            computation_trace, memory = write_out_of_place(computation_trace, original=original, parameters=sharded)
        compilation = self.begin_compilation(call, no_sync=no_sync)
        compilation.context.memory_of_inputs = memory
        if compiles_again and (inputs := compilation.context.inputs) is not None and not inputs.assigned:
            compilation.traces.inputs = inputs
        mark_constants(computation_trace.bound_symbols)
        compilation.context.computation = computation_trace
        if epilogue_trace is not None:
            epilogue_trace = pipeline.epilogue(epilogue_trace, compilation.context)
        return *compilation.shard(prologue_trace, computation_trace), epilogue_trace

    def _without_alias_updates(self, computation: TraceCtx) -> TraceCtx:
        """Return the computation before Thunder has inserted alias updates, unless a transform has changed it since."""
        for stats in self._stats:
            if stats.last_traces and stats.last_traces[-1] is computation:
                is_updated = any(b.sym.id is PrimIDs.UPDATE_ALIASES for b in computation.bound_symbols)
                return stats.last_traces[-2] if is_updated else computation
        return computation

    def begin_compilation(self, call: CallSignature, *, no_sync: bool) -> Compilation:
        """Begin a compilation, which the next hooks that Thunder calls will continue."""
        self._compilation = Compilation(self, call, no_sync=no_sync)
        return self._compilation

    @property
    def _current(self) -> Compilation:
        """The compilation in progress. If it fails, its traces never appear in :attr:`compiled`."""
        assert self._compilation is not None, "Thunder transforms the prologue first"
        return self._compilation

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        return self._current.schedule(computation_trace)

    def _again_for(self, model: ThunderModule, entry: Any) -> Callable[[], Any] | None:
        """Return a function that compiles the trace of a cache entry, made for the other mode, for the present mode."""
        compiled = next((compiled for known, compiled in self._entries if known is entry), None)
        acquired = Acquired.of(entry)
        if compiled is None or compiled.traced is None or acquired is None:
            return None
        if compiled.no_sync is get_skip_data_parallel_grad_sync():
            return None

        def compile_again() -> Any:
            self.sharded.before_compiling(model, "compiling what is traced already", stage="differentiating")
            self._again = compiled
            try:
                return compile_acquired(model, acquired)
            finally:
                self._again = None

        return compile_again

    def _take_entry(self, entry: Any) -> None:
        """Verify the final traces, which later transforms may have changed, and audit their first runs."""
        programs = [(entry.computation_fn, entry.computation_traces[-1])]
        if entry.backward_fn is not None:
            programs.append((entry.backward_fn, entry.backward_traces[-1]))
        self._current.verify_again([trace for _, trace in programs])
        if self.options.debug.audit:
            self._current.audit(programs)
        if self._current.traces.inputs is not None:
            self._entries.append((entry, self._current.traces))

    def finish(self, compiled: CompiledTraces) -> None:
        """Record the traces of a finished compilation."""
        self.compiled.append(compiled)
        self._forget_traces()
        seconds = sum(compiled.pass_seconds.values())
        self.sharded.progress.end("compiled number %d; the passes took %.1f s", compiled.number, seconds)
        if len(self.compiled) == WARN_COMPILED + 1:
            texts = list(dict.fromkeys(str(c.call) for c in self.compiled))
            warnings.warn(
                f"fsdp: {len(self.compiled)} sets of input shapes and flags have been compiled for one module, and each "
                f"takes time and memory. The latest: {'; '.join(texts[-4:])}. Pad batches to a few lengths, use "
                f"thunder_fsdp_sched.eager(model) without gradients, or thunder.jit(..., cache='symbolic values'). After "
                f"{MAX_COMPILED} the oldest are forgotten",
                stacklevel=2,
            )

    def _forget_traces(self) -> None:
        """Free the traces of all but the latest compilations, here and in Thunder's cache, but not their programs.

        With ``max_memory`` none is freed, because it plans with the traces of all steps.
        """
        if self.options.max_memory is not None:
            return
        for compiled in self.compiled[:-RECENT]:
            compiled.forget_traces()
        for stats in self._stats:
            for entry in stats.interpreter_cache[: 1 - RECENT]:  # the latest is not in the cache yet
                for traces in (entry.prologue_traces, entry.computation_traces, entry.backward_traces):
                    traces.clear()

    def _forget_oldest(self) -> None:
        """Evict the oldest traces, here and in Thunder's cache, to make room for one more set."""
        for kept in (self.compiled, *(stats.interpreter_cache for stats in self._stats)):
            del kept[: max(len(kept) - MAX_COMPILED + 1, 0)]


class Compilation:
    """One compilation: the passes that turn the traces of one call into the traces that run.

    Thunder calls :meth:`shard`, then :meth:`before_fusion` and :meth:`after_fusion` with the joint trace, then
    :meth:`schedule` with the forward trace and, if there are gradients, with the backward trace.

    Attributes:
        traces: the results.
        context: the input of the passes, besides traces.
    """

    def __init__(self, transform: FSDPTransform, call: CallSignature, *, no_sync: bool) -> None:
        self.transform, self.sharded, self.options = transform, transform.sharded, transform.options
        self.traces = CompiledTraces(no_sync, next(transform._compilations), call, buckets=self.sharded.buckets)
        executors = transform._claiming
        self.context = Context(
            self.sharded.module,
            self.sharded.buckets,
            self.sharded.locations,
            self.sharded.shards,
            self.options,
            self.traces,
            StepSettings(
                prefetch=0 if self.options.prefetch == "auto" else self.options.prefetch,
                accumulate=self.options.accumulate or "unsharded",
                kept_buckets=frozenset(self.sharded.kept_buckets),
            ),
            no_sync,
            Artifacts(self.sharded.control.number, self.traces.number),
            transform._reads.take() if transform._again is None else transform._again.inputs,
            executors=executors,
            fusions=[e for e in executors if isinstance(e, FusionExecutor) and not isinstance(e, PassExecutor)],
        )
        self._artifacts = self.context.artifacts
        self._returned: list[TraceCtx] = []  # the traces returned to Thunder: forward, and backward if there is one
        self._starts: list[Any] = []  # the ``TraceStart`` of each of them
        self._later = transforms_after(transform) or ()
        changing = [t for t in self._later if type(t).transform_trace_post_optimization is not _UNCHANGED]
        if changing and get_cache_option() is CACHE_OPTIONS.NO_CACHING:
            raise coded_error(ValueError, "trace.no-caching-with-later-transform", transform=type(changing[0]).__name__)
        self._pending_grads = NO_PENDING_GRADS
        self._same = transform._again  # the earlier compilation whose joint trace this one shares
        self._hidden: TraceCtx | None = None  # the computation, if Thunder does not see it

    def shard(self, prologue: TraceCtx, computation: TraceCtx) -> tuple[TraceCtx, TraceCtx]:
        """Let the prologue unpack shards, and unshard each parameter at its first use.

        The returned computation is empty if ``differentiate`` takes the place of Thunder's autograd, or if the joint
        trace of an earlier compilation is reused: see [Note: Blocks are differentiated once] in
        ``transforms.differentiate`` and [Note: Modes share a joint trace] in ``ir.traced_computation``.
        """
        traces, transform = self.traces, self.transform
        traces.parameters = parameters_among(computation.args, prologue)
        self.context.computation = computation
        if self._same is None and self.options.debug.differentiate_once:
            traces.traced = fingerprint(computation, traces.parameters, transform)
            equal = (e for e in transform.compiled if e.traced is not None and e.traced == traces.traced)
            self._same = next(equal, None)
        prologue = with_caches(pipeline.prologue(prologue, self.context))
        if self._same is not None:
            traces.traced, traces.parameters = self._same.traced, self._same.parameters
            traces.shares = self._same.number
            return prologue, without_computation(computation)
        computation = pipeline.computation(with_caches(computation), self.context)
        if self.options.debug.differentiate_once and defers_autograd(transform):
            self._hidden = computation
            computation = without_computation(computation)
        return prologue, computation

    def before_fusion(self, joint: TraceCtx) -> TraceCtx:
        """Bucket the communication of the joint trace and choose the settings, before operators are fused."""
        traces, done = self.traces, "differentiated"
        if self._same is not None:
            assert self._same.differentiated is not None, "compilations that have finished keep their joint trace"
            joint, done = self._same.differentiated, f"shares the joint trace of compilation {self._same.number}"
        else:
            if self._hidden is not None:
                joint = self._hidden
                self.context.has_gradients = needs_backward(joint)
            joint = pipeline.autograd(joint, self.context)
        traces.differentiated = snapshot(joint)
        compute = [bsym for bsym in joint.bound_symbols if not is_declared(bsym.sym) and not runs_nothing(bsym)]
        self.context.fusions = [e for e in self.context.fusions if any(map(e.can_fuse, compute))]
        self.sharded.progress.log_phase(
            f"{done}, %d bound symbols in the joint trace", len(joint.bound_symbols), stage="bucketing and fusing"
        )
        traces.joint = pipeline.bucketed(self._choose(snapshot(joint)), self.context)
        self.context.trains = len(split_joint(traces.joint)) == 2
        return traces.joint

    def after_fusion(self, joint: TraceCtx) -> TraceCtx:
        """Run the passes that follow the fusion executors on the joint trace."""
        return pipeline.fused(joint, self.context)

    def schedule(self, unscheduled: TraceCtx) -> TraceCtx:
        """Return the forward or backward trace that runs: sorted, with slots, verified, and agreed on by all ranks."""
        traces = self.traces
        half = "backward" if is_backward_trace(unscheduled) else "forward"
        size = len(unscheduled.bound_symbols)
        self.sharded.progress.log_phase(f"scheduling {half}, %d bound symbols", size, stage=f"scheduling {half}")
        self.context.split = unscheduled
        sorted_trace = pipeline.scheduled(pipeline.split(unscheduled, self.context), self.context)
        statements = read_statements(sorted_trace)
        schedule = schedule_of(statements)
        self._artifacts.log_schedule(half, unscheduled, schedule)
        self._agree(sorted_trace, statements, half)
        trace = pipeline.finished(sorted_trace, self.context)
        self._artifacts.log(f"fsdp_{half}_after", half, lambda: str(trace), encoding="string")
        if half == "backward":
            traces.backward_before, traces.backward, traces.backward_schedule = unscheduled, trace, schedule
        else:
            traces.forward_before, traces.forward, traces.forward_schedule = unscheduled, trace, schedule
            self.context.forward = trace
        if half == "backward" or not self.context.trains:
            self._finish()
            self._artifacts.log("fsdp_memory", half, lambda: str(traces.memory), encoding="string")
        self._starts.append(self.context.start)
        self._returned.append(with_caches(trace))
        return self._returned[-1]

    def verify_again(self, final: Sequence[TraceCtx]) -> None:
        """Verify the forward and backward traces again if transforms after this one have changed them."""
        if all(map(is_unchanged, self._returned, final)):
            return
        from .proof.verify_again import verify_again  # here, because most transforms change no trace

        after = ", ".join(type(transform).__name__ for transform in self._later) or "something else"
        with self.sharded.control.announcing_failure("verifying the traces that run"):
            if self.options.ranks_may_differ:
                load("extras.ranks_differ.conflicts:refuse_changes")(after)
            most = self.options.max_gathers_in_flight
            verify_again(self._returned, final, max_gathers_in_flight=most, after=after)

    def audit(self, programs: Sequence[tuple[Callable[..., Any], TraceCtx]]) -> None:
        """Audit the first runs of the compiled forward and backward programs."""
        forward: TraceCtx | None = None
        for (program, trace), start in zip(programs, self._starts, strict=True):
            Auditor(
                program,
                trace,
                forward=forward,
                pre_shard_storage=self.sharded.pre_shard_storage,
                control=self.sharded.control,
                start=start,
                pending=set() if start is None else start.auditing,
            )
            forward = trace

    def _finish(self) -> None:
        traces, limit, compiled = self.traces, self.options.max_memory, self.transform.compiled
        traces.settings = self.context.settings
        if limit is not None:
            with self.sharded.control.announcing_failure("the check of max_memory"):
                self.transform._planner.check_memory(
                    traces, limit=limit, pending_grads=self._pending_grads, compiled=compiled
                )
        if not any(each is traces for each in compiled):  # forward has finished it already if backward is empty
            self.transform.finish(traces)

    def _choose(self, joint: TraceCtx) -> TraceCtx:
        """Return the joint trace with bucketed communication, and choose the settings for it."""
        sharded, context = self.sharded, self.context
        if not self.options.needs_search:
            return pipeline.joint(joint, context)
        found = self.transform._planner.Chooser(
            joint, context, sharded=sharded, compiled=self.transform.compiled
        ).choose()
        if found.kept_buckets is not None:
            sharded.set_kept_buckets(found.kept_buckets)
            sharded.kept_buckets_are_final = True
        self._pending_grads, self.traces.choice = found.pending_grads, found.choice
        context.settings = found.settings(sharded.kept_buckets)
        bucketed: TraceCtx = found.bucketed
        return bucketed

    def _agree(self, trace: TraceCtx, statements: Sequence[Statement], half: str) -> None:
        """Compare the compiled traces of all ranks, and prepare the agreement at run time if it is needed."""
        traces, control = self.traces, self.sharded.control
        self.context.start = None
        if control.is_single_rank or control.agreement == "never":
            return
        if self.options.ranks_may_differ:
            self.context.start = load("extras.ranks_differ.start:start_of")(self.transform, self.context, trace, half)
            return
        from .ir.computation import actions_of, computation_of  # here, because one rank compares nothing
        from .ranks.compare_programs import check_program
        from .ranks.joint_control import joint

        computation = computation_of(statements, trace.args, traces.call.inputs)
        what = f"{half} of a {'no_sync ' if traces.no_sync else ''}trace"
        guards = any(statement.effects.ensures is not None for statement in statements)
        agreed = check_program(joint(control), what, actions_of(statements), computation, guards=guards)
        if agreed.communicates and control.agrees_in_steps:
            from .runtime.trace_start import TraceStart  # here, because one rank agrees with nobody

            name, text = f"{half}_{traces.number}", f"{half} for {traces.call}"
            issues = sum(statement.issue is not None for statement in statements)
            self.context.start = TraceStart(joint(control), name, agreed, text, computation, issues)


def find_transform(model: object) -> FSDPTransform:
    """Return the transform that shards ``model``, which is a jitted module or Lightning Fabric's wrapper of one.

    Raises:
        TypeError, RuntimeError: see :func:`~thunder_fsdp_sched.sharding.sharded_module.find_sharding`.
    """
    transform = find_sharding(model)
    assert isinstance(transform, FSDPTransform)
    return transform
