"""Combinations that add no code path, so that only ``-m long`` runs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

LONG = False
"""Whether tests marked ``long`` run; ``conftest`` sets it. A test has more random examples then, or more repetitions."""

LONG_ONLY = pytest.mark.long


def with_long(names: Iterable[str], *long: str) -> list[Any]:
    """Return all names of a table, those that are ``long`` for long runs only."""
    names = list(names)
    assert set(long) <= set(names), set(long) - set(names)
    return [pytest.param(name, marks=[LONG_ONLY] if name in long else []) for name in names]
