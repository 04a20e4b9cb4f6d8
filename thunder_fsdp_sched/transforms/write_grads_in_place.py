"""Avoid copies of gradients: the operator that computes a gradient writes it into the slot of its reduction.

[Note: Gradients written in place]
A bucket's gradients are contiguous views of the slot of its reduction. ``torch.matmul``, ``aten.mm`` and ``torch.sum`` can
write into such a view (``out=``). So where one of them computes a gradient that only the reduction reads, it becomes
``fsdp_matmul_into`` or ``fsdp_sum_into``. The result has the same bits: every gradient starts at a multiple of
``layout.ALIGNMENT`` bytes, and with that alignment the kernels do not depend on the address.

Other gradients are still copied, because no operator can write them in place, or not with the same bits: sums of
several gradients (a parameter that is used twice), gradients of an embedding, a layer norm (their backwards have no
``out=`` that does not copy) or a convolution, outputs of a fusion, gradients in another dtype than that of the reduction,
and transposed ones (a matmul into a transposed view rounds differently).

The cost: the slot is in use from the first such gradient on, not only from the issue of the reduction. Copied gradients
would have occupied memory of their own for as long, so the peak does not grow; more of it is in slots.
"""

from __future__ import annotations

from typing import Any

from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx
from thunder.executors import torchex

from ..ir.analysis import BEFORE_TRACE, Analysis
from ..ir.inspection import statements, with_bound_symbols
from ..ir.symbols import fsdp_matmul_into, fsdp_sum_into
from ..kernels.executor import executor as kernels
from ..runtime.bucket import Bucket


def write_grads_in_place(trace: TraceCtx) -> TraceCtx:
    """Replace matmuls and sums that compute a gradient with symbols that write it into the slot of the reduction.

    Runs on the split traces before ``sort_communication`` and ``assign_slots``, which fills in the slot. A trace without
    reductions keeps its bound symbols. Before::

        t128 = torch.matmul(t126, t127)
        ft151 = fsdp_reduce_scatter(bucket_blocks_2, None, t128)  # 16,384 bytes float32

    After::

        t128 = fsdp_matmul_into(bucket_blocks_2, None, 0, t126, t127)
        ft151 = fsdp_reduce_scatter(bucket_blocks_2, None, t128)  # 16,384 bytes float32

    Order and number of bound symbols stay the same, except that ``del`` statements are dropped. See [Note:
    Gradients written in place].
    """
    bsyms = statements(trace)
    live = Analysis(bsyms)
    for e in live.effects:
        for name, region in e.collects.items():
            value = live.value(name)
            if value is None or value.first == BEFORE_TRACE or len(value.reads) != 1 or region.param is None:
                continue
            if _fits(value.proxy, region.bucket, region.param):
                producer = bsyms[value.first]
                bsyms[value.first] = _into(producer, region.bucket, region.param) or producer
    return with_bound_symbols(trace, bsyms, "fsdp: write gradients in place")


def _fits(grad: TensorProxy, bucket: Bucket, index: int) -> bool:
    spec = bucket.spec
    return to_torch_dtype(grad.dtype) == spec.reduce_dtype and tuple(grad.shape) == spec.params[index].shape


def _into(producer: BoundSymbol, bucket: Bucket, index: int) -> BoundSymbol | None:
    """Return ``producer`` as a write of gradient ``index`` into a slot yet to be planned; ``None`` if it cannot."""
    if producer.sym is torchex.matmul or _is_kernel(producer, "torch_mm"):
        a, b = producer.args
        # For other numbers of dimensions torch.matmul creates intermediate tensors.
        if (a.ndim, b.ndim) == (2, 2) or (a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0]):
            return _bind(fsdp_matmul_into, producer, bucket, index, a, b)
    elif producer.sym is torchex.sum:
        a, dims, keepdim = _sum_args(*producer.args, **producer.kwargs)
        return _bind(fsdp_sum_into, producer, bucket, index, a, dims, keepdim)
    return None


def _is_kernel(bsym: BoundSymbol, name: str) -> bool:
    """Return whether a bound symbol calls a base operator of torch that ``kernels`` has put into the trace."""
    return bsym.sym.name == name and bsym.sym.executor is kernels


def _sum_args(a: TensorProxy, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> tuple[Any, ...]:
    return a, dim, keepdim


def _bind(symbol: Symbol, producer: BoundSymbol, bucket: Bucket, index: int, *args: Any) -> BoundSymbol:
    return producer.from_bsym(
        sym=symbol,
        args=(bucket, None, index, *args),
        kwargs={},
        subsymbols=(producer,),
        _import_ctx={},
        _object_ctx={},
        _executor=symbol.executor,
    )
