"""A writer of DCP's files for a folder that other runs may write into, with checksums."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .claim import METADATA, complete_folder
from .metadata import check_files, seal

__all__ = ["ClaimedWriter"]


class ClaimedWriter(FileSystemWriter):
    """The writer of files with the run's id in their names, and of the list of their contents unless another run was first.

    Args:
        run: the id that :func:`~.claim.claim` returned.
        checksums: whether to store the checksum of each chunk of data.
    """

    def __init__(self, folder: Path, run: str, *, checksums: bool) -> None:
        super().__init__(folder, overwrite=False)
        self._folder, self._run = folder, run
        self._files = _HashedFiles() if checksums else None
        if self._files is not None:
            self.fs = self._files

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self._folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix = f"{plan.storage_data.prefix}{self._run}_"
        plan = dataclasses.replace(plan, storage_data=dataclasses.replace(plan.storage_data, prefix=prefix))
        written = super().write_data(plan, planner)
        if self._files is not None:
            for result in written.value():
                info = result.storage_data
                # It is pickled with the rest, and other readers ignore it.
                info.crc32 = self._files.checksum(self._folder / info.relative_path, info.offset, info.length)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        private = self._folder / f".{self._run}"
        private.mkdir()
        self.path = private
        try:
            super().finish(metadata, results)
        finally:
            self.path = self._folder
        check_files(self._folder, metadata)
        with (private / METADATA).open("r+b") as file:
            sealed = seal(file.read())
            file.seek(0)
            file.write(sealed)
            file.flush()
            os.fsync(file.fileno())
        complete_folder(self._folder, METADATA, self._run, private / METADATA)
        shutil.rmtree(private, ignore_errors=True)


class _HashedFiles(FileSystem):
    """Files whose checksums are computed while they are written."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, int, int], int] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _HashedFile(io.FileIO(path, "wb")) as hashed:
            yield cast(io.IOBase, hashed)
        self._pieces |= {(Path(path).name, start, end): crc for start, end, crc in hashed.pieces}

    def checksum(self, path: Path, offset: int, length: int) -> int:
        """Return the checksum of a range of a file."""
        known = self._pieces.get((path.name, offset, offset + length))
        if known is not None:
            return known
        with path.open("rb") as file:  # no tell() separated it while it was written
            file.seek(offset)
            return zlib.crc32(file.read(length))


class _HashedFile(io.BufferedWriter):
    """A stream that computes the checksum of data between two calls of ``tell``, as DCP calls it around each chunk."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self.pieces: list[tuple[int, int, int]] = []
        self._start, self._crc = 0, 0

    def write(self, data: Any) -> int:
        self._crc = zlib.crc32(data, self._crc)
        return super().write(data)

    def tell(self) -> int:
        end = super().tell()
        self.pieces.append((self._start, end, self._crc))
        self._start, self._crc = end, 0
        return end
