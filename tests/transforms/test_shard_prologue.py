"""Guards in the prologue: a call finds traces only if all that they depend on is as it was when they were traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import thunder_fsdp_sched as tfs

import pytest
import thunder
import torch
from torch import nn


class _Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.power, self.kind, self.is_shifted = 2, "tanh", False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) ** self.power
        x = torch.tanh(x) if self.kind == "tanh" else torch.relu(x)
        return x + 1 if self.is_shifted else x


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.scale = _Part(), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.part(x) * self.scale
        return y if self.training else y * 2


def _set(**values: Any) -> Callable[[nn.Module], object]:
    return lambda part: vars(part).update(values)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": _set(power=3),
    "a number's type": _set(power=2.0),
    "a string": _set(kind="relu"),
    "a flag": _set(is_shifted=True),
    "a flag that is a number": _set(is_shifted=1),
    "a hook": lambda part: part.register_forward_hook(lambda *args: args[-1] * 2),
    "another hook with the same number": lambda part: part._forward_hooks.update(
        {number: lambda *args: args[-1] * 3 for number in part._forward_hooks}
    ),
    "a hook before": lambda part: part.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "no gradient": lambda part: part.linear.bias.requires_grad_(False),
}
"""Each is made on top of those before it."""


@pytest.mark.usefixtures("one_rank")
def test_what_forward_has_read_is_compared_in_each_call() -> None:
    torch.manual_seed(0)
    module, x = _Model(), torch.randn(2, 3)
    reference = copy.deepcopy(module)
    model = thunder.jit(module, transforms=[transform := tfs.fsdp()])
    compiled = transform.compiled

    def check(number: int) -> None:
        for _ in range(2):
            torch.testing.assert_close(model(x), reference(x))
            assert len(compiled) == number

    check(1)
    for number, (what, change) in enumerate(CHANGES.items(), 2):
        change(module.part)
        change(reference.part)
        check(number)
        prologue = str(thunder.last_prologue_traces(model)[-1])
        assert "fsdp_check_module(module, traced_module)" in prologue and ".kind" not in prologue, what
    for training in (False, True, False):
        for net in (model, reference):
            net.train(training)
        check(number + 1)
    of_all = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    check(number + 2)
    of_all.remove()
    check(number + 2)
    model.scale = reference.scale = float("nan")
    assert model(x).isnan().all() and model(x).isnan().all()
    assert len(compiled) == number + 3
