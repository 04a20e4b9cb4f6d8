"""Calls with other hooks of modules compile again, and calls after ``torch.autocast`` compute in full precision."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from thunder_fsdp_sched import fsdp

import pytest
import thunder
import torch
from models import Stack
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


def test_a_call_with_other_hooks_compiles_again(one_rank: None) -> None:
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


@pytest.mark.long  # `test_shard_prologue` replaces a hook
def test_a_call_with_replaced_hooks_compiles_again(one_rank: None) -> None:
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


#
# Autocast
#


@pytest.mark.parametrize("cache", ["constant values", pytest.param("no caching", marks=pytest.mark.long)])
def test_calls_after_autocast_compute_in_full_precision(cache: str, one_rank: None) -> None:
    torch.manual_seed(0)
    model, reference = Stack(1), Stack(1)
    reference.load_state_dict(model.state_dict())
    transform = fsdp()
    jitted = thunder.jit(model, transforms=[transform], cache=cache)
    x = torch.randn(6, 4)

    def check(x: torch.Tensor) -> None:
        output, expected = jitted(x), reference(x)
        assert output.dtype is expected.dtype
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)

    for _ in range(1 if cache == "no caching" else 2):  # without a cache, the second round compiles the same again
        with torch.autocast("cpu", torch.bfloat16):
            assert jitted(x).dtype is torch.bfloat16
        check(x)
        check(x[:3])
        with torch.no_grad():
            check(x)
        jitted(x).sum().backward()
        reference(x).sum().backward()
        for own, param in zip(jitted.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), param.grad, rtol=1e-5, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            check(x[:2])
