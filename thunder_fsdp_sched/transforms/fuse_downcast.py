"""Gather in lower precision where only casts read a parameter: cast the shard instead of the gathered parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

from ..ir.effects import bucket_of, effects
from ..ir.inspection import args_of, nested, swap_args, with_bound_symbols
from ..ir.symbols import fsdp_wait_params, gather_and_wait
from ..runtime.bucket_aliases import alias_bytes, alias_in_dtype, alias_of_params
from .bucket_communication import like


class _Downcast(NamedTuple):
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
    waits = [b for b in trace.bound_symbols if effects(b).unshards and bucket_of(b).spec.param_dtype.itemsize > 2]
    casts: dict[str, list[_Downcast]] = defaultdict(list)
    others: set[str] = set()
    params = {p.name for wait in waits for p in wait.output}
    for bsym in trace.bound_symbols:
        read = params.intersection(args_of(bsym)) if bsym.sym.id is not PrimIDs.GET_GRAD else ()
        if not read:
            continue
        cast = _downcast(bsym)
        if cast is not None:
            casts[cast.source].append(cast)
        else:
            others.update(read)
    lowered = {wait.args[1].name: plan for wait in waits if (plan := _Lowered.of(wait, casts, others)) is not None}
    if not lowered:
        return trace

    of_params = [of_one for plan in lowered.values() for of_one in plan.casts.values()]
    gone = {cast.output.name for of_one in of_params for cast in of_one}
    swaps: dict[str, Proxy] = {cast.output.name: first.output for first, *same in of_params for cast in same}
    new = with_bound_symbols(trace, (), "fsdp: fuse downcasts with gathers")
    with tracectx(new):
        for bsym in trace.bound_symbols:
            if effects(bsym).is_gather and bsym.output.name in lowered:
                lowered[bsym.output.name].shards = bsym.args[2:]
            elif effects(bsym).unshards and bsym.args[1].name in lowered:
                new.bound_symbols += [like(bsym, each) for each in lowered[bsym.args[1].name].emit()]
            elif (cast := _downcast(bsym)) is None or cast.output.name not in gone:
                new.bound_symbols.append(swap_args(bsym, swaps))
    return new


@dataclass
class _Lowered:
    """A bucket's gather, split into one in lower precision and one for the rest."""

    wait: BoundSymbol
    dtype: torch.dtype
    casts: dict[int, list[_Downcast]]
    rest: list[int]
    shards: Sequence[TensorProxy | None] = ()

    @classmethod
    def of(cls, wait: BoundSymbol, casts: dict[str, list[_Downcast]], others: set[str]) -> _Lowered | None:
        bucket = bucket_of(wait)
        found = {i: casts[p.name] for i, p in enumerate(wait.output) if p.name in casts and p.name not in others}
        dtypes = [cast.dtype for of_one in found.values() for cast in of_one]
        if not dtypes:
            return None
        dtype = max(dict.fromkeys(dtypes), key=dtypes.count)
        found = {i: of_one for i, of_one in found.items() if {cast.dtype for cast in of_one} == {dtype}}
        used = {i for i, p in enumerate(wait.output) if p.name in casts or p.name in others}
        rest = sorted(used - found.keys())
        lower = bucket.spec.layout.unsharded_numel * dtype.itemsize
        # The rest is gathered by an all-reduce, which sends twice its bytes.
        if not found or lower + 2 * alias_bytes(bucket, rest) >= bucket.spec.unsharded_bytes:
            return None
        return cls(wait, dtype, found, rest)

    def emit(self) -> Iterator[BoundSymbol]:
        low = alias_in_dtype(bucket_of(self.wait), self.dtype)
        outs = list(fsdp_wait_params.meta(low, None))
        for index, of_one in self.casts.items():
            outs[index] = of_one[0].output
        yield from gather_and_wait(low, self.shards, outs)
        if self.rest:
            shards, params = ([of[i] for i in self.rest] for of in (self.shards, self.wait.output))
            yield from gather_and_wait(alias_of_params(bucket_of(self.wait), self.rest), shards, params)


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
    return _Downcast(inputs[0].name, outs[0], after)


def _converts(bsym: BoundSymbol) -> bool:
    return bool(bsym.subsymbols) or bsym.sym.id in (PrimIDs.CONVERT_ELEMENT_TYPE, PrimIDs.CLONE, PrimIDs.SHALLOW_COPY)
