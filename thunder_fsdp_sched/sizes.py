"""Numbers of bytes as users write and read them."""

from __future__ import annotations

import re
from typing import Any

from .errors import coded_error

_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", re.IGNORECASE)
_UNITS = {"": 1} | {p + i: b**e for e, p in enumerate("kmgt", 1) for i, b in (("", 1000), ("i", 1024))}


def parse_bytes(name: str, value: Any) -> int:
    """Return a number of bytes given as an int (``40 * 2**30``) or a string (``"40GiB"``).

    Raises:
        TypeError, ValueError: names the option ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        expected = "bytes as an int or a string such as '40GiB'"
        raise coded_error(
            TypeError, "option.wrong-type", name=name, expected=expected, got=value, type=type(value).__name__
        )
    if isinstance(value, str):
        match = _BYTES.fullmatch(value)
        if match is None:
            raise coded_error(ValueError, "option.size-not-understood", name=name, got=value)
        value = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    if value <= 0:
        raise coded_error(ValueError, "option.size-not-positive", name=name, got=value)
    return value


def human_bytes(nbytes: int, digits: int = 3) -> str:
    """Return bytes as text: ``4927488`` -> ``"4.93 MB"`` (powers of ten), with so many significant digits."""
    size, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while float(f"{size:.{digits}g}") >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.{digits}g} {units[0]}"
