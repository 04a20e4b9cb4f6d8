"""Whole models in safetensors files, written bucket by bucket and read rows by rows: no rank holds the whole model.

The folder looks as Hugging Face's do: one file a bucket, and ``model.safetensors.index.json``, written last, which says
where each parameter is. Of tied parameters only the first name is written, as is usual there.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from thunder.core.module import ThunderModule

from ..sharding import ShardedModule, gather_param
from ..transform import find_transform
from .files import together
from .state_dict import check_names

__all__ = ["load_safetensors", "save_safetensors"]

_INDEX = "model.safetensors.index.json"


def save_safetensors(model: ThunderModule, folder: str | os.PathLike[str]) -> Path:
    """Writes the whole model into a folder, from the first rank; a collective.

    At most one unsharded bucket is in memory at a time, in the dtype of the shards.

    Returns:
        The folder's index file, ``model.safetensors.index.json``.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: on all ranks, if the folder has an index already or cannot be written.
    """
    torch_files = _import("safetensors.torch")
    sharded = find_transform(model).sharded
    check_names(sharded)
    path = Path(folder)
    writes = sharded.everyone.rank == 0
    files = {f"model-{i + 1:05d}.safetensors": bucket for i, bucket in enumerate(sharded.buckets)}
    where: dict[str, str] = {}
    total = 0

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        if writes:
            torch_files.save_file(tensors, path / file, metadata={"format": "pt"})

    def begin() -> None:
        if writes:
            if (path / _INDEX).exists():
                raise ValueError(f"folder: {path} holds a model already; give a folder of its own")
            path.mkdir(parents=True, exist_ok=True)

    together(sharded.everyone, begin)
    for file, bucket in files.items():
        tensors = {}
        for index, spec in enumerate(bucket.spec.params):
            whole = gather_param(bucket, index, bucket.params[index].detach())
            if writes:
                tensors[spec.name] = whole.cpu()
            where[spec.name] = file
            total += spec.numel * spec.dtype.itemsize
        together(sharded.everyone, lambda file=file, tensors=tensors: write(file, tensors))  # type: ignore[misc]
    rest = _unsharded(model, sharded)
    if rest:
        where |= dict.fromkeys(rest, "model-rest.safetensors")
        total += sum(t.numel() * t.dtype.itemsize for t in rest.values())
        copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in rest.items()} if writes else {}
        together(sharded.everyone, lambda: write("model-rest.safetensors", copies))

    def end() -> None:
        if writes:
            index = {"metadata": {"total_size": total}, "weight_map": where}
            partial = path / f"{_INDEX}.partial"
            partial.write_text(json.dumps(index, indent=2))
            partial.replace(path / _INDEX)

    together(sharded.everyone, end)
    return path / _INDEX


def load_safetensors(model: ThunderModule, source: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Loads a whole model; each rank reads the rows that it holds, and no more. A collective.

    Args:
        source: a ``.safetensors`` file, or a folder with some (with or without an index).
        strict: refuse files with tensors that the model does not have.

    Raises:
        ImportError: safetensors is not installed.
        CheckpointError: on all ranks, if names or shapes do not fit or a file is damaged. Nothing is changed then.
    """
    safetensors = _import("safetensors")
    sharded = find_transform(model).sharded
    rest = _unsharded(model, sharded)

    def open_all() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for file in _files(Path(source)):
            try:
                opened = safetensors.safe_open(file, framework="pt")
            except Exception as error:
                raise ValueError(f"{file} cannot be read: {error}") from error
            found |= dict.fromkeys(opened.keys(), opened)
        faults: list[str] = []
        known: set[str] = set()
        expected = {s.names: s.shape for b in sharded.buckets for s in b.spec.params}
        expected |= {(name,): tuple(tensor.shape) for name, tensor in rest.items()}
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
        if strict:
            faults += [f"{name!r} is unknown" for name in found if name not in known]
        if faults:
            more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
            raise ValueError(f"{source} does not fit the model: {'; '.join(faults[:8])}{more}")
        return slices

    slices = together(sharded.everyone, open_all)
    with torch.no_grad():
        for bucket in sharded.buckets:
            for index, spec in enumerate(bucket.spec.params):
                starts = bucket.spec.layout.placements[index].row_starts
                start, end = starts[bucket.rank : bucket.rank + 2]
                if end > start:
                    piece = slices[spec.name]
                    bucket.shard_views[index].copy_(piece[start:end] if spec.shape else piece.reshape(1))
        for name, tensor in rest.items():
            piece = slices[name]
            tensor.copy_(piece[:] if tensor.ndim else piece)


def _unsharded(model: ThunderModule, sharded: ShardedModule) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name not in sharded.places}


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    index = source / _INDEX
    if index.exists():
        return [source / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"source: {source} is no .safetensors file and no folder with one")
    if any(source.glob("model-[0-9]*.safetensors")):
        raise ValueError(f"source: {source} has no {_INDEX}: its export did not end")
    return files


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"whole models need safetensors: pip install 'thunder_fsdp_sched[safetensors]' ({error})"
        ) from None
