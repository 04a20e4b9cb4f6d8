"""Statements that check at run time what the traces depend on, and those with which ranks agree on what they run."""

from __future__ import annotations

import weakref
from collections.abc import Collection

from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx

from ..ir.effects import NOTHING, bucket_of, effects, sends
from ..ir.inspection import AGREEMENT, args_of, forward_part, outs_of, return_of, with_bound_symbols
from ..ir.registry import register
from ..ir.symbols import fsdp_backward_done, fsdp_guard_backward, fsdp_params_unchanged
from ..runtime.bucket import Bucket
from ..runtime.trace_start import TraceStart


def _before_return(trace: TraceCtx, *bsyms: BoundSymbol, pass_name: str) -> TraceCtx:
    return with_bound_symbols(trace, [*trace.bound_symbols[:-1], *bsyms, return_of(trace)], pass_name)


def guard_outputs(epilogue: TraceCtx, *, no_sync: bool) -> TraceCtx:
    """Insert ``fsdp_guard_backward`` into the epilogue, which gets the outputs when they are connected to autograd.

    Runs on the epilogue after ``insert_unshard``. Before::

        return {'h': h, 'loss': t52}

    After::

        fsdp_guard_backward(False, h, t52)
        return {'h': h, 'loss': t52}

    See [Note: Requested gradients] in ``runtime.autograd``.
    """
    outputs = [argument for argument in epilogue.args if isinstance(argument, TensorProxy)]
    guard = fsdp_guard_backward.bind(no_sync, *outputs, output=None)
    return _before_return(epilogue, guard, pass_name="fsdp: guard outputs")


def check_params_unchanged(trace: TraceCtx, *, kept: Collection[Bucket]) -> TraceCtx:
    """Insert a guard into backward for every kept bucket, with the bucket's shards as arguments.

    Runs on the joint trace after ``regather_for_backward`` and before ``keep_fusions_apart``. Does nothing if no bucket
    is kept (ZeRO-3) or the trace has no backward part. Before, at the end of backward (ZeRO-2)::

        (t144,) = fsdp_wait_grads(bucket_blocks_0, ft155)
        return ...

    After::

        (t144,) = fsdp_wait_grads(bucket_blocks_0, ft155)
        fsdp_params_unchanged(bucket_blocks_0, t_blocks_0_weight)
        fsdp_params_unchanged(bucket_blocks_1, t_blocks_1_weight)
        fsdp_params_unchanged(bucket_blocks_2, t_blocks_2_weight)
        return ...

    The guard makes the shards saved tensors, and autograd raises an error if their version has changed. Under ZeRO-3
    they are saved anyway, because backward gathers them. At run time the guard also gathers a bucket again if an
    aborted forward or an evaluation may have overwritten it since.
    """
    gathers = [b for b in trace.bound_symbols if effects(b).is_gather and bucket_of(b).base in kept]
    if not gathers or all(forward_part(trace)[:-1]):
        return trace
    guards = [
        fsdp_params_unchanged.bind(bucket, *shards, output=None) for bucket, _, *shards in (g.args for g in gathers)
    ]
    for guard in guards:
        guard.tags.add(BoundSymbolTag.BACKWARD)
    return _before_return(trace, *guards, pass_name="fsdp: check that parameters are unchanged")


def guard_first(trace: TraceCtx) -> TraceCtx:
    """Move the guards of a backward trace to its start, right after the shards that they check are unpacked.

    Runs on the split traces after ``write_grads_in_place`` and before ``sort_communication``; any earlier, a fusion
    executor could still move them. Does nothing if the trace has no guards (forward, ZeRO-3). After, with the guards of
    the example in ``check_params_unchanged``::

        t119, t117, t116, t115, t113, t112, t111, x, t_blocks_0_weight, t_blocks_1_weight, t_blocks_2_weight, = C0
        fsdp_params_unchanged(bucket_blocks_0, t_blocks_0_weight)
        fsdp_params_unchanged(bucket_blocks_1, t_blocks_1_weight)
        fsdp_params_unchanged(bucket_blocks_2, t_blocks_2_weight)
        t121 = torch.where(t119, t70, 0)
    """
    guards = [b for b in trace.bound_symbols if effects(b).ensures is not None]
    if not guards:
        return trace
    checked = {arg for guard in guards for arg in args_of(guard)}
    others = [b for b in trace.bound_symbols if effects(b).ensures is None]
    begin = 1 + max((i for i, b in enumerate(others) if checked.intersection(outs_of(b))), default=-1)
    return with_bound_symbols(trace, [*others[:begin], *guards, *others[begin:]], "fsdp: guard kept buckets first")


_FIRST = frozenset({PrimIDs.UNPACK_TRIVIAL, PrimIDs.UNPACK_SEQUENCE, PrimIDs.COMMENT})


def insert_agreement(trace: TraceCtx, *, start: TraceStart, before_issue: bool) -> TraceCtx:
    """Insert ``fsdp_agree`` at the start, and ``fsdp_agreed`` before the first collective or before the first wait.

    Runs after ``verify`` and before ``end_backward``, on both traces, if the model has several ranks and at least one
    of them communicates in this trace. With ``before_issue``, the trace then begins so, before its first gather::

        fsdp_agree(forward_0)
        fsdp_agreed(forward_0)

    A gather that finds its bucket resident issues nothing, so it does not count as the first collective. If the bucket
    turns out not to be resident at run time, the gather settles the round itself.

    Args:
        before_issue: settle the round before the first issue (gloo), not just before the first wait (NCCL).
    """
    bsyms = list(trace.bound_symbols)
    issued: set[str] = set()
    head = next(position for position, bsym in enumerate(bsyms) if bsym.sym.id not in _FIRST)
    end = len(bsyms) - 1  # if other ranks communicate in this trace and this one does not
    for position, bsym in enumerate(bsyms):
        e, sent = effects(bsym), sends(bsym)
        if sent is not None:
            issued.add(sent.future)
        waits = e.waits is not None and e.issues is None and e.waits.future in issued
        if (sent is not None and before_issue) or waits or e.runs is not None:
            end = position
            break
    of_all = list(map(effects, bsyms))
    start.left_over = [weakref.ref(e.bucket) for e in of_all if e.runs is not None and e.bucket is not None]
    start.guarded = [weakref.ref(e.ensures.bucket) for e in of_all if e.ensures is not None]
    issues = [e.issues for e in of_all if e.issues is not None]
    start.reusing = [weakref.ref(i.bucket) for i in issues if i.window is not None and i.bucket is not None]
    bsyms.insert(end, fsdp_agreed.bind(start, output=None))
    bsyms.insert(head, fsdp_agree.bind(start, output=None))
    return with_bound_symbols(trace, bsyms, "fsdp: insert agreement")


fsdp_agree = register("fsdp_agree", TraceStart.post, lambda bsym: NOTHING)
fsdp_agreed = register("fsdp_agreed", TraceStart.settle, lambda bsym: NOTHING)
assert {fsdp_agree.name, fsdp_agreed.name} == AGREEMENT


def end_backward(trace: TraceCtx, *, no_sync: bool) -> TraceCtx:
    """Insert ``fsdp_backward_done`` before the return of backward, with the buckets whose gradients it handles.

    Runs on the backward trace after ``insert_agreement`` and before Thunder's ``del_last_used``. No statement that can
    fail follows it. Does nothing if the trace neither reduces nor accumulates gradients. Before::

        (t144,) = fsdp_wait_grads(bucket_blocks_0, ft155)
        return (None, t144, t138, t129)

    After::

        (t144,) = fsdp_wait_grads(bucket_blocks_0, ft155)
        fsdp_backward_done(False, bucket_blocks_2, bucket_blocks_1, bucket_blocks_0)
        return (None, t144, t138, t129)

    See [Note: State after an exception] in ``memory``.
    """
    buckets = [e.bucket for e in map(effects, trace.bound_symbols) if (e.leaves if no_sync else e.collects or e.runs)]
    if not buckets:
        return trace
    done = fsdp_backward_done.bind(no_sync, *buckets, output=None)
    return _before_return(trace, done, pass_name="fsdp: end of backward")
