"""The symbols that appear in traces: how they print, and their grad rule. They run in ``runtime.ops``.

Forward and backward traces contain for each bucket::

    ft0 = fsdp_all_gather(bucket_h_0, slot_0, t_w, t_b)      # issue
    (w, b) = fsdp_wait_params(bucket_h_0, ft0)               # views of slot_0
    ft1 = fsdp_reduce_scatter(bucket_h_0, slot_1, dw, db)    # issue; slot_1 holds the unsharded gradients
    (g_w, g_b) = fsdp_wait_grads(bucket_h_0, ft1)            # views of one fresh flat buffer

A gather with ``again=True`` sends the same cast that its forward sent. A gather of forward has ``followed_by=3`` if
three issues on its arena follow it and none of them touches its memory, so that the bucket is still resident at the end
of forward. If backward gathers it into the same slot, and none of the ``preceded_by=2`` issues before that gather
touches the slot, nothing is sent, unless something else was issued on the arena in between. Nor is anything sent by a
gather with ``window='open'`` or ``window='last'`` if an earlier micro-batch of its accumulation window has left the bucket
in its private slot: see [Note: Gathered once in a window] in ``runtime.window``.

Some gradients are written directly into the slot of the reduction: ``dw = fsdp_matmul_into(bucket_h_0, slot_1, 0, x,
y)`` and ``fsdp_sum_into`` compute the gradient of parameter 0 of the bucket there. The reduction copies the others.

With ``reshard_after_forward=2``, forward copies a part of the bucket, and backward gathers from these copies within a
subgroup of ranks: see [Note: Secondary shards] in ``runtime.secondary``. ``x`` is a token, as in
[Note: Tokens of host copies]::

    (s, x) = fsdp_copy_secondary_shard(bucket_h_0_secondary, ft0, x, w, b)
    ft3 = fsdp_all_gather(bucket_h_0_secondary, slot_0, t_w, t_b, secondary=s)

With hybrid sharding, ``ft2 = fsdp_all_reduce(bucket_h_0, ft1)`` is between the last two: it waits for the reduction
within the group and issues the one across the replicas. The wait then takes ``ft2``.

A wait for gradients with ``hook='average'`` then calls the user's ``all_reduce_hook`` of that name, which may communicate.
So does ``fsdp_reduce_unreduced`` if it has something to reduce.

Under ``no_sync``, ``fsdp_accumulate_grads(bucket_h_0, dw, db)`` adds whole gradients to the bucket's sum. With
``accumulate="sharded"`` they are reduced, and ``fsdp_accumulate_reduced(bucket_h_0, ft1)`` waits and adds this rank's rows
to another sum: see [Note: Two ways to accumulate] in ``runtime.accumulation``.

Shards and gradients are in the order of the bucket's parameters, with ``None`` for those that the trace does not use.
A backward that reduces or accumulates gradients ends with ``fsdp_backward_done(False, bucket_h_0, bucket_h_1)``. Only
there are the gradients dropped that earlier ``no_sync`` backwards have accumulated: see [Note:
State after an exception].

With ``release`` or an extension, ``fsdp_release(slot_0, own_h_0)`` frees the memory of the arenas of these slots.

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
from thunder.extend import OperatorExecutor, register_executor

from ..distributed.process_groups import ProcessGroupRef
from ..plan.specs import BucketSpec
from ..runtime.bucket import Bucket
from ..runtime.memory import Slot
from ..runtime.module_hooks import TracedHooks, check_hooks
from ..runtime.ops import (
    accumulate_grads,
    accumulate_reduced,
    all_gather,
    all_reduce,
    backward_done,
    check_no_sync,
    matmul_into,
    params_unchanged,
    reduce_scatter,
    reduce_unreduced,
    release,
    sum_into,
    wait_grads,
    wait_params,
)
from ..runtime.requested_grads import guard_backward
from ..runtime.secondary import copy_secondary_shard
from .operands import bucket_of

__all__ = [
    "ACCUMULATORS",
    "GRAD_WRITERS",
    "ISSUES",
    "WAITS",
    "GRAD_WAITS",
    "executor",
    "fsdp_accumulate_grads",
    "fsdp_accumulate_reduced",
    "fsdp_all_gather",
    "fsdp_all_reduce",
    "fsdp_backward_done",
    "fsdp_check_hooks",
    "fsdp_check_no_sync",
    "fsdp_copy_secondary_shard",
    "fsdp_cut",
    "fsdp_guard_backward",
    "fsdp_matmul_into",
    "fsdp_params_unchanged",
    "fsdp_reduce",
    "fsdp_reduce_scatter",
    "fsdp_reduce_unreduced",
    "fsdp_release",
    "fsdp_sum_into",
    "fsdp_unshard",
    "fsdp_wait_grads",
    "fsdp_wait_params",
    "group_of",
    "is_resident",
    "residency_marks",
    "window_of",
    "payload",
    "issues_collective",
    "awaited_kind",
]

executor = OperatorExecutor("fsdp_sched", version="0.1")
register_executor(executor)


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
    window: str | None = None,
    secondary: TensorProxy | None = None,
) -> FutureTensorProxy:
    return _future(bucket, bucket.spec.layout.unsharded_numel, bucket.spec.param_dtype)


def _copy_secondary_shard_meta(
    bucket: Bucket, future: FutureTensorProxy, token: TensorProxy, *params: TensorProxy
) -> tuple[TensorProxy, TensorProxy]:
    device, dtype = devices.to_device(bucket.spec.device), dtypes.to_dtype(bucket.spec.dtype)
    return TensorProxy(shape=(bucket.spec.layout.shard_numel,), device=device, dtype=dtype, requires_grad=False), token


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


def _wait_grads_meta(bucket: Bucket, future: FutureTensorProxy, *, hook: str | None = None) -> tuple[TensorProxy, ...]:
    device, dtype = devices.to_device(bucket.spec.shard_device), dtypes.to_dtype(bucket.spec.dtype)
    return tuple(
        TensorProxy(shape=p.shard_shape(bucket.rank), device=device, dtype=dtype, requires_grad=False)
        for p in bucket.spec.layout.placements
    )


def _check_no_sync_meta(module: Any, no_sync: bool) -> None:
    return None


def _check_hooks_meta(module: Any, hooks: TracedHooks) -> None:
    return None


def _guard_backward_meta(no_sync: bool, *outputs: TensorProxy) -> None:
    return None


def _none_meta(bucket: Bucket, *tensors: TensorProxy | None, hook: str | None = None) -> None:
    return None


def _backward_done_meta(no_sync: bool, *buckets: Bucket) -> None:
    return None


def _release_meta(*slots: Slot) -> None:
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


_NAMED = (Bucket, Slot, TracedHooks)
"""Arguments that print their names."""


def _print(
    bsym: BoundSymbol, out_printables: Any, arg_printables: Sequence[Any], kwarg_printables: dict[str, Any]
) -> str:
    """Print ``out = symbol(bucket, slot, tensors)  # bytes``, with bucket, slot and hooks by name."""

    def show(arg: Any) -> str:
        if isinstance(arg, _NAMED):
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
        call += f"  # {nbytes:,} bytes {str(dtype).removeprefix('torch.')}{', already resident' * is_resident(bsym)}"
    return call


def _bind_handles(bsym: BoundSymbol) -> None:
    bsym._call_ctx = {**(bsym._call_ctx or {}), **{str(a): a for a in bsym.args if isinstance(a, _NAMED)}}


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
fsdp_copy_secondary_shard = _register("fsdp_copy_secondary_shard", _copy_secondary_shard_meta, copy_secondary_shard)
fsdp_reduce_scatter = _register("fsdp_reduce_scatter", _reduce_scatter_meta, reduce_scatter)
fsdp_matmul_into = _register("fsdp_matmul_into", _grad_meta, matmul_into)
fsdp_sum_into = _register("fsdp_sum_into", _grad_meta, sum_into)
fsdp_all_reduce = _register("fsdp_all_reduce", _all_reduce_meta, all_reduce)
fsdp_wait_grads = _register("fsdp_wait_grads", _wait_grads_meta, wait_grads)
fsdp_accumulate_grads = _register("fsdp_accumulate_grads", _none_meta, accumulate_grads, keep=True)
fsdp_accumulate_reduced = _register("fsdp_accumulate_reduced", _none_meta, accumulate_reduced, keep=True)
fsdp_check_no_sync = _register("fsdp_check_no_sync", _check_no_sync_meta, check_no_sync, keep=True)
fsdp_check_hooks = _register("fsdp_check_hooks", _check_hooks_meta, check_hooks, keep=True)
fsdp_guard_backward = _register("fsdp_guard_backward", _guard_backward_meta, guard_backward, keep=True)
fsdp_params_unchanged = _register("fsdp_params_unchanged", _none_meta, params_unchanged, keep=True)
fsdp_reduce_unreduced = _register("fsdp_reduce_unreduced", _none_meta, reduce_unreduced, keep=True)
fsdp_release = _register("fsdp_release", _release_meta, release, keep=True)
fsdp_backward_done = _register("fsdp_backward_done", _backward_done_meta, backward_done, keep=True)
fsdp_cut = _register("fsdp_cut", _cut_meta, _only_in_between)
fsdp_unshard = _register("fsdp_unshard", _unshard_meta, _only_in_between)
fsdp_reduce = _register("fsdp_reduce", _reduce_meta, _only_in_between)

ISSUES = frozenset({fsdp_all_gather.name, fsdp_reduce_scatter.name, fsdp_all_reduce.name})
GRAD_WAITS = (fsdp_wait_grads, fsdp_accumulate_reduced)
"""Symbols that wait for the reduction of a bucket's gradients."""

ACCUMULATORS = (fsdp_accumulate_grads, fsdp_accumulate_reduced)
"""Symbols that add a bucket's gradients to those of earlier micro-batches under ``no_sync``."""

WAITS = frozenset({fsdp_wait_params.name, *(symbol.name for symbol in GRAD_WAITS)})

GRAD_WRITERS = {fsdp_matmul_into.name: "matmul", fsdp_sum_into.name: "sum"}
"""Symbols that write a gradient into the slot of its reduction, and the operators that they replace."""


def is_resident(issue: BoundSymbol) -> bool:
    """Return whether a gather expects its bucket to be resident from forward, so that nothing is sent."""
    return issue.kwargs.get("preceded_by") is not None


def issues_collective(bsym: BoundSymbol) -> bool:
    """Return whether ``bsym`` issues a collective and is not a gather whose bucket is already resident."""
    return bsym.sym.name in ISSUES and not is_resident(bsym)


def residency_marks(issue: BoundSymbol) -> dict[str, int]:
    """Return the marks of a gather that are set: ``followed_by`` and ``preceded_by``."""
    return {k: v for k in ("followed_by", "preceded_by") if (v := issue.kwargs.get(k)) is not None}


def window_of(issue: BoundSymbol) -> str | None:
    """Return how a gather takes part in an accumulation window: ``"open"``, ``"last"`` or ``None``."""
    return issue.kwargs.get("window")


def payload(kind: str, spec: BucketSpec) -> tuple[int, torch.dtype]:
    """Return the bytes of the whole tensor that a collective of that kind operates on, with padding, and its dtype."""
    if kind == fsdp_all_gather.name:
        return spec.unsharded_bytes, spec.param_dtype
    if kind == fsdp_reduce_scatter.name:
        return spec.grad_bytes, spec.reduce_dtype
    return spec.layout.shard_numel * spec.reduce_dtype.itemsize, spec.reduce_dtype


def awaited_kind(wait: BoundSymbol) -> str:
    """Return the kind of collective that a wait waits for."""
    if wait.sym is fsdp_wait_params:
        return fsdp_all_gather.name
    only_inside = wait.sym is fsdp_accumulate_reduced or bucket_of(wait).ranks.replicas is None
    return fsdp_reduce_scatter.name if only_inside else fsdp_all_reduce.name


def group_of(kind: str, bucket: Bucket) -> ProcessGroupRef:
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
