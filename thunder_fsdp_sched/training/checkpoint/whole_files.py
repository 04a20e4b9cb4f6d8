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

import importlib
import json
import logging
import os
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from thunder.core.module import ThunderModule

from ...distributed.process_groups import ProcessGroupRef
from ...private_api import state_name
from ...sharding.jitted_state import rows_by_name
from ...sharding.sharded_module import ShardedModule
from ...sharding.state_entries import refuse_unshared
from ...transform import find_jitted
from .claim import INDEX, complete_folder, is_complete, release_claim
from .exchange import exchange
from .files import CheckpointError, claim_on_all_ranks, refuse_different, run_on_all_ranks
from .fitting import Cast, tell_casts

__all__ = ["load_safetensors", "save_safetensors"]

_log = logging.getLogger(__name__)

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The names of dtypes in safetensors."""


def save_safetensors(model: ThunderModule, folder: str | os.PathLike[str], *, checksums: bool = True) -> Path:
    """Write the whole model into a folder, from the first rank; a collective.

    At most one unsharded bucket is in memory at a time, in the dtype of the shards. The folder is claimed first: if
    another run saves into it, one of the two gets an error, and no file is overwritten.

    Args:
        folder: a folder that holds no whole model yet, on a disk that all ranks see.
        checksums: save the checksum of each file.

    Returns:
        The folder's index file, ``model.safetensors.index.json``.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: on all ranks, if the folder has an index already, or another run saves into it, or if it cannot
            be written.
    """
    torch_files = _import("safetensors.torch")
    model, sharded = find_jitted(model)
    for bucket in sharded.buckets:
        refuse_unshared(bucket)
    sharded.check_initialized()
    path = Path(folder)

    def begin() -> None:
        if is_complete(path, INDEX):
            raise ValueError(f"folder: {path} holds a model already; give a folder of its own")

    run_on_all_ranks(sharded.world_group, "save_safetensors", begin)
    run = claim_on_all_ranks(sharded.world_group, path, INDEX)
    try:
        _write(model, sharded, path, run, torch_files, checksums=checksums)
    except CheckpointError as error:
        if is_complete(path, INDEX):
            raise CheckpointError(f"{error}; {path} is complete nevertheless, by this run or another") from error
        raise
    finally:
        if sharded.world_group.rank == 0:
            release_claim(path, INDEX, run)
    return path / INDEX


def _write(
    model: ThunderModule, sharded: ShardedModule, path: Path, run: str, torch_files: Any, *, checksums: bool
) -> None:
    writes = sharded.world_group.rank == 0
    files = {f"model-{i + 1:05d}-{run}.safetensors": bucket for i, bucket in enumerate(sharded.buckets)}
    where: dict[str, str] = {}
    crcs: dict[str, str] = {}
    total = 0

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        if writes:
            torch_files.save_file(tensors, path / file, metadata={"format": "pt"})
            if checksums:
                crcs[file] = f"{_crc32(path / file):08x}"

    for file, bucket in files.items():
        tensors = {}
        for index, spec in enumerate(bucket.spec.params):
            whole = bucket.rows[index].gather(bucket.shard_views[index])
            if writes:
                tensors[state_name(spec.name)] = whole.cpu()
            where[state_name(spec.name)] = file
            total += spec.numel * spec.dtype.itemsize
        run_on_all_ranks(
            sharded.world_group,
            "save_safetensors",
            lambda file=file, tensors=tensors: write(file, tensors),  # type: ignore[misc]
        )
    rest = _unsharded(model, sharded)
    if rest:
        file = f"model-rest-{run}.safetensors"
        where |= dict.fromkeys(rest, file)
        total += sum(t.numel() * t.dtype.itemsize for t in rest.values())
        copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in rest.items()} if writes else {}
        run_on_all_ranks(sharded.world_group, "save_safetensors", lambda: write(file, copies))

    def end() -> None:
        if writes:
            metadata = {"total_size": total, **({"crc32": crcs} if checksums else {})}
            if missing := [name for name in sorted(set(where.values())) if not (path / name).exists()]:
                raise ValueError(f"folder: {path / missing[0]} was deleted by somebody else")
            partial = path / f"{INDEX}.{run}"
            partial.write_text(json.dumps({"metadata": metadata, "weight_map": where}, indent=2))
            try:
                complete_folder(path, INDEX, run, partial)
            finally:
                partial.unlink()

    run_on_all_ranks(sharded.world_group, "save_safetensors", end)


def load_safetensors(
    model: ThunderModule, source: str | os.PathLike[str], *, strict: bool = True, verify_checksums: bool = True
) -> None:
    """Load a whole model; a collective. Each rank reads the rows that it holds, and verifies its share of the files.

    Tensors of another dtype are cast, with a warning on the first rank.

    Args:
        source: a ``.safetensors`` file, or a folder with some (with or without an index).
        strict: refuse files with tensors that the model does not have.
        verify_checksums: verify the checksums that the index has (those of :func:`save_safetensors`), before anything
            is changed.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: on all ranks, if names or shapes do not fit, a file is damaged, or ranks were given different
            files. Nothing is changed then.
    """
    safetensors = _import("safetensors")
    model, sharded = find_jitted(model)
    rest = _unsharded(model, sharded)
    files, crcs = run_on_all_ranks(sharded.world_group, "load_safetensors", lambda: _files(Path(source)))
    _verify(sharded.world_group, Path(source), files, crcs, verify=verify_checksums)
    casts: list[Cast] = []

    def open_all() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for file in files:
            try:
                opened = safetensors.safe_open(file, framework="pt")
            except Exception as error:
                raise ValueError(f"{file} cannot be read: {error}") from error
            found |= dict.fromkeys(opened.keys(), opened)
        faults: list[str] = []
        known: set[str] = set()
        specs = {tuple(map(state_name, s.names)): s for b in sharded.buckets for s in b.spec.params}
        expected = {names: s.shape for names, s in specs.items()}
        expected |= {(name,): tuple(tensor.shape) for name, tensor in rest.items()}
        dtypes = {names[0]: s.dtype for names, s in specs.items()}
        dtypes |= {name: tensor.dtype for name, tensor in rest.items()}
        slices = {}
        for names, shape in expected.items():
            known.update(names)
            name = next((n for n in names if n in found), None)
            if name is None:
                faults.append(f"{names[0]!r} is missing")
                continue
            slices[names[0]] = found[name].get_slice(name) if shape else found[name].get_tensor(name)
            shape_there = tuple(slices[names[0]].get_shape() if shape else slices[names[0]].shape)
            if shape_there != shape:
                faults.append(f"{name!r} has shape {shape_there} there, {shape} in the model")
            dtype = _DTYPES.get(slices[names[0]].get_dtype()) if shape else slices[names[0]].dtype
            if dtype is not None and dtype != dtypes[names[0]]:
                casts.append((name, dtype, dtypes[names[0]]))
        if strict:
            faults += [f"{name!r} is unknown" for name in found if name not in known]
        if faults:
            more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
            raise ValueError(f"{source} does not fit the model: {'; '.join(faults[:8])}{more}")
        return slices

    slices = run_on_all_ranks(sharded.world_group, "load_safetensors", open_all)
    if casts and sharded.world_group.rank == 0:
        warnings.warn(f"load_safetensors casts what {source} holds: {tell_casts(casts)}", stacklevel=2)
    with torch.no_grad():
        for bucket in sharded.buckets:
            for index, spec in enumerate(bucket.spec.params):
                starts = bucket.spec.layout.placements[index].row_starts
                start, end = starts[bucket.rank : bucket.rank + 2]
                if end > start:
                    piece = slices[state_name(spec.name)]
                    bucket.write_rows(index, piece[start:end] if spec.shape else piece.reshape(1))
        for name, tensor in rest.items():
            piece = slices[name]
            tensor.copy_(piece[:] if tensor.ndim else piece)


def _unsharded(model: ThunderModule, sharded: ShardedModule) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in rows_by_name(model).items() if name not in sharded.locations}


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
            raise ValueError(f"{index} cannot be read: {type(error).__name__} {error}") from error
        if any(Path(name).name != name for name in names):
            raise ValueError(f"{index} cannot be read: it names files outside its folder")
        if crcs and crcs.keys() != set(names):
            raise ValueError(f"{index} cannot be read: it has checksums of other files than it names")
        return [source / name for name in names], crcs
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"source: {source} is no .safetensors file and no folder with one")
    if any(source.glob("model-[0-9]*.safetensors")):
        raise ValueError(f"source: {source} has no {INDEX}: its export did not end")
    return files, {}


def _verify(group: ProcessGroupRef, source: Path, files: list[Path], crcs: dict[str, str], *, verify: bool) -> None:
    """Verify that all ranks will read the same files, and that these are undamaged; a collective."""

    def look() -> tuple[list[tuple[int, ...]], str]:
        stats = [file.stat() for file in files]
        known = repr([(file.name, stat.st_size, crcs.get(file.name)) for file, stat in zip(files, stats, strict=True)])
        return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats], known

    identities, digest = run_on_all_ranks(group, "load_safetensors", look)
    everyones = exchange(group, "load_safetensors", identities)
    refuse_different(group, source, digest)
    same = all(other == everyones[0] for other in everyones)
    if not same and not crcs:
        refuse_different(
            group, source, repr(run_on_all_ranks(group, "load_safetensors", lambda: [_crc32(file) for file in files]))
        )

    def check() -> None:
        for file in (files[group.rank :: group.size] if same else files) if verify and crcs else ():
            if f"{_crc32(file):08x}" != crcs[file.name]:
                raise ValueError(
                    f"{file} is damaged, nothing is changed: its checksum is wrong (verify_checksums=False ignores that)"
                )

    run_on_all_ranks(group, "load_safetensors", check)
    if verify and not crcs and group.rank == 0:
        _log.warning("%s has no checksums", source)


def _crc32(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while data := stream.read(1 << 22):
            crc = zlib.crc32(data, crc)
    return crc


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"whole models need safetensors: pip install 'thunder_fsdp_sched[safetensors]' ({error})"
        ) from None
