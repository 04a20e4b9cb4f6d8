"""Errors with codes: one table, ``errors.ini``, holds the text of each.

A code says what is wrong, such as ``step.collective-failed``, and stays the same when the text is improved: programs and
tests compare ``error.code``. The table is read when the first error is raised.
"""

from __future__ import annotations

import configparser
import functools
from pathlib import Path
from typing import TypeVar

_TABLE = Path(__file__).with_name("errors.ini")

_E = TypeVar("_E", bound=Exception)


@functools.cache
def texts() -> dict[str, str]:
    """Return the text of each error by its code, ``section.name``, with placeholders as in :meth:`str.format`."""
    table = configparser.ConfigParser(delimiters=("=",), comment_prefixes=("#",), interpolation=None)
    table.read_string(_TABLE.read_text(encoding="utf-8"))
    # A text is one paragraph, wherever its lines are wrapped. It writes the line breaks of the message as \n.
    return {
        f"{section}.{name}": text.replace("\n", " ").replace(r"\n", "\n")
        for section in table.sections()
        for name, text in table[section].items()
    }


def coded_error(kind: type[_E], code: str, *args: object, **values: object) -> _E:
    """Return an error of a code, its attribute ``code``.

    Args:
        kind: the class of the error.
        code: the key of its text.
        args: what ``kind`` takes after the message.
        values: by the names of the text's placeholders.
    """
    return with_code(kind(texts()[code].format_map(values), *args), code)


def with_code(error: _E, code: str) -> _E:
    """Give an error a code, such as that of another error whose message it repeats."""
    error.code = code  # type: ignore[attr-defined]
    return error


def code_of(error: BaseException) -> str | None:
    """Return the code of an error, or ``None`` if it is not one of this package."""
    code = getattr(error, "code", None)
    return code if isinstance(code, str) else None
