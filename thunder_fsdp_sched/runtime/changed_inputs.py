"""The error for an input that differs from what was traced."""

from __future__ import annotations

from typing import Any

from .traced_inputs import HAS, MISSING, Check, Path


def mismatch(path: Path, value: Any, check: Check | None) -> RuntimeError:
    """Return the error for an input that differs. Users see it only if forward has changed the input itself."""
    name, expected = _expression(path), "there" if check is None else f"{check[0]} {check[1]!r}"
    found = "it is missing" if value is MISSING else f"it is {type(value).__name__} {value!r:.100}"
    return RuntimeError(
        f"fsdp: forward read {name} ({expected}), and now {found}. If this is the call that has been compiled, forward has "
        f"changed it while it was traced, and would not change it in later calls: return the values that it collects, or "
        f"assign them to an attribute or a buffer of the module (self.total = self.total + 1), which later calls then read"
    )


def _expression(path: Path) -> str:
    root, *steps = path
    text = {"INPUT_FN": "self", "INPUT_ARGS": "args", "INPUT_KWARGS": "kwargs"}.get(root, str(root))
    for kind, key in steps:
        if kind == HAS:
            return f"hasattr({text}, {key!r})"
        text += f"[{key!r}]" if kind == "item" else f".{key}"
    return text
