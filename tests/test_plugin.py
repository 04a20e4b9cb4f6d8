"""``thunder.compile(model, plugins="fsdp-sched")`` itself, compared with the unsharded model."""

from __future__ import annotations

from functools import partial
from typing import Any

from thunder_fsdp_sched import FSDPSched, FSDPTransform, Plan

import pytest
import thunder
import torch
from models import modeled
from ranks import on_ranks
from scenario import Run
from thunder.extend import get_executor
from thunder.recipes import BaseRecipe
from torch import nn


class _DefaultExecutors(BaseRecipe):
    """The default recipe, without nvFuser."""

    def setup_executors(self) -> list[thunder.Executor]:
        return list(thunder.get_default_executors())


@modeled(layers=lambda: nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3)))
def _Model(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute something else in evaluation."""
    x = torch.tanh(self.layers(x))
    return 2 * x if self.training else x


def _plan(model: Any) -> Plan:
    return next(transform.plan for transform in model._lc_transforms if isinstance(transform, FSDPTransform))


@on_ranks(2)
def test_compile_with_a_recipe_trains_like_the_unsharded_model() -> None:
    compiled = partial(thunder.compile, recipe=_DefaultExecutors(), plugins="fsdp-sched")
    run = Run(_Model().double(), others=[compiled])
    run.models = [ours := run.models[1]]  # without the one of thunder.jit
    run.model = ours
    run.use(run.make_optimizer)
    assert set(thunder.get_default_executors()) <= set(thunder.compile_data(ours).executors_list)
    assert len(_plan(ours)) > 1
    run.train(2)

    # Recipes remove the checks of a module's mode.
    assert thunder.cache_misses(ours) == 1
    run.mode(training=False)
    run.forward()
    run.pending.clear()
    run.mode(training=True)
    for frozen in (False, True, False):
        run.freeze("layers.0.weight", "layers.0.bias", frozen=frozen)
        run.micro_batch(no_sync=False)
        run.compare_gradients()
        for optimizer in run.optimizers:
            optimizer.zero_grad()
    assert thunder.cache_misses(ours) == 3  # training and evaluation, and with frozen parameters

    run.micro_batch()
    run.micro_batch(no_sync=False)
    run.step()
    assert thunder.cache_misses(ours) == 4

    recipe = BaseRecipe(fuser="torch.compile")
    fused = thunder.compile(_Model(), recipe=recipe, plugins=FSDPSched(sharding_strategy="zero2"))
    assert get_executor("torchcompile") in thunder.compile_data(fused).executors_list
    assert all(bucket.options.sharding_strategy == "zero2" for bucket in _plan(fused))


def test_a_recipe_for_thunder_fx_is_refused() -> None:
    recipe = BaseRecipe(interpreter="thunder.fx", fuser="torch.compile")
    with pytest.raises(Exception, match=r"a recipe with interpreter='thunder\.jit'"):
        thunder.compile(_Model(), recipe=recipe, plugins="fsdp-sched")(torch.ones(2, 4))
