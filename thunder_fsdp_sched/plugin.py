"""``thunder.compile(model, plugins=[...])``: the transform as one of Thunder's plugins, under the name "fsdp-sched"."""

from __future__ import annotations

from typing import Any

import thunder
from thunder.core.transform_common import Transform
from thunder.plugins import register_plugin

from .api import fsdp

__all__ = ["FSDPSched"]


class FSDPSched(thunder.Plugin):
    """Makes :func:`thunder_fsdp_sched.fsdp` part of a Thunder recipe.

    ``thunder.compile(model, plugins="fsdp-sched")`` takes the defaults, ``plugins=FSDPSched(prefetch=2)`` options.

    Args:
        **options: those of :func:`thunder_fsdp_sched.fsdp`.
    """

    def __init__(self, **options: Any) -> None:
        self.transform = fsdp(**options)

    def setup_transforms(self) -> list[Transform]:
        return [self.transform]


register_plugin("fsdp-sched", FSDPSched)
