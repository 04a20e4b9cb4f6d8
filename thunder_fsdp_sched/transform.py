"""The transform: which pass runs when in Thunder's pipeline, and the module whose parameters it shards.

[Note: The pipeline]
``thunder.jit`` calls, in this order:

once, with the module
    ``transform_module``                      plan buckets, allocate shard buffers, turn parameters into views of them
for each new set of shapes and flags
    ``transform_traces_pre_prologue``         refuse_foreign_parameters, shard_prologue, insert_unshard
    (Thunder: autograd makes one joint forward/backward trace; executors claim operators)
    ``_JointPasses`` before the fusions       bucket_communication, fuse_downcast, [choose],
                                              regather_for_backward, guard_kept, keep_fusions_apart
    (Thunder: fusion executors)
    ``_JointPasses`` after the fusions        remove_cuts, regather_for_backward
    (Thunder: the joint trace is split)
    ``transform_trace_post_optimization``     [refuse_redrawn_gradients], write_grads_in_place, guard_first,
                                              sort_communication (or replay_schedule), assign_slots, mark_retained_by_forward
                                              (backward: reuse_from_forward), verify, insert_agreement, [end_backward],
                                              del_last_used
                                              first for the forward trace, then for the backward trace; the first run
                                              of the result is audited: see [Note: The audit] in ``audit``
"""

from __future__ import annotations

import itertools
import time
import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import thunder
from thunder.core.module import ThunderModule
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import Transform
from thunder.distributed import get_skip_data_parallel_grad_sync
from thunder.executors.passes import del_last_used
from thunder.extend import FusionExecutor

from .agreement.control import Run
from .logs import LOGGER
from .options import Options
from .pipeline import CompiledTraces, JointPasses, Pass, can_fuse_any, without
from .plan.specs import Plan
from .private_api import quiet_no_sync, refuse_foreign_state_dicts
from .sharding.input_casts import attach_casts, cast_inputs
from .sharding.jitted_state import hold_entries
from .sharding.sharded_module import ShardedModule, gather_param
from .simulator.autotune import choose, gather_budget, slot_budget
from .simulator.clusters import cluster_of_this_process
from .simulator.cost import AnalyticCost
from .trace import symbols
from .trace.computation import computation_of, trace_lines
from .trace.descriptions import count_issues, read_call
from .trace.inspection import is_backward_trace, split_joint, statements
from .trace.schedule import StepSchedule, compute_digest, read_program, read_schedule, save_schedules
from .transforms import (
    ScheduleMismatch,
    assign_slots,
    bucket_communication,
    end_backward,
    fuse_downcast,
    guard_first,
    guard_kept,
    insert_agreement,
    insert_unshard,
    keep_fusions_apart,
    mark_retained_by_forward,
    refuse_foreign_parameters,
    refuse_redrawn_gradients,
    regather_for_backward,
    remove_cuts,
    replay_schedule,
    reuse_from_forward,
    shard_prologue,
    sort_communication,
    unpacked_parameters,
    verify,
    write_grads_in_place,
)
from .transforms.audit import audited

__all__ = ["FSDPTransform", "find_transform"]


WARN_COMPILED = 32
"""How many sets of shapes and flags may be compiled for one module before a warning suggests alternatives."""

MAX_COMPILED = 128
"""How many sets of shapes and flags are kept for one module. A new one evicts the oldest, which is compiled again when
needed. Ranks need not evict the same one, because a program that they have agreed on is not compared again."""


class FSDPTransform(Transform):
    """The transform that shards a module's parameters and schedules their communication.

    :func:`thunder_fsdp_sched.fsdp` creates it. A transform belongs to one module. Attributes of interest to users:
    ``plan`` after ``thunder.jit``, and after a call ``compiled``, with one :class:`CompiledTraces` for each set of
    input shapes and flags, oldest first.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.compiled: list[CompiledTraces] = []
        self._compilations = itertools.count()
        self._making: CompiledTraces | None = None
        self._sharded: ShardedModule | None = None
        self._executors = (
            JointPasses(f"fsdp_sched_before_fusion_{id(self)}", self._before_fusion),
            JointPasses(f"fsdp_sched_behind_fusion_{id(self)}", self._after_fusion),
        )
        self._fusions: list[FusionExecutor] = []
        self._agrees = True  # at run time; False only to measure the cost of agreement
        self._stats: weakref.WeakSet[Any] = weakref.WeakSet()  # Thunder's, of the jitted modules that run the traces
        self._settled = False  # whether the set of kept buckets is final

    def __repr__(self) -> str:
        return f"fsdp({self.options})"

    @property
    def plan(self) -> Plan:
        """The buckets.

        Raises:
            RuntimeError: the transform has not been given to ``thunder.jit`` yet.
        """
        return self.sharded.plan

    @property
    def sharded(self) -> ShardedModule:
        """The module's shards.

        Raises:
            RuntimeError: the transform has not been given to ``thunder.jit`` yet.
        """
        if self._sharded is None:
            raise RuntimeError("fsdp(...) has no plan yet: pass it to thunder.jit(model, transforms=[fsdp(...)]) first")
        return self._sharded

    def cast_inputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments cast as by a call of the jitted module, for callers that compile without a call."""
        return cast_inputs(self.options.mp_policy, (args, kwargs))

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
            self._sharded = ShardedModule.shard(model, self.options)
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
        hold_entries(model, self._sharded)
        attach_casts(model, self.options.mp_policy)
        refuse_foreign_state_dicts(model._model, self._sharded.locations)
        quiet_no_sync(model)
        self._stats.add(thunder.compile_stats(model))
        compile_data = thunder.compile_data(model)
        first_executor, last_executor = self._executors
        others = without(compile_data.executors_list, (symbols.executor, first_executor, last_executor))
        self._fusions = [e for e in others if isinstance(e, FusionExecutor) and not isinstance(e, JointPasses)]
        compile_data.executors_list = (symbols.executor, first_executor, *others, last_executor)

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        if self._sharded is None:  # Thunder calls transform_module only if a module is jitted
            raise TypeError(
                "fsdp: thunder.jit was given a function; give it the torch.nn.Module whose parameters are to be sharded, "
                "thunder.jit(module, transforms=[fsdp(...)]), and call the result in your function"
            )
        assert self._sharded.module_params.has_placeholders, "Thunder has traced the module without asking its cache"
        self._sharded.module_params.install_shards()
        refuse_foreign_parameters(prologue_trace, self._sharded.module, self._sharded.shards, self._sharded.known())
        no_sync = get_skip_data_parallel_grad_sync()
        self._forget_oldest()
        call = read_call(prologue_trace, no_sync=no_sync)
        self._sharded.progress.log_phase("traced for %s, %d bound symbols", call, len(computation_trace.bound_symbols))
        self._making = CompiledTraces(no_sync, next(self._compilations), call)
        locations, shards = self.sharded.locations, self.sharded.shards
        unpacked = unpacked_parameters(prologue_trace)
        inputs = {
            argument.name: unpacked[value.name]
            for value, argument in zip(prologue_trace.output[0], computation_trace.args, strict=True)
            if getattr(value, "name", None) in unpacked
        }
        run = self._making.run
        prologue_trace = run([partial(shard_prologue, shards=shards, no_sync=no_sync)], prologue_trace)
        computation_trace = run(
            [partial(insert_unshard, inputs=inputs, buckets=locations, shards=shards)], computation_trace
        )
        return prologue_trace, computation_trace, epilogue_trace

    def _before_fusion(self, trace: TraceCtx) -> TraceCtx:
        compiled = self._current
        self.sharded.progress.log_phase("differentiated, %d bound symbols in the joint trace", len(trace.bound_symbols))
        bucketed = compiled.run(
            [
                partial(bucket_communication, buckets=self.sharded.buckets, no_sync=compiled.no_sync),
                fuse_downcast,
            ],
            trace,
        )
        self._choose(bucketed)
        kept = self.sharded.kept
        passes: list[Pass] = [partial(regather_for_backward, kept=kept), partial(guard_kept, kept=kept)]
        if self._fusions:
            can_fuse = partial(can_fuse_any, self._fusions)
            passes.append(partial(keep_fusions_apart, can_fuse=can_fuse))
        compiled.joint = compiled.run(passes, bucketed)
        return compiled.joint

    def _choose(self, joint: TraceCtx) -> None:
        """Choose how far ahead to gather and, once per module, which buckets stay unsharded until backward."""
        options, compiled, budget = self.options, self._current, self.options.max_unsharded_bytes
        if isinstance(options.prefetch, int):
            compiled.prefetch = options.prefetch
            if budget is None:
                return
        has_backward = len(split_joint(joint)) == 2
        started = time.process_time()
        compiled.choice = choose(
            joint,
            cost=AnalyticCost(options.cluster or cluster_of_this_process()),
            prefetch=None if options.prefetch == "auto" else options.prefetch,
            kept=self.sharded.kept,
            may_keep=budget is not None and has_backward and not self._settled,
            max_unsharded_bytes=budget,
        )
        compiled.pass_seconds["choose"] = seconds = time.process_time() - started
        compiled.prefetch = compiled.choice.chosen.prefetch
        LOGGER.debug(
            "choose: %d candidates, %.1f ms\n%s", len(compiled.choice.considered), 1e3 * seconds, compiled.choice
        )
        if budget is not None and has_backward and not self._settled:
            self.sharded.set_kept_buckets(compiled.choice.chosen.kept)
            self._settled = True

    def _after_fusion(self, trace: TraceCtx) -> TraceCtx:
        if not self._fusions:
            return trace
        passes: list[Pass] = [remove_cuts, partial(regather_for_backward, kept=self.sharded.kept)]
        return self._current.run(passes, trace)

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        backward = is_backward_trace(computation_trace)
        compiled = self._current
        name, size = "backward" if backward else "forward", len(computation_trace.bound_symbols)
        self.sharded.progress.log_phase("scheduling %s, %d bound symbols", name, size)
        checks: list[Pass] = [refuse_redrawn_gradients] if backward else []
        unsorted = compiled.run([*checks, write_grads_in_place, guard_first], computation_trace)
        forward, kept = compiled.forward if backward else None, self.sharded.kept
        room = slot_budget(unsorted, budget=self.options.max_unsharded_bytes, kept=kept)
        passes: list[Pass] = [
            self._order(unsorted, backward),
            partial(assign_slots, kept=kept, forward=forward, max_bytes=room),
            mark_retained_by_forward if forward is None else partial(reuse_from_forward, forward=forward),
            partial(verify, forward=forward),
        ]
        sorted_trace = compiled.run(passes, unsorted)
        schedule = read_schedule(sorted_trace)
        finish = self._agree(sorted_trace, backward)
        if backward:
            finish.append(partial(end_backward, no_sync=compiled.no_sync))
        finish.append(partial(del_last_used, clear_mutable_collections=backward))
        trace = compiled.run(finish, sorted_trace)
        if backward:
            compiled.backward_before, compiled.backward = computation_trace, trace
            compiled.backward_schedule = schedule
        else:
            compiled.forward_before, compiled.forward = computation_trace, trace
            compiled.forward_schedule = schedule
        assert compiled.joint is not None
        if backward or len(split_joint(compiled.joint)) == 1:
            self._finish(compiled)
        if not self.options.audit:
            return trace
        return audited(trace, forward=forward, former_memory=self.sharded.former_memory, stats=self._stats)

    def _agree(self, trace: TraceCtx, backward: bool) -> list[Pass]:
        """Compare what the ranks have compiled, and return the pass that makes them agree at run time, if needed."""
        compiled, control, name = self._current, self.sharded.control, "backward" if backward else "forward"
        computation = computation_of(trace, compiled.call.inputs)
        agreed = self.sharded.agreement.check(
            f"{name} of a {'no_sync ' if compiled.no_sync else ''}trace", read_program(trace), computation
        )
        if control.is_single_rank or not agreed.communicates or not self._agrees:
            return []
        run = Run(
            control,
            f"{name}_{compiled.number}",
            agreed,
            f"{name} for {compiled.call}",
            computation,
            trace_lines(trace),
            count_issues(trace.bound_symbols),
        )
        on_device = all(b.ranks.group.backend_for(b.spec.device) == "nccl" for b in self.sharded.buckets)
        return [partial(insert_agreement, run=run, before_issue=not on_device)]

    @property
    def _current(self) -> CompiledTraces:
        """The traces that are being compiled. If compiling fails, they never appear in :attr:`compiled`."""
        return self.compiled[-1] if self._making is None else self._making

    def _finish(self, compiled: CompiledTraces) -> None:
        if self._making is None:  # an empty backward, whose forward has finished already
            return
        self.compiled.append(compiled)
        self._making = None
        seconds = sum(compiled.pass_seconds.values())
        self.sharded.progress.log_phase("compiled number %d; the passes took %.1f s", compiled.number, seconds)
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

    def _order(self, trace: TraceCtx, backward: bool) -> Pass:
        """Return the pass that orders communication: the sorting pass, or the replay of a pinned schedule."""
        if self.options.schedule is None:
            room = gather_budget(trace, budget=self.options.max_unsharded_bytes, kept=self.sharded.kept)
            return partial(sort_communication, prefetch=self._current.prefetch, max_unsharded_bytes=room)
        compiled = self._current
        if not backward:
            digest = compute_digest(statements(trace))
            pinned = [s for s in self.options.schedule if s.no_sync is compiled.no_sync]
            fitting = [s for s in pinned if s.forward.compute == digest] or pinned
            if not fitting:
                raise ScheduleMismatch(f"schedule: the file has no schedule for no_sync={compiled.no_sync}")
            self._pinned = fitting[0]
        schedule = self._pinned.backward if backward else self._pinned.forward
        if schedule is None:
            raise ScheduleMismatch("schedule: it has no backward schedule, but this model has a backward trace")
        return partial(replay_schedule, schedule=schedule)

    def transform_state_dict_for_submodule(
        self, model: ThunderModule, submodule_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Return this rank's rows of each unsharded entry (for ``load_original_state_dict``)."""
        self.sharded.module_params.check()
        return {k: self.sharded.shard_entry(_join(submodule_name, k), v) for k, v in state_dict.items()}

    def reverse_transform_state_dict_for_submodule(
        self, model: ThunderModule, submodule_name: str, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Gather each sharded entry (for ``original_state_dict``). A collective: all ranks must call it."""
        self.sharded.module_params.check()
        self.sharded.check_initialized()
        unsharded = {}
        for key, value in state_dict.items():
            name = _join(submodule_name, key)
            if name in self.sharded.locations:
                bucket, index = self.sharded.locations[name]
                value = gather_param(bucket, index, value)
                if self.options.move_state_dict_to_cpu:
                    value = value.cpu()
            unsharded[key] = value
        return unsharded


def find_transform(model: object) -> FSDPTransform:
    """Return the transform that shards ``model``, a jitted module.

    Raises:
        TypeError: no ``fsdp(...)`` shards it.
        RuntimeError: a parameter or submodule was replaced after ``thunder.jit``.
    """
    transform = next((t for t in getattr(model, "_lc_transforms", ()) if isinstance(t, FSDPTransform)), None)
    if transform is None:
        raise TypeError(
            f"model: expected the result of thunder.jit(module, transforms=[fsdp(...)]), got a {type(model).__name__} "
            f"that no fsdp(...) shards"
        )
    if transform._sharded is not None:
        transform._sharded.module_params.check()
    return transform


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
