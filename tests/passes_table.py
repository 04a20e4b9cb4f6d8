"""The table of passes in docs/how-it-works.md, read from the code that runs them."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class Row(NamedTuple):
    """A call of a pass.

    Attributes:
        pass_: the pass.
        when: the comment of the condition on which it runs.
        searched: whether candidates of the search run it, too.
    """

    pass_: Callable[..., Any]
    when: str
    searched: bool


def rows_of(phase: Callable[..., Any]) -> list[Row]:
    """Return the passes that a phase runs, in order."""
    source = textwrap.dedent(inspect.getsource(phase))
    [function] = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    names: dict[str, Any] = dict(inspect.getmodule(phase).__dict__)
    for node in ast.walk(function):
        if isinstance(node, ast.ImportFrom):
            names.update((alias.name, _load(f"{node.module}:{alias.name}")) for alias in node.names)
    has_search = "search" in inspect.signature(phase).parameters
    return list(_rows(function.body, source.splitlines(), names, "", has_search))


def _rows(
    body: Sequence[ast.stmt], lines: Sequence[str], names: dict[str, Any], when: str, searched: bool
) -> Iterator[Row]:
    for statement in body:
        if isinstance(statement, ast.If):
            is_final = "not search" in ast.unparse(statement.test)
            comment = _comment(lines, statement.body[0].lineno) or when
            yield from _rows(statement.body, lines, names, comment, searched and not is_final)
            otherwise = statement.orelse
            is_elif = otherwise and isinstance(otherwise[0], ast.If)
            comment = when if is_elif or not otherwise else _comment(lines, otherwise[0].lineno)
            yield from _rows(otherwise, lines, names, comment, searched)
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "run":
                pass_ = node.args[0]
                if isinstance(pass_, ast.Call):  # load("path:name")
                    yield Row(_load(ast.literal_eval(pass_.args[0])), when, searched)
                else:
                    yield Row(names[ast.unparse(pass_)], when, searched)


def _load(path: str) -> Any:
    return pkgutil.resolve_name(f"thunder_fsdp_sched.{path}")


def _comment(lines: Sequence[str], number: int) -> str:
    """Return the comment of the header above a line, which is the first of a body."""
    while number > 1 and not re.search(r":(  #|$)", lines[number - 2]):
        number -= 1
    return lines[number - 2].partition("  # ")[2]


def table_of(phases: Sequence[Callable[..., Any]], optional: Sequence[str]) -> str:
    """Return phases and their passes in Markdown.

    Args:
        optional: the names of the passes that may be left out.
    """
    lines = ["| pass | phase | when | what it does | in the search | required |", "|---|---|---|---|---|---|"]
    for phase in phases:
        lines += [f"| | | | *{inspect.getdoc(phase)}* | | |"] if phase.__doc__ else []
        for pass_, when, searched in rows_of(phase):
            sentences = " ".join((inspect.getdoc(pass_) or "").replace("``", "`").split())
            does = sentences.partition(". ")[0].removesuffix(".") + "."
            yes = f"{'yes' * searched} | {'yes' * (pass_.__name__ not in optional)}"
            lines.append(f"| `{pass_.__name__}` | {phase.__name__} | {when} | {does} | {yes} |")
    return "\n".join(lines)
