"""State dicts of model and optimizers: sharded, in the format of torch.distributed.checkpoint.state_dict, and whole."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from thunder.core.module import ThunderModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..private_api import state_name, unwrap_fabric
from ..runtime.row_dtensor import RowDTensor
from ..sharding.sharded_module import find_jitted
from ..sharding.state_entries import RowPiece, refuse_unshared


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
    names = names_of_params(model, listed(optimizers))
    owned = owned_names(names, listed(optimizers))
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in listed(optimizers):
        for group in optimizer.param_groups:
            groups.append({**group, "params": [names[p] for p in group["params"]]})
            for param in group["params"]:
                if param in optimizer.state:
                    name = names[param]
                    state[name] = tree_map_only(RowDTensor, _as_vector, optimizer.state[param])
                    if name in sharded.locations and name not in owned:
                        _check_state(name, state[name])
    return {"state": state, "param_groups": groups}


def full_state_dict(model: ThunderModule) -> dict[str, torch.Tensor]:
    """Return whole parameters under the keys of the original, unsharded module; a collective.

    It is the result of ``model.original_state_dict()``, which ``load_state_dict(strict=True)`` of the original module
    accepts.
    """
    model, _ = find_jitted(model)
    return dict(model.original_state_dict())


def listed(optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return one or several optimizers as a list, without the wrappers of Lightning Fabric and of accelerate."""
    every = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    accelerate = sys.modules.get("accelerate.optimizer")
    wrapper: Any = () if accelerate is None else accelerate.AcceleratedOptimizer
    return [o.optimizer if isinstance(o, wrapper) else unwrap_fabric(o) for o in every]


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
                    raise ValueError(
                        f"optimizers: {label} holds a tensor of shape "
                        f"{tuple(param.shape)} that is no parameter of the model: make the optimizer of the jitted "
                        f"module's parameters()"
                    )
                if param in names:
                    raise ValueError(f"optimizers: parameter {known[param]!r} is in two of them; its state would mix")
                names[param] = known[param]
    return names


def owned_names(names: dict[torch.Tensor, str], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, bool]:
    """Return, for each parameter whose state one rank has whole, whether it is this rank."""
    return {
        names[param]: owns(param)
        for optimizer in optimizers
        if (owns := getattr(optimizer, "owns", None)) is not None  # WholeParameters
        for group in optimizer.param_groups
        for param in group["params"]
    }


def _as_vector(state: RowDTensor) -> RowDTensor:
    """Return the state of a 0-dim parameter with the shape ``(1,)``, which tells it from a number that all ranks have."""
    return state if state.ndim else RowDTensor.wrap(state.to_local(), state.rows.reshaped((1,)))


def _check_state(name: str, state: dict[str, Any]) -> None:
    """Raise an error for state of which nobody can tell whether it is whole."""
    for key, value in ((key, leaf) for key, values in state.items() for leaf in tree_leaves(values)):
        if isinstance(value, torch.Tensor) and value.ndim and not isinstance(value, (DTensor, RowPiece)):
            raise ValueError(
                f"optimizers: state {key!r} of parameter {name!r} is a plain tensor of shape {tuple(value.shape)}, "
                f"and which part of a whole tensor it is cannot be told: make it from the parameter or its gradient, as "
                f"torch.zeros_like(p) does. Optimizers that need whole parameters have to be made by "
                f"WholeParameters(optimizer_class, model, params)"
            )
