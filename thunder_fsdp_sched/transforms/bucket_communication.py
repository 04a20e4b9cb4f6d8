"""Merge the communication of a bucket's parameters into one collective per bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

from ..extensions import load
from ..ir.effects import declared
from ..ir.inspection import like, return_of, with_bound_symbols
from ..ir.symbols import (
    fsdp_reduce_scatter,
    fsdp_wait_grads,
    fsdp_wait_params,
    gather_and_wait,
)
from ..runtime.accumulation import AccumulationMode
from ..runtime.bucket import Bucket


def bucket_communication(
    trace: TraceCtx,
    *,
    buckets: Sequence[Bucket],
    no_sync: bool,
    accumulate: AccumulationMode = "unsharded",
) -> TraceCtx:
    """Replace ``fsdp_unshard`` and ``fsdp_reduce`` with one gather and one reduction per bucket.

    Runs on the joint trace after Thunder's autograd and before ``fuse_downcast``. A trace without sharded parameters
    stays as it is. Before, with blocks of four parameters::

        t246 = fsdp_unshard(bucket_blocks_0, 0, t_blocks_0_0_weight)
        t247 = fsdp_unshard(bucket_blocks_0, 1, t_blocks_0_0_bias)
        t248 = torch.nn.functional.linear(x, t246, t247)
        ...
        t331 = fsdp_reduce(bucket_blocks_0, 1, t330)
        t332 = fsdp_reduce(bucket_blocks_0, 0, t327)

    After::

        ft337 = fsdp_all_gather(bucket_blocks_0, None, t_blocks_0_0_weight, t_blocks_0_0_bias, ...)  # 320 bytes float32
        (t246, t247, t254, t255,) = fsdp_wait_params(bucket_blocks_0, ft337)
        t248 = torch.nn.functional.linear(x, t246, t247)
        ...
        ft348 = fsdp_reduce_scatter(bucket_blocks_0, None, t327, t330, t308, t311)  # 320 bytes float32
        (t332, t331, t313, t312,) = fsdp_wait_grads(bucket_blocks_0, ft348)

    The gather and its wait are placed at the first use of the bucket, the reduction and its wait after the last of its
    gradients. With replicas, an all-reduce follows the reduce-scatter. Under ``no_sync`` backward returns ``None`` for the
    gradients, which are accumulated unsharded and without communication, or after their reduce-scatter::

        fsdp_accumulate_grads(bucket_blocks_0, t327, t330, t308, t311)

        ft348 = fsdp_reduce_scatter(bucket_blocks_0, None, t327, t330, t308, t311)  # 320 bytes float32
        fsdp_accumulate_reduced(bucket_blocks_0, ft348)

    Args:
        buckets: all buckets of the module. A bucket that this trace does not reduce may still hold unreduced gradients
            of other traces, which ran under ``no_sync``.
        no_sync: whether the trace is compiled for ``no_sync``.
        accumulate: how gradients are accumulated under ``no_sync``; see [Note: Two ways to accumulate] in
            ``runtime.accumulation``.
    """
    unshards: dict[Bucket, dict[int, BoundSymbol]] = defaultdict(dict)
    reduces: dict[Bucket, dict[int, BoundSymbol]] = defaultdict(dict)
    for bsym in trace.bound_symbols:
        if (single := declared(bsym).single) is not None:
            (reduces if single.reduces else unshards)[single.bucket][single.param] = bsym

    add: Any = load("extras.no_sync:accumulate") if no_sync and reduces else None
    has_replicas = any(bucket.ranks.replicas is not None for bucket in reduces)
    across = load("extras.replicas:reduce_across") if has_replicas and not no_sync else None
    new = with_bound_symbols(trace, (), "fsdp: bucket communication")
    emitted: Sequence[BoundSymbol]
    seen: dict[Bucket, int] = defaultdict(int)
    with tracectx(new):
        for bsym in trace.bound_symbols[:-1]:
            emitted = ()
            if (single := declared(bsym).single) is None:
                new.bound_symbols.append(bsym)
            elif single.reduces:
                bucket, index, grad = bsym.args
                summed = bucket, index, _sum_to_shape_of_param(grad, bucket, index)
                reduces[bucket][index] = bsym.from_bsym(args=summed)
                seen[bucket] += 1
                if seen[bucket] == len(reduces[bucket]):
                    grads = _tensors(bucket, reduces[bucket])
                    if no_sync:
                        emitted = add(bucket, grads, accumulate)
                    else:
                        emitted = _reduce(bucket, grads, reduces[bucket], across)
            elif single.bucket in unshards:
                emitted = _gather(single.bucket, unshards.pop(single.bucket))
            new.bound_symbols += [like(bsym, each) for each in emitted]
        last = return_of(trace)
        if no_sync:
            unsynced = {b.output.name for bsyms in reduces.values() for b in bsyms.values()}
            last = _return_none_for(last, unsynced)
        if reduces and not no_sync:
            frozen = [bucket for bucket in buckets if bucket not in reduces]  # but maybe trained under no_sync
            reduce_left: Any = load("extras.no_sync:reduce_left") if frozen else None
            new.bound_symbols += [reduce_left(bucket, **_hook(bucket)) for bucket in frozen]
        new.bound_symbols.append(last)
    return new


def _sum_to_shape_of_param(grad: TensorProxy, bucket: Bucket, index: int) -> TensorProxy:
    """Sum a gradient to its parameter's shape, if its own is known: see ``Bucket.sum_to_param``."""
    shape = bucket.spec.params[index].shape
    if tuple(grad.shape) == shape:
        return grad
    leading = grad.ndim - len(shape)
    dims = [d for d in range(grad.ndim) if d < leading or (shape[d - leading] == 1 and grad.shape[d] != 1)]
    return ltorch.reshape(ltorch.sum(grad, dims), shape)


def _gather(bucket: Bucket, unshards: dict[int, BoundSymbol]) -> Sequence[BoundSymbol]:
    params = list(fsdp_wait_params.meta(bucket, None))
    for index, bsym in unshards.items():
        params[index] = bsym.output
    return gather_and_wait(bucket, _tensors(bucket, unshards), params)


def _reduce(
    bucket: Bucket, grads: Sequence[TensorProxy | None], reduces: dict[int, BoundSymbol], across: Any
) -> list[BoundSymbol]:
    """Return the statements that reduce a bucket's gradients; ``across`` adds the all-reduce if there are replicas."""
    future: Proxy = fsdp_reduce_scatter.meta(bucket, None, *grads)
    emitted = [fsdp_reduce_scatter.bind(bucket, None, *grads, output=future)]
    if bucket.ranks.replicas is not None:
        emitted.append(across(bucket, future))
        future = emitted[-1].output
    sharded = list(fsdp_wait_grads.meta(bucket, future))
    for index, bsym in reduces.items():
        sharded[index] = bsym.output
    return [*emitted, fsdp_wait_grads.bind(bucket, future, **_hook(bucket), output=tuple(sharded))]


def _hook(bucket: Bucket) -> dict[str, str]:
    return {} if bucket.hook_name is None else {"hook": bucket.hook_name}


def _return_none_for(last: BoundSymbol, unsynced: set[str]) -> BoundSymbol:
    def drop(grad: object) -> object:
        return None if isinstance(grad, Proxy) and grad.name in unsynced else grad

    returned = last.args[0]
    return last.from_bsym(args=({**returned, "output": tree_map(drop, returned["output"])},))


def _tensors(bucket: Bucket, bsyms: dict[int, BoundSymbol]) -> list[TensorProxy | None]:
    """Return the tensor argument of each parameter's symbol, in the bucket's order."""
    return [bsyms[i].args[2] if i in bsyms else None for i in range(len(bucket.spec.params))]
