"""Gradients of shards, which refuse norms: those of this rank's rows are not the norm of the gradient.

[Note: Norms of sharded gradients]
``torch.nn.utils.clip_grad_norm_`` takes the norm of all ``.grad`` that it is given, which on shards is another one on each
rank, and scales each rank's gradients differently. So a hook makes each sharded ``.grad`` a :class:`ShardGrad`, a tensor
whose ``__torch_function__`` raises for functions that compute norms and calls all others on it as on a plain tensor. The
class is that of the Python object alone: kernels, autograd and the results of operations know nothing of it.

This costs about a microsecond for each parameter in backward, and one in an optimizer that loops over parameters instead of
using foreach or fused kernels. ``is_sparse`` is a class attribute because optimizers read it of every gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .compat import without_torch_function

__all__ = ["ShardGrad", "mark", "mark_after_backward"]


class ShardGrad(torch.Tensor):
    """This rank's rows of a gradient."""

    is_sparse = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _NORMS:
            raise RuntimeError(
                f"{func.__name__} of sharded gradients: each rank has some rows of a gradient, so every rank would get "
                f"another norm. Use thunder_fsdp_sched.clip_grad_norm_(model, max_norm), which returns the norm; that of "
                f"the rows is p.grad.as_subclass(torch.Tensor).norm()"
            )
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


_NORMS = frozenset(
    {
        torch._foreach_norm,
        torch.Tensor.norm,
        torch.dist,
        torch.linalg.matrix_norm,
        torch.linalg.norm,
        torch.linalg.vector_norm,
        torch.norm,
    }
)


def mark(param: torch.Tensor) -> None:
    """Makes the gradient of a shard refuse norms."""
    grad = param.grad
    if grad is not None and grad.__class__ is torch.Tensor:
        grad.__class__ = ShardGrad


def mark_after_backward(param: torch.Tensor) -> None:
    """Has :func:`mark` called whenever autograd has accumulated the gradient of ``param``, which may be frozen so far."""
    if param.dtype.is_floating_point or param.dtype.is_complex:
        trained = param.requires_grad
        param.requires_grad_(True)  # else torch takes no hook
        param.register_post_accumulate_grad_hook(mark)
        param.requires_grad_(trained)
