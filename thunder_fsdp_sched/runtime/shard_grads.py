"""Gradients of shards, which refuse norms and tests for inf, because a rank has only some rows of each gradient.

[Note: Norms of sharded gradients]
``torch.nn.utils.clip_grad_norm_`` computes the norm of all ``.grad`` tensors. With shards, every rank would compute a
different norm and scale its gradients differently. So a hook turns each sharded ``.grad`` into a :class:`ShardGrad`, a
tensor whose ``__torch_function__`` raises for functions that compute norms and treats it as a plain tensor otherwise.
New tensors with the same number of elements are also gradients of shards, so ``p.grad = p.grad / 2``, ``p.grad.data``
and ``p.grad.flatten()`` refuse norms, too. Only the Python object has this class; kernels and autograd do not see it.

``GradScaler`` skips a step if a gradient is not finite, which may be the case on only one rank. ``ShardedGradScaler``
asks the other ranks, except with a fused optimizer, where ``step`` tests the gradients. So the test is refused unless
the ranks are known to exchange its result.

This costs about a microsecond per parameter in backward, and another in an optimizer that loops over parameters instead
of using foreach or fused kernels. ``is_sparse`` is a class attribute because optimizers read it for every gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..private_api import reduces_found_infs, without_torch_function

__all__ = ["ShardGrad", "mark", "mark_after_backward", "plain"]


class ShardGrad(torch.Tensor):
    """This rank's rows of a gradient, or the result of elementwise functions on them."""

    is_sparse = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _NORMS:
            raise RuntimeError(
                f"{func.__name__} of sharded gradients: each rank has some rows of a gradient, so every rank would compute "
                f"another norm. Use thunder_fsdp_sched.clip_grad_norm_(model, max_norm), which returns the norm; that of "
                f"the rows is p.grad.as_subclass(torch.Tensor).norm()"
            )
        if func is _CHECK_FINITE and not reduces_found_infs():
            raise RuntimeError(
                "GradScaler on sharded gradients: an inf or nan in the rows of one rank would make that rank alone skip "
                "the step. Use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, and call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer) if the optimizer is fused"
            )
        with without_torch_function():
            result = func(*args, **(kwargs or {}))
        if result.__class__ is torch.Tensor and func is not torch.Tensor.as_subclass and _is_new_grad(result, args):
            result.__class__ = cls
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = copy.deepcopy(plain(self), memo)
        copied.__class__ = type(self)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


def _is_new_grad(result: torch.Tensor, args: Sequence[Any]) -> bool:
    """Return whether ``result`` is new and has as many elements as the gradients among the arguments."""
    if not result.ndim or not result.dtype.is_floating_point or any(result is arg for arg in args):
        return False
    numel = result.numel()
    joined = 0
    for arg in args:
        if isinstance(arg, ShardGrad):
            if arg.numel() == numel:
                return True
        elif isinstance(arg, (list, tuple)):
            joined += sum(item.numel() for item in arg if isinstance(item, ShardGrad))
    return joined == numel


_CHECK_FINITE = torch._amp_foreach_non_finite_check_and_unscale_


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


def plain(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a plain tensor of the same memory."""
    return grad.as_subclass(torch.Tensor)


def mark(param: torch.Tensor) -> None:
    """Make the gradient of a shard refuse norms."""
    grad = param.grad
    if grad is not None and grad.__class__ is torch.Tensor:
        grad.__class__ = ShardGrad


def mark_after_backward(param: torch.Tensor) -> None:
    """Call :func:`mark` whenever autograd has accumulated the gradient of ``param``, which may be frozen now."""
    if param.dtype.is_floating_point or param.dtype.is_complex:
        trained = param.requires_grad
        param.requires_grad_(True)  # otherwise torch refuses the hook
        param.register_post_accumulate_grad_hook(mark)
        param.requires_grad_(trained)
