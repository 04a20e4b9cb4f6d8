"""A Thunder executor for torch's own kernels of layer norm, GELU and attention on a CPU, forward and backward.

On a CPU Thunder has no executor for these operators. It differentiates them after decomposition, which runs and saves the
elementwise steps one by one: a GPT block then saves twice the bytes that the same block saves without a compiler. On a GPU
there are executors for them. So a comparison of memory on a CPU that is to say something about other systems, and not
about decompositions, gives all systems the same kernels::

    thunder.jit(model, executors=[torch_kernels.executor, *thunder.get_default_executors()])

Every operator is one call of an operator of ATen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder_fsdp_sched.compat import prepare  # noqa: F401  # before thunder

import thunder
import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import get_grad, put_grads
from thunder.extend import OperatorExecutor, register_executor

__all__ = ["executor"]

aten = torch.ops.aten
executor = OperatorExecutor("torch_kernels", version=torch.__version__)
register_executor(executor)


def _operator(function: Any, meta: Callable[..., Any]) -> Symbol:
    return executor.register_operator(f"torch.ops.aten.{function._overloadpacket.__name__}", meta=meta, fn=function)


def _like(a: TensorProxy, shape: Sequence[int] | None = None) -> TensorProxy:
    return TensorProxy(like=a, shape=tuple(a.shape if shape is None else shape))


def _statistic(a: TensorProxy, normalized_shape: Sequence[int]) -> TensorProxy:
    outer = a.ndim - len(normalized_shape)
    return _like(a, (*a.shape[:outer], *(1 for _ in normalized_shape)))


_layer_norm = _operator(
    aten.native_layer_norm.default,
    lambda a, shape, weight, bias, eps: (_like(a), _statistic(a, shape), _statistic(a, shape)),
)
_layer_norm_backward = _operator(
    aten.native_layer_norm_backward.default,
    lambda grad, a, shape, mean, rstd, weight, bias, mask: (_like(a), _like(weight), _like(bias)),
)
_gelu = _operator(aten.gelu.default, lambda a: _like(a))
_gelu_backward = _operator(aten.gelu_backward.default, lambda grad, a: _like(a))
_attention = _operator(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    lambda q, k, v, dropout, causal: (_like(q), _like(q, q.shape[:3])),
)
_attention_backward = _operator(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    lambda grad, q, k, v, out, logsumexp, dropout, causal: (_like(q), _like(k), _like(v)),
)


def _runs_layer_norm(a: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> bool:
    return bool(weight is not None and bias is not None and a.dtype == weight.dtype == bias.dtype)


def _run_layer_norm(a: Any, shape: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    return _layer_norm(a, tuple(weight.shape), weight, bias, eps)[0]


def _grad_of_layer_norm(a: Any, shape: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    shape = tuple(weight.shape)
    out, mean, rstd = _layer_norm(a, shape, weight, bias, eps)
    grads = _layer_norm_backward(get_grad(out), a, shape, mean, rstd, weight, bias, (True, True, True))
    put_grads((a, weight, bias), grads)
    return out


def _runs_gelu(a: Any, *, approximate: str = "none") -> bool:
    return approximate == "none" and dtypes.is_float_dtype(a.dtype)


def _run_gelu(a: Any, *, approximate: str = "none") -> Any:
    return _gelu(a)


def _grad_of_gelu(a: Any, *, approximate: str = "none") -> Any:
    out = _gelu(a)
    put_grads((a,), (_gelu_backward(get_grad(out), a),))
    return out


def _runs_attention(
    q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, causal: bool = False, **how: Any
) -> bool:
    scaled = how.get("scale") is not None
    return mask is None and not dropout and not scaled and q.ndim == 4 and q.shape[-1] == k.shape[-1] == v.shape[-1]


def _run_attention(
    q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, **_: Any
) -> Any:
    return _attention(q, k, v, 0.0, is_causal)[0]


def _grad_of_attention(
    q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, **_: Any
) -> Any:
    out, logsumexp = _attention(q, k, v, 0.0, is_causal)
    put_grads((q, k, v), _attention_backward(get_grad(out), q, k, v, out, logsumexp, 0.0, is_causal))
    return out


for _sym, _checker, _run, _grad in (
    (thunder.torch.layer_norm, _runs_layer_norm, _run_layer_norm, _grad_of_layer_norm),
    (thunder.torch.gelu, _runs_gelu, _run_gelu, _grad_of_gelu),
    (thunder.torch.scaled_dot_product_attention, _runs_attention, _run_attention, _grad_of_attention),
):
    executor.register_implementation(_sym, checker=_checker, execution_transform=_run, grad_transform=_grad)
