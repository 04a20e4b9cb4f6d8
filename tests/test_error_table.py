"""The table of errors and the code that raises them belong together."""

from __future__ import annotations

import ast
import configparser
import pickle
import re
import string
from collections.abc import Iterator
from pathlib import Path

import thunder_fsdp_sched

import pytest
from coded import coded

PACKAGE = Path(thunder_fsdp_sched.__file__).parent
TABLE = configparser.ConfigParser(delimiters=("=",), comment_prefixes=("#",), interpolation=None)
TABLE.read(PACKAGE / "errors.ini", encoding="utf-8")
TEXTS = {f"{section}.{name}": text for section in TABLE.sections() for name, text in TABLE[section].items()}


def _uses() -> Iterator[tuple[str, str, set[str]]]:
    """Yield each code in the package's calls: the place, the code, and the names of the values that are given there."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                given = {keyword.arg for keyword in node.keywords if keyword.arg}
                if isinstance(node.func, ast.Name) and node.func.id == "coded_error":
                    code = node.args[1]
                    assert not isinstance(code, ast.Constant) or code.value in TEXTS, f"{place}: {code.value!r}"
                for arg in node.args:
                    if isinstance(arg, ast.Constant) and arg.value in TEXTS:
                        yield place, arg.value, given


def _placeholders(text: str) -> set[str]:
    """Return the names in braces, and check that they are names, which ``format_map`` can look up."""
    names = {name for _, name, spec, _ in string.Formatter().parse(text) if name is not None}
    assert all(name.isidentifier() for name in names), text
    return names


def test_each_error_fits_its_text() -> None:
    used = set()
    for place, code, given in _uses():
        # What a function that raises many errors adds: the title of a leaf, where forward writes in place, ...
        added = _placeholders(TEXTS[code]) - given
        assert given <= _placeholders(TEXTS[code]) and added <= {"title", "where"}, f"{place}: {code}"
        used.add(code)

    assert used == set(TEXTS), "the table has texts that nothing raises"


def test_an_error_of_the_table_has_a_code_also_in_another_process() -> None:
    with pytest.raises(ValueError, check=coded("option.too-small")) as raised:
        thunder_fsdp_sched.fsdp(prefetch=-1)
    error = pickle.loads(pickle.dumps(raised.value))

    assert (error.code, str(error), type(error)) == ("option.too-small", str(raised.value), ValueError)


def test_the_page_of_errors_shows_the_code_that_its_example_raises() -> None:
    [example] = re.findall(r"```python\n(.*?)```", (PACKAGE.parent / "docs" / "errors.md").read_text(), re.DOTALL)

    exec(example, {"tfs": thunder_fsdp_sched})
