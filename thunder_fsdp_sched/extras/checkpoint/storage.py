"""The files of a checkpoint: reading and writing them, and the list of their contents, ``.metadata``.

[Note: Metadata is a pickle]
DCP pickles its metadata, and unpickling calls any function that the file names. So only the classes that belong to such
a list are allowed; anything else is refused before it is called. The bytes that are checked are also the ones that are
used: ranks compare their digest, and the data files are read according to the checked list.

A list that this package wrote ends with its stamp (see [Note: The order of saves] in ``folder``) and its own checksum. Both
follow the pickle, where other readers ignore them. It contains the checksum of each chunk of data (``crc32`` in its
``storage_data``), so checksums, data and list cannot stem from different saves.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import io
import pickle
import re
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils._pytree import keystr, tree_leaves_with_path

from ...errors import coded_error
from ...process_state import Reentrant
from .folder import METADATA, SaveRun, checksum, refuse_incomplete, stamped
from .writer_process import WriterProcess

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
    refuse_incomplete(folder)
    try:
        data = file.read_bytes()
        sealed = _SEAL.search(data)
        if sealed is not None and int(sealed[1], 16) != zlib.crc32(data[: sealed.start()]):
            raise coded_error(ValueError, "checkpoint.list-checksum-wrong")
        found = _Unpickler(io.BytesIO(data)).load()
        _check_files(found)
        if sealed is None and any(hasattr(info, "crc32") for info in found.storage_data.values()):
            raise coded_error(ValueError, "checkpoint.list-checksum-missing")
    except Exception as error:
        raise coded_error(
            ValueError, "checkpoint.list-not-readable", file=file, error_type=type(error).__name__, error=error
        ) from error
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


def check_lengths(folder: Path, chunks: Iterable[Any]) -> None:
    """Raise an error unless all data files exist with the length in the list.

    Args:
        chunks: the file, offset and length of each chunk of data, as DCP stores them.

    Raises:
        ValueError: a file is truncated.
        OSError: a file is missing.
    """
    ends: dict[str, int] = {}
    for info in chunks:
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        if (folder / name).stat().st_size < end:
            raise coded_error(ValueError, "checkpoint.file-truncated", file=folder / name)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None and module == "torch":  # a dtype is pickled as a name
            dtype = getattr(torch, name, None) if name.isidentifier() else None
            known = dtype if isinstance(dtype, torch.dtype) else None
        if known is None:
            raise coded_error(pickle.UnpicklingError, "checkpoint.class-not-allowed", module=module, name=name)
        return known


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise coded_error(pickle.UnpicklingError, "checkpoint.not-a-layout", name=name)
    return layout


def _member(kind: Any, name: str) -> Any:
    """Return a member of one of torch's enumerations, which Python 3.11.0 to 3.11.3 pickles as a call of ``getattr``."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)) or name not in kind.__members__:
        raise coded_error(pickle.UnpicklingError, "checkpoint.attribute-not-enum-member", name=name, owner=kind)
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
    # The path to which it was saved, which is not used.
    **{(module, name): _path for module in ("pathlib", "pathlib._local") for name in _PATH_CLASSES},
}


def _check_files(found: object) -> None:
    """Raise an error unless the list refers to ranges of files in its folder."""
    if not isinstance(found, Metadata):
        raise coded_error(ValueError, "checkpoint.list-of-other-type", got=type(found).__name__)
    for info in found.storage_data.values():
        path = Path(info.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise coded_error(ValueError, "checkpoint.list-names-outside-file", file=info.relative_path)
        if min(info.offset, info.length) < 0:
            raise coded_error(ValueError, "checkpoint.list-names-no-range", file=info.relative_path)


#
# Data
#


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
        self.set_up_storage_reader(metadata, is_coordinator=False)
        self.contents: Mapping[str, Any] = metadata.state_dict_metadata
        self._folder, self._metadata, self._verify = folder, metadata, verify
        self._reads = 0
        self.has_checksums = all(hasattr(info, "crc32") for info in metadata.storage_data.values())

    def load(self, values: dict[str, Any]) -> dict[str, Any]:
        """Load tensors in place, and plain values in place of ``None``, by their names in the checkpoint.

        Each rank does so alone, so this is not a collective, unlike DCP's function of the same name.

        Raises:
            ValueError: a file is damaged, or cannot be read, or a value is not plain.
        """
        planner = _PlainPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            planner.set_up_planner(values, self._metadata)
            plan, self._reads = planner.create_local_plan(), 0
            self.read_data(plan, planner).wait()
        except Exception as error:
            raise coded_error(
                ValueError, "checkpoint.not-loaded", folder=self._folder, error_type=type(error).__name__, error=error
            ) from error
        if self._reads != len(plan.items):
            raise coded_error(
                NotImplementedError, "environment.torch-reads-chunks-differently", version=torch.__version__
            )
        return values

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
            raise coded_error(ValueError, "checkpoint.entry-truncated", path=path, name=self._name_of(sinfo))
        if self._verify and _is_damaged(data, getattr(sinfo, "crc32", None)):
            raise coded_error(ValueError, "checkpoint.entry-checksum-wrong", path=path, name=self._name_of(sinfo))
        return io.BytesIO(data)

    def _name_of(self, info: Any) -> str:
        return next(index.fqn for index, other in self._metadata.storage_data.items() if other is info)


class _PlainPlanner(DefaultLoadPlanner):
    """A planner that loads plain values (numbers, texts, lists, dictionaries) and tensors, and refuses other classes."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = load_plain(value)
        except Exception as error:
            raise coded_error(
                ValueError, "checkpoint.stored-value-not-plain", name=name, reason=str(error).splitlines()[0]
            ) from None


class RunWriter(FileSystemWriter):
    """The writer of files with the run's id in their names, and of the list of their contents unless another run was first.

    Args:
        process: the process that writes this rank's data; ``None`` for this one.
        is_staged: whether all tensors are in host memory, so that no stream is waited for.
    """

    def __init__(self, run: SaveRun, *, process: WriterProcess | None = None, is_staged: bool = False) -> None:
        super().__init__(run.folder, overwrite=False, per_thread_copy_ahead=0 if is_staged else 10_000_000)
        self._run, self._process = run, process

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        prefix = f"{plan.storage_data.prefix}{self._run.id}_"
        plan = dataclasses.replace(plan, storage_data=dataclasses.replace(plan.storage_data, prefix=prefix))
        if self._process is None:
            written = super().write_data(plan, planner)
        else:
            written = Future()
            written.set_result(self._process.write(self._run.folder, plan, planner))
        for result in written.value():
            info = result.storage_data
            # It is pickled with the rest, and other readers ignore it.
            info.crc32 = checksum(self._run.folder / info.relative_path, info.offset, info.length)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.path = self._run.draft
        super().finish(metadata, results)
        check_lengths(self._run.folder, (written.storage_data for of_rank in results for written in of_rank))
        with (self._run.draft / METADATA).open("r+b") as file:
            data = file.read()
            file.write(seal(stamped(data, self._run.folder))[len(data) :])
        self._run.complete()


def check_plain(tree: Any, name: str) -> None:
    """Raise an error unless the values that DCP would save can be loaded.

    Raises:
        ValueError: a value is neither a tensor nor plain; the message has its location.
    """
    for path, value in tree_leaves_with_path(tree, is_leaf=_is_leaf):
        if type(value) not in _PLAIN and not isinstance(value, torch.Tensor):
            data = io.BytesIO()
            try:
                torch.save(value, data)
                data.seek(0)
                load_plain(data)
            except RecursionError:
                raise
            except Exception as error:
                raise coded_error(
                    ValueError,
                    "checkpoint.value-cannot-be-held",
                    name=name,
                    location=keystr(path),
                    module=type(value).__module__,
                    class_name=type(value).__qualname__,
                ) from error


def _is_leaf(value: Any) -> bool:
    if isinstance(value, dict) and any(type(key) not in _PLAIN for key in value):
        return True
    return type(value) not in (dict, OrderedDict, list, tuple)


_PLAIN = (type(None), bool, int, float, str)

_NUMPY: list[Any] = [np.ndarray, np.dtype, bytes, (bytes, "bytes")]
"""The classes and functions in pickles of NumPy's arrays and numbers, and of empty bytes.

NumPy 2 has renamed the module of two functions."""
_NUMPY += {type(np.dtype(code)) for code in f"?{np.typecodes['AllInteger']}{np.typecodes['AllFloat']}"}
for _made in (np.empty(0), np.float64()):
    _function: Any = _made.__reduce__()[0]
    _NUMPY += [(_function, f"numpy.{core}.multiarray.{_function.__name__}") for core in ("core", "_core")]


_numpy_is_safe = Reentrant(lambda: torch.serialization.safe_globals(_NUMPY))


def load_plain(data: Any) -> Any:
    """Load a tensor or plain value; no code in it is run."""
    with _numpy_is_safe:
        return torch.load(data, map_location="cpu", weights_only=True)


def _is_damaged(data: bytes, expected: int | None) -> bool:
    if expected is not None:
        return zlib.crc32(data) != expected
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return False
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.testzip() is not None
