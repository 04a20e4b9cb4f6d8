"""The text of traces, to compare them up to names."""

from __future__ import annotations

import re


def with_numbered_names(text: str) -> str:
    """Return the text of a trace without comments and with names numbered in the order of appearance.

    Strings stay as they are: a variable may have the name of a parameter that the prologue reads.
    """
    names: dict[str, str] = {}
    code = "\n".join(line.partition("#")[0].rstrip() for line in text.splitlines() if not line.startswith("# "))
    code = re.sub(r" \\\n +", " ", code)  # Thunder wraps long lines, whose length depends on names

    def numbered(part: str, kind: str) -> str:
        return re.sub(
            r"'[^']*'|\b(?!\d)\w+\b",
            lambda word: word[0] if word[0][0] == "'" else names.setdefault(kind + word[0], f"name{len(names)}"),
            part,
        )

    parts = code.split('"')  # every other one is an annotation: its f64 is a dtype, not the name of a value
    return '"'.join(numbered(part, "annotation " * (index % 2)) for index, part in enumerate(parts))
