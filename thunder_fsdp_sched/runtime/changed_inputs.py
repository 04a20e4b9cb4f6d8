"""The error for an input that differs from what was traced."""

from __future__ import annotations

from typing import Any

from ..errors import coded_error
from .traced_inputs import HAS, MISSING, Check, Path


def mismatch(path: Path, value: Any, check: Check | None) -> RuntimeError:
    """Return the error for an input that differs. Users see it only if forward has changed the input itself."""
    name, expected = _expression(path), "there" if check is None else f"{check[0]} {check[1]!r}"
    found = "it is missing" if value is MISSING else f"it is {type(value).__name__} {value!r:.100}"
    return coded_error(RuntimeError, "module.input-changed-while-traced", name=name, expected=expected, found=found)


def _expression(path: Path) -> str:
    root, *steps = path
    text = {"INPUT_FN": "self", "INPUT_ARGS": "args", "INPUT_KWARGS": "kwargs"}.get(root, str(root))
    for kind, key in steps:
        if kind == HAS:
            return f"hasattr({text}, {key!r})"
        text += f"[{key!r}]" if kind == "item" else f".{key}"
    return text
