"""The table of passes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from ...extensions import load
from ...passes import Later, Phase


def table_of(phases: Sequence[Phase]) -> str:
    """Return phases and their rows in Markdown."""
    lines = ["| pass | phase | when | what it does | in the search | required |", "|---|---|---|---|---|---|"]
    for phase in phases:
        lines += [f"| | | | *{phase.before}* | | |"] if phase.before else []
        for step in phase.steps:
            pass_ = load(step.pass_.path) if isinstance(step.pass_, Later) else step.pass_
            sentences = " ".join((inspect.getdoc(pass_) or "").replace("``", "`").split())
            does = sentences.partition(". ")[0].removesuffix(".") + "."
            yes = f"{'yes' * step.searched} | {'yes' * step.required}"
            lines.append(f"| `{step.name}` | {phase.name} | {step.when[0]} | {does} | {yes} |")
    return "\n".join(lines)
