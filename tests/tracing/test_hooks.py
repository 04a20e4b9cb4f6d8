"""Hooks of modules: they are traced, and a call while there are other hooks compiles again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from thunder_fsdp_sched import fsdp

import thunder
import torch
from models import Stack
from ranks import Ranks
from torch import nn


def _add_and_remove_hooks(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, reference = Stack(2), Stack(2)
    reference.load_state_dict(model.state_dict())
    jitted = thunder.jit(model, transforms=[fsdp()])
    x = torch.randn(4, 4)

    @torch.no_grad()  # compiles forward alone
    def check(compiled: int) -> None:
        torch.testing.assert_close(jitted(x), reference(x), rtol=0, atol=0)
        assert len(thunder.compile_stats(jitted).interpreter_cache) == compiled

    def double(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    check(1)
    hooks = [each.blocks[1].register_forward_hook(double) for each in (model, reference)]
    check(2)
    hooks += [each.blocks[0].register_forward_pre_hook(lambda module, args: args) for each in (model, reference)]
    check(3)
    for hook in hooks:
        hook.remove()
    check(3)
    glob = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    check(4)
    glob.remove()
    check(4)


def test_a_call_with_other_hooks_compiles_again(ranks: Ranks) -> None:
    ranks.run(_add_and_remove_hooks)


def _double(module: nn.Module, args: object, *output: Any) -> torch.Tensor:
    return output[-1] * 2 + len(output)  # two if keyword arguments come, too


def _triple(module: nn.Module, args: object, *output: Any) -> torch.Tensor:
    return output[-1] * 3


def _replace_hooks(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, reference = Stack(2), Stack(2)
    reference.load_state_dict(model.state_dict())
    jitted = thunder.jit(model, transforms=[fsdp()])
    x = torch.randn(4, 4)
    blocks = [each.blocks[1] for each in (model, reference)]

    @torch.no_grad()
    def check(compiled: int) -> None:
        for _ in range(2):
            torch.testing.assert_close(jitted(x), reference(x), rtol=0, atol=0)
        assert len(thunder.compile_stats(jitted).interpreter_cache) == compiled

    def register(hook: Any, **options: bool) -> None:
        for handle in handles:
            handle.remove()
        handles[:] = [block.register_forward_hook(hook, **options) for block in blocks]

    handles: list[Any] = []
    register(_double)
    check(1)
    register(_triple)
    check(2)
    register(_double)
    check(3)
    register(_double, with_kwargs=True)
    check(4)
    for handle, block in zip(handles, blocks, strict=True):
        block._forward_hooks[handle.id] = _triple
    check(5)
    for block in blocks:
        block._forward_hooks = OrderedDict()
    check(6)


def test_a_call_with_replaced_hooks_compiles_again(ranks: Ranks) -> None:
    ranks.run(_replace_hooks)
