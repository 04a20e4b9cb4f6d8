"""Exchange values among all ranks over the control channel."""

from __future__ import annotations

from typing import TypeVar

from ...agreement.control import control_of
from ...distributed.process_groups import ProcessGroupRef

__all__ = ["exchange"]

Value = TypeVar("Value")


def exchange(group: ProcessGroupRef, what: str, value: Value) -> list[Value]:
    """Return every rank's value, in the order of ranks; a collective that all ranks call for the same purpose.

    Args:
        what: the purpose, for the message if a rank does something else.
    """
    return control_of(group).exchange(what, value)
