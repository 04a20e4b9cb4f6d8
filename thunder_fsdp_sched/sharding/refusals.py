"""Modules, hooks, compilers and transforms that cannot be combined with sharding: errors that name what to do instead."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from thunder.core.module import ThunderModule
from thunder.core.trace import get_tracectx
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ..capture.leaves import Leaves
from ..extensions import load
from ..private_torch import (
    READ_BY_DDP,
    find_backward_hooks,
    has_old_backward_hooks,
    is_under_dynamo,
    memory_of,
    refuse_composable,
)
from ..runtime.row_dtensor import RowDTensor
from .former_parameters import refuse_former
from .module_parameters import find_owner, tensors_in_containers

#
# Before sharding
#


def refuse_compiled(module: nn.Module) -> None:
    """Raise an error for a graph of ``thunder.fx``, whose parameters are its inputs: nothing would be sharded."""
    if isinstance(module, torch.fx.GraphModule) and next(module.parameters(), None) is None:
        raise TypeError(
            "fsdp: thunder.fx gives graphs, which have no module to shard; use thunder.jit, and with thunder.compile a "
            "recipe with interpreter='thunder.jit', the default"
        )


def refuse_wrapped(module: nn.Module) -> None:
    """Raise an error for a module that another library has sharded, replicated or compiled, as a whole or in part.

    Raises:
        TypeError: names the submodule, and what to do.
    """
    for name, submodule in module.named_modules():
        where = f"submodule {name!r}" if name else "the module that was given to thunder.jit"
        if isinstance(submodule, FSDPModule):
            raise TypeError(
                f"{where} is sharded by fully_shard. Remove all calls of fully_shard: thunder.jit(model, "
                f"transforms=[fsdp(...)]) shards the whole model at once, and the options of fully_shard have counterparts "
                f"(mesh: ranks=, mp_policy, offload_policy, reshard_after_forward: sharding_strategy=)"
            )
        if isinstance(submodule, (FullyShardedDataParallel, DistributedDataParallel, nn.DataParallel)):
            raise TypeError(
                f"{where} is wrapped in {type(submodule).__name__}. Give thunder.jit the module itself: fsdp(...) shards it "
                f"and reduces its gradients"
            )
    if is_compiled(module):
        raise TypeError(
            "the module that was given to thunder.jit is compiled by torch.compile, which Thunder cannot trace. Leave "
            "torch.compile out: thunder.jit compiles the whole model"
        )


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` has compiled a module itself."""
    compiled: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    return isinstance(module, compiled) or module._compiled_call_impl is not None


def run_compiled_as_leaves(leaves: Leaves) -> None:
    """Let submodules that ``torch.compile`` has compiled be leaf modules.

    Raises:
        TypeError: one is not, because the user has chosen others.
    """
    parts = set(leaves.parts())
    for name, submodule in leaves.model.named_modules():
        if is_compiled(submodule) and submodule not in parts:
            if not leaves.automatic:
                raise TypeError(
                    f"submodule {name!r} is compiled by torch.compile, which Thunder cannot trace. Name it in "
                    f"fsdp(leaf_modules=...), to run it as it is compiled, or leave torch.compile out: thunder.jit compiles "
                    f"the whole model"
                )
            leaves[submodule] = name
            parts.update(submodule.modules())


def refuse_renamed(module: nn.Module) -> None:
    """Raise an error if ``named_parameters`` gives names under which the module has no parameters."""
    for name, _ in module.named_parameters():
        if find_owner(module, name) is None:
            raise ValueError(
                f"the module is a {type(module).__name__}, whose named_parameters() gives {name!r} for a parameter that has "
                f"another name: Thunder would not find it. Wrap submodules (apply_activation_checkpointing), not the model"
            )


def refuse_shards_and_grads(named: dict[str, nn.Parameter]) -> None:
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
                f"module.zero_grad(set_to_none=True) before thunder.jit(module, transforms=[fsdp(...)]), and create "
                f"optimizers after it: one with state of these parameters cannot train the shards"
            )


def refuse_grad_dtypes(named: dict[str, nn.Parameter]) -> None:
    """Raise an error for parameters whose gradients are to have another dtype than they have."""
    for name, param in named.items():
        if (dtype := getattr(param, "grad_dtype", param.dtype)) != param.dtype:
            raise ValueError(
                f"parameter {name!r} has grad_dtype={dtype}, but gradients of shards have the dtype of their parameter, "
                f"{param.dtype}. Leave it unset, and choose the dtype in which gradients are reduced: "
                f"fsdp(mp_policy=MixedPrecisionPolicy(reduce_dtype=...))"
            )


def refuse_views(
    model: ThunderModule, named: dict[str, nn.Parameter], ignored: set[str], device: torch.device | None
) -> None:
    """Raise an error for tensors that share memory with a parameter, because sharding moves the parameter away."""
    leaves = {
        memory_of(p): n for n, p in named.items() if p.numel() and (n not in ignored or device not in (None, p.device))
    }
    module_param_ids = {id(param) for param in model._model.parameters()}
    others = [
        *(("ignored parameter", n, named[n]) for n in ignored),
        *(("buffer", n, b) for n, b in model.named_buffers(remove_duplicate=False)),
        # Parameters may be in lists, which get the sharded ones.
        *(("attribute", n, t) for n, t in tensors_in_containers(model._model) if id(t) not in module_param_ids),
    ]
    for kind, name, tensor in others:
        shared = leaves.get(memory_of(tensor)) if tensor.layout is torch.strided else None
        if shared is not None and tensor is not named[shared]:
            raise ValueError(
                f"{kind} {name!r} shares memory with parameter {shared!r}. Sharding moves the parameter, so it would "
                f"keep the current values. Clone it, or read the parameter itself in forward"
            )


#
# After sharding
#


def explain_foreign_use(model: ThunderModule) -> None:
    """Let methods and wrappers of other libraries raise an error that says what to do with ``model`` instead."""
    methods = (name for name in vars(FSDPModule) if not name.startswith("_"))
    for name in (*methods, "register_comm_hook", "summon_full_params"):
        if not hasattr(model._model, name):
            vars(model)[name] = partial(_refuse_method, name)
    vars(model)[READ_BY_DDP] = _RefusedByDDP()
    refuse_composable(model.modules(), _refuse_composable)


def _refuse_method(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise AttributeError(
        f"a module sharded by fsdp(...) has no {name!r}: {load('extras.foreign_methods:fix_of')(name)}"
    )


class _RefusedByDDP:
    """An attribute of a module that only ``DistributedDataParallel`` reads."""

    def __iter__(self) -> Iterator[str]:
        raise TypeError(
            "DistributedDataParallel: fsdp(...) shards this module and reduces its gradients. DDP would copy the rows of "
            "one rank to all others: use the jitted module itself"
        )


def _refuse_composable(function: str) -> NoReturn:
    raise TypeError(
        f"{function}: the module is sharded by thunder.jit(model, transforms=[fsdp(...)]) already: remove the call; "
        f"options of {function} are options of fsdp(...)"
    )


def refuse_compilation(what: str, fix: str) -> None:
    """Raise an error if ``torch.compile`` runs the caller.

    Raises:
        RuntimeError: names ``what``, and the fix.
    """
    if is_under_dynamo():
        raise RuntimeError(f"torch.compile: {what} cannot be compiled by it: {fix}")


def refuse_nested() -> None:
    """Raise an error if Thunder traces the caller.

    Raises:
        TypeError: says what to jit.
    """
    if get_tracectx() is not None:
        raise TypeError(
            "thunder.jit was given a module or function that calls a module which fsdp(...) shards and thunder.jit has "
            "compiled already: jit only the outermost module, with transforms=[fsdp(...)]"
        )


#
# Before a call or before tracing
#


def refuse_conflicts(model: ThunderModule) -> None:
    """Raise an error if the model is also compiled with CUDA graphs.

    A graph replays kernels. Symbols of this package make decisions on the host: which gradients of ``no_sync`` are yet
    to be reduced, whether a bucket is already resident, whether the ranks agree. With a graph, they would be made only
    once, during the capture.

    Raises:
        ValueError: names the transform.
    """
    for transform in model._lc_transforms:
        if isinstance(transform, CUDAGraphTransform):
            raise ValueError(
                f"transforms: {type(transform).__name__} would capture the collectives of fsdp(...) in CUDA graphs, which "
                f"replay the capture even after no_sync or an exception has changed what to do, so gradients would be "
                f"wrong. Remove it"
            )


def refuse_backward_hooks(module: nn.Module) -> None:
    """Raise an error if a module that Thunder is about to trace has backward hooks, which Thunder ignores.

    A call with other hooks than the traced ones is traced again, so hooks that are added later are refused, too.

    Raises:
        NotImplementedError: names the module.
    """
    for name in find_backward_hooks(module):
        if name is None:
            owner = "all modules (torch.nn.modules.module.register_module_full_backward_hook)"
        else:
            owner = f"submodule {name!r}" if name else "the module that was given to thunder.jit"
        raise NotImplementedError(
            f"backward hooks of {owner} do not run, because Thunder compiles backward: gradients would be wrong without "
            f"them. Remove them. What works: hooks of parameters (register_hook, register_post_accumulate_grad_hook), "
            f"register_full_backward_hook of the jitted module, and in forward a torch.autograd.Function, which a forward "
            f"hook may call as well"
        )


def refuse_old_backward_hooks(model: nn.Module) -> None:
    """Raise an error if the jitted module has a hook of ``register_backward_hook``, which sees other values than in eager.

    Raises:
        NotImplementedError: says what to call instead.
    """
    if has_old_backward_hooks(model):
        raise NotImplementedError(
            "register_backward_hook: gradients that it returns are lost, because Thunder computes backward in one node. "
            "Call register_full_backward_hook of the jitted module instead"
        )
