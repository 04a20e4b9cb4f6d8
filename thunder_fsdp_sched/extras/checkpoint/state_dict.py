"""State dicts of model and optimizers, in the format of torch.distributed.checkpoint.state_dict, and loading them.

A checkpoint must fit the model and its optimizers, and is read into memory of its own.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from thunder.core.module import ThunderModule
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map_only

from ...errors import coded_error
from ...private_torch import state_name, unwrap_fabric
from ...runtime.row_dtensor import DTENSORS, RowDTensor, replicated
from ...sharding.sharded_module import find_jitted
from ..state_dicts.entries import refuse_unshared
from ..state_dicts.row_piece import RowPiece
from .loading import Loading, Saved
from .storage import Paths, nested

_ADDED = {"params", "param_names", "initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""Keys of parameter groups that are not options of the optimizer, or that schedulers add."""

_SELECT_STATE = {"amsgrad", "centered", "momentum"}
"""Options of torch's optimizers that decide which state they create."""


def get_model_state_dict(model: ThunderModule) -> dict[str, torch.Tensor]:
    """Return the original module's state dict, with this rank's rows in each entry; no communication.

    It is ``model.state_dict()``. Entries share memory with the model. Parameters are DTensors. Buffers and
    ``ignored_params``, which are not sharded, are plain tensors. torch's ``dcp.save``, ``dcp.async_save`` and
    ``dcp.load`` accept them; :func:`load_checkpoint` also checks before loading.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``.
        ValueError: ranks have different parameters under one name: see ``process_group_for``.
    """
    model, _ = find_jitted(model)
    return dict(model.state_dict())


def get_optimizer_state_dict(
    model: ThunderModule, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Return the state of one or several optimizers, keyed by the names of parameters; no communication.

    Returns:
        ``{"state": {name: {"exp_avg": entry, ...}}, "param_groups": [{"params": [name, ...], "lr": ..., ...}]}``, as
        torch's function of this name returns it. Tensors share memory with the optimizer, and are DTensors like those of
        :func:`get_model_state_dict`, or numbers. The state of :class:`WholeParameters` is plain tensors, only on the
        parameter's owner: DCP saves what each rank has, and loads what it requests.

    Raises:
        TypeError: ``model`` is not sharded by ``fsdp(...)``.
        ValueError: an optimizer has parameters that are not the model's; two optimizers have the same parameter; or a
            state has a plain tensor that is not a number.
    """
    model, sharded = find_jitted(model)
    for bucket in sharded.buckets:
        refuse_unshared(bucket)
    chosen = listed(optimizers)
    names = names_of_params(model, chosen)
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in chosen:
        for group in optimizer.param_groups:
            groups.append({**group, "params": [names[p] for p in group["params"]]})
            for param in group["params"]:
                if param in optimizer.state:
                    name = names[param]
                    state[name] = tree_map_only(RowDTensor, _as_vector, optimizer.state[param])
                    if name in sharded.locations and _owns(optimizer) is None:
                        _check_state(name, state[name])
    return {"state": state, "param_groups": groups}


def full_state_dict(model: ThunderModule) -> dict[str, torch.Tensor]:
    """Return whole parameters under the keys of the original, unsharded module; a collective.

    It is the result of ``model.original_state_dict()``, which ``load_state_dict(strict=True)`` of the original module
    accepts. Every rank has the whole model then; no other memory is needed. Later steps do not change it.

    Cost, on any number of ranks: one exchange, and a round of agreement and a gather for each bucket. A rank receives the
    model once.
    """
    model, _ = find_jitted(model)
    return dict(model.original_state_dict())


def listed(optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return one or several optimizers as a list, without the wrappers of Lightning Fabric and of accelerate.

    Raises:
        TypeError: one of them is not an optimizer.
    """
    if isinstance(optimizers, Mapping):
        raise coded_error(TypeError, "optimizer.got-state-dictionary")
    every = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    accelerate = sys.modules.get("accelerate.optimizer")
    wrapper: Any = () if accelerate is None else accelerate.AcceleratedOptimizer
    unwrapped = [o.optimizer if isinstance(o, wrapper) else unwrap_fabric(o) for o in every]
    for each in unwrapped:
        if not isinstance(each, torch.optim.Optimizer):
            raise coded_error(TypeError, "optimizer.not-an-optimizer", got=each, got_type=type(each).__name__)
    return unwrapped


def labelled_groups(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield an optimizer's parameter groups, each with its name in messages."""
    for number, group in enumerate(optimizer.param_groups):
        yield f"param_groups[{number}] of {type(optimizer).__name__}", group


def names_of_params(model: ThunderModule, optimizers: Iterable[torch.optim.Optimizer]) -> dict[torch.Tensor, str]:
    """Return the name of each parameter of some optimizers in the model's state dict.

    Raises:
        ValueError: a parameter is not the model's, or is in two groups.
    """
    known = {param: state_name(name) for name, param in model.named_parameters()}
    names: dict[torch.Tensor, str] = {}
    for optimizer in optimizers:
        for label, group in labelled_groups(optimizer):
            for param in group["params"]:
                if param not in known:
                    raise coded_error(
                        ValueError, "optimizer.tensor-not-a-parameter", label=label, shape=tuple(param.shape)
                    )
                if param in names:
                    raise coded_error(ValueError, "optimizer.parameter-in-two-optimizers", name=known[param])
                names[param] = known[param]
    return names


def _owns(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], bool] | None:
    """Return a function that tells whether this rank has a parameter's whole state; ``None`` if ranks have its rows."""
    return getattr(optimizer, "owns", None)  # of WholeParameters


def _as_vector(state: RowDTensor) -> RowDTensor:
    """Return the state of a 0-dim parameter with the shape ``(1,)``, unlike a number that all ranks have."""
    return state if state.ndim else RowDTensor.wrap(state.to_local(), state.rows.reshaped((1,)))


def _check_state(name: str, state: dict[str, Any]) -> None:
    """Raise an error for plain tensors in the state, which may be whole or rows."""
    for key, value in ((key, leaf) for key, values in state.items() for leaf in tree_leaves(values)):
        if isinstance(value, torch.Tensor) and value.ndim and not isinstance(value, (*DTENSORS, RowPiece)):
            raise coded_error(
                ValueError, "optimizer.state-of-unknown-shard", key=key, name=name, shape=tuple(value.shape)
            )


#
# Fitting
#


def describe_optimizers(
    model: ThunderModule, optimizers: Sequence[torch.optim.Optimizer], *, values: bool
) -> dict[str, str]:
    """Describe optimizers and their parameters, to compare ranks.

    Args:
        values: also describe what one rank saves for all: options, and the names and numbers in the state.
    """
    names = names_of_params(model, optimizers)
    facts = {"optimizers": ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"}
    for optimizer in optimizers:
        for label, group in labelled_groups(optimizer):
            facts[f"the parameters of {label}"] = ", ".join(names[param] for param in group["params"])
            if not values:
                continue
            facts |= {f"{key!r} of {label}": _text(value) for key, value in group.items() if key != "params"}
            for param in group["params"] if _owns(optimizer) is None else ():
                for path, value in tree_leaves_with_path(optimizer.state.get(param, {})):
                    facts[f"{keystr(path)} of {names[param]!r}"] = _text(value)
    return facts


def fit_optimizers(
    loading: Loading, paths: Paths, model: ThunderModule, optimizers: Sequence[torch.optim.Optimizer]
) -> list[dict[str, Any]]:
    """Provide memory for the state of optimizers, and return the argument for each optimizer's ``load_state_dict``.

    The argument has parameters by number, and groups in the optimizer's own order. Values that ``load_state_dict`` will
    cast to the dtype of the parameter are among the casts.

    Args:
        paths: the paths of the state of all optimizers, as :func:`get_optimizer_state_dict` returns it.

    Raises:
        ValueError: the source has other parameter groups, or the state of another kind of optimizer.
    """
    _, sharded = find_jitted(model)
    names = names_of_params(model, optimizers)
    path_of = {name: path for path, name in paths.items()}
    shapes = {alias: p.shape for p, name in names.items() if p.ndim for alias in sharded.names_of(name)}
    sizes = {path: loading.size_of(name) for path, name in paths.items() if path[0] == "state"}
    later = {path for path, size in sizes.items() if size is not None}
    of_rows = {path[2:] for path in later if shapes.get(path[1]) == sizes[path]}
    # Everything except the tensors of the state is read now. Options must fit, and may be tensors, too.
    now = loading.reader.load({name: loading.blank(name) for path, name in paths.items() if path not in later})
    saved = nested({path: now.get(name, Saved(name)) for path, name in paths.items()})
    states = {sharded.names_of(name)[0]: state for name, state in saved.get("state", {}).items()}
    groups = {frozenset(sharded.names_of(n)[0] for n in g["params"]): g for g in saved.get("param_groups", ())}

    def memory_for(param: torch.Tensor, is_whole: bool, name: Saved) -> torch.Tensor:
        value, path = loading.blank(name), path_of[name][2:]
        what = ".".join(map(str, path))
        if isinstance(param, RowDTensor) and not is_whole:
            value = _blank_state(param, value, is_rows=path in of_rows, what=f"{what!r} of {names[param]!r}")
        if what != "step" and value.is_floating_point() and param.is_floating_point() and value.dtype != param.dtype:
            loading.casts.append((f"{what} of {names[param]}", value.dtype, param.dtype))
        loading.memory[name] = value
        is_vector = isinstance(value, RowDTensor) and not param.ndim
        return RowDTensor.wrap(value.to_local(), value.rows.reshaped(())) if is_vector else value

    result: list[dict[str, Any]] = []
    for optimizer in optimizers:
        result.append({"state": {}, "param_groups": []})
        owns, numbers = _owns(optimizer), itertools.count()
        for label, group in labelled_groups(optimizer):
            mine = [names[param] for param in group["params"]]
            if (options := groups.get(frozenset(mine))) is None:
                raise coded_error(
                    ValueError, "checkpoint.optimizer-group-missing", label=label, name=mine[0], more=len(mine) - 1
                )
            if why := _misfit(label, group, options):
                raise coded_error(ValueError, "checkpoint.optimizers-do-not-fit", reason=why)
            numbered = dict(zip(group["params"], numbers, strict=False))
            result[-1]["param_groups"].append({**group, **options, "params": list(numbered.values())})
            for param, number in numbered.items():
                if names[param] in states and (owns is None or owns(param)):
                    fit = partial(memory_for, param, owns is not None)
                    result[-1]["state"][number] = tree_map_only(Saved, fit, states[names[param]])
    return result


def _blank_state(param: RowDTensor, whole: torch.Tensor, *, is_rows: bool, what: str) -> torch.Tensor:
    """Return memory for the state of a sharded parameter: rows, a tensor that all ranks have, or a number.

    State of a 0-dim parameter is rows if that of other parameters is; older versions saved it with the shape ``(1,)``.
    """
    is_vector = not param.ndim and whole.shape == (1,)
    if is_rows and not is_vector and whole.shape != param.shape:
        saved, shape = tuple(whole.shape), tuple(param.shape)
        raise coded_error(ValueError, "checkpoint.optimizer-shape-mismatch", entry=what, saved=saved, shape=shape)
    local = param.to_local()
    if is_rows or is_vector:
        rows = param.rows.reshaped(whole.shape)
        return RowDTensor.wrap(local.new_empty(rows.local_shape, dtype=whole.dtype), rows)
    return replicated(whole.to(local.device), param.device_mesh) if whole.ndim else whole


def _misfit(label: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Return why a parameter group was saved by another kind of optimizer; empty if it was not.

    Args:
        own: the group.
        saved: its options in the checkpoint.
    """
    if unknown := sorted(saved.keys() - own.keys() - _ADDED):
        return f"it was saved by another kind of optimizer: {label} has no option {', '.join(map(repr, unknown))}"
    for key in sorted(_SELECT_STATE & saved.keys() & own.keys()):
        if bool(saved[key]) != bool(own[key]):
            return f"it was saved with {key}={saved[key]!r} where {label} has {own[key]!r}, and makes other state"
    return ""


def _text(value: Any) -> str:
    """Describe a value; for a tensor that may be rows, say only that it is a tensor."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return "a tensor" if value.ndim or isinstance(value, (*DTENSORS, RowPiece)) else repr(value.tolist())
