"""Checkpoints on disk in the format of torch.distributed.checkpoint (DCP): saved whole or not at all, loaded likewise.

[Note: All or nothing]
DCP writes every rank's file first and the list of their contents, ``.metadata``, last. So a folder is a checkpoint if
that file is there, and each checkpoint gets a folder of its own: saving over an old one would damage it before the new
one is complete. Loading compares names and shapes with that list before anything is read, reads into memory of its own,
and changes model and optimizers after every rank has read everything.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..groups import Group
from ..sharding import ShardedModule
from ..transform import find_transform
from .pieces import as_entry, local_rows
from .state_dict import get_model_state_dict, get_optimizer_state_dict, listed, names_of_params, owned_names

__all__ = ["CheckpointError", "latest_checkpoint", "load_checkpoint", "save_checkpoint", "together"]

Result = TypeVar("Result")
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

_METADATA = ".metadata"


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved, or does not fit; raised on every rank, and nothing is changed."""


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: ThunderModule,
    optimizers: Optimizers = (),
    *,
    extra: dict[str, Any] | None = None,
    keys: tuple[str, str] = ("model", "optim"),
) -> Path:
    """Saves model and optimizers, each rank its part; a collective.

    It is ``dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizers), **extra})``
    with checks. FSDP2, and any other number of ranks, can load it.

    Args:
        folder: a folder that holds no checkpoint yet, on a disk that all ranks see.
        optimizers: one or several; none saves the model alone.
        extra: what else to save, by name: the step's number, the state dicts of schedulers and data loaders. Equal on all
            ranks.
        keys: names under which model and optimizers are saved.

    Returns:
        The folder.

    Raises:
        CheckpointError: on all ranks, if one of them could not do it: the folder has a checkpoint, the disk is full, an
            optimizer has other parameters. The folder is no checkpoint then, and others are as they were.
    """
    path = Path(folder)
    sharded = find_transform(model).sharded

    def collect() -> dict[str, Any]:
        if (path / _METADATA).exists():
            raise ValueError(f"folder: {path} holds a checkpoint already; save each one into a folder of its own")
        state: dict[str, Any] = {keys[0]: get_model_state_dict(model)}
        if listed(optimizers):
            state[keys[1]] = get_optimizer_state_dict(model, optimizers)
        if taken := state.keys() & (extra or {}).keys():
            raise ValueError(f"extra: the name {sorted(taken)[0]!r} is taken by the model or its optimizers (keys)")
        return {**state, **(extra or {})}

    state = together(sharded.everyone, collect)
    try:
        save(state, checkpoint_id=path, process_group=sharded.everyone.process_group)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"fsdp: the checkpoint {path} was not saved: {_reason(error)}") from error
    return path


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: ThunderModule,
    optimizers: Optimizers = (),
    *,
    extra: dict[str, Any] | None = None,
    keys: tuple[str, str] = ("model", "optim"),
    strict: bool = True,
) -> dict[str, Any]:
    """Loads what :func:`save_checkpoint`, or ``dcp.save`` of FSDP2's state dicts, has saved; a collective.

    The number of ranks, the strategy, the buckets may be others than when it was saved. Beside the model's shards it takes
    as much memory again while it reads.

    Args:
        folder: the checkpoint.
        optimizers: made of the jitted module's parameters; none loads the model alone.
        extra: names and structure of what else to load.
        keys: names under which model and optimizers were saved.
        strict: refuse a checkpoint with parameters that the model does not have.

    Returns:
        What ``extra`` names, as it was saved.

    Raises:
        CheckpointError: on all ranks, if the folder is no checkpoint or one that does not fit, with the names and shapes
            that do not, or if a file cannot be read. Nothing is changed then.
    """
    path = Path(folder)
    sharded = find_transform(model).sharded

    def prepare() -> dict[str, Any]:
        contents = _contents(path)
        for name in [keys[0], *([keys[1]] if listed(optimizers) else []), *(extra or {})]:
            if name not in contents:
                raise ValueError(f"the checkpoint {path} holds no {name!r}, but {list(contents)} (see keys, extra)")
        entries = get_model_state_dict(model)
        _compare(contents[keys[0]], entries, strict=strict)
        target = {**copy.deepcopy(extra or {}), keys[0]: {n: torch.empty_like(e) for n, e in entries.items()}}
        if listed(optimizers):
            target[keys[1]] = _blank_optimizer_state(contents[keys[1]], model, listed(optimizers))
        return target

    target = together(sharded.everyone, prepare)
    try:
        load(target, checkpoint_id=path, process_group=sharded.everyone.process_group)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"fsdp: the checkpoint {path} was not loaded, nothing is changed: {_reason(error)}"
        ) from error

    # Every rank has read everything. What is left can fail on all ranks alike only, before anything is changed.
    states = _optimizer_state_dicts(target[keys[1]], model, listed(optimizers)) if listed(optimizers) else []
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(local_rows(target[keys[0]][name]))
    for optimizer, state in zip(listed(optimizers), states, strict=True):
        optimizer.load_state_dict(state)
    return {name: target[name] for name in extra or {}}


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in a subfolder of ``folder`` that was completed last, if there is one.

    Ranks have to see the same disk. Folders that a save has left incomplete do not count.
    """
    complete = [p.parent for p in Path(folder).glob(f"*/{_METADATA}")]
    return max(complete, key=lambda p: ((p / _METADATA).stat().st_mtime_ns, p.name), default=None)


def together(group: Group, do: Callable[[], Result]) -> Result:
    """Does something on every rank of ``group`` that may fail on some of them; then it fails on all.

    Raises:
        CheckpointError: with the message of each rank that failed.
    """
    result, message, cause = None, "", None
    try:
        result = do()
    except Exception as error:
        message, cause = f"{error}", error
    messages: list[Any] = [message]
    if group.size > 1 and group.backend != "fake":
        messages = [None] * group.size
        dist.all_gather_object(messages, message, group=group.process_group)
    ranks_of: dict[str, list[int]] = {}
    for rank, text in zip(group.global_ranks, messages, strict=False):
        if text:
            ranks_of.setdefault(text, []).append(rank)
    if ranks_of:
        parts = [f"{text} (on ranks {ranks})" if len(ranks) < group.size else text for text, ranks in ranks_of.items()]
        raise CheckpointError("fsdp: " + "; ".join(parts)) from cause
    return result  # type: ignore[return-value]  # no message: it is there


def _reason(error: BaseException) -> str:
    """What went wrong, on which ranks, without their tracebacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(f"rank {rank}: {type(e).__name__} {e}" for rank, (e, _) in error.failures.items())


def _contents(path: Path) -> dict[str, dict[tuple[Any, ...], Any]]:
    """What a checkpoint holds: for each top-level name the path below it of each leaf, and its metadata."""
    if not (path / _METADATA).exists():
        begun = path.is_dir() and any(path.iterdir())
        raise ValueError(f"{path} is {'a checkpoint whose save did not end' if begun else 'no checkpoint'}")
    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:
        raise ValueError(f"{path / _METADATA} cannot be read: {type(error).__name__} {error}") from error
    contents: dict[str, dict[tuple[Any, ...], Any]] = {}
    for name, (top, *below) in (metadata.planner_data or {}).items():
        contents.setdefault(str(top), {})[tuple(below)] = metadata.state_dict_metadata[name]
    return contents


def _compare(saved: dict[tuple[Any, ...], Any], entries: dict[str, torch.Tensor], *, strict: bool) -> None:
    """Refuses a saved model with other names or shapes."""
    faults = [f"{name!r} is missing" for name in entries if (name,) not in saved]
    if strict:
        faults += [f"{'.'.join(map(str, below))!r} is unknown" for below in saved if below[0] not in entries]
    for name, entry in entries.items():
        found = saved.get((name,))
        if isinstance(found, TensorStorageMetadata) and found.size != entry.shape:
            faults.append(f"{name!r} has shape {tuple(found.size)} there, {tuple(entry.shape)} in the model")
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise ValueError(f"the checkpoint does not fit the model: {'; '.join(faults[:8])}{more}")


def _blank_optimizer_state(
    saved: dict[tuple[Any, ...], Any], model: ThunderModule, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Somewhere to load to: the state that the checkpoint holds of each of the optimizers' parameters, and their groups."""
    sharded = find_transform(model).sharded
    names = names_of_params(model, optimizers)
    owned = owned_names(names, optimizers)
    aliases = {alias: name for name in names.values() for alias in sharded.names_of(name)}
    state: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    for below, found in saved.items():
        if below[0] == "param_groups":
            groups.setdefault(below[1], {})[below[2]] = None
        elif below[1] in aliases and owned.get(aliases[below[1]], True):
            state.setdefault(below[1], {})[below[2]] = (
                _blank_state(sharded, aliases[below[1]], below[2], found, whole=aliases[below[1]] in owned)
                if isinstance(found, TensorStorageMetadata)
                else None
            )
    return {"state": state, "param_groups": [groups[i] for i in sorted(groups)]}


def _blank_state(
    sharded: ShardedModule, name: str, what: str, found: TensorStorageMetadata, *, whole: bool
) -> torch.Tensor:
    dtype = found.properties.dtype
    if whole or not found.size or name not in sharded.places:
        return torch.empty(found.size, dtype=dtype)
    bucket, index = sharded.places[name]
    expected = bucket.spec.params[index].shape or (1,)
    if tuple(found.size) != expected:
        raise ValueError(
            f"the checkpoint does not fit the optimizers: {what!r} of {name!r} has shape {tuple(found.size)} there, the "
            f"parameter {expected}"
        )
    return as_entry(bucket, index, torch.empty_like(bucket.params[index], dtype=dtype).detach(), as_rows=True)


def _optimizer_state_dicts(
    loaded: dict[str, Any], model: ThunderModule, optimizers: Sequence[torch.optim.Optimizer]
) -> list[dict[str, Any]]:
    """What ``load_state_dict`` of each optimizer takes: parameters by their numbers, groups in its own order."""
    sharded = find_transform(model).sharded
    names = names_of_params(model, optimizers)
    states = {sharded.names_of(name)[0]: state for name, state in loaded["state"].items()}
    groups = {frozenset(sharded.names_of(n)[0] for n in group["params"]): group for group in loaded["param_groups"]}
    result = []
    for optimizer in optimizers:
        numbers = itertools.count()
        state_dict: dict[str, Any] = {"state": {}, "param_groups": []}
        for number, group in enumerate(optimizer.param_groups):
            mine = [names[param] for param in group["params"]]
            if frozenset(mine) not in groups:
                raise CheckpointError(
                    f"fsdp: the checkpoint does not fit the optimizers, nothing is changed: it has no group of the same "
                    f"parameters as param_groups[{number}] of {type(optimizer).__name__} ({mine[0]!r} and "
                    f"{len(mine) - 1} more)"
                )
            numbered = list(itertools.islice(numbers, len(mine)))
            values = {k: v for k, v in groups[frozenset(mine)].items() if k != "params"}
            state_dict["param_groups"].append({**group, **values, "params": numbered})
            for i, name in zip(numbered, mine, strict=True):
                if name in states:
                    state_dict["state"][i] = {
                        what: local_rows(v) if isinstance(v, torch.Tensor) else v for what, v in states[name].items()
                    }
        result.append(state_dict)
    return result
