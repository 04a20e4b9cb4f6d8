"""Clusters in JSON files and on the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import coded_error
from ...sizes import parse_bytes
from .clusters import NUMBERS, ClusterSpec, Efficiency, Protocol, cluster


def read_cluster(name: str, changes: Sequence[str] = ()) -> ClusterSpec:
    """Return a cluster by the name of a preset or the path of a JSON file, with some of its values changed.

    A file holds an object with the attributes of :class:`ClusterSpec`; ``"like"`` names the preset that has those that
    are left out::

        {"like": "h100-sxm", "name": "our H100", "inter_node_bandwidth": "25GB", "flops": {"bfloat16": 8e14}}

    Args:
        name: a preset, or a path that ends with ``.json``.
        changes: ``attribute=value``, such as ``inter_node_bandwidth=25GB`` (bytes/s) or ``devices_per_node=4``.

    Raises:
        ValueError: there is no such preset, file or attribute, or a value is invalid.
    """
    values: dict[str, Any] = {}
    like: Any = name
    if name.endswith(".json"):
        path = Path(name)
        try:
            values = {**json.loads(path.read_text())}
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise coded_error(ValueError, "plan.cluster-file-not-readable", path=path, error=error) from error
        like = values.pop("like", None)
        source = path.name if like is None else f"{path.name}, like {like}"
        values = {"name": path.stem, "source": source, **values}
    for change in changes:
        key, found, value = change.partition("=")
        if not found:
            raise coded_error(ValueError, "plan.cluster-change-without-value", change=change)
        values[key.strip()] = value.strip()
    base = None if like is None else cluster(like)
    if base is not None and not values:
        return base
    types = {f.name: str(f.type) for f in dataclasses.fields(ClusterSpec)}
    if unknown := sorted(values.keys() - types.keys()):
        raise coded_error(
            ValueError,
            "plan.cluster-unknown-attributes",
            place=name,
            unknown=", ".join(unknown),
            known=", ".join(types),
        )
    required = {f.name for f in dataclasses.fields(ClusterSpec) if f.default is dataclasses.MISSING}
    if base is None and (missing := sorted(required - values.keys())):
        raise coded_error(ValueError, "plan.cluster-file-lacks-attributes", path=name, missing=", ".join(missing))
    for key, value in values.items():
        try:
            values[key] = _read(types[key], value, None if base is None else getattr(base, key))
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise coded_error(
                ValueError, "plan.cluster-attribute-invalid", place=name, name=key, value=value, error=error
            ) from error
    return ClusterSpec(**values) if base is None else dataclasses.replace(base, **values)


def _read(of: str, value: Any, base: Any) -> Any:
    """Return the value of an attribute of a type; ``base`` is that of the preset, of which a file may change a part."""
    if of == "Peaks":
        return {**(base or {}), **{getattr(torch, dtype): peak for dtype, peak in value.items()}}
    if of == "Efficiency":
        return dataclasses.replace(base or Efficiency(), **value)
    if of == "tuple[Protocol, ...]":
        return tuple(Protocol(**protocol) for protocol in value)
    if of == "bool":
        return {"true": True, "false": False}.get(value, value)
    if not isinstance(value, str) or of not in NUMBERS:
        return value
    number = float(parse_bytes("value", value) if value[-1:].isalpha() else value)
    return int(number) if number.is_integer() else number
