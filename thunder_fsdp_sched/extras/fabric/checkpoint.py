"""``fabric.save`` and ``fabric.load``: a folder to which each rank writes its rows, or one file with whole values.

[Note: Fabric's checkpoint formats]
Both formats are those of Fabric's ``FSDPStrategy`` and ``ModelParallelStrategy``, which can read them. A folder has the
state of the module and of the optimizers as ``torch.distributed.checkpoint`` writes it, under the keys of ``state``, and
``meta.pt`` with everything else, as the first rank has it. A file has everything under the keys of ``state``; the state of
optimizers is keyed by parameters' names.

A folder that has no checkpoint yet is written in place. Otherwise the new checkpoint is completed under another name, and
then takes the place of the old one.

[Note: Replacing a checkpoint]
A file replaces a file in one operation of the file system. No operation replaces a folder: the old checkpoint is renamed,
then the new one gets its name, then the old one is removed, except for files in its folder that are not the checkpoint's.
A process that is killed in between leaves the old checkpoint under the other name, where :func:`load` finds it. The next
save removes whatever it has left. A new checkpoint is on disk before anything of the old one is removed: see [Note: Order
on disk] in ``folder``.
"""

from __future__ import annotations

import glob
import io
import os
import pickle
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from thunder.core.module import ThunderModule
from torch.utils.data import DataLoader

from ...errors import coded_error
from ...runtime.row_dtensor import RowDTensor, local_rows
from ...sharding.sharded_module import ShardedModule, find_jitted
from ..checkpoint import load_checkpoint, save_checkpoint
from ..checkpoint.folder import METADATA, OTHERS, make_folder, sync
from ..checkpoint.loading import Loading, tensor_metadata
from ..checkpoint.on_all_ranks import run_on_all_ranks, share_on_all_ranks
from ..checkpoint.state_dict import (
    fit_optimizers,
    get_model_state_dict,
    get_optimizer_state_dict,
    names_of_params,
)
from ..state_dicts.jitted import gather_entries

Filter = Mapping[str, Callable[[str, Any], bool]]


@dataclass
class _Objects:
    """The objects of one ``fabric.save`` or ``fabric.load`` call, by their keys.

    Data loaders without a state are left out: pickled ones would resume nothing, and could not be read with
    ``weights_only``.
    """

    model: ThunderModule
    sharded: ShardedModule
    module_key: str
    optimizers: dict[str, torch.optim.Optimizer]
    others: dict[str, Any]

    @classmethod
    def of(cls, state: Mapping[str, Any], what: str) -> _Objects:
        modules = {key: value for key, value in state.items() if isinstance(value, torch.nn.Module)}
        if len(modules) != 1:
            raise coded_error(ValueError, "fabric.expected-one-module", call=what, got=list(modules) or "none")
        [(key, module)] = modules.items()
        model, sharded = find_jitted(module)
        optimizers = {k: value for k, value in state.items() if isinstance(value, torch.optim.Optimizer)}
        others = {
            k: value
            for k, value in state.items()
            if k != key and k not in optimizers and (_has_state(value) or not isinstance(value, DataLoader))
        }
        return cls(model, sharded, key, optimizers, others)

    @property
    def keys(self) -> tuple[str, str]:
        """The names in a folder: of the module, and of all optimizers together."""
        return self.module_key, "+".join(sorted(self.optimizers)) or "optimizer"


def save(path: Path, state: Mapping[str, Any], *, whole: bool, keep: Filter | None) -> None:
    """Save a module, its optimizers and everything else; a collective.

    A file costs what :func:`gather_entries` does for the module and for the state of each parameter, a folder what
    :func:`save_checkpoint` does.

    Args:
        path: the same on all ranks.
        whole: write one file, else a folder.
        keep: for each key, which entries to save; only for whole values.

    Raises:
        CheckpointError: on all ranks, if it could not be saved.
    """
    parts = _Objects.of(state, "fabric.save")
    states = lambda: {key: v.state_dict() if _has_state(v) else v for key, v in parts.others.items()}  # noqa: E731
    others = run_on_all_ranks(parts.sharded.world_group, "fabric.save", states)
    if whole:
        _save_file(path, parts, others, keep or {})
    elif keep:
        raise coded_error(NotImplementedError, "fabric.filter-without-full")
    else:
        _save_folder(path, parts, others)


def _save_folder(path: Path, parts: _Objects, others: dict[str, Any]) -> None:
    group = parts.sharded.world_group

    def begin() -> tuple[Path, Path]:
        """Return the folder of the checkpoint, and the folder to save into."""
        own = path.resolve()
        clean_up(own)
        new = new_beside(own) if is_checkpoint(own) else own
        make_folder(new)
        _write(others, new / OTHERS)
        return own, new

    own, new = share_on_all_ranks(group, "fabric.save", lambda: (path, path) if group.rank else begin())[0]
    save_checkpoint(parts.model, new, parts.optimizers.values(), keys=parts.keys)
    if new != own:
        run_on_all_ranks(group, "fabric.save", lambda: replace(own, new) if group.rank == 0 else None)


def _save_file(path: Path, parts: _Objects, others: dict[str, Any], keep: Filter) -> None:
    group = parts.sharded.world_group
    writes = group.rank == 0

    if owned := [key for key, optimizer in parts.optimizers.items() if hasattr(optimizer, "owns")]:
        raise coded_error(NotImplementedError, "fabric.state-needs-sharded", key=owned[0])

    def collect() -> tuple[dict[str, Any], dict[str, Any]]:
        parts.sharded.check_initialized()
        if writes and path.is_dir() and not is_checkpoint(path):
            raise coded_error(ValueError, "fabric.path-is-folder", path=path)
        states = {key: get_optimizer_state_dict(parts.model, each) for key, each in parts.optimizers.items()}
        return get_model_state_dict(parts.model), states

    model, states = run_on_all_ranks(group, "fabric.save", collect)
    content: dict[str, Any] = {parts.module_key: gather_entries(model, parts.sharded, keeps=writes)}
    for key, state in states.items():
        entries = {name: gather_entries(values, parts.sharded, keeps=writes) for name, values in state["state"].items()}
        content[key] = {"state": entries, "param_groups": state["param_groups"]}
    content |= others

    def write() -> None:
        if not writes:
            return
        for key, is_kept in keep.items():
            if isinstance(content[key], dict):
                content[key] = {name: value for name, value in content[key].items() if is_kept(name, value)}
        make_folder(path.parent)
        clean_up(path)
        partial = path.with_name(f"{_partly_written(path.name)}{uuid.uuid4().hex}")
        try:
            _write(content, partial)
            replace(path, partial)
        finally:
            partial.unlink(missing_ok=True)

    run_on_all_ranks(group, "fabric.save", write)


def load_module(path: Path, module: torch.nn.Module, *, strict: bool, weights_only: bool | None) -> None:
    """Load a file with a module's whole state dict; a collective.

    Raises:
        CheckpointError: on all ranks, if the file cannot be read or does not fit.
    """
    model, sharded = find_jitted(module)
    whole = run_on_all_ranks(sharded.world_group, "fabric.load_raw", lambda: _read(path, weights_only))
    run_on_all_ranks(sharded.world_group, "fabric.load_raw", lambda: model.load_state_dict(whole, strict=strict))


def load(path: Path, state: dict[str, Any], *, strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Load a module, its optimizers and everything else in ``state``; a collective.

    Objects with ``load_state_dict`` load their part; other values of ``state`` are replaced.

    Returns:
        The other values of the checkpoint that ``state`` does not have.

    Raises:
        CheckpointError: on all ranks, if ``path`` has no checkpoint, or one that does not fit.
        KeyError: it has no value for a key of ``state`` (``strict``). The module and its optimizers are loaded then.
    """
    parts = _Objects.of(state, "fabric.load")
    group = parts.sharded.world_group
    path = find(path)
    if path.is_dir():
        load_checkpoint(parts.model, path, parts.optimizers.values(), keys=parts.keys, strict=strict)
        others = run_on_all_ranks(
            group, "fabric.load", lambda: _read(file, weights_only) if (file := path / OTHERS).exists() else {}
        )
    else:
        others = _load_file(path, parts, strict=strict, weights_only=weights_only)
    for key, value in parts.others.items():
        if key not in others:
            if strict:
                raise coded_error(KeyError, "fabric.strict-entry-missing", path=path, key=key, found=sorted(others))
        elif _has_state(value):
            value.load_state_dict(others.pop(key))
        else:
            state[key] = others.pop(key)
    return others


def _load_file(path: Path, parts: _Objects, *, strict: bool, weights_only: bool | None) -> dict[str, Any]:
    group = parts.sharded.world_group

    def read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        content = _read(path, weights_only)
        for key in (parts.module_key, *parts.optimizers):
            if key not in content:
                raise coded_error(ValueError, "fabric.entry-missing", path=path, key=key, found=sorted(content))
        states = [_fit_whole(content.pop(key), parts, path, optimizer) for key, optimizer in parts.optimizers.items()]
        return content, states

    content, states = run_on_all_ranks(group, "fabric.load", read)
    whole = content.pop(parts.module_key)
    run_on_all_ranks(group, "fabric.load", lambda: parts.model.load_state_dict(whole, strict=strict))
    for optimizer, loaded in zip(parts.optimizers.values(), states, strict=True):
        optimizer.load_state_dict(loaded)
    return content


def _fit_whole(
    whole: Mapping[str, Any], parts: _Objects, path: Path, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return the argument of an optimizer's ``load_state_dict`` with this rank's rows of whole state.

    Parameters may be keyed by name or, as an unsharded optimizer saves them, by number.

    Raises:
        ValueError: it does not fit.
    """
    numbered = list(names_of_params(parts.model, [optimizer]).values())

    def name_of(key: Any) -> str:
        if isinstance(key, int) and key >= len(numbered):
            raise coded_error(ValueError, "fabric.too-many-parameters-saved", saved=key + 1, expected=len(numbered))
        return numbered[key] if isinstance(key, int) else key

    values: dict[tuple[Any, ...], Any] = {}
    for key, state in whole["state"].items():
        values |= {("state", name_of(key), what): value for what, value in state.items()}
    for number, group in enumerate(whole["param_groups"]):
        options = {**group, "params": list(map(name_of, group["params"]))}
        values |= {("param_groups", number, key): value for key, value in options.items()}
    names = {below: ".".join(map(str, below)) for below in values}
    loading = Loading(path, _WholeValues({name: values[below] for below, name in names.items()}))
    [loaded] = fit_optimizers(loading, names, parts.model, [optimizer])
    loading.reader.load(loading.memory)
    return loaded


class _WholeValues:
    """The reader of values in memory, of which it copies this rank's rows."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        contents = {n: tensor_metadata(v) if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        self.contents: Mapping[str, Any] = contents

    def load(self, values: dict[str, Any]) -> dict[str, Any]:
        for name, value in values.items():
            whole = self._values[name]
            if value is None:
                values[name] = whole
            else:
                local_rows(value).copy_(value.rows.of(whole) if isinstance(value, RowDTensor) else whole)
        return values


def _write(content: Mapping[str, Any], path: Path) -> None:
    try:
        with path.open("wb") as file:  # torch itself would not say why it cannot write
            torch.save(content, file)
        sync(path)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        for key, value in content.items():
            try:
                torch.save(value, io.BytesIO())
            except (AttributeError, TypeError, pickle.PicklingError) as reason:
                raise coded_error(ValueError, "fabric.entry-not-picklable", key=key, reason=reason) from error
        raise


def _read(path: Path, weights_only: bool | None) -> dict[str, Any]:
    try:
        content = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise coded_error(ValueError, "checkpoint.file-not-readable", file=path, error=error) from error
    if not isinstance(content, dict):
        raise coded_error(ValueError, "fabric.file-not-dictionary", path=path, got=type(content).__name__)
    return content


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` is a file, or a folder with a checkpoint."""
    return path.is_file() or (path / METADATA).is_file()


def new_beside(path: Path) -> Path:
    """Return the folder in which the checkpoint is completed that will replace ``path``."""
    return path.with_name(f".{path.name}.fsdp_sched_new")


def replace(path: Path, new: Path) -> None:
    """Replace ``path``, if it exists, by ``new``, a complete folder or file; see [Note: Replacing a checkpoint]."""
    if path.exists() and (path.is_dir() or new.is_dir()):
        os.rename(path, _old_beside(path))
        sync(path.parent)  # else a crash may leave the new one alone, without the other files of the folder
    os.replace(new, path)
    sync(path.parent)
    _discard_old(path)


def find(path: Path) -> Path:
    """Return the location of the checkpoint ``path``: another one if a process was killed while replacing it."""
    old = _old_beside(path)
    return old if old.exists() and not path.exists() else path


def clean_up(path: Path) -> None:
    """Undo or finish the replacement that a killed process has begun, before ``path`` is saved again."""
    if (old := find(path)) != path:
        os.rename(old, path)
    _discard_old(path)
    _remove(new_beside(path))
    for partial in path.parent.glob(f"{_partly_written(glob.escape(path.name))}*"):
        _remove(partial)


def _old_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.fsdp_sched_old")


def _partly_written(name: str) -> str:
    """Return the beginning of the names of files that are being written and will take the place of the file ``name``."""
    return f".{name}.fsdp_sched_partial_"


def _discard_old(path: Path) -> None:
    """Remove the checkpoint that ``path`` has replaced; other files in its folder move to the new one."""
    old = _old_beside(path)
    if old.is_dir() and path.is_dir():
        for file in old.iterdir():
            if not file.name.startswith((METADATA, OTHERS)) and file.suffix != ".distcp":
                file.rename(path / file.name)
        sync(path)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
