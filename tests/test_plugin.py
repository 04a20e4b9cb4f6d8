"""``thunder.compile(model, plugins="fsdp-sched")`` itself, compared with the unsharded model."""

from __future__ import annotations

import copy

from thunder_fsdp_sched import FSDPSched, full_state_dict
from thunder_fsdp_sched.transform import find_transform

import pytest
import thunder
import torch
import torch.distributed as dist
from ranks import on_ranks
from thunder.extend import get_executor
from thunder.recipes import BaseRecipe
from torch import nn


class _DefaultExecutors(BaseRecipe):
    """The default recipe, without nvFuser."""

    def setup_executors(self) -> list[thunder.Executor]:
        return list(thunder.get_default_executors())


class _Model(nn.Module):
    """Computes something else in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers(x))
        return 2 * x if self.training else x


def _check(ours: nn.Module, reference: nn.Module, x: torch.Tensor) -> None:
    """Compare outputs and, in training, gradients."""
    outputs = ours(x), reference(x)
    torch.testing.assert_close(*outputs)
    if ours.training:
        for model, output in zip((ours, reference), outputs, strict=True):
            model.zero_grad()
            output.square().sum().backward()
        for name, param in reference.named_parameters():
            grad = ours.get_parameter(name).grad
            assert (grad is None) == (param.grad is None) == (not param.requires_grad), name
            if grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
                torch.testing.assert_close(grad.full_tensor(), param.grad)


@on_ranks(2)
def test_compile_with_a_recipe_trains_like_the_unsharded_model(rank: int) -> None:
    model = _Model().double()
    reference = copy.deepcopy(model)
    ours = thunder.compile(model, recipe=_DefaultExecutors(), plugins="fsdp-sched")
    executors = thunder.compile_data(ours).executors_list
    assert set(thunder.get_default_executors()) <= set(executors)
    assert len(find_transform(ours).plan) > 1

    models = ours, reference
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    for _ in range(2):
        _check(ours, reference, x)
        for optimizer in optimizers:
            optimizer.step()
    for name, whole in full_state_dict(ours).items():
        torch.testing.assert_close(whole, reference.get_parameter(name))

    # Recipes remove the checks of a module's mode.
    assert thunder.cache_misses(ours) == 1
    for change in (
        lambda model: model.eval(),
        lambda model: model.train(),
        lambda model: model.get_submodule("layers.0").requires_grad_(False),
        lambda model: model.get_submodule("layers.0").requires_grad_(True),
    ):
        for model in models:
            change(model)
        _check(ours, reference, x)
    assert thunder.cache_misses(ours) == 3  # training and evaluation, and with frozen parameters

    with ours.no_sync():
        ours(x).sum().backward()
    ours(x).sum().backward()
    assert thunder.cache_misses(ours) == 4

    recipe = BaseRecipe(fuser="torch.compile")
    fused = thunder.compile(_Model(), recipe=recipe, plugins=FSDPSched(sharding_strategy="zero2"))
    assert get_executor("torchcompile") in thunder.compile_data(fused).executors_list
    assert all(bucket.options.sharding_strategy == "zero2" for bucket in find_transform(fused).plan)


def test_a_recipe_for_thunder_fx_is_refused() -> None:
    recipe = BaseRecipe(interpreter="thunder.fx", fuser="torch.compile")
    with pytest.raises(Exception, match=r"a recipe with interpreter='thunder\.jit'"):
        thunder.compile(_Model(), recipe=recipe, plugins="fsdp-sched")(torch.ones(2, 5))
