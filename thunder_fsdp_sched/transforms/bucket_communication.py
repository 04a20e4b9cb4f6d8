"""Merge the communication of a bucket's parameters into one collective per bucket, in as few bytes as their readers need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import thunder.torch as ltorch
import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx

from ..ir.effects import bucket_of, declared, effects, operations
from ..ir.inspection import args_of, nested, return_of, swap_args, with_bound_symbols
from ..ir.symbols import (
    fsdp_accumulate_grads,
    fsdp_accumulate_reduced,
    fsdp_all_reduce,
    fsdp_reduce_scatter,
    fsdp_reduce_unreduced,
    fsdp_wait_grads,
    fsdp_wait_params,
    gather_and_wait,
)
from ..runtime.accumulation import AccumulationMode
from ..runtime.bucket import Bucket
from ..runtime.bucket_aliases import alias_bytes, alias_in_dtype, alias_of_params


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
                    emitted = _reduce(bucket, reduces[bucket], accumulate if no_sync else None)
            elif single.bucket in unshards:
                emitted = _gather(single.bucket, unshards.pop(single.bucket))
            new.bound_symbols += [_like(bsym, each) for each in emitted]
        last = return_of(trace)
        if no_sync:
            unsynced = {b.output.name for bsyms in reduces.values() for b in bsyms.values()}
            last = _return_none_for(last, unsynced)
        if reduces and not no_sync:
            for bucket in buckets:  # including frozen ones, which may have been trained under no_sync
                if bucket not in reduces:
                    idle = fsdp_reduce_unreduced.bind(bucket, **_hook(bucket), output=None)
                    idle.tags.add(BoundSymbolTag.BACKWARD)
                    new.bound_symbols.append(idle)
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


def _reduce(bucket: Bucket, reduces: dict[int, BoundSymbol], accumulate: AccumulationMode | None) -> list[BoundSymbol]:
    """Return what handles the gradients of a bucket, under ``no_sync`` in the given way to accumulate."""
    grads = _tensors(bucket, reduces)
    if accumulate == "unsharded":
        return [fsdp_accumulate_grads.bind(bucket, *grads, output=None)]
    future: Proxy = fsdp_reduce_scatter.meta(bucket, None, *grads)
    emitted = [fsdp_reduce_scatter.bind(bucket, None, *grads, output=future)]
    if accumulate == "sharded":
        return [*emitted, fsdp_accumulate_reduced.bind(bucket, future, output=None)]
    if bucket.ranks.replicas is not None:
        inside, future = future, fsdp_all_reduce.meta(bucket, future)
        emitted.append(fsdp_all_reduce.bind(bucket, inside, output=future))
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


def _like(original: BoundSymbol, bsym: BoundSymbol) -> BoundSymbol:
    """Copy tags and source position of ``original``: where the bucket is used, and whether in backward."""
    return bsym.from_bsym(
        tags=original.tags.copy(),
        source_filename=original.source_filename,
        source_positions=original.source_positions,
    )


class _Downcast(NamedTuple):
    bsym: BoundSymbol
    source: str
    output: TensorProxy
    dtype: torch.dtype


def fuse_downcast(trace: TraceCtx) -> TraceCtx:
    """Gather a bucket in lower precision if only casts to that precision read its parameters, and drop the casts.

    Runs on the joint trace after ``bucket_communication``, so each bucket has one gather, and before
    ``regather_for_backward``. Does nothing if no parameter is read by casts alone, as under autocast. Before, under
    autocast to bfloat16::

        ft723 = fsdp_all_gather(bucket_blocks_0, None, t_blocks_0_0_weight, ...)  # 320 bytes float32
        (t506, t509, t540, t543,) = fsdp_wait_params(bucket_blocks_0, ft723)
        t508 = Tensor.to(t506, torch.bfloat16, copy=True)
        t511 = Tensor.to(t509, torch.bfloat16, copy=True)
        ...

    After::

        ft743 = fsdp_all_gather(bucket_blocks_0_bfloat16, None, t_blocks_0_0_weight, ...)  # 160 bytes bfloat16
        (t508, t511, t542, t545,) = fsdp_wait_params(bucket_blocks_0_bfloat16, ft743)

    Casting the rows before the gather yields the same bits as casting the gathered parameter. Parameters of the bucket
    that are also read in full precision, such as those of norms, are gathered a second time, on their own. If that
    would send more bytes than before, the bucket stays as it is. Gradients are reduced in the precision in which
    autograd returns them.

    DeepSpeed's pull request 7588 does the same by configuration.
    """
    _, found = operations(trace.bound_symbols, of_buckets=True)
    gathers = [
        (issue, wait)
        for issue, *_, wait in found
        if effects(wait).unshards and bucket_of(wait).spec.param_dtype.itemsize > 2
    ]
    params = {p.name for _, wait in gathers for p in wait.output}
    casts: dict[str, list[_Downcast]] = defaultdict(list)
    others: set[str] = set()
    for bsym in trace.bound_symbols:
        if bsym.sym.id is PrimIDs.GET_GRAD:
            continue
        if read := params.intersection(args_of(bsym)):
            cast = _downcast(bsym)
            if cast is not None:
                casts[cast.source].append(cast)
            else:
                others.update(read)
    new = with_bound_symbols(trace, (), "fsdp: fuse downcasts with gathers")
    instead: dict[int, list[BoundSymbol]] = {}  # of gathers, their waits and casts
    swaps: dict[str, Proxy] = {}
    with tracectx(new):
        for gather, wait in gathers:
            fused, rest = _fusable(wait, casts, others)
            if fused:
                instead[id(gather)] = []
                instead[id(wait)] = [_like(wait, each) for each in _gathers(gather, wait, fused, rest)]
                for first, *same in fused.values():
                    instead.update((id(cast.bsym), []) for cast in (first, *same))
                    swaps.update((cast.output.name, first.output) for cast in same)
    if not instead:
        return trace
    for bsym in trace.bound_symbols:
        new.bound_symbols += instead.get(id(bsym), [swap_args(bsym, swaps)])
    return new


def _fusable(
    wait: BoundSymbol, casts: Mapping[str, list[_Downcast]], others: Collection[str]
) -> tuple[dict[int, list[_Downcast]], list[int]]:
    """Return the casts that a gather in lower precision makes superfluous, by parameter, and which others are read.

    There are none if both gathers would send more bytes than one.
    """
    bucket = bucket_of(wait)
    found = {i: casts[p.name] for i, p in enumerate(wait.output) if p.name in casts and p.name not in others}
    dtypes = [cast.dtype for of_one in found.values() for cast in of_one]
    dtype = max(dict.fromkeys(dtypes), key=dtypes.count, default=bucket.spec.param_dtype)
    found = {i: of_one for i, of_one in found.items() if {cast.dtype for cast in of_one} == {dtype}}
    rest = [i for i, p in enumerate(wait.output) if i not in found and (p.name in casts or p.name in others)]
    # The rest is gathered by an all-reduce, which sends twice its bytes.
    sent = bucket.spec.layout.unsharded_numel * dtype.itemsize + 2 * alias_bytes(bucket, rest)
    return (found, rest) if sent < bucket.spec.unsharded_bytes else ({}, [])


def _gathers(
    gather: BoundSymbol, wait: BoundSymbol, fused: Mapping[int, list[_Downcast]], rest: Sequence[int]
) -> Iterator[BoundSymbol]:
    """Yield a gather in lower precision, whose parameters are the results of the casts, and one for the rest."""
    bucket, (_, _, *shards), (cast, *_) = bucket_of(wait), gather.args, next(iter(fused.values()))
    low = alias_in_dtype(bucket, cast.dtype)
    params = list(fsdp_wait_params.meta(low, None))
    for index, (first, *_) in fused.items():
        params[index] = first.output
    yield from gather_and_wait(low, shards, params)
    if rest:
        of_rest = ([each[i] for i in rest] for each in (shards, wait.output))
        yield from gather_and_wait(alias_of_params(bucket, rest), *of_rest)


def _downcast(bsym: BoundSymbol) -> _Downcast | None:
    """Return ``bsym`` as a downcast if it does nothing but cast one tensor to a narrower floating-point dtype."""
    inputs = [p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
    outs = [p for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)]
    if bsym.sym.is_fusion or len(inputs) != 1 or len(outs) != 1 or not all(map(_converts, nested([bsym]))):
        return None
    before, after = (to_torch_dtype(p.dtype) for p in (inputs[0], outs[0]))
    narrower = before.is_floating_point and after.is_floating_point and after.itemsize < before.itemsize
    if not narrower or tuple(inputs[0].shape) != tuple(outs[0].shape):
        return None
    return _Downcast(bsym, inputs[0].name, outs[0], after)


def _converts(bsym: BoundSymbol) -> bool:
    return bool(bsym.subsymbols) or bsym.sym.id in (PrimIDs.CONVERT_ELEMENT_TYPE, PrimIDs.CLONE, PrimIDs.SHALLOW_COPY)
