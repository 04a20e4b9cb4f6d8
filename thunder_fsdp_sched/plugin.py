"""``thunder.compile(model, plugins=[...])``: the transform as one of Thunder's plugins, under the name "fsdp-sched"."""

from __future__ import annotations

from typing import Any

import thunder
from thunder.core.transform_common import Transform
from thunder.plugins import register_plugin

from .api import fsdp

__all__ = ["FSDPSched"]


class FSDPSched(thunder.Plugin):
    """The plugin that adds :func:`thunder_fsdp_sched.fsdp` to a Thunder recipe.

    ``thunder.compile(model, plugins="fsdp-sched")`` uses the default options, ``plugins=FSDPSched(prefetch=2)`` others.

    Args:
        **options: the options of :func:`thunder_fsdp_sched.fsdp`.
    """

    def __init__(self, **options: Any) -> None:
        self.transform = fsdp(**options)

    def setup_transforms(self) -> list[Transform]:
        return [self.transform]


register_plugin("fsdp-sched", FSDPSched)
