"""The pipeline: all passes in order, with their conditions, arguments and the reasons for their positions.

[Note: The passes]
Each function below runs the passes of one phase on a trace. No other place orders passes. The comment above a pass gives
the reason for its position. The comment of an ``if`` says when the pass runs, and is printed in docs/how-it-works.md.

Candidates of the search run the same phases with ``search``. They have no fusions and never run, so they need no guards,
cuts, checks or releases. All passes that affect order, slots, bytes or time are the same.

Passes return traces and store nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx
from thunder.executors.passes import del_last_used

from .errors import coded_error
from .extensions import load
from .ir.bound_symbols import IN_CHECKPOINT
from .ir.gradients import PIECEWISE_CONSTANT, WRONG_GRADIENTS, has_complex
from .ir.inspection import is_recomputed, nested
from .kernels.executor import executor as kernels
from .mends.random_draws import draw_once, mark_draws, refuse_merged_draws, reject_resampled_random_grads
from .passes import Context, Run
from .proof import verify
from .transforms.assign_slots import assign_slots
from .transforms.bucket_communication import bucket_communication
from .transforms.claim_operators import claim_operators, skip_unused_gradients
from .transforms.differentiate import differentiate
from .transforms.end_backward import end_backward
from .transforms.guard_outputs import detach_constants, guard_outputs
from .transforms.insert_unshard import insert_unshard
from .transforms.regather_for_backward import regather_for_backward
from .transforms.reuse_from_forward import reuse_from_forward, reuse_in_window
from .transforms.shard_prologue import shard_prologue
from .transforms.sort_communication import sort_communication
from .transforms.write_grads_in_place import write_grads_in_place

OPTIONAL = (
    "recompute_whole_regions",
    "fuse_downcast",
    "gather_from_secondary",
    "write_grads_in_place",
    "sort_communication",
    "reuse_from_forward",
    "release_slots",
    "reuse_in_window",
    "take_over_first",
)
"""Passes that ``Debug(skip_passes=...)`` may leave out: without them numbers are still right, or there is an error."""


def epilogue(trace: TraceCtx, c: Context) -> TraceCtx:
    """Thunder has traced the module, and in-place operators have been replaced by out-of-place ones."""
    run = Run(c)
    # First, so that `guard_outputs` finds no path from an input to an output through a detached value.
    trace = run(detach_constants, trace, computation=c.computation)
    # Before `shard_prologue`, which turns the proxies of parameters into those of shards.
    return run(guard_outputs, trace, no_sync=c.no_sync, computation=c.computation)


def prologue(trace: TraceCtx, c: Context) -> TraceCtx:
    run = Run(c)
    return run(
        shard_prologue,
        trace,
        module=c.module,
        shards=c.shards,
        no_sync=c.no_sync,
        inputs=c.inputs,
        memory_of_inputs=c.memory_of_inputs,
    )


def computation(trace: TraceCtx, c: Context) -> TraceCtx:
    run = Run(c)
    # After the prologue, which unpacks the shards. Before autograd, which turns `fsdp_unshard` into `fsdp_reduce`.
    trace = run(insert_unshard, trace, parameters=c.traces.parameters, locations=c.locations, shards=c.shards)
    if any(map(is_recomputed, trace.bound_symbols)):  # with values that are recomputed
        # Recomputed regions may contain only pure operators. After `insert_unshard`, because operators are observed with
        # the shapes of whole parameters.
        trace = run(draw_once, trace)
    if any(IN_CHECKPOINT in b.tags for b in trace.bound_symbols):  # in regions of `torch.utils.checkpoint`
        from .mends.recompute_whole_regions import recompute_whole_regions

        # Before autograd, which reads the tags of recomputed values.
        trace = run(recompute_whole_regions, trace)
    if _has(trace, "fsdp_leaf"):  # with leaf modules
        # After `insert_unshard`, because it clones views of parameters. Before autograd, which calls the leaves' grad
        # rule.
        trace = run(load("extras.leaf_modules.symbols:prepare_leaves"), trace)
    if _has(trace, *PIECEWISE_CONSTANT):  # with a `floor`, a `dropout` or the like
        from .mends.wrong_gradients import connect_constants

        # After in-place operators have been replaced: `floor_` is a `floor` now.
        trace = run(connect_constants, trace)
    if _has_scalars(trace):  # with operands without dimensions
        from .mends.wrong_gradients import broadcast_scalars

        # After `insert_unshard`: before it, parameters without dimensions had the shapes of their shards. Before autograd,
        # which differentiates a broadcast into a sum.
        trace = run(broadcast_scalars, trace)
    if _has(trace, *WRONG_GRADIENTS) or _has_complex(trace):  # with an `index_put`, a `hstack` or the like
        from .mends.wrong_gradients import refuse_wrong_gradients

        # Before autograd, because it checks the operators that Thunder differentiates.
        trace = run(refuse_wrong_gradients, trace)
    return trace


def autograd(trace: TraceCtx, c: Context) -> TraceCtx:
    """Thunder differentiates the computation, unless `differentiate` does, and calls this package's first executor."""
    run = Run(c)
    if c.has_gradients is not None:  # in place of Thunder's autograd (`differentiate_once`)
        return run(differentiate, trace, executors=c.executors, has_gradients=c.has_gradients)
    else:  # after Thunder's autograd
        return run(claim_operators, trace, executors=c.executors)


def joint(trace: TraceCtx, c: Context) -> TraceCtx:
    run = Run(c)
    if kernels in c.executors:  # with kernels of torch
        # After autograd, because it looks for the readers of gradients.
        trace = run(skip_unused_gradients, trace)
    # After dead code has been removed, and unused parameters with it. After autograd, which adds the gradients.
    trace = run(bucket_communication, trace, buckets=c.buckets, no_sync=c.no_sync, accumulate=c.settings.accumulate)
    if any(b.sym.id is PrimIDs.CONVERT_ELEMENT_TYPE for b in nested(trace.bound_symbols)):  # with casts
        from .transforms.fuse_downcast import fuse_downcast

        # Each bucket has one gather now, whose dtype may change. Backward's gather, inserted later, takes over the dtype.
        trace = run(fuse_downcast, trace)
    return trace


def bucketed(trace: TraceCtx, c: Context, *, search: bool = False) -> TraceCtx:
    """The settings are chosen, by the search if an option asks for it."""
    run = Run(c, search=search)
    trace = run(regather_for_backward, trace, kept_buckets=c.settings.kept_buckets, recomputed=c.settings.recomputed)
    if c.fusions and not search:  # if an executor can fuse operators
        from .transforms.keep_fusions_apart import keep_fusions_apart

        trace = run(keep_fusions_apart, trace, fusions=c.fusions)
        trace = run(mark_draws, trace)
    return trace


def fused(trace: TraceCtx, c: Context, *, search: bool = False) -> TraceCtx:
    """Thunder's fusion executors fuse operators, and Thunder calls this package's second executor."""
    run, kept_buckets = Run(c, search=search), c.settings.kept_buckets
    if c.fusions and not search:  # if an executor can fuse operators
        from .transforms.keep_fusions_apart import remove_cuts

        trace = run(refuse_merged_draws, trace, joint=c.traces.joint)
        trace = run(remove_cuts, trace)
        # Again, because a fusion can make backward read forward's parameters. Without cuts, which hide derived values.
        trace = run(regather_for_backward, trace, kept_buckets=kept_buckets)
    if kept_buckets and not search:  # if buckets stay unsharded until backward
        from .transforms.check_params_unchanged import check_params_unchanged

        # After fusion, because fusion executors could move the guards, which must come first in backward. Sorting does not.
        trace = run(check_params_unchanged, trace, kept_buckets=kept_buckets)
    if any(bucket.secondary_ranks is not None for bucket in c.buckets):  # with `Sharding(secondary_ranks=...)`
        # After `regather_for_backward`, which inserts backward's gathers.
        trace = run(load("extras.secondary_shards:gather_from_secondary"), trace)
    return trace


def split(trace: TraceCtx, c: Context, *, search: bool = False) -> TraceCtx:
    """Thunder splits the joint trace; the next phases run on forward first, then on backward."""
    run = Run(c, search=search)
    if c.forward is not None and c.computation is not None and not search:  # backward of a traced step
        # First, because the next pass replaces operators by symbols of this package, which count as pure.
        trace = run(reject_resampled_random_grads, trace, forward=c.forward, computation=c.computation)
    # Before sorting: a gradient written in place needs its slot earlier, which may delay a gather.
    return run(write_grads_in_place, trace)


def scheduled(trace: TraceCtx, c: Context, *, search: bool = False) -> TraceCtx:
    run, sharding = Run(c, search=search), c.options.sharding_strategy
    # Before slots are assigned, because the order decides how long each is in use.
    if c.options.schedule is None:  # unless a schedule is pinned
        trace = run(
            sort_communication,
            trace,
            prefetch=c.settings.prefetch,
            max_gathers_in_flight=c.options.max_gathers_in_flight,
            reductions_in_flight=c.settings.reductions_in_flight,
        )
    elif not search:  # in its place with `schedule`
        pinned = load("extras.replay:pinned_schedule")(
            trace, c.options.schedule, c.traces.forward_schedule, no_sync=c.no_sync
        )
        trace = run(load("extras.replay:replay_schedule"), trace, schedule=pinned)
    # Backward may reuse buckets that forward has left in slots only if the ranks agree on it in each step.
    retains = c.options.agree == "step" and c.trains
    trace = run(
        assign_slots,
        trace,
        kept_buckets=c.settings.kept_buckets,
        arena_of=c.arena_of,
        forward=c.forward,
        reuses=retains,
        release=sharding.release,
        trains=c.trains,
        backward_arena=c.settings.backward_arena,
    )
    if retains and c.forward is not None:  # backward, with `agree="step"`
        # After `assign_slots`, because it compares the slots of forward and backward.
        trace = run(reuse_from_forward, trace, forward=c.forward)
    if sharding.release and not search:  # with `release`
        from .transforms.release_slots import release_slots

        trace = run(release_slots, trace, forward=c.forward, trains=c.trains)
    if c.settings.backward_arena and not sharding.release:  # if `max_memory` extends the arena for backward
        from .transforms.release_slots import release_extension

        trace = run(release_extension, trace, buckets=c.buckets, arena_of=c.arena_of)
    is_window = retains and c.forward is None and not sharding.reshard_after_backward
    if is_window:  # forward, unless `reshard_after_backward`, with `agree="step"`
        trace = run(reuse_in_window, trace, no_sync=c.no_sync)
    if retains and c.forward is None and any(b.early for b in c.buckets):  # forward, after `overlap_step`
        # After `assign_slots` and `reuse_in_window`, because it reads the slots of all gathers and their marks.
        trace = run(load("extras.training.early_gathers:take_over_first"), trace)
    if not search:
        # Last, because it also verifies the marks and the releases.
        most = c.options.max_gathers_in_flight
        trace = run(verify, trace, forward=c.forward, original=c.split, max_gathers_in_flight=most)
    return trace


def finished(trace: TraceCtx, c: Context) -> TraceCtx:
    """The schedule is read, and the ranks compare it."""
    run = Run(c)
    # After verification: the ranks agree only on verified traces.
    audit = c.options.debug.audit
    if c.start is not None and not c.options.ranks_may_differ:  # with several ranks
        from .transforms.insert_agreement import insert_agreement

        trace = run(insert_agreement, trace, start=c.start, before_issue=c.agrees_before_issue, audit=audit)
    elif c.start is not None:  # in its place with `ranks_may_differ`
        trace = run(load("extras.ranks_differ.start:insert_choice"), trace, start=c.start, audit=audit)
    if c.forward is not None:  # backward
        # Nothing that can fail may follow the end of backward.
        trace = run(end_backward, trace, no_sync=c.no_sync)
    # Last, because no later pass may insert a statement that reads a deleted value.
    return run(del_last_used, trace, clear_mutable_collections=c.forward is not None)


PHASES: tuple[Callable[..., TraceCtx], ...] = (
    epilogue,
    prologue,
    computation,
    autograd,
    joint,
    bucketed,
    fused,
    split,
    scheduled,
    finished,
)
"""All phases, in order. A phase's docstring says what Thunder or ``transform.Compilation`` does right before it."""


def _has(trace: TraceCtx, *names: str) -> bool:
    """Return whether a trace has bound symbols of one of these names."""
    return any(bsym.sym.name in names for bsym in trace.bound_symbols)


def _has_scalars(trace: TraceCtx) -> bool:
    """Return whether an operator reads a tensor without dimensions."""
    read = (p for b in nested(trace.bound_symbols) for p in b.flat_proxy_args)
    return any(isinstance(p, TensorProxy) and not p.ndim for p in read)


def _has_complex(trace: TraceCtx) -> bool:
    """Return whether an operator reads a complex tensor or number."""
    return any(has_complex(b.flat_args) for b in trace.bound_symbols)


def check_skipped(names: Iterable[str]) -> None:
    """Raise an error for a name that does not belong to an optional pass."""
    if wrong := [name for name in names if name not in OPTIONAL]:
        raise coded_error(ValueError, "option.pass-cannot-be-skipped", got=wrong[0], allowed=", ".join(OPTIONAL))
