"""Compile with the memory that only backward needs in an extension, which otherwise only a search with a limit chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from thunder_fsdp_sched import FSDPTransform


def extended(transform: FSDPTransform, *, no_sync: bool = True) -> FSDPTransform:
    """Return the transform, which from now on compiles every step with an extension.

    Args:
        no_sync: whether micro-batches under ``no_sync`` are compiled with it, too.
    """
    begin = transform.begin_compilation

    def begin_extended(call: Any, **flags: bool) -> Any:
        compilation = begin(call, **flags)
        settings = replace(compilation.context.settings, backward_arena=no_sync or not flags["no_sync"])
        compilation.context.settings = settings
        return compilation

    transform.begin_compilation = begin_extended  # type: ignore[method-assign]
    return transform
