"""The symbols that appear in traces: how they print, and their grad rule. They run in ``runtime.ops``.

Forward and backward traces contain for each bucket::

    ft0 = fsdp_all_gather(bucket_h_0, slot_0, t_w, t_b)      # issue
    (w, b) = fsdp_wait_params(bucket_h_0, ft0)               # views of slot_0
    ft1 = fsdp_reduce_scatter(bucket_h_0, slot_1, dw, db)    # issue; slot_1 holds the unsharded gradients
    (g_w, g_b) = fsdp_wait_grads(bucket_h_0, ft1)            # views of one fresh flat buffer

A gather with ``reuse_cast=True`` sends the same cast that its forward sent. A gather in backward with ``resident=True``
sends nothing, because forward has left the bucket in the slot, unless something was written there between the two
traces: see [Note: Buckets left by forward] in ``transforms.reuse_from_forward``. A gather with ``window='open'`` or
``window='last'`` sends nothing if an earlier micro-batch of its accumulation window has left the bucket in its private
slot: see [Note: Gathered once in a window] in ``runtime.bucket``. A gather with ``window='first'`` may have been issued
by the optimizer's step: see [Note: Gathers that a step begins] in ``extras.training.early_gathers``.

Some gradients are written directly into the slot of the reduction: ``dw = fsdp_matmul_into(bucket_h_0, slot_1, 0, x,
y)`` and ``fsdp_sum_into`` compute the gradient of parameter 0 of the bucket there. The reduction copies the others.

With ``Sharding(secondary_ranks=2)``, forward copies a part of the bucket, and backward gathers from these copies within a
subgroup of ranks: see [Note: Secondary shards] in ``extras.secondary_shards``. ``x`` is a token, see
[Note: Tokens of copies] there::

    (s, x) = fsdp_copy_secondary_shard(bucket_h_0_secondary, ft0, x, w, b)
    ft3 = fsdp_all_gather(bucket_h_0_secondary, slot_0, t_w, t_b, secondary=s)

With hybrid sharding, ``ft2 = fsdp_all_reduce(bucket_h_0, ft1)`` is between the last two: it waits for the reduction
within the group and issues the one across the replicas. The wait then takes ``ft2``.

A wait for gradients with ``hook='average'`` then calls the user's ``all_reduce_hook`` of that name, which may communicate.
So does ``fsdp_reduce_unreduced`` if it has something to reduce; that and the symbols of ``no_sync`` are in
``extras.no_sync``.

Shards and gradients are in the order of the bucket's parameters, with ``None`` for those that the trace does not use.
A backward that reduces or accumulates gradients ends with ``fsdp_backward_done(False, bucket_h_0, bucket_h_1)``. Only
this drops the gradients that earlier ``no_sync`` backwards have accumulated: see [Note: State after an exception].

With ``release`` or an extension, ``fsdp_release(slot_0, own_h_0)`` frees the memory of the arenas of these slots.

``fsdp_unshard`` and ``fsdp_reduce`` exist only until the ``bucket_communication`` pass. They handle one parameter each,
so that autograd decides for each parameter whether it has a gradient. ``fsdp_fusion_barrier`` and a wait's third argument, a
token, exist only around the fusion executors: see [Note: Cuts] in ``transforms.keep_fusions_apart``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import FutureTensorProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.transforms import get_grad, put_grad

from ..runtime import ops
from ..runtime.autograd import guard_backward
from ..runtime.bucket import Bucket
from ..runtime.memory import Slot
from ..runtime.row_dtensor import local_rows
from ..runtime.traced_inputs import assign_attributes, check_inputs, check_number
from ..runtime.traced_module import check_module
from .effects import (
    Effects,
    Issue,
    SlotRegion,
    UnbucketedParam,
    Wait,
    bucket_of,
)
from .inspection import WAIT_PARAMS, names
from .registry import executor, register

#
# Gathers
#


def tensor_proxy(
    shape: Sequence[int], device: torch.device, dtype: torch.dtype, *, requires_grad: bool = False
) -> TensorProxy:
    return TensorProxy(
        shape=shape, device=devices.to_device(device), dtype=dtypes.to_dtype(dtype), requires_grad=requires_grad
    )


def _future(bucket: Bucket, numel: int, dtype: torch.dtype) -> FutureTensorProxy:
    return FutureTensorProxy(shape=(numel,), device=devices.to_device(bucket.spec.device), dtype=dtypes.to_dtype(dtype))


def shard_bytes_in(bucket: Bucket, dtype: torch.dtype) -> int:
    """Return the bytes of the shard of a bucket, or of its gradients, in a dtype."""
    return bucket.spec.layout.shard_numel * dtype.itemsize


def loaded_bytes(bucket: Bucket) -> int:
    """Return the bytes of an offloaded shard that are copied to the device."""
    spec = bucket.spec
    return shard_bytes_in(bucket, spec.param_dtype if spec.gather_wire is None else spec.dtype)


def _all_gather_meta(
    bucket: Bucket,
    slot: Slot | None,
    *shards: TensorProxy | None,
    reuse_cast: bool = False,
    resident: bool | None = None,
    window: str | None = None,
    secondary: TensorProxy | None = None,
) -> FutureTensorProxy:
    return _future(bucket, bucket.spec.layout.unsharded_numel, bucket.spec.param_dtype)


def gather_of(bucket: Bucket, slot: Slot | None = None, future: str = "", **marks: Any) -> Issue:
    """Return the gather of a bucket."""
    spec, dtype = bucket.spec, bucket.spec.param_dtype
    region, group = SlotRegion(bucket, slot, dtype), bucket.ranks.group
    return Issue(
        "fsdp_all_gather",
        future,
        bucket,
        group,
        spec.unsharded_bytes,
        dtype,
        region,
        gathers=True,
        transport=spec.comm.transport,
        encoding=spec.options.formats[0],
        resident=bool(marks.get("resident")),
        window=marks.get("window"),
        traffic=bucket.transport.gather_traffic(spec),
        from_host=loaded_bytes(bucket) if spec.comm.offload else 0,
    )


def _all_gather_effects(bsym: BoundSymbol) -> Effects:
    bucket, slot, marks = bucket_of(bsym), bsym.args[1], bsym.kwargs
    issue = gather_of(bucket, slot, bsym.output.name, **marks)
    secondary = next(names([marks.get("secondary")]), None)
    return Effects(
        issues=issue,
        bucket=bucket,
        uses=slot,
        in_place=(issue.future,),
        requires=((secondary, None if bucket is bucket.primary else ("secondary", bucket)),),
    )


fsdp_all_gather = register("fsdp_all_gather", ops.all_gather, _all_gather_effects, _all_gather_meta)


def _wait_params_meta(
    bucket: Bucket, future: FutureTensorProxy, token: TensorProxy | None = None
) -> tuple[TensorProxy, ...]:
    spec = bucket.spec
    return tuple(
        tensor_proxy(p.shape, spec.device, spec.param_dtype, requires_grad=spec.requires_grad) for p in spec.params
    )


def _wait_params_effects(bsym: BoundSymbol) -> Effects:
    params = tuple(p.name for p in bsym.output)
    bucket, wait = bucket_of(bsym), Wait(bsym.args[1].name, (fsdp_all_gather.name,))
    return Effects(waits=wait, bucket=bucket, in_place=params)


fsdp_wait_params = register(WAIT_PARAMS, ops.wait_params, _wait_params_effects, _wait_params_meta)


#
# Reductions
#


def reduction_meta(bucket: Bucket, *operands: Any) -> FutureTensorProxy:
    return _future(bucket, bucket.spec.layout.shard_numel, bucket.spec.reduce_dtype)


def reduction_of(bucket: Bucket, slot: Slot | None = None, future: str = "") -> Issue:
    """Return the reduction of a bucket's gradients."""
    spec, dtype = bucket.spec, bucket.spec.reduce_dtype
    region, group = SlotRegion(bucket, slot, dtype), bucket.ranks.reductions
    return Issue(
        "fsdp_reduce_scatter",
        future,
        bucket,
        group,
        spec.grad_bytes,
        dtype,
        region,
        transport=spec.comm.transport,
        encoding=spec.options.formats[1],
        traffic=bucket.transport.reduce_traffic(spec),
    )


def _reduce_scatter_effects(bsym: BoundSymbol) -> Effects:
    bucket, (_, slot, *grads), future = bucket_of(bsym), bsym.args, bsym.output.name
    dtype = bucket.spec.reduce_dtype
    return Effects(
        issues=reduction_of(bucket, slot, future),
        bucket=bucket,
        uses=slot,
        collects={grad.name: SlotRegion(bucket, slot, dtype, i) for i, grad in enumerate(grads) if grad is not None},
    )


fsdp_reduce_scatter = register("fsdp_reduce_scatter", ops.reduce_scatter, _reduce_scatter_effects, reduction_meta)


def _grad_meta(bucket: Bucket, slot: Slot | None, index: int, *args: Any) -> TensorProxy:
    return tensor_proxy(bucket.spec.params[index].shape, bucket.spec.device, bucket.spec.reduce_dtype)


def _grad_effects(bsym: BoundSymbol) -> Effects:
    bucket, (_, slot, index, *_) = bucket_of(bsym), bsym.args
    region = SlotRegion(bucket, slot, bucket.spec.reduce_dtype, index)
    return Effects(bucket=bucket, uses=slot, fills=region, in_place=(bsym.output.name,))


fsdp_matmul_into = register("fsdp_matmul_into", ops.matmul_into, _grad_effects, _grad_meta)
fsdp_sum_into = register("fsdp_sum_into", ops.sum_into, _grad_effects, _grad_meta)


def _wait_grads_meta(bucket: Bucket, future: FutureTensorProxy, *, hook: str | None = None) -> tuple[TensorProxy, ...]:
    spec = bucket.spec
    return tuple(
        tensor_proxy(p.shard_shape(bucket.rank), spec.shard_device, spec.dtype) for p in spec.layout.placements
    )


def _wait_grads_effects(bsym: BoundSymbol) -> Effects:
    bucket, (_, future), hook = bucket_of(bsym), bsym.args, bsym.kwargs.get("hook")
    expected = bucket.hook_name
    return Effects(
        waits=Wait(future.name, ("fsdp_reduce_scatter" if bucket.ranks.replicas is None else "fsdp_all_reduce",)),
        bucket=bucket,
        hook=hook,
        faults=() if hook == expected else (f"calls the all_reduce_hook {hook}, expected {expected}",),
    )


fsdp_wait_grads = register("fsdp_wait_grads", ops.wait_grads, _wait_grads_effects, _wait_grads_meta)


fsdp_backward_done = register("fsdp_backward_done", ops.backward_done)

#
# Others
#


fsdp_check_module = register("fsdp_check_module", check_module)
fsdp_check_inputs = register("fsdp_check_inputs", check_inputs)
fsdp_assign_attributes = register("fsdp_assign_attributes", assign_attributes)
fsdp_check_number = register("fsdp_check_number", check_number)
fsdp_guard_backward = register("fsdp_guard_backward", guard_backward)


LEAF = "fsdp_leaf"
"""The name of the symbol that runs a leaf module, in the computation; it is an extra's, ``extras.leaf_modules``."""


def effects_of_alias(bsym: BoundSymbol) -> Effects:
    """Return the effects of a symbol that returns its first argument."""
    aliases = {bsym.output.name: (bsym.args[0].name,)}
    return Effects(aliases=aliases)


fsdp_detached = register(
    "fsdp_detached", torch.Tensor.detach, effects_of_alias, lambda tensor: TensorProxy(like=tensor)
)


def only_in_between(*args: Any) -> None:
    """Raise an error: this symbol is in no trace that runs."""
    raise AssertionError("a pass must replace this symbol before a trace runs")


def become_shard(proxy: TensorProxy, param: torch.nn.Parameter) -> None:
    """Turn the proxy of a parameter into that of its shard, in place: traces and prologue share proxies by name."""
    shard = local_rows(param)
    proxy._shape = tuple(shard.shape)
    proxy._numel = shard.numel()
    proxy._ndim = shard.ndim
    proxy._device = devices.to_device(shard.device)
    dtype = dtypes.to_dtype(shard.dtype)
    if proxy.dtype is not dtype:  # the module was traced with parameters in lower precision
        proxy._dtype = proxy._true_dtype = dtype
    proxy._requires_grad = param.requires_grad


def _unshard_meta(bucket: Bucket, index: int, shard: TensorProxy) -> TensorProxy:
    spec = bucket.spec
    return tensor_proxy(spec.params[index].shape, spec.device, spec.param_dtype, requires_grad=shard.requires_grad)


def _reduce_meta(bucket: Bucket, index: int, grad: TensorProxy) -> TensorProxy:
    shape = bucket.spec.layout.placements[index].shard_shape(bucket.rank)
    return tensor_proxy(shape, bucket.spec.shard_device, bucket.spec.dtype, requires_grad=grad.requires_grad)


def _single_effects(bsym: BoundSymbol) -> Effects:
    bucket, index, _ = bsym.args
    return Effects(single=UnbucketedParam(bucket, index, reduces=bsym.sym.name == "fsdp_reduce"))


fsdp_unshard = register("fsdp_unshard", only_in_between, _single_effects, _unshard_meta)
fsdp_reduce = register("fsdp_reduce", only_in_between, _single_effects, _reduce_meta)


def _unshard_grad(bucket: Bucket, index: int, shard: TensorProxy) -> TensorProxy:
    unsharded = fsdp_unshard(bucket, index, shard)
    put_grad(shard, fsdp_reduce(bucket, index, get_grad(unsharded)))
    return unsharded


executor.register_implementation(fsdp_unshard, fsdp_unshard, grad_transform=_unshard_grad)


def gather_and_wait(
    bucket: Bucket, shards: Sequence[TensorProxy | None], params: Sequence[Proxy], **marks: Any
) -> tuple[BoundSymbol, BoundSymbol]:
    """Return the gather of a bucket and its wait, which returns ``params``."""
    future = fsdp_all_gather.meta(bucket, None, *shards)
    gather = fsdp_all_gather.bind(bucket, None, *shards, **marks, output=future)
    return gather, fsdp_wait_params.bind(bucket, future, output=tuple(params))
