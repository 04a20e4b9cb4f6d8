"""Read JSON files and name the first field that is missing or of another type."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_Read = TypeVar("_Read")


def read_json(
    path: str | Path, option: str, holds: str, version: int, read: Callable[[dict[str, Any]], _Read]
) -> _Read:
    """Return what ``read`` makes of the JSON object in a file.

    Args:
        option: the option that names the file, for messages.
        holds: what the file should hold, for messages.
        version: the value that the object's field ``format`` must have.
        read: raises ValueError for content that it cannot read.

    Raises:
        ValueError: the file holds something else; the message names the file and the first fault.
    """
    try:
        content = typed(json.loads(Path(path).read_text()), dict, "the file")
        if content.get("format") != version:
            raise ValueError(f"format {content.get('format')!r}, this version reads {version}")
        return read(content)
    except RecursionError:
        raise ValueError(f"{option}: {path} holds no {holds}: it is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError is one
        raise ValueError(f"{option}: {path} holds no {holds}: {error}") from error


def field_of(content: dict[str, Any], name: str, types: type | tuple[type, ...], json_path: str) -> Any:
    """Return a field of an object.

    Raises:
        ValueError: it is missing or not of one of these types.
    """
    if name not in content:
        raise ValueError(f"{json_path} has no {name!r}")
    return typed(content[name], types, f"{json_path}.{name}")


def typed(value: Any, types: type | tuple[type, ...], json_path: str) -> Any:
    """Return ``value``.

    Raises:
        ValueError: it is not of one of these types.
    """
    types = types if isinstance(types, tuple) else (types,)
    if type(value) not in types:  # not isinstance, which accepts a bool as an int
        names = " or ".join("null" if cls is type(None) else cls.__name__ for cls in types)
        raise ValueError(f"{json_path}: expected {names}, got {type(value).__name__}")
    return value
