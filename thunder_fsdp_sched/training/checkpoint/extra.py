"""Additional values in a checkpoint, stored as JSON and tensors, so that reading them runs no code."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...runtime.row_dtensor import local_rows

__all__ = ["decode", "digests", "encode", "tensor_targets"]

_TYPE = "$type"
"""The key of JSON objects that represent values of types that JSON lacks."""

_PLAIN = (type(None), bool, int, str)
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def encode(extra: dict[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    """Split values into JSON and the tensors that it refers to by name.

    Raises:
        ValueError: a value has a type that cannot be stored; the message has its location.
    """
    tensors: dict[str, torch.Tensor] = {}

    def walk(value: Any, path: tuple[Any, ...]) -> Any:
        cls = type(value)
        if cls in _PLAIN:
            return value
        if isinstance(value, (np.bool_, np.integer, np.floating)):
            return walk(value.item(), path)
        if cls is float:
            return value if math.isfinite(value) else {_TYPE: "float", "value": repr(value)}
        if isinstance(value, torch.Tensor):
            name = base = ".".join(map(str, path))
            while name in tensors:
                name = f"{base}#{len(tensors)}"
            tensors[name] = value.detach()
            return {_TYPE: "tensor", "name": name}
        if cls is list:
            return [walk(v, (*path, i)) for i, v in enumerate(value)]
        if cls is tuple:
            return {_TYPE: "tuple", "items": [walk(v, (*path, i)) for i, v in enumerate(value)]}
        if cls in _DICTS.values():
            for key in value:
                if type(key) not in (str, int):
                    raise ValueError(f"{_path_text(path)} has the key {key!r}: keys have to be texts or integers")
            if cls is dict and all(type(key) is str for key in value) and _TYPE not in value:
                return {key: walk(v, (*path, key)) for key, v in value.items()}
            return {_TYPE: cls.__name__, "items": [[k, walk(v, (*path, k))] for k, v in value.items()]}
        if cls is bytes:
            return {_TYPE: "bytes", "value": base64.b64encode(value).decode()}
        if cls is np.ndarray and value.dtype.kind in "biufc":
            content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
            return {_TYPE: "ndarray", "dtype": value.dtype.str, "shape": list(value.shape), "value": content}
        raise ValueError(
            f"{_path_text(path)} is a {cls.__module__}.{cls.__qualname__}, which a checkpoint cannot hold: give numbers, "
            f"texts, tensors, or lists, tuples and dictionaries of them "
            f"(the state_dict() of an object instead of the object)"
        )

    if odd := [name for name in extra if type(name) is not str or name == _TYPE]:
        raise ValueError(f"extra: {odd[0]!r} cannot be a name in it")
    try:
        return json.dumps(walk(extra, ()), allow_nan=False), tensors
    except RecursionError:
        raise ValueError("extra: it contains itself, or is nested too deeply") from None


def decode(text: str, tensor: Callable[[str], Any]) -> dict[str, Any]:
    """Return the values that :func:`encode` received.

    Args:
        tensor: returns the tensor with a name.
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
            return tensor(value["name"])
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


def digests(extra: dict[str, Any]) -> dict[str, str]:
    """Return a digest of each value of ``extra``, to compare ranks. Tensors that are spread over ranks are skipped."""
    found = {}
    for name, value in extra.items():
        text, tensors = encode({name: value})
        crc = zlib.crc32(text.encode())
        for tensor in tensors.values():
            if local_rows(tensor) is tensor and tensor.layout is torch.strided and not tensor.is_meta:
                crc = zlib.crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
        found[name] = f"{crc:08x}"
    return found


def tensor_targets(
    wanted: dict[str, Any], saved: dict[str, Any], found: dict[str, TensorStorageMetadata]
) -> dict[str, torch.Tensor]:
    """Return memory to load tensors into, keyed by name, like the tensors in ``wanted``.

    Args:
        wanted: names and structure that the caller expects.
        saved: the values in the checkpoint, with a :class:`TensorName` in place of each tensor.
        found: size and dtype of each tensor.

    Raises:
        ValueError: a wanted value is missing, or has another structure.
    """
    targets: dict[str, torch.Tensor] = {}

    def walk(want: Any, have: Any, path: tuple[Any, ...]) -> None:
        if isinstance(want, torch.Tensor) != isinstance(have, TensorName) and want is not None:
            there = "a tensor" if isinstance(have, TensorName) else f"a {type(have).__name__}"
            raise ValueError(f"{_path_text(path)} is {there} in the checkpoint, but a {type(want).__name__} was given")
        if isinstance(have, TensorName):
            entry = found[have]
            if want is None:
                targets[have] = torch.empty(entry.size, dtype=entry.properties.dtype)
            elif want.shape != entry.size:
                raise ValueError(
                    f"{_path_text(path)} has shape {tuple(entry.size)} in the checkpoint, but {tuple(want.shape)} was given"
                )
            elif local_rows(want) is want:
                targets[have] = torch.empty(entry.size, dtype=entry.properties.dtype, device=want.device)
            else:
                targets[have] = torch.empty_like(want.detach())
        elif isinstance(have, dict):
            if isinstance(want, dict) and (missing := [key for key in want if key not in have]):
                raise ValueError(f"{_path_text(path)} has no {missing[0]!r} in the checkpoint, but {list(have)}")
            for key, value in have.items():
                walk(want.get(key) if isinstance(want, dict) else None, value, (*path, key))
        elif isinstance(have, (list, tuple)):
            for i, value in enumerate(have):
                fits = isinstance(want, (list, tuple)) and len(want) == len(have)
                walk(want[i] if fits else None, value, (*path, i))

    for name, want in wanted.items():
        if isinstance(want, dict) and not isinstance(saved[name], dict):
            raise ValueError(
                f"{_path_text((name,))} is a {type(saved[name]).__name__} in the checkpoint, but a dict was given"
            )
        walk(want, saved[name], (name,))
    return targets


class TensorName(str):
    """The name of a tensor, as its placeholder."""


def _path_text(path: tuple[Any, ...]) -> str:
    return "extra" + "".join(f"[{key!r}]" for key in path)
