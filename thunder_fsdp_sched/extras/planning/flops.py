"""FLOPs of a bound symbol, as observed: those of the base operators that it calls (``ir.observation``)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import PrimIDs
from thunder.core.symbol import BoundSymbol

from ...ir.effects import Effects
from ...ir.observation import observe_call
from ..step_memory.observed_effects import observed_effects

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    PrimIDs.LINEAR: torch.nn.functional.linear,
    PrimIDs.MATMUL: torch.matmul,
    PrimIDs.CONVOLUTION: torch.convolution,
}
"""The functions of the prims that multiply matrices, which a fusion may consist of."""

_ATTENTION = {
    "sdpaex_grad_forward_scaled_dot_product_efficient_attention": (0, 2),
    "sdpaex_scaled_dot_product_efficient_attention_backward": (1, 5),
    "sdpafx_grad_forward_scaled_dot_product_efficient_attention": (0, 2),
    "sdpafx_scaled_dot_product_efficient_attention_backward": (1, 5),
    "cudnn_sdpa_fwd": (0, 2),
    "cudnn_sdpa_bwd": (1, 5),
    "fa3_fwd": (0, 2),
    "fa3_bwd": (1, 5),
    "scaled_dot_product_attention": (0, 2),
}
"""Attention in one kernel: the index of its query, and of how many matrix products it consists.

The formulas of ``flop_counter`` ignore causality. Fused kernels skip the part above the diagonal, which is half of the work
if there are as many queries as keys.
"""


def flops_of(bsym: BoundSymbol, known: Effects | None = None) -> Mapping[torch.dtype, int]:
    """Return the FLOPs of a bound symbol by dtype; those of its subsymbols if it cannot be observed.

    Args:
        known: its observed effects; by default those for contiguous inputs.
    """
    if bsym.sym.name in _ATTENTION:
        return _of_attention(bsym)
    observed = (known or observed_effects(bsym, {})).flops
    if observed is not None:
        return observed
    if bsym.sym.id in _FUNCTIONS and (calls := observe_call(bsym, _FUNCTIONS[bsym.sym.id], {})):
        return calls[0].flops or {}
    flops: Counter[torch.dtype] = Counter()
    for sub in bsym.subsymbols:
        flops.update(flops_of(sub))
    return flops


def _of_attention(bsym: BoundSymbol) -> dict[torch.dtype, int]:
    first, products = _ATTENTION[bsym.sym.name]
    query, key = bsym.args[first : first + 2]
    axis = 1 if bsym.sym.name.startswith("fa3") else 2  # that of the sequence
    length, keys = int(query.shape[axis]), int(key.shape[axis])
    flops = 2 * products * math.prod(map(int, query.shape)) * keys
    causal = any(arg is True for arg in bsym.args[first + 3 :]) or bsym.kwargs.get("is_causal", False)
    return {to_torch_dtype(query.dtype): flops // 2 if causal and length == keys else flops}
