from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

from ..ir.effects import bucket_of, effects
from ..ir.inspection import args_of, like, nested, swap_args, with_bound_symbols
from ..ir.statements import operations, read_statements
from ..ir.symbols import fsdp_wait_params, gather_and_wait
from ..plan.specs import BucketSpec


class _Downcast(NamedTuple):
    bsym: BoundSymbol
    source: str
    output: TensorProxy
    dtype: torch.dtype


def fuse_downcast(trace: TraceCtx) -> TraceCtx:
    """Gather a bucket in lower precision if only casts to that precision read its parameters, and drop the casts.

    Runs on the joint trace after ``bucket_communication``, so each bucket has one gather, and before
    ``regather_for_backward``. Does nothing unless a parameter is read by casts alone. Before, under autocast::

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
    _, found = operations(read_statements(trace))
    gathers = [(issue, wait) for issue, *_, wait in found if effects(wait).unshards and _is_long(bucket_of(wait).spec)]
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
    instead: dict[int, list[BoundSymbol]] = {}  # the replacements of gathers, waits and casts, by `id`
    swaps: dict[str, Proxy] = {}
    with tracectx(new):
        for gather, wait in gathers:
            fused, rest = _fusable(wait, casts, others)
            if fused:
                instead[id(gather)] = []
                instead[id(wait)] = [like(wait, each) for each in _gathers(gather, wait, fused, rest)]
                for first, *same in fused.values():
                    instead.update((id(cast.bsym), []) for cast in (first, *same))
                    swaps.update((cast.output.name, first.output) for cast in same)
    if not instead:
        return trace
    for bsym in trace.bound_symbols:
        new.bound_symbols += instead.get(id(bsym), [swap_args(bsym, swaps)])
    return new


def _is_long(spec: BucketSpec) -> bool:
    """Return whether a cast could save bytes. Encoded buckets send fewer anyway, and a cast before would round twice."""
    return spec.param_dtype.itemsize > 2 and spec.gather_wire is None


def _fusable(
    wait: BoundSymbol, casts: Mapping[str, list[_Downcast]], others: Collection[str]
) -> tuple[dict[int, list[_Downcast]], list[int]]:
    """Return the casts that a gather in lower precision makes redundant, by parameter, and the other parameters read.

    Return none if the two gathers would send more bytes than the one before.
    """
    bucket = bucket_of(wait)
    found = {i: casts[p.name] for i, p in enumerate(wait.output) if p.name in casts and p.name not in others}
    dtypes = [cast.dtype for of_one in found.values() for cast in of_one]
    dtype = max(dict.fromkeys(dtypes), key=dtypes.count, default=bucket.spec.param_dtype)
    found = {i: of_one for i, of_one in found.items() if {cast.dtype for cast in of_one} == {dtype}}
    rest = [i for i, p in enumerate(wait.output) if i not in found and (p.name in casts or p.name in others)]
    if not found:
        return {}, []
    from ..runtime.bucket_aliases import alias_bytes  # here, because most traces have no such casts

    # The rest is gathered by an all-reduce, which sends twice its bytes.
    sent = bucket.spec.layout.unsharded_numel * dtype.itemsize + 2 * alias_bytes(bucket, rest)
    return (found, rest) if sent < bucket.spec.unsharded_bytes else ({}, [])


def _gathers(
    gather: BoundSymbol, wait: BoundSymbol, fused: Mapping[int, list[_Downcast]], rest: Sequence[int]
) -> Iterator[BoundSymbol]:
    """Yield a gather in lower precision, whose parameters are the results of the casts, and one for the rest."""
    from ..runtime.bucket_aliases import alias_in_dtype, alias_of_params

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
