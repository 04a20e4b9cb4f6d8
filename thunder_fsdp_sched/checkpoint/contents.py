"""The list of a checkpoint's contents, ``.metadata``: read without running code from it, and checked.

[Note: Metadata is a pickle]
DCP pickles its metadata, and unpickling calls any function that the file names. So only the classes that belong to such
a list are allowed; anything else is refused before it is called. The bytes that are checked are those that are used:
ranks compare their digest, and the data files are read according to the checked list.

A list that this package wrote ends with its own checksum, after the pickle, where other readers ignore it. It contains
the checksum of each chunk of data (``crc32`` in its ``storage_data``), so checksums, data and list cannot stem from
different saves.
"""

from __future__ import annotations

import enum
import hashlib
import io
import pickle
import re
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from .folder import METADATA, is_complete

Paths = Mapping[tuple[Any, ...], str]
"""For each path below a top-level name, the name under which DCP has saved the value."""

_SEAL = re.compile(rb"\nthunder_fsdp_sched crc32 ([0-9a-f]{8})\n\Z")


def seal(data: bytes) -> bytes:
    """Append the checksum of ``data`` to it."""
    return data + b"\nthunder_fsdp_sched crc32 %08x\n" % zlib.crc32(data)


def read_metadata(folder: Path) -> tuple[Metadata, str]:
    """Read the list of a checkpoint's contents, and return it with the digest of its bytes.

    Raises:
        ValueError: the folder is not a checkpoint, or its save did not finish, or the list is damaged or contains
            something that does not belong there.
    """
    file = folder / METADATA
    if not is_complete(folder, METADATA):
        has_begun = folder.is_dir() and any(folder.iterdir())
        raise ValueError(f"{folder} is {'a checkpoint whose save did not end' if has_begun else 'no checkpoint'}")
    try:
        data = file.read_bytes()
        sealed = _SEAL.search(data)
        if sealed is not None and int(sealed[1], 16) != zlib.crc32(data[: sealed.start()]):
            raise ValueError("its checksum is wrong: the file was damaged")
        found = _Unpickler(io.BytesIO(data)).load()
        _check_files(found)
        if sealed is None and any(hasattr(info, "crc32") for info in found.storage_data.values()):
            raise ValueError("its checksum is missing: the file was damaged")
    except Exception as error:
        raise ValueError(f"{file} cannot be read: {type(error).__name__} {error}") from error
    return found, hashlib.sha256(data).hexdigest()


def paths_of(found: Metadata) -> dict[str, dict[tuple[Any, ...], str]]:
    """Return the contents of a checkpoint: for each top-level name, the :data:`Paths` below it."""
    paths: dict[str, dict[tuple[Any, ...], str]] = {}
    for name, (top, *below) in (found.planner_data or {}).items():
        paths.setdefault(str(top), {})[tuple(below)] = name
    return paths


def nested(values: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return nested dictionaries and lists of values, given by their paths; keys of dictionaries are texts."""
    if () in values:
        return values[()]
    below: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (key, *rest), value in values.items():
        below.setdefault(key, {})[tuple(rest)] = value
    tree = {key: nested(inner) for key, inner in below.items()}
    return [tree[key] for key in sorted(tree)] if tree and all(isinstance(key, int) for key in tree) else tree


def check_lengths(folder: Path, found: Metadata) -> None:
    """Raise an error unless all data files exist with the length in the list.

    Raises:
        ValueError: a file is truncated.
        OSError: a file is missing.
    """
    ends: dict[str, int] = {}
    for info in found.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        if (folder / name).stat().st_size < end:
            raise ValueError(f"{folder / name} is truncated")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None and module == "torch":  # a dtype is pickled as a name
            dtype = getattr(torch, name, None) if name.isidentifier() else None
            known = dtype if isinstance(dtype, torch.dtype) else None
        if known is None:
            raise pickle.UnpicklingError(
                f"it references {module}.{name}, a class that is not allowed; it was not called"
            )
        return known


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"{name!r} is no layout")
    return layout


def _member(kind: Any, name: str) -> Any:
    """Return a member of one of torch's enumerations, which Python 3.11.0 to 3.11.3 pickles as a call of ``getattr``."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)) or name not in kind.__members__:
        raise pickle.UnpicklingError(
            f"it takes the attribute {name!r} of {kind!r}, which is no member of an enumeration"
        )
    return kind[name]


def _path(*parts: str) -> PurePosixPath:
    return PurePosixPath(*parts)


_METADATA_CLASSES = ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")
_TENSOR_CLASSES = ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
_PATH_CLASSES = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_KNOWN: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _METADATA_CLASSES + _TENSOR_CLASSES},
    (filesystem.__name__, "_StorageInfo"): getattr(filesystem, "_StorageInfo"),  # noqa: B009
    ("torch", "Size"): torch.Size,
    ("builtins", "getattr"): _member,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): dict,
    # The path where it was saved, which is unused.
    **{(module, name): _path for module in ("pathlib", "pathlib._local") for name in _PATH_CLASSES},
}


def _check_files(found: object) -> None:
    """Raise an error unless the list refers to ranges of files in its folder."""
    if not isinstance(found, Metadata):
        raise ValueError(f"it holds a {type(found).__name__}")
    for info in found.storage_data.values():
        path = Path(info.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it names a file outside its folder, {info.relative_path!r}")
        if min(info.offset, info.length) < 0:
            raise ValueError(f"it names no range of {info.relative_path!r}")
