"""Describe a cluster by a preset, a JSON file, and single values, as the command line does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..sizes import parse_bytes
from .clusters import ClusterSpec, Efficiency, Protocol, as_json, cluster

_IN_BYTES = {"memory", "memory_bandwidth", "intra_node_bandwidth", "inter_node_bandwidth", "host_bandwidth"}
_FIELDS = {f.name: f for f in dataclasses.fields(ClusterSpec)}


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
    spec = _from_file(Path(name)) if name.endswith(".json") else cluster(name)
    values: dict[str, Any] = {}
    for change in changes:
        key, found, value = change.partition("=")
        if not found:
            raise ValueError(f"cluster: expected attribute=value, got {change!r}")
        values[key.strip()] = value.strip()
    return _changed(spec, values, "cluster") if values else spec


def save_cluster(spec: ClusterSpec, path: str | Path) -> None:
    """Write a cluster to a JSON file that :func:`read_cluster` reads."""
    Path(path).write_text(f"{as_json(spec)}\n")


def _from_file(path: Path) -> ClusterSpec:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cluster: {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"cluster: {path} must hold a JSON object, got {type(values).__name__}")
    base = values.pop("like", None)
    values.setdefault("name", path.stem)
    if base is not None:
        values.setdefault("source", f"{path.name}, like {base}")
        return _changed(cluster(base), values, str(path))
    values.setdefault("source", path.name)
    required = {f.name for f in _FIELDS.values() if f.default is dataclasses.MISSING}
    if missing := sorted(required - values.keys()):
        raise ValueError(f'cluster: {path} lacks {", ".join(missing)}; add them, or "like": "h100-sxm"')
    return ClusterSpec(**_checked(values, str(path)))


def _changed(spec: ClusterSpec, values: Mapping[str, Any], where: str) -> ClusterSpec:
    checked = _checked(values, where)
    if "flops" in checked:
        checked["flops"] = {**spec.flops, **checked["flops"]}
    if isinstance(values.get("efficiency"), dict):
        checked["efficiency"] = dataclasses.replace(spec.efficiency, **values["efficiency"])
    return dataclasses.replace(spec, **checked)


def _checked(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    if unknown := sorted(values.keys() - _FIELDS.keys()):
        raise ValueError(f"{where}: a cluster has no {', '.join(unknown)}; its attributes are {', '.join(_FIELDS)}")
    checked = {}
    for name, value in values.items():
        try:
            checked[name] = _convert(name, value)
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{where}: {name} cannot be {value!r}: {error}") from error
    return checked


def _convert(name: str, value: Any) -> Any:
    """Return the value of an attribute that a file or the command line gives, in part as text."""
    if name in ("name", "source"):
        return str(value)
    if name == "flops":
        return {getattr(torch, dtype): float(peak) for dtype, peak in value.items()}
    if name == "protocols":
        return tuple(Protocol(**protocol) for protocol in value)
    if name == "efficiency":
        return Efficiency(**value)
    if name == "synchronous":
        if value not in (True, False, "true", "false"):
            raise ValueError("expected true or false")
        return value in (True, "true")
    try:
        number = float(value)
    except ValueError:
        if name not in _IN_BYTES:
            raise
        number = parse_bytes(name, value)
    return int(number) if name in ("devices_per_node", "memory", "concurrent") else number
