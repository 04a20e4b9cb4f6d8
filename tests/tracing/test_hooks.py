"""Hooks of modules: they are traced, and a call with other hooks than a trace has compiles again."""

from __future__ import annotations

from thunder_fsdp_sched import fsdp

import thunder
import torch
from models import Stack
from ranks import Ranks
from torch import nn


def _add_and_remove_hooks(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, reference = Stack(3), Stack(3)
    reference.load_state_dict(model.state_dict())
    jitted = thunder.jit(model, transforms=[fsdp()])
    x = torch.randn(4, 4)

    def check(compiled: int) -> None:
        torch.testing.assert_close(jitted(x), reference(x), rtol=0, atol=0)
        assert len(thunder.compile_stats(jitted).interpreter_cache) == compiled

    def double(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    check(1)
    hooks = [each.blocks[1].register_forward_hook(double) for each in (model, reference)]
    check(2)
    hooks += [each.blocks[2].register_forward_pre_hook(lambda module, args: args) for each in (model, reference)]
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
