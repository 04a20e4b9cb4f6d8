"""The text of traces, to compare them up to names."""

from __future__ import annotations

import re

__all__ = ["with_numbered_names"]


def with_numbered_names(text: str) -> str:
    """Return the text of a trace without comments and with names numbered in the order of appearance."""
    names: dict[str, str] = {}
    code = "\n".join(line.partition("#")[0].rstrip() for line in text.splitlines() if not line.startswith("# "))
    return re.sub(r"\b(?!\d)\w+\b", lambda word: names.setdefault(word[0], f"name{len(names)}"), code)
