"""Errors for programs that a trace would not reproduce: they name the line of the program and what to do instead."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from thunder.core.interpreter import get_interpreterruntimectx

from ..errors import coded_error
from ..ir.inspection import is_library

AS_TENSORS = (
    "Compute with tensors instead (torch.where, torch.clamp, a mask), or compute the value outside of forward and pass it "
    "as an argument; each value is then compiled once"
)
"""The advice for a program that depends on the value of a tensor."""

_PACKAGE = str(Path(__file__).parents[1])
_STANDARD = str(Path(random.__file__).parent)  # Python's library, which may contain installed packages

_refused: ContextVar[list[NotImplementedError] | None] = ContextVar("_refused", default=None)


def refusal(what: str, instead: str, line: str = "") -> NotImplementedError:
    """Return the error for something that the program does, by default on the line that is being traced.

    Args:
        what: what it does and why a trace does not reproduce it, without a period.
        instead: what to do instead, without a period.
        line: the file and line.
    """
    line = line or user_line()
    error = coded_error(
        NotImplementedError,
        "module.not-reproduced-by-trace",
        where=line + ": " if line else "",
        operation=what,
        instead=instead,
    )
    known = _refused.get()
    if known is not None:
        known.append(error)
    return error


@contextmanager
def collect_refusals() -> Iterator[list[NotImplementedError]]:
    """Collect the errors of :func:`refusal`. The traced program may catch them, but its trace is wrong nevertheless."""
    refused: list[NotImplementedError] = []
    token = _refused.set(refused)
    try:
        yield refused
    finally:
        _refused.reset(token)


def count_refused() -> int:
    """Return how many refusals the running trace has collected."""
    return len(_refused.get() or ())


def latest_refused() -> NotImplementedError:
    """Return the latest refusal that the running trace has collected."""
    known = _refused.get()
    assert known, "something was refused"
    return known[-1]


def is_in_thunder() -> bool:
    """Return whether the traced function that runs is one of Thunder's own, which needs Thunder's types."""
    return str(get_interpreterruntimectx().frame_stack[-1].module).startswith("thunder.")


def is_own(filename: str) -> bool:
    """Return whether a file is one of this package."""
    return filename.startswith(_PACKAGE)


def user_line() -> str:
    """Return the file and line of the innermost traced function that belongs to no library; "" outside of tracing."""
    try:
        frames = get_interpreterruntimectx().frame_stack
    except LookupError:
        return ""
    for frame in reversed(frames):
        if frame.positions is not None and is_of_program(frame.code.co_filename):
            return f"{frame.code.co_filename}:{frame.positions.lineno}"
    return ""


def is_of_program(filename: str) -> bool:
    """Return whether a file is not part of Python's library, torch, Thunder or this package."""
    is_standard = filename.startswith(_STANDARD) and "site-packages" not in filename
    return not (is_standard or is_library(filename) or is_own(filename) or filename.startswith("<"))
