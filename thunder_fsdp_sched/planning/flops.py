"""FLOPs of a bound symbol, by the formulas of ``torch.utils.flop_counter``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from torch.utils.flop_counter import flop_registry


def flops_of(bsym: BoundSymbol) -> dict[torch.dtype, int]:
    """Return the FLOPs of a bound symbol, keyed by dtype; empty if ``torch.utils.flop_counter`` has no formula."""
    counted: dict[torch.dtype, int] = {}
    for part in _with_formula(bsym):
        flops = _FORMULAS[_key(part)](part) if _key(part) in _FORMULAS else _aten(part)
        if flops:
            dtype = to_torch_dtype(next(tensors(part.flat_proxy_args)).dtype)
            counted[dtype] = counted.get(dtype, 0) + flops
    return counted


def _with_formula(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    if _key(bsym) in _FORMULAS or bsym.sym.name.startswith(_ATEN):
        yield bsym
    else:
        for sub in bsym.subsymbols:
            yield from _with_formula(sub)


_ATEN = "torch.ops.aten."


def _key(bsym: BoundSymbol) -> Any:
    return bsym.sym.id if isinstance(bsym.sym.id, PrimIDs) else bsym.sym.name


@lru_cache(maxsize=4096)
def _formula(name: str, *shapes: Any, out: Any = None) -> int:
    return int(flop_registry[getattr(torch.ops.aten, name)](*shapes, out_val=out))


def _shape(proxy: Any) -> Any:
    return tuple(int(size) for size in proxy.shape) if isinstance(proxy, TensorProxy) else proxy


def _linear(bsym: BoundSymbol) -> int:
    a, weight = map(_shape, bsym.args[:2])
    return _formula("mm", (math.prod(a[:-1]), a[-1]), weight[::-1])


def _matmul(bsym: BoundSymbol) -> int:
    a, b = map(_shape, bsym.args[:2])
    if len(a) == 1:
        a = (1, *a)
    if len(b) == 1:
        b = (*b, 1)
    if len(b) == 2:
        return _formula("mm", (math.prod(a[:-1]), a[-1]), b)
    batch = math.prod(torch.broadcast_shapes(a[:-2], b[:-2]))
    return _formula("bmm", (batch, *a[-2:]), (batch, *b[-2:]))


def _grouped_mm(bsym: BoundSymbol) -> int:
    a, b = map(_shape, bsym.args[:2])
    # Each row (or column) of the ragged side is multiplied with one group only: the FLOPs are those of one group.
    return _formula("mm", a[-2:], b[-2:]) * (a[0] if len(a) == len(b) == 3 else 1)


def _convolution(bsym: BoundSymbol) -> int:
    a, weight = map(_shape, bsym.args[:2])
    return _formula("convolution", a, weight, None, None, None, None, bool(bsym.args[6]), out=_shape(bsym.output))


def _attention(first: int, heads: int = 1) -> Callable[[BoundSymbol], int]:
    """Return a formula for attention whose query is argument ``first``; 1 means backward, with the gradient as argument 0.

    The formulas of ``flop_counter`` ignore causality. Fused kernels skip the part above the diagonal, which is half of
    the work if there are as many queries as keys, and so does this formula.
    """

    def flops(bsym: BoundSymbol) -> int:
        shapes = [_shape(arg) for arg in bsym.args[: first + 3]]
        if heads == 2:  # (batch, sequence, heads, size)
            shapes = [(s[0], s[2], s[1], s[3]) for s in shapes]
        name = "_scaled_dot_product_flash_attention" + ("_backward" if first else "")
        counted = _formula(name, *shapes)
        causal = any(arg is True for arg in bsym.args[first + 3 :]) or bsym.kwargs.get("is_causal", False)
        return counted // 2 if causal and shapes[first][2] == shapes[first + 1][2] else counted

    return flops


_FORMULAS: dict[Any, Callable[[BoundSymbol], int]] = {
    PrimIDs.LINEAR: _linear,
    PrimIDs.MATMUL: _matmul,
    PrimIDs.CONVOLUTION: _convolution,
    "sdpaex_grad_forward_scaled_dot_product_efficient_attention": _attention(0),
    "sdpafx_grad_forward_scaled_dot_product_efficient_attention": _attention(0),
    "sdpaex_scaled_dot_product_efficient_attention_backward": _attention(1),
    "sdpafx_scaled_dot_product_efficient_attention_backward": _attention(1),
    "cudnn_sdpa_fwd": _attention(0),
    "cudnn_sdpa_bwd": _attention(1),
    "fa3_fwd": _attention(0, heads=2),
    "fa3_bwd": _attention(1, heads=2),
    "scaled_dot_product_attention": _attention(0),
}


if hasattr(PrimIDs, "_GROUPED_MM"):
    _FORMULAS[PrimIDs._GROUPED_MM] = _grouped_mm


def _aten(bsym: BoundSymbol) -> int:
    packet = getattr(torch.ops.aten, bsym.sym.name.removeprefix(_ATEN), None)
    if packet not in flop_registry:
        return 0
    outs = tuple(_shape(o) for o in bsym.flat_outs)
    return int(flop_registry[packet](*map(_shape, bsym.args), out_val=outs if len(outs) != 1 else outs[0]))


def tensors(proxies: Sequence[Any]) -> Iterator[TensorProxy]:
    return (p for p in proxies if isinstance(p, TensorProxy))
