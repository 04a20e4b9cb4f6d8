"""Hooks of modules: they are traced, and a call while there are other hooks compiles again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from thunder_fsdp_sched import fsdp

import thunder
import torch
from models import Stack
from ranks import on_ranks
from torch import nn


class Compiled:
    """A sharded model and an equal one in eager mode, which the test gives the same hooks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.reference = Stack(2), Stack(2)
        self.reference.load_state_dict(self.model.state_dict())
        self.jitted = thunder.jit(self.model, transforms=[fsdp()])

    def blocks(self, index: int) -> list[nn.Module]:
        return [each.blocks[index] for each in (self.model, self.reference)]

    @torch.no_grad()  # compiles forward alone
    def check(self, compiled: int) -> None:
        x = torch.linspace(-1, 1, 16).view(4, 4)
        for _ in range(2):
            torch.testing.assert_close(self.jitted(x), self.reference(x), rtol=0, atol=0)
        assert len(thunder.compile_stats(self.jitted).interpreter_cache) == compiled


def _double(module: nn.Module, args: object, *output: Any) -> torch.Tensor:
    return output[-1] * 2 + len(output)  # two if keyword arguments come, too


def _triple(module: nn.Module, args: object, *output: Any) -> torch.Tensor:
    return output[-1] * 3


@on_ranks(2)
def test_a_call_with_other_hooks_compiles_again() -> None:
    both = Compiled()
    both.check(1)
    hooks = [block.register_forward_hook(_double) for block in both.blocks(1)]
    both.check(2)
    hooks += [block.register_forward_pre_hook(lambda module, args: args) for block in both.blocks(0)]
    both.check(3)
    for hook in hooks:
        hook.remove()
    both.check(3)
    glob = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    both.check(4)
    glob.remove()
    both.check(4)


@on_ranks(2)
def test_a_call_with_replaced_hooks_compiles_again() -> None:
    both = Compiled()
    handles: list[Any] = []
    for number, (hook, options) in enumerate(
        [(_double, {}), (_triple, {}), (_double, {}), (_double, {"with_kwargs": True})]
    ):
        for handle in handles:
            handle.remove()
        handles = [block.register_forward_hook(hook, **options) for block in both.blocks(1)]
        both.check(number + 1)
    for handle, block in zip(handles, both.blocks(1), strict=True):
        block._forward_hooks[handle.id] = _triple
    both.check(5)
    for block in both.blocks(1):
        block._forward_hooks = OrderedDict()
    both.check(6)
