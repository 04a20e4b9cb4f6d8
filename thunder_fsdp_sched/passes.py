"""The pipeline as a table: every pass, in order, what it runs on, when, and what must have run before it.

[Note: The table of passes]
:data:`PIPELINE` is the only place where passes are put in order. :func:`run` runs the rows of one phase: in a compilation,
in one that plans a traced step again, and, for the rows with ``searched``, for each candidate of the search. A candidate
has no fusions, and nothing of it runs, so it needs no guards, cuts, checks or releases; everything that decides order,
slots, bytes or time is the same.

A pass gets its arguments by the names of its parameters from the :data:`Context` of the compilation; a row binds the
others. Passes return traces and store nothing.
"""

from __future__ import annotations

import inspect
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from thunder.core.trace import TraceCtx
from thunder.executors.passes import del_last_used
from thunder.extend import FusionExecutor

from .ir.inspection import statements
from .ir.schedule import Schedule, compute_digest
from .proof import verify
from .transforms.assign_slots import assign_slots
from .transforms.bucket_communication import bucket_communication
from .transforms.check_params_unchanged import check_params_unchanged, guard_first
from .transforms.claim_operators import claim_operators
from .transforms.differentiate import differentiate
from .transforms.draw_once import draw_once, mark_draws, refuse_merged_draws, reject_resampled_random_grads
from .transforms.end_backward import end_backward
from .transforms.fuse_downcast import fuse_downcast
from .transforms.gather_from_secondary import gather_from_secondary
from .transforms.guard_outputs import detach_state, guard_outputs
from .transforms.insert_agreement import insert_agreement
from .transforms.insert_unshard import insert_unshard
from .transforms.keep_fusions_apart import keep_fusions_apart, remove_cuts
from .transforms.offload_activations import offload_activations
from .transforms.recompute_whole_regions import recompute_whole_regions
from .transforms.regather_for_backward import regather_for_backward
from .transforms.release_slots import release_extension, release_slots
from .transforms.replay_schedule import ScheduleMismatch, replay_schedule
from .transforms.reuse_from_forward import mark_retained_by_forward, reuse_from_forward, reuse_in_window
from .transforms.shard_prologue import shard_prologue
from .transforms.sort_communication import sort_communication
from .transforms.sort_host_copies import sort_host_copies
from .transforms.write_grads_in_place import write_grads_in_place

Phase = Literal[
    "epilogue", "prologue", "computation", "autograd", "joint", "bucketed", "fused", "split", "scheduled", "finished"
]
"""When a pass runs: on the epilogue, the prologue and the computation that Thunder has traced; to differentiate it; on the
joint trace of forward and backward until its settings are chosen, then until operators are fused, and after that; on the
forward or backward trace when Thunder has split them; until its schedule is read, and after the ranks have compared it."""

Context = ChainMap[str, Any]
"""The settings and results of one compilation, by name: its own values, such as ``executors``, in front of the attributes
of its compiled traces and of the options. ``new_child`` changes some of them for a candidate."""

Condition = tuple[str, Callable[[Context], bool]]
"""When a pass runs: in words, for the docs, and whether it does in a context."""


@dataclass(frozen=True)
class Step:
    """A row of the table.

    Attributes:
        pass_: the pass.
        phase: what it runs on.
        after: passes that must precede it in the table.
        when: whether it runs.
        bind: returns those of its arguments for a trace that the context does not have.
        searched: whether candidates of the search run it, too.
    """

    pass_: Callable[..., TraceCtx]
    phase: Phase
    after: tuple[Callable[..., TraceCtx], ...] = ()
    when: Condition = ("", lambda c: True)
    bind: Callable[[Context, TraceCtx], Mapping[str, Any]] = lambda c, trace: {}
    searched: bool = False

    @property
    def name(self) -> str:
        return self.pass_.__name__

    def arguments(self, context: Context, trace: TraceCtx) -> dict[str, Any]:
        """Return the arguments of the pass for a trace."""
        found = {name: context[name] for name in inspect.signature(self.pass_).parameters if name in context}
        return {**found, **self.bind(context, trace)}


def _is_backward(c: Context) -> bool:
    return c["forward"] is not None


def _retains(c: Context) -> bool:
    """Return whether backward may find what forward has left in slots."""
    return c["release"] == "never" or bool(c["trains"])


def _pinned(c: Context, trace: TraceCtx) -> dict[str, Any]:
    """Return the pinned schedule of a trace: the one for the same compute, or else the first of the same mode."""
    forward: Schedule | None = c["forward_schedule"]
    digest = forward.compute if forward is not None else compute_digest(statements(trace))
    pinned = [s for s in c["schedule"] if s.no_sync is c["no_sync"]]
    fitting = [s for s in pinned if s.forward.compute == digest] or pinned
    if not fitting:
        raise ScheduleMismatch(f"schedule: the file has no schedule for no_sync={c['no_sync']}")
    schedule = fitting[0].backward if forward is not None else fitting[0].forward
    if schedule is None:
        raise ScheduleMismatch("schedule: it has no backward schedule, but this model has a backward trace")
    return {"schedule": schedule}


_FUSES: Condition = ("with fusion executors", lambda c: bool(c["fusions"]))
_OFFLOADS: Condition = ("if `max_memory` offloads values", lambda c: bool(c["offloaded"]))

PIPELINE: tuple[Step, ...] = (
    Step(detach_state, "epilogue"),
    Step(guard_outputs, "epilogue", (detach_state,)),
    Step(shard_prologue, "prologue", (guard_outputs,)),
    Step(draw_once, "computation", (shard_prologue,)),
    Step(recompute_whole_regions, "computation", (draw_once,)),
    Step(insert_unshard, "computation", (recompute_whole_regions,)),
    Step(
        differentiate,
        "autograd",
        (insert_unshard,),
        ("in place of Thunder's autograd (`trace_modules_once`)", lambda c: c["has_gradients"] is not None),
    ),
    Step(
        claim_operators,
        "autograd",
        (insert_unshard,),
        ("after Thunder's autograd", lambda c: c["has_gradients"] is None),
    ),
    Step(bucket_communication, "joint", (claim_operators, differentiate)),
    Step(fuse_downcast, "joint", (bucket_communication,)),
    Step(regather_for_backward, "bucketed", (fuse_downcast,), searched=True),
    Step(check_params_unchanged, "bucketed", (regather_for_backward,)),
    Step(keep_fusions_apart, "bucketed", (check_params_unchanged,), _FUSES),
    Step(mark_draws, "bucketed", (keep_fusions_apart,), _FUSES),
    Step(refuse_merged_draws, "fused", (mark_draws,), _FUSES),
    Step(remove_cuts, "fused", (keep_fusions_apart,), _FUSES),
    Step(
        regather_for_backward,
        "fused",
        (remove_cuts,),
        ("with fusion executors, which can make backward read parameters of forward", _FUSES[1]),
        lambda c, t: {"recomputed": ()},
    ),
    Step(gather_from_secondary, "fused", (regather_for_backward,), searched=True),
    Step(offload_activations, "fused", (gather_from_secondary,), _OFFLOADS, searched=True),
    Step(
        reject_resampled_random_grads,
        "split",
        when=("backward of a traced step", lambda c: _is_backward(c) and c["computation"] is not None),
    ),
    Step(write_grads_in_place, "split", (regather_for_backward,), searched=True),
    Step(guard_first, "split", (check_params_unchanged, write_grads_in_place)),
    Step(sort_host_copies, "scheduled", (offload_activations, guard_first), _OFFLOADS, searched=True),
    Step(
        sort_communication,
        "scheduled",
        (sort_host_copies,),
        ("unless a schedule is pinned", lambda c: c["schedule"] is None),
        searched=True,
    ),
    Step(
        replay_schedule,
        "scheduled",
        (sort_host_copies,),
        ("in its place with `schedule`", lambda c: c["schedule"] is not None),
        _pinned,
    ),
    Step(assign_slots, "scheduled", (sort_communication, replay_schedule), searched=True),
    Step(
        mark_retained_by_forward,
        "scheduled",
        (assign_slots,),
        ("forward, unless `release` frees what it leaves", lambda c: _retains(c) and not _is_backward(c)),
        searched=True,
    ),
    Step(
        reuse_from_forward,
        "scheduled",
        (assign_slots,),
        ("backward, unless `release` frees what forward leaves", lambda c: _retains(c) and _is_backward(c)),
        searched=True,
    ),
    Step(release_slots, "scheduled", (reuse_from_forward,), ("with `release`", lambda c: c["release"] != "never")),
    Step(
        release_extension,
        "scheduled",
        (reuse_from_forward,),
        ("if `max_memory` extends the arena for backward", lambda c: c["release"] == "never" and c["backward_arena"]),
        searched=True,
    ),
    Step(
        reuse_in_window,
        "scheduled",
        (assign_slots,),
        (
            "forward, unless `reshard_after_backward`",
            lambda c: c["trains"] and not _is_backward(c) and not c["reshard_after_backward"],
        ),
        searched=True,
    ),
    Step(verify, "scheduled", (release_slots, release_extension, reuse_in_window, mark_retained_by_forward)),
    Step(insert_agreement, "finished", (verify,), ("with several ranks", lambda c: c["start"] is not None)),
    Step(end_backward, "finished", (insert_agreement,), ("backward", _is_backward)),
    Step(
        del_last_used,
        "finished",
        (verify, end_backward),
        bind=lambda c, t: {"clear_mutable_collections": _is_backward(c)},
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
        if step.phase == phase and (step.searched or not search) and step.when[1](context):
            trace = record(trace, step.pass_, **step.arguments(context, trace))
    return trace


def table() -> str:
    """Return the table of passes in Markdown, as docs/how-it-works.md has it."""
    lines = ["| pass | phase | when | what it does | in the search |", "|---|---|---|---|---|"]
    for step in PIPELINE:
        sentences = " ".join((inspect.getdoc(step.pass_) or "").replace("``", "`").split())
        does = sentences.partition(". ")[0].removesuffix(".") + "."
        lines.append(f"| `{step.name}` | {step.phase} | {step.when[0]} | {does} | {'yes' * step.searched} |")
    return "\n".join(lines)


class PassExecutor(FusionExecutor):
    """A fusion executor that runs our passes.

    Its ``fusion_pass`` is the only public hook that sees the joint trace before it is split.

    Args:
        name: of the executor.
        run: the passes.
        claims: whether all operators are left to ``run`` as they are, and no later executor claims one before it.
    """

    def __init__(self, name: str, run: Callable[[TraceCtx], TraceCtx], *, claims: bool = False) -> None:
        super().__init__(name)
        self.fusion_pass = run
        self._claims = claims

    def can_execute(self, bsym: Any) -> bool:
        return False

    def can_fuse(self, bsym: Any) -> bool:
        return self._claims

    def can_execute_or_fuse(self, bsym: Any) -> bool:
        return False  # Thunder's autograd asks, to find an executor's own formula for gradients
