"""Failures of this rank that all ranks know of, so that whatever they pass through need not announce them again.

A mark counts only for the work in which it was made: a program may keep an exception and raise it again in a later step.
"""

from __future__ import annotations

_work = 0  # how often this process has begun work whose failure it would announce


def begin_work() -> None:
    """Note that work begins whose failure the other ranks do not know of, whichever exception it raises."""
    global _work
    _work += 1


def known_to_all(error: Exception) -> Exception:
    """Mark an error as one that all ranks have raised in the present work, or an error that names it."""
    error._is_known_in_work = _work  # type: ignore[attr-defined]
    return error


def is_known_to_all(error: BaseException | None) -> bool:
    """Return whether all ranks have raised this error in the present work, or that which has caused it."""
    while error is not None:
        if getattr(error, "_is_known_in_work", None) == _work:
            return True
        error = error.__cause__
    return False
