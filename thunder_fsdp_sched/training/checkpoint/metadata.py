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
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from .claim import METADATA, is_complete

__all__ = ["Contents", "check_files", "contents_of", "read_metadata", "seal"]

Contents = dict[str, dict[tuple[Any, ...], Any]]
"""For each top-level name, the path below it and the metadata of each leaf."""

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
        begun = folder.is_dir() and any(folder.iterdir())
        raise ValueError(f"{folder} is {'a checkpoint whose save did not end' if begun else 'no checkpoint'}")
    try:
        data = file.read_bytes()
        sealed = _SEAL.search(data)
        if sealed is not None and int(sealed[1], 16) != zlib.crc32(data[: sealed.start()]):
            raise ValueError("its checksum is wrong: the file was damaged")
        found = _Unpickler(io.BytesIO(data)).load()
        _check_types(found)
        if sealed is None and any(hasattr(info, "crc32") for info in found.storage_data.values()):
            raise ValueError("its checksum is missing: the file was damaged")
    except Exception as error:
        raise ValueError(f"{file} cannot be read: {type(error).__name__} {error}") from error
    return found, hashlib.sha256(data).hexdigest()


def contents_of(found: Metadata) -> Contents:
    """Arrange the contents of a checkpoint by top-level name."""
    contents: Contents = {}
    for name, (top, *below) in (found.planner_data or {}).items():
        contents.setdefault(str(top), {})[tuple(below)] = found.state_dict_metadata[name]
    return contents


def check_files(folder: Path, found: Metadata) -> None:
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
            raise ValueError(f"{folder / name} is cut")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None and module == "torch":  # a dtype is pickled as a name
            dtype = getattr(torch, name, None) if name.isidentifier() else None
            known = dtype if isinstance(dtype, torch.dtype) else None
        if known is None:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no list of a checkpoint's contents is made of; it was not called"
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


_KNOWN: dict[tuple[str, str], Any] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): getattr(filesystem, "_StorageInfo"),  # noqa: B009
    ("torch", "Size"): torch.Size,
    ("builtins", "getattr"): _member,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): dict,
    # The path where it was saved, which is unused.
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


def _check_types(found: object) -> None:
    """Raise an error unless the list has the expected structure, on which all later code relies."""
    if not isinstance(found, Metadata):
        raise ValueError(f"it holds a {type(found).__name__}")
    planner_data = found.planner_data or {}
    if not isinstance(planner_data, dict) or not all(isinstance(p, tuple) and p for p in planner_data.values()):
        raise ValueError("its planner_data are no paths")
    if not isinstance(found.state_dict_metadata, dict) or not all(
        isinstance(entry, (TensorStorageMetadata, BytesStorageMetadata)) for entry in found.state_dict_metadata.values()
    ):
        raise ValueError("its state_dict_metadata describe no tensors and bytes")
    if missing := planner_data.keys() - found.state_dict_metadata.keys():
        raise ValueError(f"it describes no {sorted(missing)[0]!r}")
    if not isinstance(found.storage_data, dict):
        raise ValueError("it has no storage_data")
    for index, info in found.storage_data.items():
        path = getattr(info, "relative_path", None)
        if not isinstance(index, MetadataIndex) or not isinstance(path, str):
            raise ValueError("its storage_data name no files")
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(f"it names a file outside its folder, {path!r}")
        if not isinstance(info.offset, int) or not isinstance(info.length, int) or min(info.offset, info.length) < 0:
            raise ValueError(f"it names no range of {path!r}")
