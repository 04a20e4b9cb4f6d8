"""The transform: what Thunder calls when, and the module whose parameters are sharded.

[Note: The pipeline]
``thunder.jit`` calls, in this order (the phases are those of the table in ``passes``):

once, with the module
    ``transform_module``                      plan buckets, allocate shard buffers, turn parameters into views of them
for each new set of shapes and flags
    ``transform_traces_pre_prologue``         refuse_foreign_parameters, guard_outputs, shard_prologue, *computation*
    (Thunder goes on with an empty computation: see [Note: Blocks are differentiated once] in ``transforms.differentiate``
    and [Note: Modes share a joint trace] in ``capture.traced_computation``)
    ``JointPasses`` before the fusions        *autograd*, *joint*, the choice of settings, *bucketed*
    (Thunder: fusion executors)
    ``JointPasses`` after the fusions         *fused*
    (Thunder: the joint trace is split)
    ``transform_trace_post_optimization``     *split*, *scheduled*, *finished*: first for the forward trace, then for the
                                              backward trace; the first run of the result is audited: see
                                              [Note: The audit] in ``proof.audit``
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import thunder
from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx
from thunder.distributed import get_skip_data_parallel_grad_sync
from thunder.extend import Executor

from .capture.repetition import Repetition, call_forward, trace_module_calls
from .capture.traced_computation import defers_autograd, fingerprint
from .compilation import Compilation
from .ir.computation import Call, read_call
from .ir.registry import executor as own_executor
from .ir.schedule import StepSchedule, save_schedules
from .options import Options
from .pipeline import CompiledTraces, JointPasses, without
from .plan.plan import Plan
from .private_thunder import quiet_no_sync
from .private_torch import refuse_foreign_functions
from .sharding.huggingface_models import let_accelerate_prepare, refuse_save_pretrained, transformers_lookasides
from .sharding.jitted_state import install_state_dict
from .sharding.module_policies import attach_casts, cast_inputs
from .sharding.refusals import refuse_fsdp2_methods
from .sharding.shard_module import shard_module
from .sharding.sharded_module import ShardingTransform, find_sharding
from .transforms.guard_outputs import guard_outputs
from .transforms.shard_prologue import refuse_foreign_parameters

WARN_COMPILED = 32
"""How many sets of shapes and flags may be compiled for one module before a warning suggests alternatives."""

MAX_COMPILED = 128
"""How many sets of shapes and flags are kept for one module. A new one evicts the oldest, which is compiled again when
needed. Ranks need not evict the same one, because a program that they have agreed on is not compared again."""


class FSDPTransform(ShardingTransform):
    """The transform that shards a module's parameters and schedules their communication.

    :func:`thunder_fsdp_sched.fsdp` creates it. A transform belongs to one module. Attributes of interest to users:
    ``plan`` after ``thunder.jit``, and after a call ``compiled``, with one :class:`CompiledTraces` for each set of
    input shapes and flags, oldest first.
    """

    def __init__(self, options: Options, planner: Any = None) -> None:
        super().__init__()
        self.options = options
        self._planner = planner
        self.compiled: list[CompiledTraces] = []
        self._compilations = itertools.count()
        self._compilation: Compilation | None = None
        self._executors = (
            JointPasses(f"fsdp_sched_before_fusion_{id(self)}", self._before_fusion, claims=True),
            JointPasses(f"fsdp_sched_behind_fusion_{id(self)}", self._after_fusion),
        )
        self._claiming: tuple[Executor, ...] = ()
        self._agrees = True  # at run time; False only to measure the cost of agreement
        self._repetition = Repetition()
        self._stats: weakref.WeakSet[Any] = weakref.WeakSet()  # Thunder's, of the jitted modules that run the traces

    def __repr__(self) -> str:
        return f"fsdp({self.options})"

    @property
    def plan(self) -> Plan:
        """The buckets.

        Raises:
            RuntimeError: the transform has not been given to ``thunder.jit`` yet.
        """
        return self.sharded.plan

    def cast_inputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments cast as by a call of the jitted module, for callers that compile without a call."""
        return cast_inputs(self.sharded.mp_policy, (args, kwargs))

    @property
    def schedules(self) -> list[StepSchedule]:
        """The schedule of each compiled set of shapes and flags, oldest first."""
        return [c.schedule for c in self.compiled if c.forward_schedule is not None]

    def save_schedules(self, path: str | Path) -> None:
        """Write :attr:`schedules` to a file that ``fsdp(schedule=path)`` replays."""
        save_schedules(self.schedules, path)

    def transform_module(self, model: ThunderModule) -> None:
        if any(isinstance(transform, FSDPTransform) for transform in model._lc_transforms):
            raise ValueError("fsdp: the module is sharded already; pass one fsdp(...) in transforms=[...]")
        if self._sharded is None:
            self._sharded = shard_module(model, self.options)
            plan = self._sharded.plan
            sizes = sum(len(b.params) for b in plan), plan.param_bytes, len(plan), plan.world_size
            self._sharded.progress.say("%d parameters of %d bytes in %d buckets, sharded over %d ranks", *sizes)
        elif self._sharded.module is not model._model:
            raise ValueError(
                "this fsdp(...) already shards another module: make one transform for each module, "
                "thunder.jit(model, transforms=[fsdp(...)])"
            )
        # Adding a transform to a jitted module creates a new ThunderModule, which gets the same shards.
        self._sharded.attach(model)
        install_state_dict(model, self._sharded, to_cpu=self.options.move_state_dict_to_cpu)
        attach_casts(model, self._sharded.mp_policy)
        refuse_foreign_functions(model._model, self._sharded.locations)
        refuse_save_pretrained(model._model)
        let_accelerate_prepare(model)
        refuse_fsdp2_methods(model)
        quiet_no_sync(model)
        self._stats.add(thunder.compile_stats(model))
        compile_data = thunder.compile_data(model)
        compile_data.executor_lookasides |= transformers_lookasides()
        trace_module_calls(compile_data, self._repetition if self.options.trace_modules_once else call_forward)
        first_executor, last_executor = self._executors
        others = without(compile_data.executors_list, (own_executor, first_executor, last_executor))
        self._claiming = (own_executor, *others)
        compile_data.executors_list = (first_executor, *self._claiming, last_executor)

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        if self._sharded is None:  # Thunder calls transform_module only if a module is jitted
            raise TypeError(
                "fsdp: thunder.jit was given a function; give it the torch.nn.Module whose parameters are to be sharded, "
                "thunder.jit(module, transforms=[fsdp(...)]), and call the result in your function, or wrap the function in "
                "a module whose forward calls it"
            )
        assert self._sharded.module_params.has_placeholders, "Thunder has traced the module without asking its cache"
        self._sharded.module_params.remove_placeholders()
        refuse_foreign_parameters(prologue_trace, self._sharded.module, self._sharded.shards, self._sharded.known())
        no_sync = get_skip_data_parallel_grad_sync()
        self._forget_oldest()
        call = read_call(prologue_trace, no_sync=no_sync)
        self._sharded.progress.log_phase(
            "traced for %s, %d bound symbols", call, len(computation_trace.bound_symbols), stage="differentiating"
        )
        compilation = self.begin_compilation(call, no_sync=no_sync)
        if epilogue_trace is not None:
            epilogue_trace = compilation.traces.run(epilogue_trace, guard_outputs, no_sync=no_sync)
        if not self.options.trace_modules_once:
            return *compilation.shard(prologue_trace, computation_trace), epilogue_trace
        here, defers = partial(fingerprint, transform=self), defers_autograd(self)
        return *compilation.shard(prologue_trace, computation_trace, here, defers_autograd=defers), epilogue_trace

    def begin_compilation(self, call: Call, *, no_sync: bool) -> Compilation:
        """Return a new compilation, which the hooks that Thunder calls next go on with."""
        traces = CompiledTraces(no_sync, next(self._compilations), call, buckets=self.sharded.buckets)
        self._compilation = Compilation(
            traces,
            self.sharded,
            self.options,
            self._claiming,
            self._stats,
            compiled=self.compiled,
            agrees=self._agrees,
            planner=self._planner,
        )
        return self._compilation

    @property
    def _current(self) -> Compilation:
        """The compilation that Thunder is in. If it fails, its traces never appear in :attr:`compiled`."""
        assert self._compilation is not None, "Thunder transforms the prologue first"
        return self._compilation

    def _before_fusion(self, trace: TraceCtx) -> TraceCtx:
        return self._current.before_fusion(trace)

    def _after_fusion(self, trace: TraceCtx) -> TraceCtx:
        return self._current.after_fusion(trace)

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        compilation = self._current
        was_finished = compilation.is_finished  # by a forward whose backward is empty
        trace = compilation.schedule(computation_trace)
        if compilation.is_finished and not was_finished:
            self._finish(compilation.traces)
        return trace

    def _finish(self, compiled: CompiledTraces) -> None:
        self.compiled.append(compiled)
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

    def _forget_oldest(self) -> None:
        """Evict the oldest traces, here and in Thunder's cache, to make room for one more set."""
        for kept in (self.compiled, *(stats.interpreter_cache for stats in self._stats)):
            del kept[: max(len(kept) - MAX_COMPILED + 1, 0)]


def find_transform(model: object) -> FSDPTransform:
    """Return the transform that shards ``model``, a jitted module or Lightning Fabric's wrapper of one.

    Raises:
        TypeError, RuntimeError: see :func:`~thunder_fsdp_sched.sharding.sharded_module.find_sharding`.
    """
    transform = find_sharding(model)
    assert isinstance(transform, FSDPTransform)
    return transform
