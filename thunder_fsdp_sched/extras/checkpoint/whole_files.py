"""Whole models in safetensors files, written bucket by bucket and read by rows, so no rank holds the whole model.

The folder has the format of Hugging Face: one file per bucket, and ``model.safetensors.index.json``, written last,
which maps parameters to files. As usual in that format, only the first name of tied parameters is written. The index
also contains the checksum of each file (``metadata``, ``crc32``), which other tools ignore.

[Note: Verifying whole files]
A rank reads rows, but a checksum is that of a whole file. So ranks verify whole files before anything is changed. If
all ranks see the same files, each rank verifies some of them; otherwise (copies on disks of several hosts) each
verifies all. Files are the same if inode, size and modification time are equal on all ranks. Files without checksums
that are not the same are compared by content.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from thunder.core.module import ThunderModule

from ...errors import coded_error
from ...private_torch import state_name
from ...ranks.control import control_of
from ...ranks.process_groups import ProcessGroupRef
from ...runtime.row_dtensor import RowDTensor, local_rows
from ...sharding.sharded_module import find_jitted
from ..state_dicts.entries import refuse_unshared
from ..state_dicts.jitted import rows_by_name
from .beside import Rounds, Saving, Write, finish_latest, save_beside, save_in_rounds
from .folder import INDEX, METADATA, SaveRun, checksum, is_complete, path_of, refuse_complete, sync
from .loading import Loading, tensor_metadata
from .on_all_ranks import refuse_different, run_on_all_ranks
from .staging import Staging

_log = logging.getLogger(__name__)


def save_safetensors(model: ThunderModule, folder: str | os.PathLike[str]) -> Path:
    """Write the whole model into a folder, from the first rank; a collective.

    The first rank receives one bucket at a time, in the dtype of the shards, over gloo. If another run saves into the
    folder, one of the two gets an error, and no file is overwritten.

    Cost: three exchanges, and each rank sends its rows to the first rank, in a message for each bucket, and two other
    messages, which are answered. So the first rank receives the model once.

    Args:
        folder: a folder without a whole model, on a disk that all ranks see.

    Returns:
        The folder's index file, ``model.safetensors.index.json``.

    Raises:
        CheckpointError: on all ranks, if the folder has an index already, or another run saves into it, or if it cannot
            be written, or an earlier asynchronous save failed, or safetensors is not installed.
    """
    group, path, state, write = _prepare(model, folder)
    return save_in_rounds(group, path, INDEX, state, write)


def save_safetensors_async(model: ThunderModule, folder: str | os.PathLike[str]) -> Saving:
    """Copy each rank's rows to host memory; gather and write them in threads while training continues; a collective.

    See [asynchronous saves](checkpoints.md#asynchronous-saves). Other arguments, errors and cost are those of
    :func:`save_safetensors`.
    """
    group, path, staging, write = _prepare(model, folder, Staging)
    return save_beside(group, path, INDEX, staging, write)


def _prepare(
    model: ThunderModule,
    folder: str | os.PathLike[str],
    stage: Callable[[dict[str, Any]], Any] = lambda state: state,
) -> tuple[ProcessGroupRef, Path, Any, Write]:
    """Return the ranks, the folder, the result of ``stage`` for the entries, and the function that writes them."""
    model, sharded = find_jitted(model)
    group = sharded.world_group

    def check() -> tuple[Path, dict[str, torch.Tensor], Any]:
        sharded.check_initialized()  # a collective
        sharded.take_attributes()
        _import("safetensors.torch")
        for bucket in sharded.buckets:
            refuse_unshared(bucket)
        finish_latest()
        path, entries = path_of(folder, "folder"), rows_by_name(model)
        refuse_complete(path, INDEX)
        return path, entries, stage(entries)

    path, entries, values = run_on_all_ranks(group, "save_safetensors", check)
    parts = {f"{n:05d}": [state_name(p.name) for p in b.spec.params] for n, b in enumerate(sharded.buckets, 1)}
    parts["rest"] = [name for name in entries if name not in sharded.locations]

    def write(rounds: Rounds, run: SaveRun, state: dict[str, Any]) -> None:
        index: dict[str, Any] = {"metadata": {"total_size": 0, "crc32": {}}, "weight_map": {}}
        for label, names in parts.items():
            rows, file = {name: state[name] for name in names}, run.folder / f"model-{label}-{run.id}.safetensors"
            rounds.run(partial(_rows_to_send, rows, rounds.rank), partial(_write_file, file, rows, index))
        rounds.run(lambda: None, lambda _: _complete(run, index))

    return group, path, values, write


def _rows_to_send(entries: Mapping[str, torch.Tensor], rank: int) -> dict[str, tuple[int, Any]]:
    """Return the bytes of this rank's rows, and the number of their first element, unless another rank sends them."""
    sent: dict[str, tuple[int, Any]] = {}
    for name, entry in entries.items():
        sends, start, local = rank == 0, 0, local_rows(entry)
        if isinstance(entry, RowDTensor):
            replicas = entry.rows.ranks.replicas
            sends, start = replicas is None or replicas.rank == 0, entry.rows.start * math.prod(entry.shape[1:])
        if sends and local.numel():
            sent[name] = start, local.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return sent


def _write_file(
    file: Path,
    entries: Mapping[str, torch.Tensor],
    index: dict[str, Any],
    everyones: Sequence[dict[str, tuple[int, Any]]],
) -> None:
    """Write a file of entries, whose rows the ranks have sent, and add it to the index."""
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}
    for name, (start, data) in itertools.chain.from_iterable(theirs.items() for theirs in everyones):
        rows = torch.from_numpy(data).view(tensors[name].dtype)
        tensors[name].view(-1)[start : start + rows.numel()] = rows
    if tensors:
        _import("safetensors.torch").save_file(tensors, file, metadata={"format": "pt"})
        sync(file)
        index["weight_map"] |= dict.fromkeys(tensors, file.name)
        index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
        index["metadata"]["crc32"][file.name] = _checksum(file)


def _complete(run: SaveRun, index: dict[str, Any]) -> None:
    for name in index["metadata"]["crc32"]:
        if not (run.folder / name).exists():
            raise coded_error(ValueError, "checkpoint.file-deleted-meanwhile", file=run.folder / name)
    (run.draft / INDEX).write_text(json.dumps(index, indent=2))
    run.complete()


def load_safetensors(
    model: ThunderModule, source: str | os.PathLike[str], *, strict: bool = True, verify_checksums: bool = True
) -> None:
    """Load a whole model; a collective. Each rank reads the rows that it holds, and verifies its share of the files.

    Tensors of another dtype are cast, with a warning on the first rank. While reading, it needs as much additional memory as
    the model's shards.

    Cost, on any number of ranks: seven exchanges, nine if ranks see different copies of the files. Values are read, not
    sent.

    Args:
        source: a ``.safetensors`` file, or a folder with some (with or without an index).
        strict: refuse files that have tensors that the model lacks, or lack some that it has. With ``False``, as in
            torch's ``load_state_dict``, the latter keep their values, and a warning names them.
        verify_checksums: verify the checksums in the index, which :func:`save_safetensors` writes, before anything is
            changed.

    Raises:
        CheckpointError: on all ranks, if safetensors is not installed, names or shapes do not fit, a file is damaged, or
            ranks were given different files. Nothing is changed then.
    """
    model, sharded = find_jitted(model)
    group = sharded.world_group

    def find() -> tuple[Path, list[Path], dict[str, str]]:
        _import("safetensors")
        finish_latest()
        path = path_of(source, "source")
        return path, *_files(path)

    path, files, crcs = run_on_all_ranks(group, "load_safetensors", find)
    _verify(group, path, files, crcs, verify=verify_checksums)

    def prepare() -> Loading:
        reader = _RowReader(files)
        loading = Loading(path, reader)
        loading.fit_model(model, {name: name for name in reader.contents}, strict=strict)
        return loading

    run_on_all_ranks(group, "load_safetensors", prepare).finish(group, "load_safetensors")


class _RowReader:
    """A reader of rows of tensors in files. If several files have a tensor, the last one counts.

    Raises:
        ValueError: a file cannot be read, or holds a part of a tensor.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        contents: dict[str, Any] = {}
        self.contents: Mapping[str, Any] = contents
        self._files: dict[str, Path] = {}
        for file in files:
            with _opened(file) as opened:
                parts = json.loads((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
                for name in opened.keys():  # noqa: SIM118
                    shape = opened.get_slice(name).get_shape()
                    first = opened.get_slice(name)[:1] if shape else opened.get_tensor(name)
                    contents[name] = tensor_metadata(first.new_empty(shape, device="meta"))
                    self._files[name] = file
            for name, part in parts.items():
                if any(part["saved_offsets"]):
                    raise coded_error(ValueError, "checkpoint.file-of-partial-tensor", file=file, name=name)

    def load(self, values: dict[str, Any]) -> dict[str, Any]:
        """Read this rank's rows of tensors, or whole tensors, in place, by their names."""
        for file in dict.fromkeys(self._files[name] for name in values):
            with _opened(file) as opened:
                for name in (name for name in values if self._files[name] == file):
                    entry, local = values[name], local_rows(values[name])
                    if isinstance(entry, RowDTensor) and entry.ndim:
                        if local.numel():
                            local.copy_(opened.get_slice(name)[entry.rows.start : entry.rows.end])
                    else:
                        local.copy_(opened.get_tensor(name))
        return values


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with _import("safetensors").safe_open(file, "pt") as opened:
            yield opened
    except Exception as error:
        raise coded_error(ValueError, "checkpoint.file-not-readable", file=file, error=error) from error


def _files(source: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files of a whole model, and the checksums that exist."""
    if source.is_file():
        return [source], {}
    index = source / INDEX
    if index.exists():
        try:
            content = json.loads(index.read_text())
            names = sorted(set(content["weight_map"].values()))
            crcs = dict(content.get("metadata", {}).get("crc32", {}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise coded_error(
                ValueError, "checkpoint.list-not-readable", file=index, error_type=type(error).__name__, error=error
            ) from error
        if any(Path(name).name != name for name in names):
            raise coded_error(ValueError, "checkpoint.index-names-outside-files", index=index)
        if crcs and crcs.keys() != set(names):
            raise coded_error(ValueError, "checkpoint.index-checksums-of-other-files", index=index)
        return [source / name for name in names], crcs
    files = sorted(source.glob("*.safetensors"))
    if not files:
        hint = "" if source.exists() else ": it does not exist"
        if is_complete(source, METADATA):
            hint = ": it is a checkpoint, which load_checkpoint(model, folder) loads"
        elif below := next(source.glob("*/*.safetensors"), None):
            hint = f": {below.parent} has some"
        raise coded_error(ValueError, "checkpoint.source-without-safetensors", source=source, hint=hint)
    if any(source.glob("model-[0-9]*.safetensors")):
        raise coded_error(ValueError, "checkpoint.export-did-not-end", source=source, index=INDEX)
    return files, {}


def _verify(group: ProcessGroupRef, source: Path, files: list[Path], crcs: dict[str, str], *, verify: bool) -> None:
    """Verify that all ranks will read the same files, and that these are undamaged; a collective."""
    stats = run_on_all_ranks(group, "load_safetensors", lambda: [file.stat() for file in files])
    known = [(file.name, stat.st_size, crcs.get(file.name)) for file, stat in zip(files, stats, strict=True)]
    refuse_different(group, source, repr(known))
    identities = [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
    is_shared = len(set(map(repr, control_of(group).exchange("load_safetensors", identities)))) == 1
    if not is_shared and not crcs:
        contents = run_on_all_ranks(group, "load_safetensors", lambda: list(map(_checksum, files)))
        refuse_different(group, source, repr(contents))
    if verify and not crcs and group.rank == 0:
        _log.warning("%s has no checksums", source)

    def check() -> None:
        for file in files[group.rank :: group.size] if is_shared else files:
            if verify and crcs and _checksum(file) != crcs[file.name]:
                raise coded_error(ValueError, "checkpoint.file-checksum-wrong", file=file)

    run_on_all_ranks(group, "load_safetensors", check)


def _checksum(file: Path) -> str:
    return f"{checksum(file, 0, file.stat().st_size):08x}"


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise coded_error(ImportError, "environment.safetensors-missing", error=error) from None
