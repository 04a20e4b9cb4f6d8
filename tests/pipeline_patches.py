"""Compile with other passes than the table has."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

from internals import passes, pipeline
from thunder.core.trace import TraceCtx


def replacing(
    name: str, pass_: Callable[[TraceCtx, passes.Context], TraceCtx]
) -> contextlib.AbstractContextManager[Any]:
    """Let another pass stand where the table has the one of this name."""
    assert any(step.name == name for phase in pipeline.PIPELINE for step in phase.steps), name
    table = [
        passes.Phase(p.name, p.before, *(dataclasses.replace(s, bind=pass_) if s.name == name else s for s in p.steps))
        for p in pipeline.PIPELINE
    ]
    return mock.patch.object(pipeline, "PIPELINE", table)


def without(name: str) -> contextlib.AbstractContextManager[Any]:
    """Leave a pass out."""
    return replacing(name, lambda trace, context: trace)
