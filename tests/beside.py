"""A sharded model beside the same module in eager mode: a call gives the same outputs, gradients and buffers.

It is for one rank, or ranks with equal batches. A :class:`scenario.Run` has batches of its own for each rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from thunder_fsdp_sched import fsdp

import thunder
import torch
from scenario import loss_of, whole_of
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only


def compare_gradients(model: nn.Module, module: nn.Module, what: str = "", **tolerance: Any) -> None:
    """Compare a sharded model's gradients, which must be missing where they are missing in eager mode."""
    for name, param in module.named_parameters():
        ours, message = model.get_parameter(name).grad, f"{what} {name}".strip()
        assert (ours is None) is (param.grad is None), message
        if param.grad is not None:
            say = lambda text, message=message: f"gradient, {message}: {text}"  # noqa: E731
            torch.testing.assert_close(whole_of(ours), param.grad, msg=say, **tolerance)


class Beside:
    """A module in eager mode, and a copy of it that is sharded.

    Args:
        jit: options of ``thunder.jit``.
        options: the options of ``fsdp``.

    Attributes:
        module: the module in eager mode.
        own: the copy, which ``model`` contains.
        both: ``model`` and ``module``.
    """

    def __init__(self, module: nn.Module, *, jit: dict[str, Any] | None = None, **options: Any) -> None:
        self.module, self.own, self.transform = module, copy.deepcopy(module), fsdp(**options)
        self.model = thunder.jit(self.own, transforms=[self.transform], **(jit or {}))
        self.both = self.model, module

    def check(self, *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any) -> Any:
        """Compare a call and, where gradients are enabled, its backward. Return the sharded model's output.

        Each model gets tensors of its own, which it may write.
        """
        outputs, given = [], [tree_map_only(torch.Tensor, torch.clone, args) for _ in self.both]
        for net, own in zip(self.both, given, strict=True):
            net.zero_grad()
            torch.manual_seed(0)
            outputs.append(net(*own, **kwargs))
            loss = loss_of(outputs[-1]) if torch.is_grad_enabled() else None
            if loss is not None and loss.requires_grad:
                loss.backward()
        torch.testing.assert_close(*outputs, rtol=rtol, atol=atol)
        torch.testing.assert_close(
            *([leaf for leaf in tree_leaves(own) if isinstance(leaf, torch.Tensor)] for own in given)
        )
        self.compare_gradients(rtol=rtol, atol=atol)
        torch.testing.assert_close(dict(self.model.named_buffers()), dict(self.module.named_buffers()))
        return outputs[0]

    def compare_gradients(self, what: str = "", **tolerance: Any) -> None:
        compare_gradients(self.model, self.module, what, **tolerance)

    def check_each(self, names: Iterable[str], *args: Any, **tolerance: Any) -> None:
        """Compare a call whose output has a number for each name, and the gradients of each number."""
        outputs = [net(*args) for net in self.both]
        for name, *numbers in zip(names, *outputs, strict=True):
            torch.testing.assert_close(*numbers, msg=lambda text, name=name: f"{name}: {text}")
            for net, number in zip(self.both, numbers, strict=True):
                net.zero_grad()
                number.backward(retain_graph=True)
            self.compare_gradients(name, **tolerance)


class Applied(nn.Module):
    """A linear layer, and then a function of its result and the other arguments."""

    def __init__(self, function: Callable[..., Any], width: int = 2) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(width, width), function

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear(x), *args, **kwargs)


class AppliedEach(nn.Module):
    """Linear layers in two blocks and the outermost module; for each function, the sum of its results on all three."""

    def __init__(self, functions: Iterable[Callable[..., torch.Tensor]], width: int = 4) -> None:
        super().__init__()
        self.functions = list(functions)
        self.linear, self.blocks = nn.Linear(width, width), nn.ModuleList(Applied(self.each, width) for _ in range(2))

    def each(self, y: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.stack([function(y, *args).sum() for function in self.functions])

    def forward(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        return sum((block(x, *args) for block in self.blocks), self.each(self.linear(x), *args))
