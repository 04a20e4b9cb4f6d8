"""Check that a checkpoint fits a model and its optimizers, and create memory to load it into."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from thunder.core.module import ThunderModule
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...runtime.row_dtensor import local_rows
from ...sharding.sharded_module import ShardedModule
from ...sharding.state_entries import as_entry
from ...transform import find_jitted
from .optimizers import misfits
from .state_dict import group_label, names_of_params, owned_names

__all__ = ["Cast", "blank_optimizer_state", "compare", "optimizer_state_dicts", "tell_casts"]

Cast = tuple[str, torch.dtype, torch.dtype]
"""The name of an entry, its dtype in the checkpoint, and its dtype in memory."""


def compare(saved: dict[tuple[Any, ...], Any], entries: dict[str, torch.Tensor], *, strict: bool) -> list[Cast]:
    """Return the entries whose dtype differs from the saved one.

    Raises:
        ValueError: the saved model has other names or shapes.
    """
    faults = [f"{name!r} is missing" for name in entries if (name,) not in saved]
    if strict:
        faults += [f"{'.'.join(map(str, below))!r} is unknown" for below in saved if below[0] not in entries]
    casts = []
    for name, entry in entries.items():
        found = saved.get((name,))
        if isinstance(found, TensorStorageMetadata):
            if found.size != entry.shape:
                faults.append(f"{name!r} has shape {tuple(found.size)} there, {tuple(entry.shape)} in the model")
            elif found.properties.dtype != entry.dtype:
                casts.append((name, found.properties.dtype, entry.dtype))
        elif found is not None:
            faults.append(f"{name!r} is no tensor there")
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise ValueError(f"the checkpoint does not fit the model: {'; '.join(faults[:8])}{more}")
    return casts


def blank_optimizer_state(
    saved: dict[tuple[Any, ...], Any], model: ThunderModule, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[dict[str, Any], list[Cast]]:
    """Return memory for loading: the state of each parameter in the checkpoint, and the optimizers' groups.

    It also returns the entries that an optimizer's ``load_state_dict`` will cast to the dtype of the parameter.
    """
    _, sharded = find_jitted(model)
    names = names_of_params(model, optimizers)
    owned = owned_names(names, optimizers)
    dtypes = {name: param.dtype for param, name in names.items()}
    aliases = {alias: name for name in names.values() for alias in sharded.names_of(name)}
    state: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    casts: list[Cast] = []
    for below, found in saved.items():
        is_tensor = isinstance(found, TensorStorageMetadata)
        if below[0] == "param_groups":
            blank = torch.empty(found.size, dtype=found.properties.dtype) if is_tensor else None
            groups.setdefault(below[1], {})[below[2]] = blank
        elif below[1] in aliases and owned.get(aliases[below[1]], True):
            name = aliases[below[1]]
            state.setdefault(below[1], {})[below[2]] = (
                _blank_state(sharded, name, below[2], found, whole=name in owned) if is_tensor else None
            )
            if is_tensor and below[2] != "step" and found.properties.dtype.is_floating_point:
                if found.properties.dtype != dtypes[name] and dtypes[name].is_floating_point:
                    casts.append((f"{below[2]} of {name}", found.properties.dtype, dtypes[name]))
    return {"state": state, "param_groups": [groups[i] for i in sorted(groups)]}, casts


def _blank_state(
    sharded: ShardedModule, name: str, what: str, found: TensorStorageMetadata, *, whole: bool
) -> torch.Tensor:
    dtype = found.properties.dtype
    if whole or not found.size or name not in sharded.locations:
        return torch.empty(found.size, dtype=dtype)
    bucket, index = sharded.locations[name]
    expected = bucket.spec.params[index].shape or (1,)
    if tuple(found.size) != expected:
        raise ValueError(
            f"the checkpoint does not fit the optimizers: {what!r} of {name!r} has shape {tuple(found.size)} there, the "
            f"parameter {expected}"
        )
    return as_entry(bucket, index, torch.empty_like(bucket.shard_views[index], dtype=dtype), as_rows=True)


def optimizer_state_dicts(
    loaded: dict[str, Any], model: ThunderModule, optimizers: Sequence[torch.optim.Optimizer]
) -> list[dict[str, Any]]:
    """Return the argument for each optimizer's ``load_state_dict``: parameters by number, groups in its own order.

    Raises:
        ValueError: the checkpoint has other parameter groups, or the state of another kind of optimizer.
    """
    _, sharded = find_jitted(model)
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
                raise ValueError(
                    f"the checkpoint does not fit the optimizers, nothing is changed: it has no group of the same "
                    f"parameters as {group_label(optimizer, number)} ({mine[0]!r} and "
                    f"{len(mine) - 1} more)"
                )
            numbered = list(itertools.islice(numbers, len(mine)))
            values = {k: v for k, v in groups[frozenset(mine)].items() if k != "params"}
            saved = {param: states[name] for param, name in zip(group["params"], mine, strict=True) if name in states}
            if faults := misfits(optimizer, number, values, saved, names):
                raise ValueError(
                    f"the checkpoint does not fit the optimizers, nothing is changed: {'; '.join(faults)}. Make the "
                    f"optimizer as it was when the checkpoint was saved, or load the model alone"
                )
            state_dict["param_groups"].append({**group, **values, "params": numbered})
            for i, name in zip(numbered, mine, strict=True):
                if name in states:
                    state_dict["state"][i] = {
                        what: local_rows(v) if isinstance(v, torch.Tensor) else v for what, v in states[name].items()
                    }
        result.append(state_dict)
    return result


def tell_casts(casts: Sequence[Cast]) -> str:
    """Return a text that lists the entries that are cast."""
    lines = [f"{name} from {_short(there)} to {_short(here)}" for name, there, here in casts[:8]]
    return f"{'; '.join(lines)}{f'; and {len(casts) - 8} more' if len(casts) > 8 else ''}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
