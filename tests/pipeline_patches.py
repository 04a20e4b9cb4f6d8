"""Compile with other passes than the table has."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

from thunder_fsdp_sched import passes


def replacing(name: str, pass_: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Let another pass stand where the table has the one of this name."""
    table = tuple(dataclasses.replace(s, pass_=pass_) if s.name == name else s for s in passes.PIPELINE)
    assert any(new is not old for new, old in zip(table, passes.PIPELINE, strict=True)), name
    return mock.patch.object(passes, "PIPELINE", table)


def without(name: str) -> contextlib.AbstractContextManager[Any]:
    """Leave a pass out."""
    return replacing(name, lambda trace, **arguments: trace)
