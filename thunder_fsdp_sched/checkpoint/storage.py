"""The reader and writer of DCP's files: checksums, plain values only, and names that contain the run's id."""

from __future__ import annotations

import dataclasses
import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future
from torch.utils._pytree import keystr, tree_leaves_with_path

from ..ranks.control import control_of
from ..ranks.process_groups import ProcessGroupRef
from .contents import check_lengths, seal
from .folder import METADATA, Run, checksum

_ALL = "all"
"""The only top-level name of what is loaded: ranks tell each other these names."""


def load_values(values: dict[str, Any], reader: StorageReader, group: ProcessGroupRef) -> None:
    """Load values by their names in the checkpoint, in place; a collective."""
    planner = _PlainPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    process_group = control_of(group).process_group(group)
    load({_ALL: values}, storage_reader=reader, planner=planner, process_group=process_group)


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
        self._reads = 0
        self.has_checksums = all(hasattr(info, "crc32") for info in metadata.storage_data.values())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        expected = self._reads + len(plan.items)
        done = super().read_data(plan, planner)
        if self._reads != expected:
            raise NotImplementedError(
                f"torch {torch.__version__} reads chunks in another way, so they were not verified"
            )
        return done

    def read_tensor(self, name: str) -> torch.Tensor:
        """Read a tensor that was saved as one chunk."""
        [info] = [info for index, info in self._metadata.storage_data.items() if index.fqn == name]
        with (self._folder / info.relative_path).open("rb") as file:
            tensor: torch.Tensor = _load_plain(self._slice_file(file, info))
        return tensor

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """Return the bytes of a chunk.

        Raises:
            ValueError: it is truncated, or its checksum is wrong.
        """
        self._reads += 1
        path = self._folder / sinfo.relative_path
        file.seek(sinfo.offset)
        data = file.read(sinfo.length)
        if len(data) < sinfo.length:
            raise ValueError(f"{path} is truncated: it ends before {self._name_of(sinfo)!r} does")
        if self._verify and _is_damaged(data, getattr(sinfo, "crc32", None)):
            raise ValueError(
                f"{path} is damaged: the checksum of {self._name_of(sinfo)!r} is wrong (verify_checksums=False ignores that)"
            )
        return io.BytesIO(data)

    def _name_of(self, info: Any) -> str:
        return next(index.fqn for index, other in self._metadata.storage_data.items() if other is info)


class _PlainPlanner(DefaultLoadPlanner):
    """A planner that loads plain values (numbers, texts, lists, dictionaries) and tensors, and refuses other classes."""

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict[_ALL], metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = _load_plain(value)
        except Exception as error:
            raise ValueError(
                f"{name!r} is no plain value, and was not unpickled: {str(error).splitlines()[0]}"
            ) from None


class RunWriter(FileSystemWriter):
    """The writer of files with the run's id in their names, and of the list of their contents unless another run was first.

    Args:
        checksums: whether to store the checksum of each chunk of data.
    """

    def __init__(self, run: Run, *, checksums: bool) -> None:
        super().__init__(run.folder, overwrite=False)
        self._run, self._checksums = run, checksums

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix = f"{plan.storage_data.prefix}{self._run.id}_"
        plan = dataclasses.replace(plan, storage_data=dataclasses.replace(plan.storage_data, prefix=prefix))
        written = super().write_data(plan, planner)
        for result in written.value() if self._checksums else ():
            info = result.storage_data
            # It is pickled with the rest, and other readers ignore it.
            info.crc32 = checksum(self._run.folder / info.relative_path, info.offset, info.length)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.path = self._run.draft
        super().finish(metadata, results)
        check_lengths(self._run.folder, metadata)
        with (self._run.draft / METADATA).open("r+b") as file:
            sealed = seal(file.read())
            file.seek(0)
            file.write(sealed)
            file.flush()
            os.fsync(file.fileno())
        self._run.complete()


def check_plain(tree: Any, name: str) -> None:
    """Raise an error unless what DCP saves of a state dict can be loaded.

    Raises:
        ValueError: a value is neither a tensor nor plain; the message has its location.
    """
    for path, value in tree_leaves_with_path(tree, is_leaf=lambda value: not isinstance(value, (dict, list))):
        if not isinstance(value, (torch.Tensor, str, int, float, type(None))) or isinstance(value, np.generic):
            data = io.BytesIO()
            try:
                torch.save(value, data)
                data.seek(0)
                _load_plain(data)
            except Exception as error:
                raise ValueError(
                    f"{name}{keystr(path)} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
                    f"cannot hold: give numbers, texts, tensors, or lists, tuples and dictionaries of them"
                ) from error


def _load_plain(data: Any) -> Any:
    """Load a tensor or plain value; no code in it is run."""
    return torch.load(data, map_location="cpu", weights_only=True)


def _is_damaged(data: bytes, expected: int | None) -> bool:
    if expected is not None:
        return zlib.crc32(data) != expected
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return False
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.testzip() is not None
