"""Check that a checkpoint fits a model and its optimizers, and create memory to load it into."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from thunder.core.module import ThunderModule
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_map_only

from ...runtime.row_dtensor import RowDTensor, replicated
from ...transform import find_jitted
from .optimizers import misfit
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
    params = {alias: param for param, name in names.items() for alias in sharded.names_of(name)}
    of_shape = {
        below[2:]
        for below, found in saved.items()
        if below[0] == "state" and below[1] in params and params[below[1]].ndim
        if isinstance(found, TensorStorageMetadata) and found.size == params[below[1]].shape
    }
    blank: dict[Any, Any] = {}
    casts: list[Cast] = []
    for below, found in saved.items():
        value = (
            torch.empty(found.size, dtype=found.properties.dtype) if isinstance(found, TensorStorageMetadata) else None
        )
        if below[0] == "state":
            if below[1] not in params or not owned.get(names[params[below[1]]], True):
                continue
            param, name, what = params[below[1]], names[params[below[1]]], ".".join(map(str, below[2:]))
            if value is not None and isinstance(param, RowDTensor) and name not in owned:
                value = _blank_state(param, value, found, is_rows=below[2:] in of_shape, what=f"{what!r} of {name!r}")
            if value is not None and what != "step" and value.is_floating_point() and param.is_floating_point():
                if value.dtype != param.dtype:
                    casts.append((f"{what} of {name}", value.dtype, param.dtype))
        container = blank
        for key in below[:-1]:
            container = container.setdefault(key, {})
        container[below[-1]] = value
    blank = {"state": {}, "param_groups": {}} | blank
    return {"state": _with_lists(blank["state"]), "param_groups": _with_lists(blank["param_groups"]) or []}, casts


def _with_lists(tree: Any) -> Any:
    """Return nested dictionaries with lists in place of those whose keys are their positions."""
    if not isinstance(tree, dict):
        return tree
    below = {key: _with_lists(value) for key, value in tree.items()}
    is_list = bool(below) and all(isinstance(key, int) for key in below) and sorted(below) == list(range(len(below)))
    return [below[number] for number in range(len(below))] if is_list else below


def _blank_state(
    param: RowDTensor, whole: torch.Tensor, found: TensorStorageMetadata, *, is_rows: bool, what: str
) -> torch.Tensor:
    """Return memory for the state of a sharded parameter: rows, a tensor that all ranks have, or a number.

    State of another shape than the parameter's that was saved in several chunks is rows, too (see ``RowDTensor``). State
    of a 0-dim parameter is rows if that of other parameters is; older versions saved it with the shape ``(1,)``.
    """
    rows, local = param.rows, param.to_local()
    is_vector = not param.ndim and found.size == (1,)
    if is_rows and not is_vector and found.size != param.shape:
        raise ValueError(
            f"the checkpoint does not fit the optimizers: {what} has shape {tuple(found.size)} there, the parameter "
            f"{tuple(param.shape)}"
        )
    if is_rows or is_vector or (found.size[:1] == rows.starts[-1:] and (len(found.chunks) > 1 or found.size[0] == 1)):
        rows = rows.reshaped(found.size)
        return RowDTensor.wrap(local.new_empty(rows.local_shape, dtype=whole.dtype), rows)
    return replicated(whole.to(local.device), param.device_mesh) if whole.ndim else whole


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
            if why := misfit(optimizer, number, values):
                raise ValueError(
                    f"the checkpoint does not fit the optimizers, nothing is changed: {why}. Make the optimizer as it was "
                    f"when the checkpoint was saved, or load the model alone"
                )
            state_dict["param_groups"].append({**group, **values, "params": numbered})
            for i, name in zip(numbered, mine, strict=True):
                if name in states:
                    state_dict["state"][i] = tree_map_only(RowDTensor, _of_shape, states[name])
        result.append(state_dict)
    return result


def _of_shape(state: RowDTensor) -> RowDTensor:
    """Return the state of a 0-dim parameter that was saved as a vector as a 0-dim tensor."""
    rows = state.rows
    is_scalar = rows.place is not None and not rows.place[0].rows[rows.place[1]].shape
    return RowDTensor.wrap(state.to_local(), rows.reshaped(())) if is_scalar else state


def tell_casts(casts: Sequence[Cast]) -> str:
    """Return a text that lists the entries that are cast."""
    lines = [f"{name} from {_short(there)} to {_short(here)}" for name, there, here in casts[:8]]
    return f"{'; '.join(lines)}{f'; and {len(casts) - 8} more' if len(casts) > 8 else ''}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
