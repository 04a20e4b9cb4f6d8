"""Read fields of JSON files and name the first one that is missing or of another type."""

from __future__ import annotations

from typing import Any

__all__ = ["field_of", "typed"]


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
