"""The pipeline as a table: every pass, in order, what it runs on, when, with which arguments, and why there.

[Note: The table of passes]
:data:`PIPELINE` is the only place where passes are put in order. :func:`run` runs the rows of one phase: in a compilation,
in one that plans a traced step again, and, for the rows with ``searched``, for each candidate of the search. A candidate
has no fusions, and nothing of it runs, so it needs no guards, cuts, checks or releases; everything that decides order,
slots, bytes or time is the same.

A row names the arguments of its pass, which it takes from the :class:`Context` of the compilation. Passes return traces and
store nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from thunder.core.prims import PrimIDs
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbolTag
from thunder.core.trace import TraceCtx
from thunder.executors.passes import del_last_used

from .capture.bound_symbols import IN_CHECKPOINT
from .extensions import load
from .ir.gradients import WRONG_GRADIENTS
from .ir.inspection import nested
from .kernels.symbols import executor as kernels
from .passes import Condition, Context, Later, Order, Phase, PhaseName, Step, check_order, given
from .proof import verify
from .transforms.assign_slots import assign_slots
from .transforms.bucket_communication import bucket_communication
from .transforms.claim_operators import claim_operators
from .transforms.differentiate import differentiate
from .transforms.end_backward import end_backward
from .transforms.guard_outputs import detach_constants, guard_outputs
from .transforms.insert_unshard import insert_unshard
from .transforms.regather_for_backward import regather_for_backward
from .transforms.reject_resampled_random_grads import reject_resampled_random_grads
from .transforms.reuse_from_forward import mark_retained_by_forward, reuse_from_forward, reuse_in_window
from .transforms.shard_prologue import shard_prologue
from .transforms.skip_unused_gradients import skip_unused_gradients
from .transforms.sort_communication import sort_communication
from .transforms.write_grads_in_place import write_grads_in_place

draw_once = Later("transforms.draw_once")
recompute_whole_regions = Later("transforms.recompute_whole_regions")
average_counted_targets = Later("transforms.average_counted_targets")
broadcast_scalars = Later("transforms.broadcast_scalars")
refuse_wrong_gradients = Later("transforms.refuse_wrong_gradients")
fuse_downcast = Later("transforms.fuse_downcast")
check_params_unchanged = Later("transforms.check_params_unchanged")
guard_first = Later("transforms.check_params_unchanged:guard_first")
keep_fusions_apart = Later("transforms.keep_fusions_apart")
remove_cuts = Later("transforms.keep_fusions_apart:remove_cuts")
mark_draws = Later("transforms.draws_in_fusions:mark_draws")
refuse_merged_draws = Later("transforms.draws_in_fusions:refuse_merged_draws")
release_slots = Later("transforms.release_slots")
release_extension = Later("transforms.release_slots:release_extension")
insert_agreement = Later("transforms.insert_agreement")
insert_choice = Later("extras.ranks_differ.insert_choice")
gather_from_secondary = Later("extras.secondary_shards:gather_from_secondary")
prepare_leaves = Later("extras.leaf_modules.symbols:prepare_leaves")
replay_schedule = Later("extras.replay:replay_schedule")


def _has(*names: str) -> Callable[[TraceCtx, Context], bool]:
    """Return a condition: whether a trace has bound symbols of one of these names."""
    return lambda trace, c: any(bsym.sym.name in names for bsym in trace.bound_symbols)


def _recomputes(trace: TraceCtx, c: Context) -> bool:
    """Return whether autograd recomputes a value, as in regions of ``torch.utils.checkpoint``."""
    return any(
        BoundSymbolTag.RECOMPUTE_IN_BACKWARD in bsym.tags
        or any(ProxyTag.RECOMPUTE_IN_BACKWARD in out.tags for out in bsym.flat_proxy_outs)
        for bsym in trace.bound_symbols
    )


def _casts(trace: TraceCtx, c: Context) -> bool:
    return any(bsym.sym.id is PrimIDs.CONVERT_ELEMENT_TYPE for bsym in nested(trace.bound_symbols))


def _has_scalars(trace: TraceCtx, c: Context) -> bool:
    """Return whether an operator reads a tensor without dimensions."""
    read = (p for b in nested(trace.bound_symbols) for p in b.flat_proxy_args)
    return any(isinstance(p, TensorProxy) and not p.ndim for p in read)


def _retains(c: Context) -> bool:
    """Return whether backward may find what forward has left in slots, and the ranks agree in each step that it does."""
    return c.options.agree == "step" and c.trains


_FUSES: Condition = ("if an executor can fuse operators", lambda trace, c: bool(c.fusions))

PIPELINE: tuple[Phase, ...] = (
    Phase(
        "epilogue",
        "Thunder has traced the module, and what the computation changes in place is written out of place.",
        Step(detach_constants, lambda trace, c: detach_constants(trace, computation=c.computation)),
        Step(guard_outputs, lambda trace, c: guard_outputs(trace, no_sync=c.no_sync, computation=c.computation)),
    ),
    Phase(
        "prologue",
        "",
        Step(
            shard_prologue,
            lambda trace, c: shard_prologue(
                trace,
                shards=c.shards,
                no_sync=c.no_sync,
                hooks=c.hooks,
                inputs=c.inputs,
                memory_of_inputs=c.memory_of_inputs,
            ),
        ),
    ),
    Phase(
        "computation",
        "",
        Step(draw_once, when=("with values that are recomputed", _recomputes)),
        Step(
            recompute_whole_regions,
            when=(
                "in regions of `torch.utils.checkpoint`",
                lambda trace, c: any(IN_CHECKPOINT in b.tags for b in trace.bound_symbols),
            ),
            required=False,
        ),
        Step(
            average_counted_targets,
            when=("with a `cross_entropy`", _has("cross_entropy")),
        ),
        Step(
            insert_unshard,
            lambda trace, c: insert_unshard(
                trace, parameters=c.traces.parameters, locations=c.locations, shards=c.shards
            ),
        ),
        Step(prepare_leaves, when=("with leaf modules", _has("fsdp_leaf"))),
        Step(broadcast_scalars, when=("with operands without dimensions", _has_scalars)),
        Step(
            refuse_wrong_gradients,
            when=("with an `index_put`, a `hstack` or the like", _has(*WRONG_GRADIENTS)),
        ),
    ),
    Phase(
        "autograd",
        "Thunder differentiates the computation, unless `differentiate` does, and calls this package's first executor.",
        Step(
            differentiate,
            lambda trace, c: differentiate(trace, executors=c.executors, has_gradients=given(c.has_gradients)),
            when=(
                "in place of Thunder's autograd (`trace_modules_once`)",
                lambda trace, c: c.has_gradients is not None,
            ),
        ),
        Step(
            claim_operators,
            lambda trace, c: claim_operators(trace, executors=c.executors),
            when=("after Thunder's autograd", lambda trace, c: c.has_gradients is None),
        ),
    ),
    Phase(
        "joint",
        "",
        Step(skip_unused_gradients, when=("with kernels of torch", lambda trace, c: kernels in c.executors)),
        Step(
            bucket_communication,
            lambda trace, c: bucket_communication(
                trace, buckets=c.buckets, no_sync=c.no_sync, accumulate=c.settings.accumulate
            ),
        ),
        Step(fuse_downcast, when=("with casts", _casts), required=False),
    ),
    Phase(
        "bucketed",
        "The settings are chosen, by the search if an option asks for it.",
        Step(
            regather_for_backward,
            lambda trace, c: regather_for_backward(
                trace, kept_buckets=c.settings.kept_buckets, recomputed=c.settings.recomputed
            ),
            searched=True,
        ),
        Step(
            check_params_unchanged,
            lambda trace, c: check_params_unchanged(trace, kept_buckets=c.settings.kept_buckets),
            when=("if buckets stay unsharded until backward", lambda trace, c: bool(c.settings.kept_buckets)),
        ),
        Step(keep_fusions_apart, lambda trace, c: keep_fusions_apart(trace, fusions=c.fusions), when=_FUSES),
        Step(mark_draws, when=_FUSES),
    ),
    Phase(
        "fused",
        "Thunder's fusion executors fuse operators, and Thunder calls this package's second executor.",
        Step(refuse_merged_draws, lambda trace, c: refuse_merged_draws(trace, joint=c.traces.joint), when=_FUSES),
        Step(remove_cuts, when=_FUSES),
        Step(
            regather_for_backward,
            lambda trace, c: regather_for_backward(trace, kept_buckets=c.settings.kept_buckets),
            when=("if an executor can fuse operators, which can make backward read parameters of forward", _FUSES[1]),
        ),
        Step(
            gather_from_secondary,
            when=(
                "with `Sharding(secondary_ranks=...)`",
                lambda trace, c: any(b.secondary_ranks is not None for b in c.buckets),
            ),
            searched=True,
            required=False,
        ),
    ),
    Phase(
        "split",
        "Thunder splits the joint trace; what follows runs on forward first, then on backward.",
        Step(
            reject_resampled_random_grads,
            lambda trace, c: reject_resampled_random_grads(trace, forward=c.forward, computation=c.computation),
            when=("backward of a traced step", lambda trace, c: c.forward is not None and c.computation is not None),
        ),
        Step(write_grads_in_place, searched=True, required=False),
        Step(guard_first, when=("with guards of kept buckets", _has("fsdp_params_unchanged"))),
    ),
    Phase(
        "scheduled",
        "",
        Step(
            sort_communication,
            lambda trace, c: sort_communication(
                trace,
                prefetch=c.settings.prefetch,
                max_unsharded_bytes=c.options.sharding_strategy.max_unsharded_bytes,
                max_gathers_in_flight=c.options.max_gathers_in_flight,
                reductions_in_flight=c.settings.reductions_in_flight,
                kept_buckets=c.settings.kept_buckets,
                forward=c.forward,
            ),
            when=("unless a schedule is pinned", lambda trace, c: c.options.schedule is None),
            searched=True,
            required=False,
        ),
        Step(
            replay_schedule,
            lambda trace, c: replay_schedule(
                trace,
                schedule=load("extras.replay:pinned_schedule")(
                    trace, given(c.options.schedule), c.traces.forward_schedule, no_sync=c.no_sync
                ),
            ),
            when=("in its place with `schedule`", lambda trace, c: c.options.schedule is not None),
        ),
        Step(
            assign_slots,
            lambda trace, c: assign_slots(
                trace,
                kept_buckets=c.settings.kept_buckets,
                arena_of=c.arena_of,
                forward=c.forward,
                max_unsharded_bytes=c.options.sharding_strategy.max_unsharded_bytes,
                release=c.options.sharding_strategy.release,
                trains=c.trains,
                backward_arena=c.settings.backward_arena,
            ),
            searched=True,
        ),
        Step(
            mark_retained_by_forward,
            when=(
                'forward of a backward, with `agree="step"`',
                lambda trace, c: _retains(c) and c.forward is None,
            ),
            searched=True,
            required=False,
        ),
        Step(
            reuse_from_forward,
            lambda trace, c: reuse_from_forward(trace, forward=c.forward),
            when=(
                'backward, with `agree="step"`',
                lambda trace, c: _retains(c) and c.forward is not None,
            ),
            searched=True,
            required=False,
        ),
        Step(
            release_slots,
            lambda trace, c: release_slots(trace, forward=c.forward, trains=c.trains),
            when=("with `release`", lambda trace, c: c.options.sharding_strategy.release),
            required=False,
        ),
        Step(
            release_extension,
            lambda trace, c: release_extension(trace, buckets=c.buckets, arena_of=c.arena_of),
            when=(
                "if `max_memory` extends the arena for backward",
                lambda trace, c: not c.options.sharding_strategy.release and c.settings.backward_arena,
            ),
            searched=True,
        ),
        Step(
            reuse_in_window,
            lambda trace, c: reuse_in_window(trace, no_sync=c.no_sync),
            when=(
                'forward, unless `reshard_after_backward`, with `agree="step"`',
                lambda trace, c: (
                    c.options.agree == "step"
                    and c.trains
                    and c.forward is None
                    and not c.options.sharding_strategy.reshard_after_backward
                ),
            ),
            searched=True,
            required=False,
        ),
        Step(
            verify,
            lambda trace, c: verify(
                trace, forward=c.forward, original=c.split, max_gathers_in_flight=c.options.max_gathers_in_flight
            ),
        ),
    ),
    Phase(
        "finished",
        "The schedule is read, and the ranks compare it.",
        Step(
            insert_agreement,
            lambda trace, c: insert_agreement(
                trace, start=given(c.start), before_issue=c.agrees_before_issue, audit=c.options.debug.audit
            ),
            when=("with several ranks", lambda trace, c: c.start is not None and not c.options.ranks_may_differ),
        ),
        Step(
            insert_choice,
            lambda trace, c: insert_choice(trace, start=given(c.start), audit=c.options.debug.audit),
            when=(
                "in its place with `ranks_may_differ`",
                lambda trace, c: c.start is not None and c.options.ranks_may_differ,
            ),
        ),
        Step(
            end_backward,
            lambda trace, c: end_backward(trace, no_sync=c.no_sync),
            when=("backward", lambda trace, c: c.forward is not None),
        ),
        Step(del_last_used, lambda trace, c: del_last_used(trace, clear_mutable_collections=c.forward is not None)),
    ),
)
"""All passes from the computation that Thunder has traced to the traces that run, in order."""

ORDER: tuple[Order, ...] = (
    (detach_constants, guard_outputs, "no input reaches an output through a value that is detached"),
    (
        guard_outputs,
        shard_prologue,
        "the epilogue's passes read the proxies of parameters, which become those of shards",
    ),
    (shard_prologue, insert_unshard, "the computation takes the shards that the prologue unpacks"),
    (draw_once, recompute_whole_regions, "only pure operators may stay in regions that are recomputed"),
    (recompute_whole_regions, average_counted_targets, "a loss that is recomputed is recomputed as a whole"),
    (recompute_whole_regions, differentiate, "autograd reads the tags of what is recomputed"),
    (recompute_whole_regions, claim_operators, "Thunder's autograd, right before claim_operators, reads the tags, too"),
    (
        insert_unshard,
        broadcast_scalars,
        "proxies of parameters without dimensions have those of their shards until then",
    ),
    (broadcast_scalars, differentiate, "the derivative of a broadcast is a sum"),
    (refuse_wrong_gradients, differentiate, "it looks at operators that are not differentiated yet"),
    (broadcast_scalars, claim_operators, "Thunder's autograd, right before claim_operators, differentiates broadcasts"),
    (insert_unshard, prepare_leaves, "inputs of leaves that are views of parameters are cloned"),
    (prepare_leaves, differentiate, "the grad rule of a leaf reads which gradients are needed"),
    (prepare_leaves, claim_operators, "Thunder's autograd, right before claim_operators, calls the rule, too"),
    (insert_unshard, differentiate, "the derivative of fsdp_unshard is fsdp_reduce"),
    (insert_unshard, claim_operators, "Thunder's autograd, right before claim_operators, differentiates fsdp_unshard"),
    (differentiate, skip_unused_gradients, "it looks at what reads gradients"),
    (claim_operators, skip_unused_gradients, "it looks at what reads gradients"),
    (differentiate, bucket_communication, "a bucket is reduced after the last of its gradients"),
    (claim_operators, bucket_communication, "dead code is gone by then, and with it parameters that nothing needs"),
    (bucket_communication, fuse_downcast, "a bucket has one gather by then, whose dtype may change"),
    (fuse_downcast, regather_for_backward, "backward gathers a bucket in the dtype in which forward does"),
    (check_params_unchanged, guard_first, "the guards have to exist before they move"),
    (keep_fusions_apart, remove_cuts, "the cuts have to exist before they are removed"),
    (remove_cuts, regather_for_backward, "a cut hides which values derive from parameters alone"),
    (regather_for_backward, gather_from_secondary, "backward's gathers have to exist before they change"),
    (
        reject_resampled_random_grads,
        write_grads_in_place,
        "some operators become symbols of this package, which count as pure",
    ),
    (write_grads_in_place, sort_communication, "a gradient in place needs its slot earlier, which may delay a gather"),
    (write_grads_in_place, assign_slots, "the writes of gradients get a slot, too"),
    (guard_first, sort_communication, "the guards stay where they are then, and have to be first"),
    (guard_first, replay_schedule, "the guards stay where they are then, and have to be first"),
    (sort_communication, assign_slots, "the order decides how long a slot is in use"),
    (replay_schedule, assign_slots, "the order decides how long a slot is in use"),
    (assign_slots, mark_retained_by_forward, "slots can only be compared once they are assigned"),
    (mark_retained_by_forward, reuse_from_forward, "backward reuses what forward has marked"),
    (assign_slots, reuse_from_forward, "slots can only be compared once they are assigned"),
    (assign_slots, release_slots, "only slots that are known can be freed"),
    (assign_slots, reuse_in_window, "only gathers into private slots are marked"),
    (mark_retained_by_forward, verify, "the marks are proved"),
    (reuse_from_forward, verify, "the marks are proved"),
    (reuse_in_window, verify, "the marks are proved"),
    (release_slots, verify, "it is proved that nothing is freed too early"),
    (release_extension, verify, "it is proved that nothing is freed too early"),
    (verify, insert_agreement, "the ranks agree on a trace that is proved"),
    (verify, insert_choice, "the ranks agree on a trace that is proved"),
    (insert_agreement, end_backward, "nothing that can fail may follow the end of backward"),
    (insert_choice, end_backward, "nothing that can fail may follow the end of backward"),
    (end_backward, del_last_used, "values are deleted after the last statement that reads them"),
)
"""Which pass stands before which other one, because of what. Rows may move as long as these pairs hold."""


check_order(PIPELINE, ORDER)


def run(name: PhaseName, trace: TraceCtx, context: Context, *, search: bool = False) -> TraceCtx:
    """Run the passes of a phase; see :meth:`Phase.run`."""
    [phase] = [phase for phase in PIPELINE if phase.name == name]
    return phase.run(trace, context, search=search)


def check_skipped(names: Iterable[str]) -> None:
    """Raise an error for a name that is not that of a pass which may be left out."""
    allowed = [step.name for phase in PIPELINE for step in phase.steps if not step.required]
    if wrong := [name for name in names if name not in allowed]:
        raise ValueError(f"Debug: skip_passes: {wrong[0]!r} cannot be left out; these can: {', '.join(allowed)}")


def table() -> str:
    """Return the table of passes in Markdown, as docs/how-it-works.md has it."""
    text: str = load("extras.reports.passes_table:table_of")(PIPELINE)
    return text
