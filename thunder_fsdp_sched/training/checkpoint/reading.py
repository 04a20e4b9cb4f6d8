"""A reader of DCP's files that verifies checksums and unpickles only plain values."""

from __future__ import annotations

import copy
import io
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

__all__ = ["CheckedReader", "PlainPlanner", "blank_values", "check_plain"]


class CheckedReader(FileSystemReader):
    """The reader of data chunks, which verifies each before it is used.

    A rank reads whole chunks even if it needs only a part, so verifying requires no further reads, and ranks share the
    work as they share reading. A chunk without our checksum (in FSDP2's checkpoints) is a zip archive, which has its
    own.

    Args:
        metadata: the checked list of contents.
        verify: whether to verify checksums.
    """

    def __init__(self, folder: Path, metadata: Metadata, *, verify: bool) -> None:
        super().__init__(folder)
        self._folder, self._metadata, self._verify = folder, metadata, verify
        self.storage_data = metadata.storage_data
        self.has_checksums = all(hasattr(info, "crc32") for info in metadata.storage_data.values())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items_of: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items_of[self.storage_data[item.storage_index].relative_path].append(item)
        for items in items_of.values():
            for item in sorted(items, key=lambda item: self.storage_data[item.storage_index].offset):
                data = self.read(item.storage_index, item)
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, data)
                else:
                    tensor = _load(data)
                    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        tensor = tensor.narrow(dim, offset, length)
                    target = planner.resolve_tensor(item).detach()
                    if target.shape != tensor.shape:
                        raise ValueError(f"{item.storage_index.fqn!r} has shape {tuple(tensor.shape)} in its file")
                    target.copy_(tensor)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read(self, index: MetadataIndex, item: ReadItem | None = None) -> io.BytesIO:
        """Read a chunk of data.

        Raises:
            ValueError: it is truncated, or its checksum is wrong.
        """
        info = self.storage_data[index]
        path = self._folder / info.relative_path
        with path.open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        if len(data) < info.length:
            raise ValueError(f"{path} is cut: it ends before {index.fqn!r} does")
        stream = io.BytesIO(data)
        if self._verify:
            _verify(data, stream, getattr(info, "crc32", None), index.fqn, path)
        if getattr(info, "transform_descriptors", None) and item is not None:
            stream = io.BytesIO(
                self.transforms.transform_load_stream(item, info.transform_descriptors, stream).read(-1)
            )
        return stream

    def read_tensor(self, name: str) -> torch.Tensor:
        """Read a tensor that was saved as one chunk."""
        [index] = [index for index in self.storage_data if index.fqn == name]
        return _load(self.read(index))


class PlainPlanner(DefaultLoadPlanner):
    """A planner that loads plain values (numbers, texts, lists, dictionaries) and tensors, and refuses other classes."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = _load(value)
        except Exception as error:
            raise ValueError(
                f"{name!r} is no plain value, and was not unpickled: {str(error).splitlines()[0]}"
            ) from None
        *above, last = self.mappings[name]
        container: Any = self.original_state_dict
        for key in above:
            container = container[_key(container, key)]
        container[_key(container, last)] = loaded


def check_plain(value: Any, location: str) -> None:
    """Raise an error unless :class:`PlainPlanner` can load a state dict that DCP saved.

    Raises:
        ValueError: a value is neither a tensor nor plain; the message has its location.
    """
    if isinstance(value, dict):
        for key, below in value.items():
            check_plain(below, f"{location}[{key!r}]")
    elif isinstance(value, list) and any(isinstance(below, (dict, list, torch.Tensor)) for below in value):
        for number, below in enumerate(value):
            check_plain(below, f"{location}[{number}]")
    elif not isinstance(value, (torch.Tensor, str, int, float, type(None))) or isinstance(value, np.generic):
        data = io.BytesIO()
        try:
            torch.save(value, data)
            data.seek(0)
            _load(data)
        except Exception as error:
            raise ValueError(
                f"{location} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: give "
                f"numbers, texts, tensors, or lists, tuples and dictionaries of them"
            ) from error


def blank_values(wanted: dict[str, Any], metadata: Metadata) -> dict[str, Any]:
    """Return memory for values that DCP has saved under its own names, with the structure of ``wanted``.

    Raises:
        ValueError: it was saved with another structure.
    """
    target = copy.deepcopy(wanted)
    for name, (top, *below) in (metadata.planner_data or {}).items():
        if top in target and below:
            _add_leaf(target[top], below, metadata.state_dict_metadata[name], f"extra[{top!r}]")
    planner = DefaultLoadPlanner()
    planner.set_up_planner(target, metadata)
    for name, value in planner.state_dict.items():
        location = "extra" + "".join(f"[{key!r}]" for key in planner.mappings[name])
        found = metadata.state_dict_metadata.get(name)
        if found is None:
            raise ValueError(f"{location} is not in the checkpoint: extra has to have the structure that was saved")
        if isinstance(found, TensorStorageMetadata):
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
            if shape != tuple(found.size):
                raise ValueError(
                    f"{location} is a tensor of shape {tuple(found.size)} in the checkpoint, but "
                    f"{f'one of shape {shape}' if shape is not None else f'a {type(value).__name__}'} was given"
                )
    return target


def _add_leaf(container: Any, path: Sequence[Any], found: Any, name: str) -> None:
    """Create memory for saved values that are not in the given structure.

    Raises:
        ValueError: their structure is ambiguous, because DCP converts all keys to text.
    """
    key = _key(container, path[0])
    name = f"{name}[{key!r}]"
    if isinstance(container, dict) and key not in container:
        if len(path) > 1 or not any(isinstance(own, str) for own in container):
            raise ValueError(f"{name} is in the checkpoint only: extra has to have the structure that was saved")
        is_tensor = isinstance(found, TensorStorageMetadata)
        container[key] = torch.empty(found.size, dtype=found.properties.dtype) if is_tensor else None
    elif isinstance(container, (list, tuple)) and not (isinstance(key, int) and key < len(container)):
        raise ValueError(f"{name} is in the checkpoint only: extra has to have the structure that was saved")
    elif len(path) > 1 and isinstance(container, (dict, list, tuple)):
        _add_leaf(container[key], path[1:], found, name)


def _key(container: Any, key: Any) -> Any:
    """Return the dictionary key that DCP has converted to text."""
    if isinstance(container, dict) and key not in container:
        return next((own for own in container if str(own) == key), key)
    return key


def _load(data: io.BytesIO) -> Any:
    return torch.load(data, map_location="cpu", weights_only=True)


def _verify(data: bytes, stream: io.BytesIO, expected: int | None, name: str, path: Path) -> None:
    if expected is not None:
        damaged = zlib.crc32(data) != expected
    elif zipfile.is_zipfile(stream):
        with zipfile.ZipFile(stream) as archive:
            damaged = archive.testzip() is not None
    else:
        damaged = False
    stream.seek(0)
    if damaged:
        raise ValueError(f"{path} is damaged: the checksum of {name!r} is wrong (verify_checksums=False ignores that)")
