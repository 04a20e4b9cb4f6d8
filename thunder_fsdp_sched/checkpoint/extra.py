"""Additional values in a checkpoint, stored as JSON and tensors, so that reading them runs no code."""

from __future__ import annotations

import base64
import copy
import json
import math
import zlib
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..runtime.row_dtensor import local_rows
from .storage import Paths, nested

EXTRA = "extra"
"""The name under which ``extra`` is saved: ``json``, a text as bytes, and ``tensors``, keyed by name."""

_TYPE = "$type"
"""The key of JSON objects that represent values of types that JSON lacks."""

_PLAIN = (type(None), bool, int, str)
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


class Saved(str):
    """The name under which DCP has saved a value, as its placeholder."""


def encode(extra: dict[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    """Split values into JSON and the tensors that it refers to by name.

    Raises:
        ValueError: a value has a type that cannot be stored; the message has its location.
    """
    tensors: dict[str, torch.Tensor] = {}

    def walk(value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, (np.bool_, np.integer, np.floating)):
            value = value.item()
        cls = type(value)
        if cls in _PLAIN or (cls is float and math.isfinite(value)):
            return value
        if cls is float:
            return {_TYPE: "float", "value": repr(value)}
        if isinstance(value, torch.Tensor):
            name = base = ".".join(map(str, path))
            while name in tensors:
                name = f"{base}#{len(tensors)}"
            tensors[name] = value.detach()
            return {_TYPE: "tensor", "name": name}
        if cls in (list, tuple):
            items = [walk(v, (*path, i)) for i, v in enumerate(value)]
            return items if cls is list else {_TYPE: "tuple", "items": items}
        if cls in _DICTS.values():
            if odd := [key for key in value if type(key) not in (str, int)]:
                raise ValueError(f"{_text(path)} has the key {odd[0]!r}: keys have to be texts or integers")
            below = [[key, walk(v, (*path, key))] for key, v in value.items()]
            is_json = cls is dict and all(type(key) is str for key in value) and _TYPE not in value
            return dict(below) if is_json else {_TYPE: cls.__name__, "items": below}
        if cls is bytes:
            return {_TYPE: "bytes", "value": base64.b64encode(value).decode()}
        if cls is np.ndarray and value.dtype.kind in "biufc":
            content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
            return {_TYPE: "ndarray", "dtype": value.dtype.str, "shape": list(value.shape), "value": content}
        raise ValueError(
            f"{_text(path)} is a {cls.__module__}.{cls.__qualname__}, which a checkpoint cannot hold: give numbers, "
            f"texts, tensors, or lists, tuples and dictionaries of them "
            f"(the state_dict() of an object instead of the object)"
        )

    if odd := [name for name in extra if type(name) is not str or name == _TYPE]:
        raise ValueError(f"extra: {odd[0]!r} cannot be a name in it")
    try:
        return json.dumps(walk(extra, ()), allow_nan=False), tensors
    except RecursionError:
        raise ValueError("extra: it contains itself, or is nested too deeply") from None


def decode(text: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that :func:`encode` received, with a :class:`Saved` in place of each tensor.

    Args:
        names: the names under which DCP has saved the tensors.
    """

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(v) for v in value]
        if not isinstance(value, dict):
            return value
        kind = value.get(_TYPE)
        if kind is None:
            return {k: walk(v) for k, v in value.items()}
        if kind == "float":
            return float(value["value"])
        if kind == "tensor":
            return Saved(names[value["name"]])
        if kind == "tuple":
            return tuple(walk(v) for v in value["items"])
        if kind in _DICTS:
            made = _DICTS[kind]()
            made.update({k: walk(v) for k, v in value["items"]})
            return made
        if kind == "bytes":
            return base64.b64decode(value["value"])
        if kind == "ndarray":
            content = bytearray(base64.b64decode(value["value"]))
            return np.frombuffer(content, dtype=value["dtype"]).reshape(value["shape"])
        raise ValueError(f"extra: it holds a {kind!r}, which this version does not know")

    made = walk(json.loads(text))
    if not isinstance(made, dict):
        raise ValueError(f"extra: it is a {type(made).__name__}")
    return made


def facts_of(text: str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Describe encoded values, to compare ranks. Tensors that are spread over ranks are skipped."""
    facts = {f"extra[{name!r}]": json.dumps(value) for name, value in json.loads(text).items()}
    for name, tensor in tensors.items():
        if local_rows(tensor) is tensor and tensor.layout is torch.strided and not tensor.is_meta:
            data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            facts[f"the tensor {name!r} of extra"] = f"{tensor.dtype}, CRC-32 {zlib.crc32(data):08x}"
    return facts


def from_dcp(wanted: Any, paths: Paths, name: str) -> Any:
    """Return the structure of values that ``dcp.save`` saved, with a :class:`Saved` in place of each value.

    Args:
        wanted: tells the keys and classes of dictionaries, because DCP converts all keys to text.

    Raises:
        ValueError: their structure is ambiguous.
    """

    def walk(wanted: Any, saved: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(saved, Saved):
            return saved
        if not isinstance(wanted, type(saved)):
            raise ValueError(
                f"{_text(path)} is a {type(saved).__name__} in the checkpoint, but a {type(wanted).__name__} was given: "
                f"extra has to have the structure that was saved"
            )
        if isinstance(saved, list):
            given = wanted + [None] * len(saved)
            return [walk(given[i], value, (*path, i)) for i, value in enumerate(saved)]
        keys = {str(key): key for key in wanted}
        result = copy.copy(wanted)
        result.clear()
        for text, value in saved.items():
            key = keys.get(text, text)
            if key not in wanted and not any(isinstance(own, str) for own in wanted):
                raise ValueError(
                    f"{_text((*path, key))} is in the checkpoint only: extra has to have the structure that was saved"
                )
            result[key] = walk(wanted.get(key), value, (*path, key))
        return result

    return walk(wanted, nested({path: Saved(leaf) for path, leaf in paths.items()}), (name,))


def memory_for(wanted: Any, saved: Any, name: str, contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return memory for saved values by their names in the checkpoint; that of tensors is like in ``wanted``.

    Args:
        wanted: structure that the caller expects.
        saved: the value in the checkpoint, with a :class:`Saved` in place of those that are yet to be loaded.

    Raises:
        ValueError: a wanted value is missing, or has another structure.
    """
    memory: dict[str, Any] = {}

    def walk(wanted: Any, saved: Any, path: tuple[Any, ...]) -> None:
        found = contents[saved] if isinstance(saved, Saved) else None
        is_tensor = isinstance(found, TensorStorageMetadata)
        is_other = isinstance(wanted, torch.Tensor) is not is_tensor
        is_other |= path == (name,) and isinstance(wanted, dict) and not isinstance(saved, dict)
        if wanted is not None and is_other:
            kind = "tensor" if is_tensor else "value" if found is not None else type(saved).__name__
            raise ValueError(f"{_text(path)} is a {kind} in the checkpoint, but a {type(wanted).__name__} was given")
        if isinstance(found, TensorStorageMetadata):
            memory[saved] = _memory_like(wanted, found, path)
        elif found is not None:
            memory[saved] = None
        elif isinstance(saved, dict):
            given = wanted if isinstance(wanted, dict) else {}
            if missing := [key for key in given if key not in saved]:
                raise ValueError(f"{_text(path)} has no {missing[0]!r} in the checkpoint, but {list(saved)}")
            for key, value in saved.items():
                walk(given.get(key), value, (*path, key))
        elif isinstance(saved, (list, tuple)):
            is_alike = isinstance(wanted, (list, tuple)) and len(wanted) == len(saved)
            for i, value in enumerate(saved):
                walk(wanted[i] if is_alike else None, value, (*path, i))

    walk(wanted, saved, (name,))
    return memory


def _memory_like(wanted: torch.Tensor | None, found: TensorStorageMetadata, path: tuple[Any, ...]) -> torch.Tensor:
    if wanted is not None and wanted.shape != found.size:
        raise ValueError(
            f"{_text(path)} has shape {tuple(found.size)} in the checkpoint, but {tuple(wanted.shape)} was given"
        )
    if wanted is not None and local_rows(wanted) is not wanted:
        return torch.empty_like(wanted.detach())
    return torch.empty(found.size, dtype=found.properties.dtype, device=None if wanted is None else wanted.device)


def filled(saved: Any, memory: Mapping[str, Any]) -> Any:
    """Return ``saved`` with loaded values in place of their names."""
    if isinstance(saved, Saved):
        return memory[saved]
    if isinstance(saved, (list, tuple)):
        return type(saved)(filled(value, memory) for value in saved)
    if isinstance(saved, dict):
        for key, value in saved.items():
            saved[key] = filled(value, memory)
    return saved


def _text(path: tuple[Any, ...]) -> str:
    return "extra" + "".join(f"[{key!r}]" for key in path)
