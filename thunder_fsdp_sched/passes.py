"""The pipeline as a table: every pass, in order, what it runs on, when, and what must have run before it.

[Note: The table of passes]
:data:`PIPELINE` is the only place where passes are put in order. :func:`run` runs the rows of one phase: in a compilation,
in one that plans a traced step again, and, for the rows with ``searched``, for each candidate of the search. A candidate
has no fusions, and nothing of it runs, so it needs no guards, cuts, checks or releases; everything that decides order,
slots, bytes or time is the same.

A row binds what its pass needs from the :class:`Context` of the compilation. Passes return traces and store nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors.passes import del_last_used
from thunder.extend import Executor, FusionExecutor

from .ir.inspection import statements
from .ir.schedule import Schedule, StepSchedule, compute_digest
from .proof import verify
from .runtime.accumulation import Way
from .runtime.bucket import Bucket
from .runtime.memory import Arena
from .transforms.assign_slots import assign_slots
from .transforms.bucket_communication import bucket_communication
from .transforms.claim_operators import claim_operators
from .transforms.differentiate import differentiate
from .transforms.draw_once import draw_once, mark_draws, refuse_merged_draws, refuse_redrawn_gradients
from .transforms.end_backward import end_backward
from .transforms.extend_arena import release_extension
from .transforms.fuse_downcast import fuse_downcast
from .transforms.gather_from_secondary import gather_from_secondary
from .transforms.guard_kept import guard_first, guard_kept
from .transforms.insert_agreement import insert_agreement
from .transforms.insert_unshard import insert_unshard
from .transforms.keep_fusions_apart import keep_fusions_apart, remove_cuts
from .transforms.offload_activations import offload_activations, offloadable
from .transforms.regather_for_backward import regather_for_backward
from .transforms.release_slots import release_slots
from .transforms.replay_schedule import ScheduleMismatch, replay_schedule
from .transforms.reuse_from_forward import mark_retained_by_forward, reuse_from_forward
from .transforms.reuse_in_window import reuse_in_window
from .transforms.sort_communication import MAX_REDUCTIONS_IN_FLIGHT, sort_communication
from .transforms.sort_host_copies import sort_host_copies
from .transforms.sort_within_budget import shared_budget, sort_within_budget
from .transforms.write_grads_in_place import write_grads_in_place

Pass = Callable[[TraceCtx], TraceCtx]

Phase = Literal["computation", "autograd", "joint", "bucketed", "fused", "split", "scheduled", "finished"]
"""When a pass runs: on the computation that Thunder has traced; to differentiate it; on the joint trace of forward and
backward until its settings are chosen, then until operators are fused, and after that; on the forward or backward trace
when Thunder has split them; until its schedule is read, and after the ranks have compared it."""


@dataclass(frozen=True)
class Context:
    """Settings and results of one compilation from which its passes get their arguments.

    Attributes:
        buckets: all buckets of the module.
        kept: those that stay unsharded from forward to backward.
        no_sync: whether the trace is compiled for ``no_sync``.
        accumulate: how ``no_sync`` accumulates.
        deduplicate: whether operators that are alike are claimed once.
        max_unsharded_bytes, max_gathers_in_flight, release: the options of these names.
        pinned: the schedules that the option ``schedule`` pins.
        reuse: whether later micro-batches under ``no_sync`` may reuse what is gathered.
        prefetch: how many prefetch steps gathers are issued ahead of their waits.
        reductions: how many equally large reductions of one process group may be in flight.
        extends: whether backward allocates the memory of slots that only backward needs.
        recomputed: names of the values of forward that backward computes again.
        offloaded: names of the values that wait in host memory.
        copy_times: the times by which copies of offloaded values are placed: the arguments of ``sort_host_copies``.
        arena_of: the arena of a bucket.
        inputs: names of parameters by those of arguments.
        locations: bucket and index of each parameter.
        shards: parameters by name.
        executors: those that claim operators.
        fusions: those that fuse them.
        has_gradients: whether the computation has a backward.
        before_fusion: the joint trace before operators are fused.
        traced: the computation as Thunder traced it; ``None`` if it is planned again.
        forward: for a backward trace, the forward trace that runs.
        forward_schedule: its schedule.
        agreement: the arguments of ``insert_agreement``; empty if no rank has to be asked.
        trains: whether the step has a backward.
    """

    buckets: Sequence[Bucket]
    kept: Collection[Bucket]
    no_sync: bool = False
    accumulate: Way = "unsharded"
    deduplicate: bool = True
    max_unsharded_bytes: int | None = None
    max_gathers_in_flight: int | None = None
    release: Literal["never", "step", "bucket"] = "never"
    pinned: Sequence[StepSchedule] | None = None
    reuse: bool = False
    prefetch: int = 1
    reductions: int = MAX_REDUCTIONS_IN_FLIGHT
    extends: bool = False
    recomputed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    copy_times: Mapping[str, Any] = field(default_factory=dict)
    arena_of: Callable[[Bucket], Arena] = lambda bucket: bucket.arena
    inputs: Mapping[str, str] = field(default_factory=dict)
    locations: Mapping[str, Any] = field(default_factory=dict)
    shards: Mapping[str, Any] = field(default_factory=dict)
    executors: Sequence[Executor] = ()
    fusions: Sequence[FusionExecutor] = ()
    has_gradients: bool | None = None
    before_fusion: TraceCtx | None = None
    traced: TraceCtx | None = None
    forward: TraceCtx | None = None
    forward_schedule: Schedule | None = None
    agreement: Mapping[str, Any] = field(default_factory=dict)
    trains: bool = False

    @property
    def backward(self) -> bool:
        """Whether the trace is a backward trace."""
        return self.forward is not None


@dataclass(frozen=True)
class Step:
    """A row of the table.

    Attributes:
        pass_: the pass.
        phase: what it runs on.
        bind: returns its other arguments for a trace.
        when: returns whether it runs; always by default.
        condition: the same in words, for the docs.
        after: passes that must precede it in the table.
        searched: whether candidates of the search run it, too.
    """

    pass_: Callable[..., TraceCtx]
    phase: Phase
    bind: Callable[[Context, TraceCtx], Mapping[str, Any]] = lambda c, trace: {}
    when: Callable[[Context], bool] = lambda c: True
    condition: str = ""
    after: tuple[Callable[..., TraceCtx], ...] = ()
    searched: bool = False

    @property
    def name(self) -> str:
        return self.pass_.__name__


def _sorting(c: Context) -> dict[str, Any]:
    limits = {"max_gathers_in_flight": c.max_gathers_in_flight, "max_reductions_in_flight": c.reductions}
    return {"prefetch": c.prefetch, **limits}


def _sorting_within(c: Context, trace: TraceCtx) -> dict[str, Any]:
    sort = partial(sort_communication, **_sorting(c))
    budget = {"max_unsharded_bytes": c.max_unsharded_bytes, "max_reductions_in_flight": c.reductions}
    return {"sort": sort, **budget, "kept": c.kept, "forward": c.forward}


def _kept_now(c: Context) -> Collection[Bucket]:
    """Return the kept buckets. A forward alone must not use the private slots that a forward may wait in, if it frees."""
    return c.kept if c.trains or c.release == "never" else frozenset()


def _slots(c: Context, trace: TraceCtx) -> dict[str, Any]:
    kept = _kept_now(c)
    room = shared_budget(trace, budget=c.max_unsharded_bytes, kept=kept)
    separate = c.release == "bucket"
    return {
        "kept": kept,
        "arena_of": c.arena_of,
        "forward": c.forward,
        "max_bytes": room,
        "separate": separate,
        "extend": c.extends,
    }


def _pinned(c: Context, trace: TraceCtx) -> dict[str, Any]:
    """Return the pinned schedule of a trace: the one for the same compute, or else the first of the same mode."""
    digest = c.forward_schedule.compute if c.forward_schedule is not None else compute_digest(statements(trace))
    pinned = [s for s in c.pinned or () if s.no_sync is c.no_sync]
    fitting = [s for s in pinned if s.forward.compute == digest] or pinned
    if not fitting:
        raise ScheduleMismatch(f"schedule: the file has no schedule for no_sync={c.no_sync}")
    schedule = fitting[0].backward if c.backward else fitting[0].forward
    if schedule is None:
        raise ScheduleMismatch("schedule: it has no backward schedule, but this model has a backward trace")
    return {"schedule": schedule}


def _retains(c: Context) -> bool:
    return c.release == "never" or (c.release == "step" and c.trains)


def _arenas(c: Context, trace: TraceCtx) -> dict[str, Any]:
    return {"arenas": {c.arena_of(bucket): None for bucket in c.buckets}}


def can_fuse_any(fusions: Sequence[FusionExecutor], bsym: BoundSymbol) -> bool:
    """Return whether one of the executors can fuse a bound symbol."""
    return any(executor.can_fuse(bsym) for executor in fusions)


def _fuses(c: Context) -> bool:
    return bool(c.fusions)


def _offloads(c: Context) -> bool:
    return bool(c.offloaded)


PIPELINE: tuple[Step, ...] = (
    Step(draw_once, "computation"),
    Step(
        insert_unshard,
        "computation",
        lambda c, t: {"inputs": c.inputs, "buckets": c.locations, "shards": c.shards},
        after=(draw_once,),
    ),
    Step(
        differentiate,
        "autograd",
        lambda c, t: {"executors": c.executors, "has_gradients": c.has_gradients},
        lambda c: c.has_gradients is not None,
        "in place of Thunder's autograd (`trace_modules_once`)",
        (insert_unshard,),
    ),
    Step(
        claim_operators,
        "autograd",
        lambda c, t: {"executors": c.executors, "once": c.deduplicate},
        lambda c: c.has_gradients is None,
        "after Thunder's autograd",
        (insert_unshard,),
    ),
    Step(
        bucket_communication,
        "joint",
        lambda c, t: {"buckets": c.buckets, "no_sync": c.no_sync, "accumulate": c.accumulate},
        after=(claim_operators, differentiate),
    ),
    Step(fuse_downcast, "joint", after=(bucket_communication,)),
    Step(
        regather_for_backward,
        "bucketed",
        lambda c, t: {"kept": c.kept, "recomputed": c.recomputed},
        after=(fuse_downcast,),
        searched=True,
    ),
    Step(guard_kept, "bucketed", lambda c, t: {"kept": c.kept}, after=(regather_for_backward,)),
    Step(
        keep_fusions_apart,
        "bucketed",
        lambda c, t: {"can_fuse": partial(can_fuse_any, c.fusions)},
        _fuses,
        "with fusion executors",
        (guard_kept,),
    ),
    Step(mark_draws, "bucketed", when=_fuses, condition="with fusion executors", after=(keep_fusions_apart,)),
    Step(
        refuse_merged_draws,
        "fused",
        lambda c, t: {"before": c.before_fusion},
        _fuses,
        "with fusion executors",
        (mark_draws,),
    ),
    Step(remove_cuts, "fused", when=_fuses, condition="with fusion executors", after=(keep_fusions_apart,)),
    Step(
        regather_for_backward,
        "fused",
        lambda c, t: {"kept": c.kept},
        _fuses,
        "with fusion executors, which can make backward read parameters of forward",
        (remove_cuts,),
    ),
    Step(gather_from_secondary, "fused", after=(regather_for_backward,), searched=True),
    Step(
        offload_activations,
        "fused",
        lambda c, t: {"offloaded": c.offloaded & offloadable(t, min_bytes=0).keys() if c.fusions else c.offloaded},
        _offloads,
        "if `max_memory` offloads values",
        (gather_from_secondary,),
        searched=True,
    ),
    Step(
        refuse_redrawn_gradients,
        "split",
        lambda c, t: {"forward": c.forward, "computation": c.traced},
        lambda c: c.backward and c.traced is not None,
        "backward of a traced step",
    ),
    Step(write_grads_in_place, "split", after=(regather_for_backward,), searched=True),
    Step(guard_first, "split", after=(guard_kept, write_grads_in_place)),
    Step(
        sort_host_copies,
        "scheduled",
        lambda c, t: c.copy_times,
        _offloads,
        "if `max_memory` offloads values",
        (offload_activations, guard_first),
        searched=True,
    ),
    Step(
        sort_communication,
        "scheduled",
        lambda c, t: _sorting(c),
        lambda c: c.pinned is None and c.max_unsharded_bytes is None,
        after=(sort_host_copies,),
        searched=True,
    ),
    Step(
        sort_within_budget,
        "scheduled",
        _sorting_within,
        lambda c: c.pinned is None and c.max_unsharded_bytes is not None,
        "in its place with `max_unsharded_bytes`",
        (sort_host_copies,),
        searched=True,
    ),
    Step(
        replay_schedule,
        "scheduled",
        _pinned,
        lambda c: c.pinned is not None,
        "in its place with `schedule`",
        (sort_host_copies,),
    ),
    Step(assign_slots, "scheduled", _slots, after=(sort_communication, replay_schedule), searched=True),
    Step(
        mark_retained_by_forward,
        "scheduled",
        when=lambda c: _retains(c) and not c.backward,
        condition="forward, unless `release` frees what it leaves",
        after=(assign_slots,),
        searched=True,
    ),
    Step(
        reuse_from_forward,
        "scheduled",
        lambda c, t: {"forward": c.forward},
        lambda c: _retains(c) and c.backward,
        "backward, unless `release` frees what forward leaves",
        (assign_slots,),
        searched=True,
    ),
    Step(
        release_slots,
        "scheduled",
        lambda c, t: {
            "when": c.release,
            "forward": c.forward,
            "waits_for_backward": c.trains and not c.backward,
        },
        lambda c: c.release != "never",
        "with `release`",
        (reuse_from_forward,),
    ),
    Step(
        release_extension,
        "scheduled",
        _arenas,
        lambda c: c.release == "never" and c.extends,
        "if `max_memory` extends the arena for backward",
        (reuse_from_forward,),
        searched=True,
    ),
    Step(
        reuse_in_window,
        "scheduled",
        lambda c, t: {"no_sync": c.no_sync},
        lambda c: c.trains and not c.backward and c.reuse,
        "forward, unless `reshard_after_backward`",
        (assign_slots,),
        searched=True,
    ),
    Step(
        verify,
        "scheduled",
        lambda c, t: {"forward": c.forward, "max_gathers_in_flight": c.max_gathers_in_flight},
        after=(release_slots, release_extension, reuse_in_window, mark_retained_by_forward),
    ),
    Step(
        insert_agreement,
        "finished",
        lambda c, t: c.agreement,
        lambda c: bool(c.agreement),
        "with several ranks",
        (verify,),
    ),
    Step(
        end_backward,
        "finished",
        lambda c, t: {"no_sync": c.no_sync},
        lambda c: c.backward,
        "backward",
        (insert_agreement,),
    ),
    Step(
        del_last_used, "finished", lambda c, t: {"clear_mutable_collections": c.backward}, after=(verify, end_backward)
    ),
)
"""All passes from the computation that Thunder has traced to the traces that run, in order."""


def steps(phase: Phase, context: Context, *, search: bool = False) -> list[Step]:
    """Return the rows of a phase that run in a context.

    Args:
        search: whether this is a candidate of the search.
    """
    return [s for s in PIPELINE if s.phase == phase and s.when(context) and (s.searched or not search)]


def run(
    phase: Phase,
    trace: TraceCtx,
    context: Context,
    *,
    search: bool = False,
    record: Callable[[Sequence[Pass], TraceCtx], TraceCtx] | None = None,
) -> TraceCtx:
    """Run the passes of a phase.

    Args:
        search: whether this is a candidate of the search.
        record: runs passes and records their times; by default they just run.
    """
    for step in steps(phase, context, search=search):
        pass_ = partial(step.pass_, **step.bind(context, trace))
        trace = pass_(trace) if record is None else record([pass_], trace)
    return trace


def table() -> str:
    """Return the table of passes in Markdown, as docs/how-it-works.md has it."""
    lines = ["| pass | phase | when | what it does | in the search |", "|---|---|---|---|---|"]
    for step in PIPELINE:
        does = (inspect.getdoc(step.pass_) or "").partition("\n")[0].replace("``", "`")
        lines.append(f"| `{step.name}` | {step.phase} | {step.condition} | {does} | {'yes' * step.searched} |")
    return "\n".join(lines)
