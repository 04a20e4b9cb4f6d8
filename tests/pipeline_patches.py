"""Compile with passes other than the pipeline's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from internals import passes
from thunder.core.trace import TraceCtx


def replacing(name: str, function: Callable[[TraceCtx, Any], TraceCtx]) -> contextlib.AbstractContextManager[Any]:
    """Replace the pass of this name by another function."""
    call = passes.Run.__call__

    def run(self: passes.Run, pass_: Callable[..., TraceCtx], trace: TraceCtx, **arguments: Any) -> TraceCtx:
        def instead(trace: TraceCtx, **arguments: Any) -> TraceCtx:
            return function(trace, self.context)

        instead.__name__ = name
        return call(self, instead if pass_.__name__ == name else pass_, trace, **arguments)

    return mock.patch.object(passes.Run, "__call__", run)


def without(name: str) -> contextlib.AbstractContextManager[Any]:
    """Leave a pass out."""
    return replacing(name, lambda trace, context: trace)
