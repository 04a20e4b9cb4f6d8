"""Attention as a GPU would run it, for plans that are made on a machine without one.

[Note: Planned attention]
On a CPU and on the meta device, Thunder decomposes ``scaled_dot_product_attention`` into matrix multiplications and a
softmax, whose scores need ``heads x length x length`` elements. On a GPU its ``sdpa`` executor runs a fused kernel
instead, which saves one number for each row of the scores. So a plan for a cluster of GPUs uses that executor's symbols:
flash attention for 16-bit dtypes without a mask, memory-efficient attention for float32 and for masks of four
dimensions. Thunder asks the GPU which kernels it has; this executor assumes both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import get_grad, put_grad, put_grads
from thunder.executors import sdpaex
from thunder.extend import OperatorExecutor

_MAX_HEAD_SIZE = 256
"""The largest size of a head (elements) that flash attention supports."""

executor = OperatorExecutor("fsdp_sched_gpu_attention", version="0.1")
"""The executor that claims ``scaled_dot_product_attention``; see [Note: Planned attention]."""


class _Attention(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``."""

    query: TensorProxy
    key: TensorProxy
    value: TensorProxy
    attn_mask: TensorProxy | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None

    @property
    def is_flash(self) -> bool:
        """Whether flash attention supports it."""
        is_short = self.query.dtype in (dtypes.bfloat16, dtypes.float16)
        return is_short and self.attn_mask is None and self.query.shape[-1] <= _MAX_HEAD_SIZE

    def run(self) -> Any:
        """Call the kernel, and return its outputs: the result, and what its backward needs."""
        options = self.dropout_p, self.is_causal
        if self.is_flash:
            return sdpaex.sdpfa_gradfwd(*self[:3], *options, scale=self.scale)
        return sdpaex.sdpea_gradfwd(*self[:3], self.attn_mask, *options, scale=self.scale)


def _check(*args: Any, **kwargs: Any) -> bool:
    call = _Attention(*args, **kwargs)
    query, mask = call.query, call.attn_mask
    if any(t.ndim != 4 or t.dtype is not query.dtype or t.shape[:2] != query.shape[:2] for t in call[:3]):
        return False
    batch, heads = query.shape[:2]
    if mask is not None and (mask.ndim != 4 or mask.shape[:2] not in ((batch, 1), (batch, heads))):
        return False
    return call.is_flash or query.dtype in (dtypes.bfloat16, dtypes.float16, dtypes.float32)


def _forward(*args: Any, **kwargs: Any) -> TensorProxy:
    return _Attention(*args, **kwargs).run()[0]


def _grad(*args: Any, **kwargs: Any) -> TensorProxy:
    call = _Attention(*args, **kwargs)
    inputs, mask, options = call[:3], call.attn_mask, (call.dropout_p, call.is_causal)
    out, *saved = call.run()
    grad = get_grad(out)
    if call.is_flash:
        *lengths, seed, offset, _ = saved[1:]  # what precedes them are the sums of rows
        grads = sdpaex.sdpfa_bwd(grad, *inputs, out, saved[0], *lengths, *options, seed, offset, scale=call.scale)
    else:
        *grads, of_mask = sdpaex.sdpea_bwd(grad, *inputs, mask, out, *saved, *options, scale=call.scale)
        if mask is not None and of_mask is not None:
            put_grad(mask, of_mask)
    put_grads(inputs, grads)
    return out


executor.register_implementation(
    ltorch.scaled_dot_product_attention, checker=_check, execution_transform=_forward, grad_transform=_grad
)
