"""Clusters in JSON files and on the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import coded_error
from ...sizes import parse_bytes
from .clusters import ClusterSpec, Efficiency, Protocol, cluster


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
    for change in changes:
        key, found, value = change.partition("=")
        if not found:
            raise coded_error(ValueError, "plan.cluster-change-without-value", change=change)
        values[key.strip()] = value.strip()
    spec = _from_file(Path(name)) if name.endswith(".json") else cluster(name)
    return _changed(spec, values, "cluster") if values else spec


def _from_file(path: Path) -> ClusterSpec:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise coded_error(ValueError, "plan.cluster-file-not-readable", path=path, error=error) from error
    if not isinstance(values, dict):
        raise coded_error(ValueError, "plan.cluster-file-not-object", path=path, type=type(values).__name__)
    base = values.pop("like", None)
    values = {"name": path.stem, "source": path.name if base is None else f"{path.name}, like {base}"} | values
    if base is not None:
        return _changed(cluster(base), values, str(path))
    if missing := _missing(ClusterSpec, values):
        raise coded_error(ValueError, "plan.cluster-file-lacks-attributes", path=path, missing=", ".join(missing))
    return ClusterSpec(**_checked(ClusterSpec, values, str(path)))


def _missing(kind: Any, values: Mapping[str, Any]) -> list[str]:
    """Return the attributes of a class that have no default value and are not given."""
    required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    return sorted(required - values.keys())


def _changed(spec: ClusterSpec, values: Mapping[str, Any], where: str) -> ClusterSpec:
    checked = _checked(ClusterSpec, values, where)
    if "flops" in checked:
        checked["flops"] = {**spec.flops, **checked["flops"]}
    if "efficiency" in checked:
        checked["efficiency"] = dataclasses.replace(spec.efficiency, **values["efficiency"])
    return dataclasses.replace(spec, **checked)


def _checked(kind: Any, values: Any, where: str) -> dict[str, Any]:
    """Return the values of attributes of a class that a file or the command line gives, in part as text."""
    if not isinstance(values, dict):
        raise coded_error(ValueError, "plan.cluster-value-not-attributes", type=type(values).__name__)
    fields = {f.name: f.type for f in dataclasses.fields(kind)}
    name_of = {ClusterSpec: "a cluster", Protocol: "a protocol", Efficiency: "an efficiency"}[kind]
    if unknown := sorted(values.keys() - fields.keys()):
        raise coded_error(
            ValueError,
            "plan.cluster-unknown-attributes",
            place=where,
            owner=name_of,
            unknown=", ".join(unknown),
            known=", ".join(fields),
        )
    checked = {}
    for name, value in values.items():
        try:
            checked[name] = _READ[fields[name]](value)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise coded_error(
                ValueError, "plan.cluster-attribute-invalid", place=where, name=name, value=value, error=error
            ) from error
    return checked


def _number(value: Any) -> float:
    """Return a number, or as many bytes as a text with a unit says: ``"25GB"``."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise coded_error(ValueError, "plan.cluster-value-not-number")
    has_unit = isinstance(value, str) and value[-1:].isalpha()
    return float(parse_bytes("value", value) if has_unit else value)


def _whole_number(value: Any) -> float:
    number = _number(value)
    return int(number) if number.is_integer() else number  # which the class refuses


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise coded_error(ValueError, "plan.cluster-value-not-text")
    return value


def _flag(value: Any) -> bool:
    if value is not True and value is not False and value not in ("true", "false"):
        raise coded_error(ValueError, "plan.cluster-value-not-bool")
    return value in (True, "true")


def _peaks(value: Any) -> dict[torch.dtype, float]:
    if not isinstance(value, dict):
        raise coded_error(ValueError, "plan.cluster-flops-not-object")
    peaks = {getattr(torch, name): _number(peak) for name, peak in value.items()}
    if unknown := [name for name, dtype in zip(value, peaks, strict=True) if not isinstance(dtype, torch.dtype)]:
        raise coded_error(ValueError, "plan.cluster-flops-unknown-dtype", dtype=unknown[0])
    return peaks


def _protocols(value: Any) -> tuple[Protocol, ...]:
    if not isinstance(value, list):
        raise coded_error(ValueError, "plan.cluster-protocols-not-list")
    checked = [_checked(Protocol, protocol, "protocols") for protocol in value]
    for protocol in checked:
        if missing := _missing(Protocol, protocol):
            raise coded_error(ValueError, "plan.cluster-protocol-lacks-attributes", missing=", ".join(missing))
    return tuple(Protocol(**protocol) for protocol in checked)


_READ: dict[Any, Callable[[Any], Any]] = {
    "str": _text,
    "int": _whole_number,
    "float": _number,
    "bool": _flag,
    "Mapping[torch.dtype, float]": _peaks,
    "tuple[Protocol, ...]": _protocols,
    "Efficiency": lambda shares: Efficiency(**_checked(Efficiency, shares, "efficiency")),
}
"""Functions that read the values of a file or of the command line, by the types of attributes."""
