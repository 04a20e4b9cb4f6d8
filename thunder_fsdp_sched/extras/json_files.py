"""JSON files of dataclasses and named tuples with a version, read by the types of their fields."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_Read = TypeVar("_Read")


def write_json(path: str | Path, version: int, content: Mapping[str, Any]) -> None:
    """Write a file that :func:`read_json` reads."""
    Path(path).write_text(json.dumps({"format": version, **content}, indent=1) + "\n")


def read_json(path: str | Path, option: str, holds: str, version: int, cls: type[_Read]) -> _Read:
    """Return the object of a class that a file describes.

    Args:
        option: the option that names the file, for messages.
        holds: what the file should hold, for messages.
        version: the value that the file's field ``format`` must have.
        cls: a dataclass or named tuple, of such, of tuples, mappings, ``None`` and JSON's own types.

    Raises:
        ValueError: the file holds something else; the message names the file and the first fault.
    """
    try:
        content = json.loads(Path(path).read_text())
        if (found := content.pop("format", None) if isinstance(content, dict) else None) != version:
            raise ValueError(f"format {found!r}, this version reads {version}")
        read: _Read = _read(content, cls, "")
    except RecursionError:
        raise ValueError(f"{option}: {path} holds no {holds}: it is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError is one
        raise ValueError(f"{option}: {path} holds no {holds}: {error}") from error
    return read


def _read(value: Any, annotation: Any, at: str) -> Any:
    """Return what the JSON value at a path of the file stands for."""
    options = get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if value is None and types.NoneType in options:
        return None
    of = options[0]
    arguments, kind = get_args(of), get_origin(of) or of
    fields = get_type_hints(of) if dataclasses.is_dataclass(of) or hasattr(of, "_fields") else None
    is_mapping = issubclass(kind, Mapping)
    expected = list if kind is tuple else dict if fields is not None or is_mapping else kind
    if type(value) is not expected and (type(value), expected) != (int, float):  # isinstance accepts a bool as an int
        names = expected.__name__ + " or null" * (types.NoneType in options)
        raise ValueError(f"{at or 'the file'}: expected {names}, got {type(value).__name__}")
    if expected is list:
        return tuple([_read(each, arguments[0], f"{at}[{number}]") for number, each in enumerate(value)])
    paths = {name: f"{at}.{name}" if at else name for name in value} if expected is dict else {}
    if is_mapping:
        return {name: _read(each, arguments[1], paths[name]) for name, each in value.items()}
    if fields is None:
        return value
    if unknown := sorted(value.keys() - fields.keys()):
        raise ValueError(f"{paths[unknown[0]]} is unknown")
    if missing := [name for name in fields if name not in value]:
        raise ValueError(f"{at or 'the file'} has no {missing[0]!r}")
    return of(**{name: _read(value[name], type_, paths[name]) for name, type_ in fields.items()})
