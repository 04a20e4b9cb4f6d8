"""``thunder.compile(model, plugins=[...])``: the transform as one of Thunder's plugins, under the name "fsdp-sched"."""

from __future__ import annotations

import inspect
import warnings
from types import FrameType
from typing import Any

import thunder
from thunder.core.module import ThunderModule
from thunder.core.recipe import Interpreter, Recipe
from thunder.core.transform_common import Transform
from thunder.extend import get_default_executors, get_executor
from thunder.plugins import register_plugin

from .api import fsdp

__all__ = ["FSDPSched"]


class FSDPSched(thunder.Plugin):
    """The plugin that adds :func:`thunder_fsdp_sched.fsdp` to a Thunder recipe.

    ``thunder.compile(model, plugins="fsdp-sched")`` uses the default options, ``plugins=FSDPSched(prefetch=2)`` others.
    Thunder's default recipe fuses with nvFuser, without which ``thunder.compile`` fails. With this plugin, the recipe
    uses Thunder's default executors instead, as ``thunder.jit`` does, and a warning says so.

    Args:
        **options: the options of :func:`thunder_fsdp_sched.fsdp`.

    Raises:
        TypeError: by ``thunder.compile``, if the recipe compiles with ``thunder.fx``.
    """

    def __init__(self, **options: Any) -> None:
        self.transform = fsdp(**options)

    def setup_transforms(self) -> list[Transform]:
        recipe = _running_recipe(inspect.currentframe())
        if recipe is not None:
            if recipe.interpreter is Interpreter.THUNDER_FX:
                raise TypeError(
                    "FSDPSched: the recipe has interpreter='thunder.fx', whose graphs have no module to shard; pass a "
                    "recipe with interpreter='thunder.jit', the default"
                )
            _replace_missing_nvfuser(recipe)
        return [self.transform, _TraceEachMode()]


def _running_recipe(frame: FrameType | None) -> Recipe | None:
    """Return the recipe whose ``apply`` asks for transforms: plugins are not given it."""
    while frame is not None:
        if frame.f_code is Recipe.apply.__code__:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


class _TraceEachMode(Transform):
    """Lets a module have traces for training, for evaluation, and for each choice of trainable parameters.

    Thunder's recipes remove the checks that decide whether a trace fits the module (``PrunePrologueChecks``). A trace
    for training would then run after ``model.eval()``, with dropout.
    """

    def transform_module(self, model: ThunderModule) -> None:
        stats = thunder.compile_stats(model)
        traces_of_mode: dict[tuple[bool, ...], list[Any]] = {}
        current: tuple[bool, ...] | None = None

        def select_traces(model: ThunderModule, *_: Any) -> None:
            nonlocal current
            mode = (
                *(module.training for module in model._model.modules()),
                *(param.requires_grad for param in model.parameters()),
            )
            if mode != current:
                if current is not None:
                    traces_of_mode[current] = list(stats.interpreter_cache)
                    stats.interpreter_cache[:] = traces_of_mode.pop(mode, ())
                current = mode

        model.register_forward_pre_hook(select_traces)


def _replace_missing_nvfuser(recipe: Recipe) -> None:
    names = getattr(recipe, "executor_names", None)
    if not isinstance(names, list) or "nvfuser" not in names or get_executor("nvfuser") is not None:
        return
    # Before the recipe looks its executors up. By the time of the next call, nvFuser may be missing no longer.
    defaults = [executor.name for executor in get_default_executors()]
    recipe.executor_names = [new for name in names for new in (defaults if name == "nvfuser" else [name])]
    warnings.warn(
        f"FSDPSched: {type(recipe).__name__} fuses with nvFuser, which does not work here; Thunder's default executors "
        f"({', '.join(defaults)}) are used instead, as by thunder.jit. To fuse with torch.compile, pass "
        f"recipe=thunder.recipes.BaseRecipe(fuser='torch.compile')",
        stacklevel=5,  # the caller of thunder.compile
    )


register_plugin("fsdp-sched", FSDPSched)
