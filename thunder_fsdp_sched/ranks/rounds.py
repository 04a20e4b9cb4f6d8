"""The actions that ranks announce in rounds, and the error if these differ: see [Note: Rounds] in ``channel``.

[Note: Known failures]
Failures of this rank that all ranks know of are marked, so that whatever they pass through need not announce them again.
A mark counts only for the work in which it was made: a program may keep an exception and raise it again in a later step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

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


TOKEN = struct.Struct("<5q")
"""The format of a token: a hash of what all ranks must have in common, one of what they may have in common (inputs), one
of what ranks must have in common if they have that (the exact computation), bits that may differ, of which those
count that all ranks have set, and a hash of what the ranks exchange unless it is the same on all of them."""


class ScheduleDisagreement(RuntimeError):
    """The error that ranks of a process group do different things: other schedules, other traces, or some did not come."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        known_to_all(self)


class RoundAction:
    """The action that a rank announces in a round.

    Attributes:
        text: a description in one line.
        advice: how to allow a difference between actions with this advice; empty if that is impossible.
    """

    def __init__(self, text: str, advice: str = "") -> None:
        self.text, self.advice = text, advice

    def describe(self) -> str:
        """Return one line for the message of a disagreement."""
        return self.text

    def details(self) -> Sequence[str]:
        """Return lines to compare if the descriptions of ranks are equal; may be empty."""
        return ()

    @property
    def remembered(self) -> RoundAction:
        """The action whose description a channel keeps until its next round, without what belongs to a module."""
        return self

    def cancel(self) -> None:
        """Record that the action will not be performed, after it was posted."""

    def apply_agreement(self, offered_bits: int, *, alike: bool) -> None:
        """Act on the bits that all ranks have offered, once the round is settled.

        Args:
            alike: whether the last hash of all tokens is the same.
        """


class IssueCounts:
    """The number of collectives that one model has issued on this rank; see [Note: Agreement of ranks] in ``control``.

    Each collective counts twice, before and after it is issued, so an issue that failed halfway is recognized.

    Attributes:
        log: the kind and the bucket's handle of each collective since the last round in which all ranks had issued the
            same ones, for ``extras.training.gradients``; ``None`` unless the ranks agree in steps.
    """

    __slots__ = ("expected", "issued", "log", "settle")

    def __init__(self, settle: Callable[[], None] = lambda: None, *, logs: bool = False) -> None:
        self.issued = 0
        self.log: list[tuple[str, str]] | None = [] if logs else None
        self.expected = 0  # the collectives of all traces that have started
        self.settle = settle  # ends a round of agreement that is still open

    @property
    def surplus_issues(self) -> int:
        """How much has been issued beyond what was expected: 0 unless an exception interrupted a trace."""
        return self.issued - self.expected


def after_surplus(surplus_issues: int) -> str:
    """Return what a description of an action ends with if an exception interrupted a trace before it."""
    if not surplus_issues:
        return ""
    number, compared = f"{abs(surplus_issues) / 2:g}", "fewer" if surplus_issues < 0 else "more"
    return f" (this rank has issued {number} collectives {compared} than planned, for example after an exception)"
