"""The symbols that appear in traces: how they print, their grad rule, and their run-time implementation.

Forward and backward traces contain for each bucket::

    ft0 = fsdp_all_gather(bucket_h_0, slot_0, t_w, t_b)      # issue
    (w, b) = fsdp_wait_params(bucket_h_0, ft0)               # views of slot_0
    ft1 = fsdp_reduce_scatter(bucket_h_0, slot_1, dw, db)    # issue; slot_1 holds the unsharded gradients
    (g_w, g_b) = fsdp_wait_grads(bucket_h_0, ft1)            # views of one fresh flat buffer

A gather with ``again=True`` sends the same cast that its forward sent. A gather of forward has ``followed_by=3`` if
three issues on its arena follow it and none of them touches its memory, so that the bucket is still resident at the end
of forward. If backward gathers it into the same slot, and none of the ``preceded_by=2`` issues before that gather
touches the slot, nothing is sent, unless something else was issued on the arena in between.

Some gradients are written directly into the slot of the reduction: ``dw = fsdp_matmul_into(bucket_h_0, slot_1, 0, x,
y)`` and ``fsdp_sum_into`` compute the gradient of parameter 0 of the bucket there. The reduction copies the others.

With hybrid sharding, ``ft2 = fsdp_all_reduce(bucket_h_0, ft1)`` is between the last two: it waits for the reduction
within the group and issues the one across the replicas. The wait then takes ``ft2``.

Shards and gradients are in the order of the bucket's parameters, with ``None`` for those that the trace does not use.
A backward that reduces or accumulates gradients ends with ``fsdp_backward_done(False, bucket_h_0, bucket_h_1)``. Only
there are the gradients dropped that earlier ``no_sync`` backwards have accumulated: see [Note:
State after an exception].

``fsdp_unshard`` and ``fsdp_reduce`` exist only until the ``bucket_communication`` pass. They handle one parameter each,
so that autograd decides for each parameter whether it has a gradient. ``fsdp_cut`` and a wait's third argument, a
token, exist only around the fusion executors: see [Note: Cuts] in ``transforms.keep_fusions_apart``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from thunder.core import codeutils, devices, dtypes, prims
from thunder.core.proxies import FutureTensorProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.transforms import get_grad, put_grad
from thunder.distributed import get_skip_data_parallel_grad_sync
from thunder.extend import OperatorExecutor, register_executor

from ..compat import running_node_number
from ..distributed.process_groups import Group
from ..plan.specs import BucketSpec
from ..runtime.bucket import Bucket
from ..runtime.forward_numbers import forward_number
from ..runtime.memory import InFlight, Slot, address, failed
from ..transports.base import Views, labelled
from .operands import bucket_of

__all__ = [
    "GRAD_WRITERS",
    "ISSUES",
    "WAITS",
    "all_gather",
    "executor",
    "fsdp_accumulate_grads",
    "fsdp_all_gather",
    "fsdp_all_reduce",
    "fsdp_backward_done",
    "fsdp_check_no_sync",
    "fsdp_cut",
    "fsdp_matmul_into",
    "fsdp_params_unchanged",
    "fsdp_reduce",
    "fsdp_reduce_scatter",
    "fsdp_reduce_unreduced",
    "fsdp_sum_into",
    "fsdp_unshard",
    "fsdp_wait_grads",
    "fsdp_wait_params",
    "group_of",
    "is_there",
    "marks",
    "payload",
    "travels",
    "wait_params",
    "waited_by",
]

executor = OperatorExecutor("fsdp_sched", version="0.1")
register_executor(executor)


#
# Run-time implementations
#


def _check_shards(bucket: Bucket, shards: Sequence[torch.Tensor | None]) -> None:
    for index, (shard, pointer) in enumerate(zip(shards, bucket.shard_pointers, strict=True)):
        if shard is not None and address(shard) != pointer:
            raise RuntimeError(
                f"parameter {bucket.spec.params[index].name!r} is no longer in the shard buffer of bucket "
                f"{bucket.spec.name!r}: it was replaced by another tensor (`p.data = ...`, "
                f"or a change of dtype or device). Copy into the parameter instead: `with torch.no_grad(): p.copy_(new)`."
            )


def all_gather(
    bucket: Bucket,
    slot: Slot,
    *shards: torch.Tensor | None,
    again: bool = False,
    followed_by: int | None = None,
    preceded_by: int | None = None,
) -> InFlight:
    _check_shards(bucket, shards)
    arena, tally = slot.arena, bucket.tally
    tally.issued += 1
    arena.claim(slot)
    if arena.take_left(bucket, slot, preceded_by):
        tally.issued += 1
        return arena.issue(InFlight(bucket, "all-gather", slot, ()))
    if preceded_by is not None:
        tally.settle()  # the trace settles the round only before the first gather that certainly sends
    unsharded = slot.params[bucket]
    if slot is bucket.private_slot:
        bucket.kept_since = None
    sent = bucket.shard_to_send(again=again)
    try:
        with labelled(bucket.all_gather_label):
            works = bucket.gather_into(unsharded, sent)
        arena.issue(flight := InFlight(bucket, "all-gather", slot, works, sent=sent))
    except RuntimeError as error:
        raise failed(bucket, "all-gather", error) from error
    except BaseException as error:
        _interrupted(bucket, "all-gather", slot, error)
        raise
    tally.issued += 1
    if followed_by is not None:
        arena.leave(bucket, slot, followed_by)
    return flight


def _interrupted(bucket: Bucket, what: str, slot: Slot, error: BaseException) -> None:
    # A transport that raises an Exception leaves nothing in flight; an interrupt may have come at any time.
    if not isinstance(error, Exception):
        slot.arena.lose(bucket, what, slot)


def wait_params(bucket: Bucket, flight: InFlight, token: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    slot = flight.slot
    assert slot is not None
    slot.arena.finish(flight)
    if flight.sent is not None and bucket.spec.travel.offload and running_node_number() is not None:
        bucket.source.finish_copy()
    if slot is bucket.private_slot:
        bucket.kept_since = forward_number()
    return slot.params[bucket].tensors


def _place_of_grad(bucket: Bucket, slot: Slot, index: int) -> torch.Tensor:
    # The slot of a reduction is in use from its first gradient on.
    slot.arena.write_gradient(slot)
    return slot.grads[bucket].tensors[index]


def _matmul_into(bucket: Bucket, slot: Slot, index: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    multiply = torch.mm if a.ndim == 2 else torch.bmm  # what torch.matmul calls; both write into `out`
    return multiply(a, b, out=_place_of_grad(bucket, slot, index))


def _sum_into(
    bucket: Bucket, slot: Slot, index: int, a: torch.Tensor, dims: int | tuple[int, ...] | None, keepdim: bool
) -> torch.Tensor:
    grad = _place_of_grad(bucket, slot, index)
    return torch.sum(a, dims, keepdim, dtype=grad.dtype, out=grad)


def _reduce_scatter(bucket: Bucket, slot: Slot, *grads: torch.Tensor | None) -> InFlight:
    arena = slot.arena
    arena.claim(slot)
    unsharded = slot.grads[bucket]
    unreduced, unreduced_params = bucket.unreduced_grads()
    # All but those that their producer wrote in place: these are the view itself.
    copied = [(v, g) for v, g in zip(unsharded.tensors, grads, strict=True) if g is not None and g is not v]
    if copied:
        torch._foreach_copy_([v for v, _ in copied], [g for _, g in copied])  # one kernel on a GPU
    if unreduced is not None:
        for view, grad in zip(unsharded.tensors, grads, strict=True):
            if grad is None:
                view.zero_()
        unsharded.flat.add_(unreduced)
    bucket.tally.issued += 1
    # Autograd keeps the sharded gradients as `.grad` without a copy and adds to them, so this must be new memory.
    shard = torch.empty(bucket.shard.numel(), dtype=bucket.spec.reduce_dtype, device=bucket.spec.device)
    try:
        with labelled(bucket.reduce_scatter_label):
            works = bucket.transport.reduce_scatter(bucket, unsharded, shard)
        only_unreduced = tuple(i for i in unreduced_params if grads[i] is None)
        arena.issue(flight := InFlight(bucket, "reduce-scatter", slot, works, shard, only_unreduced))
    except RuntimeError as error:
        raise failed(bucket, "reduce-scatter", error) from error
    except BaseException as error:
        _interrupted(bucket, "reduce-scatter", slot, error)
        raise
    bucket.tally.issued += 1
    return flight


def _all_reduce(bucket: Bucket, flight: InFlight) -> InFlight:
    assert flight.slot is not None and flight.output is not None
    flight.slot.arena.finish(flight)
    return flight._replace(what="all-reduce", slot=None, works=[_average_replicas(bucket, flight.output)])


def _average_replicas(bucket: Bucket, shard: torch.Tensor) -> torch.distributed.Work:
    assert bucket.ranks.replicas is not None
    bucket.tally.issued += 1
    try:
        with labelled(bucket.all_reduce_label):
            work = torch.distributed.all_reduce(
                shard, op=torch.distributed.ReduceOp.AVG, group=bucket.ranks.replicas.process_group, async_op=True
            )
    except RuntimeError as error:
        raise failed(bucket, "all-reduce", error) from error
    bucket.tally.issued += 1
    return work


def _wait_grads(bucket: Bucket, flight: InFlight) -> tuple[torch.Tensor, ...]:
    if flight.slot is None:
        flight.wait()
    else:
        flight.slot.arena.finish(flight)
    assert flight.output is not None
    grads = bucket.sharded_grads(flight.output)
    bucket.late_grads = {index: grads[index] for index in flight.only_unreduced} if flight.only_unreduced else {}
    return grads


def _accumulate_grads(bucket: Bucket, *grads: torch.Tensor | None) -> None:
    bucket.accumulate(grads)


def _check_no_sync(module: Any, no_sync: bool) -> None:
    if get_skip_data_parallel_grad_sync() is not no_sync:
        raise RuntimeError(f"these traces were compiled for no_sync={no_sync}")


def _reduce_unreduced(bucket: Bucket) -> None:
    unreduced, unreduced_params = bucket.unreduced_grads()
    if unreduced is None:
        return
    unreduced = unreduced.clone()  # a transport may write to it, and if this backward fails it is still needed
    spec = bucket.spec
    shard = torch.empty(bucket.shard.numel(), dtype=spec.reduce_dtype, device=spec.device)
    staging = torch.empty(spec.sent_numel, dtype=shard.dtype, device=shard.device) if spec.travel.staging else None
    bucket.tally.issued += 1
    try:
        works = bucket.transport.reduce_scatter(
            bucket, Views(unreduced, (), spec.layout.pieces(unreduced), staging), shard
        )
    except RuntimeError as error:
        raise failed(bucket, "reduce-scatter", error) from error
    bucket.tally.issued += 1
    InFlight(bucket, "reduce-scatter", None, works).wait()
    if bucket.ranks.replicas is not None:
        InFlight(bucket, "all-reduce", None, [_average_replicas(bucket, shard)]).wait()
    grads = bucket.sharded_grads(shard)
    bucket.late_grads = {index: grads[index] for index in unreduced_params}


def _backward_done(no_sync: bool, *buckets: Bucket) -> None:
    for bucket in buckets:
        if no_sync:
            bucket.adding = False
        elif bucket.unreduced is not None:
            bucket.drop_unreduced()


def _params_unchanged(bucket: Bucket, *shards: torch.Tensor | None) -> None:
    # Backward receives the shards as saved tensors, and autograd compares their versions when it unpacks them.
    _check_shards(bucket, shards)
    slot = bucket.private_slot
    assert slot is not None
    slot.arena.finish_leftovers(slot)
    if bucket.is_kept_for_this_backward():
        return
    bucket.tally.settle()  # the trace settles the round only before its own collectives
    wait_params(bucket, all_gather(bucket, slot, *shards, again=True))


#
# Meta functions and printing
#


def _params_meta(bucket: Bucket, requires_grad: bool) -> tuple[TensorProxy, ...]:
    device, dtype = devices.to_device(bucket.spec.device), dtypes.to_dtype(bucket.spec.param_dtype)
    return tuple(
        TensorProxy(shape=p.shape, device=device, dtype=dtype, requires_grad=requires_grad) for p in bucket.spec.params
    )


def _future(bucket: Bucket, numel: int, dtype: torch.dtype) -> FutureTensorProxy:
    return FutureTensorProxy(shape=(numel,), device=devices.to_device(bucket.spec.device), dtype=dtypes.to_dtype(dtype))


def _all_gather_meta(
    bucket: Bucket,
    slot: Slot | None,
    *shards: TensorProxy | None,
    again: bool = False,
    followed_by: int | None = None,
    preceded_by: int | None = None,
) -> FutureTensorProxy:
    return _future(bucket, bucket.spec.layout.unsharded_numel, bucket.spec.param_dtype)


def _wait_params_meta(
    bucket: Bucket, future: FutureTensorProxy, token: TensorProxy | None = None
) -> tuple[TensorProxy, ...]:
    return _params_meta(bucket, bucket.spec.requires_grad)


def _reduce_scatter_meta(bucket: Bucket, slot: Slot | None, *grads: TensorProxy | None) -> FutureTensorProxy:
    return _future(bucket, bucket.spec.layout.shard_numel, bucket.spec.reduce_dtype)


def _grad_meta(bucket: Bucket, slot: Slot | None, index: int, *args: Any) -> TensorProxy:
    device, dtype = devices.to_device(bucket.spec.device), dtypes.to_dtype(bucket.spec.reduce_dtype)
    return TensorProxy(shape=bucket.spec.params[index].shape, device=device, dtype=dtype, requires_grad=False)


def _all_reduce_meta(bucket: Bucket, future: FutureTensorProxy) -> FutureTensorProxy:
    return _future(bucket, bucket.spec.layout.shard_numel, bucket.spec.reduce_dtype)


def _wait_grads_meta(bucket: Bucket, future: FutureTensorProxy) -> tuple[TensorProxy, ...]:
    device, dtype = devices.to_device(bucket.spec.shard_device), dtypes.to_dtype(bucket.spec.dtype)
    return tuple(
        TensorProxy(shape=p.shard_shape(bucket.rank), device=device, dtype=dtype, requires_grad=False)
        for p in bucket.spec.layout.placements
    )


def _check_no_sync_meta(module: Any, no_sync: bool) -> None:
    return None


def _none_meta(bucket: Bucket, *tensors: TensorProxy | None) -> None:
    return None


def _backward_done_meta(no_sync: bool, *buckets: Bucket) -> None:
    return None


def _cut_meta(*tensors: TensorProxy) -> tuple[TensorProxy, ...]:
    return tuple(TensorProxy(like=t) for t in tensors)


def _unshard_meta(bucket: Bucket, index: int, shard: TensorProxy) -> TensorProxy:
    spec = bucket.spec
    device, dtype = devices.to_device(spec.device), dtypes.to_dtype(spec.param_dtype)
    shape = spec.params[index].shape
    return TensorProxy(shape=shape, like=shard, device=device, dtype=dtype, requires_grad=shard.requires_grad)


def _reduce_meta(bucket: Bucket, index: int, grad: TensorProxy) -> TensorProxy:
    spec = bucket.spec
    shape = spec.layout.placements[index].shard_shape(bucket.rank)
    device, dtype = devices.to_device(spec.shard_device), dtypes.to_dtype(spec.dtype)
    return TensorProxy(shape=shape, like=grad, device=device, dtype=dtype)


def _print(
    bsym: BoundSymbol, out_printables: Any, arg_printables: Sequence[Any], kwarg_printables: dict[str, Any]
) -> str:
    """Print ``out = symbol(bucket, slot, tensors)  # bytes``, with bucket and slot by name."""

    def show(arg: Any) -> str:
        if isinstance(arg, (Bucket, Slot)):
            return str(arg)
        return codeutils.prettyprint(arg)

    args = list(bsym.args)
    while args and args[-1] is None and bsym.sym is fsdp_wait_params:
        args.pop()  # no token
    named = {key: value for key, value in bsym.kwargs.items() if value is not None}
    shown = [*map(show, args), *(f"{key}={codeutils.prettyprint(value)}" for key, value in named.items())]
    call = f"{bsym.sym.name}({', '.join(shown)})"
    if isinstance(bsym.output, Proxy):
        call = f"{bsym.output.name} = {call}"
    elif bsym.output:
        call = f"({', '.join(o.name for o in bsym.output)},) = {call}"
    if bsym.sym.name in ISSUES:
        nbytes, dtype = payload(bsym.sym.name, bucket_of(bsym).spec)
        call += f"  # {nbytes:,} bytes {str(dtype).removeprefix('torch.')}{', already resident' * is_there(bsym)}"
    return call


def _bind_handles(bsym: BoundSymbol) -> None:
    bsym._call_ctx = {**(bsym._call_ctx or {}), **{str(a): a for a in bsym.args if isinstance(a, (Bucket, Slot))}}


def _register(name: str, meta: Callable, fn: Callable, *, keep: bool = False) -> Symbol:
    symbol = executor.register_operator(
        name,
        meta=meta,
        fn=fn,
        tags=[prims.OpTags.DONT_DCE] if keep else None,
        bind_postprocess=_bind_handles,
        python_printer=_print,
    )
    executor.register_implementation(symbol, symbol)
    return symbol


def _only_in_between(*args: Any) -> None:
    raise AssertionError("fsdp_unshard, fsdp_reduce and fsdp_cut must be removed before a trace runs")


fsdp_all_gather = _register("fsdp_all_gather", _all_gather_meta, all_gather)
fsdp_wait_params = _register("fsdp_wait_params", _wait_params_meta, wait_params)
fsdp_reduce_scatter = _register("fsdp_reduce_scatter", _reduce_scatter_meta, _reduce_scatter)
fsdp_matmul_into = _register("fsdp_matmul_into", _grad_meta, _matmul_into)
fsdp_sum_into = _register("fsdp_sum_into", _grad_meta, _sum_into)
fsdp_all_reduce = _register("fsdp_all_reduce", _all_reduce_meta, _all_reduce)
fsdp_wait_grads = _register("fsdp_wait_grads", _wait_grads_meta, _wait_grads)
fsdp_accumulate_grads = _register("fsdp_accumulate_grads", _none_meta, _accumulate_grads, keep=True)
fsdp_check_no_sync = _register("fsdp_check_no_sync", _check_no_sync_meta, _check_no_sync, keep=True)
fsdp_params_unchanged = _register("fsdp_params_unchanged", _none_meta, _params_unchanged, keep=True)
fsdp_reduce_unreduced = _register("fsdp_reduce_unreduced", _none_meta, _reduce_unreduced, keep=True)
fsdp_backward_done = _register("fsdp_backward_done", _backward_done_meta, _backward_done, keep=True)
fsdp_cut = _register("fsdp_cut", _cut_meta, _only_in_between)
fsdp_unshard = _register("fsdp_unshard", _unshard_meta, _only_in_between)
fsdp_reduce = _register("fsdp_reduce", _reduce_meta, _only_in_between)

ISSUES = frozenset({fsdp_all_gather.name, fsdp_reduce_scatter.name, fsdp_all_reduce.name})
WAITS = frozenset({fsdp_wait_params.name, fsdp_wait_grads.name})

GRAD_WRITERS = {fsdp_matmul_into.name: "matmul", fsdp_sum_into.name: "sum"}
"""Symbols that write a gradient into the slot of its reduction, and the operators that they replace."""


def is_there(issue: BoundSymbol) -> bool:
    """Return whether a gather expects its bucket to be resident from forward, so that nothing is sent."""
    return issue.kwargs.get("preceded_by") is not None


def travels(bsym: BoundSymbol) -> bool:
    """Return whether ``bsym`` issues a collective and is not a gather whose bucket is already resident."""
    return bsym.sym.name in ISSUES and not is_there(bsym)


def marks(issue: BoundSymbol) -> dict[str, int]:
    """Return the marks of a gather that are set: ``followed_by`` and ``preceded_by``."""
    return {k: v for k in ("followed_by", "preceded_by") if (v := issue.kwargs.get(k)) is not None}


def payload(kind: str, spec: BucketSpec) -> tuple[int, torch.dtype]:
    """Return the bytes of the whole tensor that a collective of that kind operates on, with padding, and its dtype."""
    if kind == fsdp_all_gather.name:
        return spec.unsharded_bytes, spec.param_dtype
    if kind == fsdp_reduce_scatter.name:
        return spec.grad_bytes, spec.reduce_dtype
    return spec.layout.shard_numel * spec.reduce_dtype.itemsize, spec.reduce_dtype


def waited_by(wait: BoundSymbol) -> str:
    """Return the kind of collective that a wait waits for."""
    if wait.sym is fsdp_wait_params:
        return fsdp_all_gather.name
    return fsdp_reduce_scatter.name if bucket_of(wait).ranks.replicas is None else fsdp_all_reduce.name


def group_of(kind: str, bucket: Bucket) -> Group:
    """Return the ranks that take part in a collective of that kind."""
    if kind == fsdp_all_gather.name:
        return bucket.ranks.group
    if kind == fsdp_reduce_scatter.name:
        return bucket.ranks.reductions
    assert bucket.ranks.replicas is not None
    return bucket.ranks.replicas


def _unshard_grad(bucket: Bucket, index: int, shard: TensorProxy) -> TensorProxy:
    unsharded = fsdp_unshard(bucket, index, shard)
    put_grad(shard, fsdp_reduce(bucket, index, get_grad(unsharded)))
    return unsharded


executor.register_implementation(fsdp_unshard, fsdp_unshard, grad_transform=_unshard_grad)
