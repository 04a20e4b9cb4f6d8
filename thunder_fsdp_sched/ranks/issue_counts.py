"""The collectives that a model has issued, and those that its traces contain: [Note: Agreement of ranks] in ``control``."""

from __future__ import annotations

from collections.abc import Callable


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
