"""Reads the reStructuredText roles of the docstrings: ``:func:`name``` becomes ``name`` in code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([^`]+)`")


class DocstringRoles(griffe.Extension):
    """Replaces roles before the docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", obj.docstring.value)
