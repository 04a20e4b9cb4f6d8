"""The plugin "fsdp-sched" of ``thunder.compile(model, plugins=[...])``."""

from __future__ import annotations

from typing import Any

import thunder
from thunder.core.module import ThunderModule
from thunder.core.transform_common import Transform

from ..api import fsdp


class FSDPSched(thunder.Plugin):
    """The plugin that adds :func:`thunder_fsdp_sched.fsdp` to a Thunder recipe.

    ``thunder.compile(model, plugins="fsdp-sched")`` uses the default options, ``plugins=FSDPSched(prefetch=2)`` others.
    Thunder's default recipe fuses with nvFuser, without which ``thunder.compile`` fails. Then pass a recipe:
    ``thunder.compile(model, recipe=thunder.recipes.BaseRecipe(fuser="torch.compile"), plugins="fsdp-sched")``. A recipe
    that compiles with ``thunder.fx`` raises an error at the first call.

    Args:
        **options: the options of :func:`thunder_fsdp_sched.fsdp`.
    """

    def __init__(self, **options: Any) -> None:
        self.transform = fsdp(**options)

    def setup_transforms(self) -> list[Transform]:
        return [self.transform, _TraceEachMode()]


class _TraceEachMode(Transform):
    """A transform that keeps traces for training, for evaluation, and for each choice of trainable parameters.

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
