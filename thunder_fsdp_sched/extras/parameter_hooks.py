"""The hooks of sharded parameters.

[Note: Hooks of parameters]
Under ``no_sync`` a compiled backward returns no gradients, but autograd still calls a parameter's hooks: tensor hooks
with ``None``, and post-accumulate-grad hooks before there is a ``.grad``. FSDP2 calls no hooks in such a backward, and
neither do we: a hook runs once in each window, with the reduced gradient. So each hook is wrapped in a function that
skips it. A post-accumulate-grad hook does not get the gradient, so a tensor hook of ours records whether there was one.

A gradient that only earlier micro-batches of a window have is not returned to autograd by the backward that ends the window
(``Accumulation.deferred``), so :func:`accumulate` runs the hooks, in the order of autograd.

Alternative: leave the parameters out of the autograd graph under ``no_sync``. Then autograd would refuse
``backward(inputs=parameters)``, and could not say for which parameters a backward was called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ..private_torch import hooks_of, set_hooks


class _GradientNoted:
    """A tensor hook that records whether the latest backward had a gradient."""

    has_gradient = False

    def __call__(self, grad: torch.Tensor | None) -> None:
        self.has_gradient = grad is not None


Hook: TypeAlias = "Callable[[Any], Any]"


def guarded_hook(param: torch.Tensor, hook: Hook) -> Hook:
    """Wrap a tensor hook to be registered: that of a parameter is skipped in a backward without a gradient."""
    if not isinstance(param, torch.nn.Parameter):
        return hook
    return lambda grad: None if grad is None else hook(grad)


def guarded_accumulated_hook(param: torch.Tensor, hook: Hook) -> Hook:
    """Wrap a post-accumulate-grad hook to be registered; see [Note: Hooks of parameters]."""
    if not isinstance(param, torch.nn.Parameter):
        return hook
    noted = _noted(param)
    return lambda updated: hook(updated) if noted.has_gradient else None


def take_hooks(old: torch.nn.Parameter, new: torch.nn.Parameter) -> None:
    """Give the sharded parameter ``new`` the hooks of ``old``, which their handles can still remove."""
    hooks, accumulated_hooks = hooks_of(old)
    for number, hook in hooks.items():
        hooks[number] = guarded_hook(new, hook)
    set_hooks(new, hooks, accumulated_hooks)
    for number, hook in accumulated_hooks.items():
        accumulated_hooks[number] = guarded_accumulated_hook(new, hook)


def accumulate(param: torch.nn.Parameter, grad: torch.Tensor) -> None:
    """Add a gradient that backward does not return to ``.grad``, with the hooks that autograd would run."""
    hooks, accumulated_hooks = hooks_of(param)
    for hook in list(hooks.values()):
        if (replaced := hook(grad)) is not None:
            grad = replaced
    param.grad = grad if param.grad is None else param.grad.add_(grad)
    for hook in list(accumulated_hooks.values()):
        hook(param)


def _noted(param: torch.Tensor) -> _GradientNoted:
    hooks, _ = hooks_of(param)
    noted = next((hook for hook in hooks.values() if isinstance(hook, _GradientNoted)), None)
    if noted is None:
        torch.Tensor.register_hook(param, noted := _GradientNoted())
    return noted
