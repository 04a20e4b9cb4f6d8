"""The actions that ranks announce in rounds, and the error if these differ: see [Note: Rounds] in ``channel``.

[Note: Known failures]
An exception of which all ranks know is marked, so that no handler announces it again. The mark counts only during the
work in which it was made: a program may keep an exception and raise it again in a later step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

_work = 0  # how often this process has begun work whose failure it would announce


def begin_work() -> None:
    """Note that new work begins: the other ranks know of none of its failures, even if it raises a marked exception."""
    global _work
    _work += 1


def known_to_all(error: Exception) -> Exception:
    """Mark an error that all ranks have raised in the present work, either itself or in one that names it."""
    error._is_known_in_work = _work  # type: ignore[attr-defined]
    return error


def is_known_to_all(error: BaseException | None) -> bool:
    """Return whether all ranks have raised this error in the present work, or the error that has caused it."""
    while error is not None:
        if getattr(error, "_is_known_in_work", None) == _work:
            return True
        error = error.__cause__
    return False


TOKEN = struct.Struct("<5q")
"""The format of a token: a hash of all that must be the same on all ranks; a hash of the inputs, which may differ; a
hash of the exact computation, which must be the same on ranks with the same inputs; offered bits, which count if all
ranks set them; and a hash of data that the ranks exchange only if the hashes differ."""


class ScheduleDisagreement(RuntimeError):
    """The error for ranks that do different things: their schedules or traces differ, or some ranks did not come."""

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
        """An action with the same description that keeps no module alive, for the channel to keep until its next round."""
        return self

    def cancel(self) -> None:
        """Record that the action will not be performed, after it was posted."""

    def apply_agreement(self, offered_bits: int, *, alike: bool) -> None:
        """Act on the bits that all ranks have offered, once the round is settled.

        Args:
            alike: whether the last hash of the token is the same on all ranks.
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
        """The issues beyond those that were expected: 0 unless an exception interrupted a trace."""
        return self.issued - self.expected


def after_surplus(surplus_issues: int) -> str:
    """Return the end of an action's description that tells of an earlier interrupted trace; usually empty."""
    if not surplus_issues:
        return ""
    number, compared = f"{abs(surplus_issues) / 2:g}", "fewer" if surplus_issues < 0 else "more"
    return f" (this rank has issued {number} collectives {compared} than planned, for example after an exception)"
