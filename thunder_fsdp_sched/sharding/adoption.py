"""Check that a module's own parameters can become shards, before anything is changed."""

from __future__ import annotations

import torch
from thunder.core.module import ThunderModule

from ..options import Options
from ..plan.specs import ParamSpec
from ..runtime.row_dtensor import RowDTensor
from .containers import tensors_in_containers
from .former_parameters import refuse_former
from .module_parameters import find_owner

__all__ = ["module_param_of", "refuse_graph", "refuse_renamed", "refuse_shards_and_grads", "refuse_views"]


def module_param_of(module: torch.nn.Module, spec: ParamSpec, param: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return the module's own object for a parameter; ``param`` itself if another transform has replaced it."""
    found = find_owner(module, spec.name)
    module_param = None if found is None else found[0]._parameters[found[1]]
    return (
        param
        if module_param is None or module_param.shape != param.shape or module_param.dtype != param.dtype
        else module_param
    )


def refuse_renamed(module: torch.nn.Module) -> None:
    """Raise an error if ``named_parameters`` gives names under which the module has no parameters."""
    for name, _ in module.named_parameters():
        if find_owner(module, name) is None:
            raise ValueError(
                f"the module is a {type(module).__name__}, whose named_parameters() gives {name!r} for a parameter that has "
                f"another name: Thunder would not find it. Wrap submodules (apply_activation_checkpointing), not the model"
            )


def refuse_graph(module: torch.nn.Module) -> None:
    """Raise an error if ``thunder.fx`` gives a graph, whose parameters are its inputs."""
    if isinstance(module, torch.fx.GraphModule) and next(module.parameters(), None) is None:
        raise TypeError(
            "fsdp: thunder.fx gives graphs, which have no module to shard; use thunder.jit, and with thunder.compile a "
            "recipe with interpreter='thunder.jit', the default"
        )


def refuse_shards_and_grads(named: dict[str, torch.nn.Parameter]) -> None:
    """Raise an error for parameters that are already shards, or that have an unsharded gradient."""
    refuse_former(named.values())
    for name, param in named.items():
        if isinstance(param, RowDTensor):
            raise ValueError(
                f"parameter {name!r} is a shard already, of {param.rows.label!r}: fsdp(...) was given the "
                f"module, or one that shares the parameter, before. Create a new module, and jit it once"
            )
        if param.grad is not None:
            raise ValueError(
                f"parameter {name!r} has a gradient, which is not sharded with it: call "
                f"module.zero_grad(set_to_none=True) before thunder.jit(module, transforms=[fsdp(...)])"
            )


def refuse_views(
    model: ThunderModule, named: dict[str, torch.nn.Parameter], ignored: set[str], options: Options
) -> None:
    """Raise an error for tensors that share memory with a parameter, because sharding moves the parameter away."""
    leaves = {
        _storage_of(p): n
        for n, p in named.items()
        if p.numel() and not p.is_meta and (n not in ignored or options.device not in (None, p.device))
    }
    module_param_ids = {id(param) for param in model._model.parameters()}
    others = [
        *(("ignored parameter", n, named[n]) for n in ignored),
        *(("buffer", n, b) for n, b in model.named_buffers(remove_duplicate=False)),
        # Parameters may be in lists, because they stay the same objects.
        *(("attribute", n, t) for n, t in tensors_in_containers(model._model) if id(t) not in module_param_ids),
    ]
    for kind, name, tensor in others:
        shared = None if tensor.is_meta or tensor.layout is not torch.strided else leaves.get(_storage_of(tensor))
        if shared is not None and tensor is not named[shared]:
            raise ValueError(
                f"{kind} {name!r} shares memory with parameter {shared!r}. Sharding moves the parameter, so it would "
                f"keep the current values. Clone it, or read the parameter itself in forward"
            )


def _storage_of(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
