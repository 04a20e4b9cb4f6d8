"""The pipeline as a table: every pass, in order, what it runs on, when, and what must have run before it.

[Note: The table of passes]
:data:`PIPELINE` is the only place where passes are put in order. :func:`run` runs the rows of one phase: in a compilation,
in one that plans a traced step again, and, for the rows with ``searched``, for each candidate of the search. A candidate
has no fusions, and nothing of it runs, so it needs no guards, cuts, checks or releases; everything that decides order,
slots, bytes or time is the same.

A parameter of a pass that is named like a field of the :class:`Context` of the compilation gets its value; a row binds the
others. Passes return traces and store nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from thunder.core.trace import TraceCtx
from thunder.executors.passes import del_last_used
from thunder.extend import Executor, FusionExecutor

from .ir.inspection import statements
from .ir.schedule import Schedule, StepSchedule, compute_digest
from .proof import verify
from .runtime.accumulation import AccumulationMode
from .runtime.bucket import Bucket
from .runtime.memory import Arena
from .transforms.assign_slots import assign_slots
from .transforms.bucket_communication import bucket_communication
from .transforms.claim_operators import claim_operators
from .transforms.differentiate import differentiate
from .transforms.draw_once import draw_once, mark_draws, refuse_merged_draws, refuse_redrawn_gradients
from .transforms.end_backward import end_backward
from .transforms.fuse_downcast import fuse_downcast
from .transforms.gather_from_secondary import gather_from_secondary
from .transforms.guard_kept import guard_first, guard_kept
from .transforms.insert_agreement import insert_agreement
from .transforms.insert_unshard import insert_unshard
from .transforms.keep_fusions_apart import keep_fusions_apart, remove_cuts
from .transforms.offload_activations import offload_activations, offloadable
from .transforms.regather_for_backward import regather_for_backward
from .transforms.release_slots import release_extension, release_slots
from .transforms.replay_schedule import ScheduleMismatch, replay_schedule
from .transforms.reuse_from_forward import mark_retained_by_forward, reuse_from_forward, reuse_in_window
from .transforms.sort_communication import MAX_REDUCTIONS_IN_FLIGHT, sort_communication
from .transforms.sort_host_copies import sort_host_copies
from .transforms.sort_within_budget import shared_budget, sort_within_budget
from .transforms.write_grads_in_place import write_grads_in_place

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
        max_unsharded_bytes, max_gathers_in_flight, release: the options of these names.
        pinned: the schedules that the option ``schedule`` pins.
        reuse: whether later micro-batches under ``no_sync`` may reuse what is gathered.
        prefetch: how many prefetch steps gathers are issued ahead of their waits.
        max_reductions_in_flight: how many equally large reductions of one process group may be in flight.
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
        computation: the computation as Thunder traced it; ``None`` if it is planned again.
        forward: for a backward trace, the forward trace that runs.
        forward_schedule: its schedule.
        agreement: the arguments of ``insert_agreement``; empty if no rank has to be asked.
        trains: whether the step has a backward.
    """

    buckets: Sequence[Bucket] = ()
    kept: Collection[Bucket] = frozenset()
    no_sync: bool = False
    accumulate: AccumulationMode = "unsharded"
    max_unsharded_bytes: int | None = None
    max_gathers_in_flight: int | None = None
    release: Literal["never", "step", "bucket"] = "never"
    pinned: Sequence[StepSchedule] | None = None
    reuse: bool = False
    prefetch: int = 1
    max_reductions_in_flight: int = MAX_REDUCTIONS_IN_FLIGHT
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
    computation: TraceCtx | None = None
    forward: TraceCtx | None = None
    forward_schedule: Schedule | None = None
    agreement: Mapping[str, Any] = field(default_factory=dict)
    trains: bool = False

    @property
    def backward(self) -> bool:
        """Whether the trace is a backward trace."""
        return self.forward is not None

    @property
    def retains(self) -> bool:
        """Whether backward may find what forward has left in slots."""
        return self.release == "never" or (self.release == "step" and self.trains)


class Condition(NamedTuple):
    """When a pass runs.

    Attributes:
        words: for the docs.
        holds: whether it does in a context.
    """

    words: str
    holds: Callable[[Context], bool]


_ALWAYS = Condition("", lambda c: True)
_FUSES = Condition("with fusion executors", lambda c: bool(c.fusions))
_OFFLOADS = Condition("if `max_memory` offloads values", lambda c: bool(c.offloaded))


@dataclass(frozen=True)
class Step:
    """A row of the table.

    Attributes:
        pass_: the pass.
        phase: what it runs on.
        after: passes that must precede it in the table.
        when: whether it runs.
        bind: returns those of its arguments for a trace that are no fields of the context.
        searched: whether candidates of the search run it, too.
    """

    pass_: Callable[..., TraceCtx]
    phase: Phase
    after: tuple[Callable[..., TraceCtx], ...] = ()
    when: Condition = _ALWAYS
    bind: Callable[[Context, TraceCtx], Mapping[str, Any]] = lambda c, trace: {}
    searched: bool = False

    @property
    def name(self) -> str:
        return self.pass_.__name__

    def arguments(self, context: Context, trace: TraceCtx) -> dict[str, Any]:
        """Return the arguments of the pass for a trace."""
        parameters = inspect.signature(self.pass_).parameters
        shared = {name: getattr(context, name) for name in parameters if hasattr(context, name)}
        return {**shared, **self.bind(context, trace)}


def _slots(c: Context, trace: TraceCtx) -> dict[str, Any]:
    # A forward alone must not use the private slots that a forward may wait in, if it frees.
    kept = c.kept if c.trains or c.release == "never" else frozenset()
    room = shared_budget(trace, budget=c.max_unsharded_bytes, kept=kept)
    return {"kept": kept, "max_bytes": room, "separate": c.release == "bucket"}


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


PIPELINE: tuple[Step, ...] = (
    Step(draw_once, "computation"),
    Step(insert_unshard, "computation", (draw_once,)),
    Step(
        differentiate,
        "autograd",
        (insert_unshard,),
        Condition("in place of Thunder's autograd (`trace_modules_once`)", lambda c: c.has_gradients is not None),
    ),
    Step(
        claim_operators,
        "autograd",
        (insert_unshard,),
        Condition("after Thunder's autograd", lambda c: c.has_gradients is None),
    ),
    Step(bucket_communication, "joint", (claim_operators, differentiate)),
    Step(fuse_downcast, "joint", (bucket_communication,)),
    Step(regather_for_backward, "bucketed", (fuse_downcast,), searched=True),
    Step(guard_kept, "bucketed", (regather_for_backward,)),
    Step(keep_fusions_apart, "bucketed", (guard_kept,), _FUSES),
    Step(mark_draws, "bucketed", (keep_fusions_apart,), _FUSES),
    Step(refuse_merged_draws, "fused", (mark_draws,), _FUSES),
    Step(remove_cuts, "fused", (keep_fusions_apart,), _FUSES),
    Step(
        regather_for_backward,
        "fused",
        (remove_cuts,),
        Condition("with fusion executors, which can make backward read parameters of forward", _FUSES.holds),
        lambda c, t: {"recomputed": ()},
    ),
    Step(gather_from_secondary, "fused", (regather_for_backward,), searched=True),
    Step(
        offload_activations,
        "fused",
        (gather_from_secondary,),
        _OFFLOADS,
        lambda c, t: {"offloaded": c.offloaded & offloadable(t, min_bytes=0).keys() if c.fusions else c.offloaded},
        searched=True,
    ),
    Step(
        refuse_redrawn_gradients,
        "split",
        when=Condition("backward of a traced step", lambda c: c.backward and c.computation is not None),
    ),
    Step(write_grads_in_place, "split", (regather_for_backward,), searched=True),
    Step(guard_first, "split", (guard_kept, write_grads_in_place)),
    Step(
        sort_host_copies,
        "scheduled",
        (offload_activations, guard_first),
        _OFFLOADS,
        lambda c, t: c.copy_times,
        searched=True,
    ),
    Step(
        sort_communication,
        "scheduled",
        (sort_host_copies,),
        Condition("", lambda c: c.pinned is None and c.max_unsharded_bytes is None),
        searched=True,
    ),
    Step(
        sort_within_budget,
        "scheduled",
        (sort_host_copies,),
        Condition(
            "in its place with `max_unsharded_bytes`", lambda c: c.pinned is None and c.max_unsharded_bytes is not None
        ),
        searched=True,
    ),
    Step(
        replay_schedule,
        "scheduled",
        (sort_host_copies,),
        Condition("in its place with `schedule`", lambda c: c.pinned is not None),
        _pinned,
    ),
    Step(assign_slots, "scheduled", (sort_communication, replay_schedule), bind=_slots, searched=True),
    Step(
        mark_retained_by_forward,
        "scheduled",
        (assign_slots,),
        Condition("forward, unless `release` frees what it leaves", lambda c: c.retains and not c.backward),
        searched=True,
    ),
    Step(
        reuse_from_forward,
        "scheduled",
        (assign_slots,),
        Condition("backward, unless `release` frees what forward leaves", lambda c: c.retains and c.backward),
        searched=True,
    ),
    Step(
        release_slots,
        "scheduled",
        (reuse_from_forward,),
        Condition("with `release`", lambda c: c.release != "never"),
        lambda c, t: {"waits_for_backward": c.trains and not c.backward},
    ),
    Step(
        release_extension,
        "scheduled",
        (reuse_from_forward,),
        Condition("if `max_memory` extends the arena for backward", lambda c: c.release == "never" and c.extends),
        lambda c, t: {"arenas": dict.fromkeys(map(c.arena_of, c.buckets))},
        searched=True,
    ),
    Step(
        reuse_in_window,
        "scheduled",
        (assign_slots,),
        Condition("forward, unless `reshard_after_backward`", lambda c: c.trains and not c.backward and c.reuse),
        searched=True,
    ),
    Step(verify, "scheduled", (release_slots, release_extension, reuse_in_window, mark_retained_by_forward)),
    Step(
        insert_agreement,
        "finished",
        (verify,),
        Condition("with several ranks", lambda c: bool(c.agreement)),
        lambda c, t: c.agreement,
    ),
    Step(end_backward, "finished", (insert_agreement,), Condition("backward", lambda c: c.backward)),
    Step(
        del_last_used, "finished", (verify, end_backward), bind=lambda c, t: {"clear_mutable_collections": c.backward}
    ),
)
"""All passes from the computation that Thunder has traced to the traces that run, in order."""


def run(
    phase: Phase,
    trace: TraceCtx,
    context: Context,
    *,
    search: bool = False,
    record: Callable[..., TraceCtx] = lambda trace, pass_, **arguments: pass_(trace, **arguments),
) -> TraceCtx:
    """Run the passes of a phase.

    Args:
        search: whether this is a candidate of the search.
        record: runs a pass on a trace with its arguments, and records its time; by default it just runs.
    """
    for step in PIPELINE:
        if step.phase == phase and step.when.holds(context) and (step.searched or not search):
            trace = record(trace, step.pass_, **step.arguments(context, trace))
    return trace


def table() -> str:
    """Return the table of passes in Markdown, as docs/how-it-works.md has it."""
    lines = ["| pass | phase | when | what it does | in the search |", "|---|---|---|---|---|"]
    for step in PIPELINE:
        sentences = " ".join((inspect.getdoc(step.pass_) or "").replace("``", "`").split())
        does = sentences.partition(". ")[0].removesuffix(".") + "."
        lines.append(f"| `{step.name}` | {step.phase} | {step.when.words} | {does} | {'yes' * step.searched} |")
    return "\n".join(lines)
