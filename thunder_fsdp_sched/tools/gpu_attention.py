"""Attention as a GPU would run it, for plans that are made on a machine without one.

[Note: Planned attention]
On a CPU and on the meta device, Thunder decomposes ``scaled_dot_product_attention`` into matrix multiplications and a
softmax, whose scores need ``heads x length x length`` elements. On a GPU its ``sdpa`` executor runs a fused kernel
instead, which saves one number for each row of the scores. So a plan for a cluster of GPUs uses that executor's symbols:
flash attention for 16-bit dtypes without a mask, memory-efficient attention for float32 and for masks of four
dimensions. Thunder asks the GPU which kernels it has; this executor assumes both.
"""

from __future__ import annotations

from typing import Any

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import get_grad, put_grad, put_grads
from thunder.executors import sdpaex
from thunder.extend import OperatorExecutor

__all__ = ["executor"]

_MAX_HEAD_SIZE = 256
"""The largest size of a head (elements) that flash attention supports."""

executor = OperatorExecutor("fsdp_sched_gpu_attention", version="0.1")
"""The executor that claims ``scaled_dot_product_attention``; see [Note: Planned attention]."""


def _flash(query: TensorProxy, mask: TensorProxy | None) -> bool:
    is_short = query.dtype in (dtypes.bfloat16, dtypes.float16)
    return is_short and mask is None and query.shape[-1] <= _MAX_HEAD_SIZE


def _check(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> bool:
    tensors = (query, key, value)
    if any(t.ndim != 4 or t.dtype is not query.dtype or t.shape[:2] != query.shape[:2] for t in tensors):
        return False
    batch, heads = query.shape[:2]
    if attn_mask is not None and (attn_mask.ndim != 4 or attn_mask.shape[:2] not in ((batch, 1), (batch, heads))):
        return False
    return _flash(query, attn_mask) or query.dtype in (dtypes.bfloat16, dtypes.float16, dtypes.float32)


def _forward(*args: Any, **kwargs: Any) -> TensorProxy:
    return _run(*args, **kwargs)[0]


def _run(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    if _flash(query, attn_mask):
        return sdpaex.sdpfa_gradfwd(query, key, value, dropout_p, is_causal, scale=scale)
    return sdpaex.sdpea_gradfwd(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def _grad(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> TensorProxy:
    inputs = (query, key, value)
    out, *saved = _run(*inputs, attn_mask, dropout_p, is_causal, scale=scale)
    grad = get_grad(out)
    if _flash(query, attn_mask):
        sums, queries, keys, longest_query, longest_key, seed, offset, _ = saved
        lengths = (queries, keys, longest_query, longest_key)
        put_grads(
            inputs,
            sdpaex.sdpfa_bwd(grad, *inputs, out, sums, *lengths, dropout_p, is_causal, seed, offset, scale=scale),
        )
        return out
    *grads, of_mask = sdpaex.sdpea_bwd(grad, *inputs, attn_mask, out, *saved, dropout_p, is_causal, scale=scale)
    put_grads(inputs, grads)
    if attn_mask is not None and of_mask is not None:
        put_grad(attn_mask, of_mask)
    return out


executor.register_implementation(
    ltorch.scaled_dot_product_attention, checker=_check, execution_transform=_forward, grad_transform=_grad
)
