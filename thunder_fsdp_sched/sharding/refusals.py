"""Modules, hooks, compilers and transforms that cannot be combined with sharding: errors that name what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from thunder.core.module import ThunderModule
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import parametrize

from ..options import Options
from ..private_torch import find_backward_hooks, find_hooks, has_old_backward_hooks, runs_under_torch_compile
from ..runtime.row_dtensor import RowDTensor
from .former_parameters import refuse_former
from .module_parameters import find_owner, tensors_in_containers

_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)

_HOOKS = {"torch.nn.utils.weight_norm": "weight_norm", "torch.nn.utils.spectral_norm": "spectral_norm"}
"""The functions that add a hook which computes a parameter, by the module of the hook's class."""

_PARAMETRIZATIONS = {"_WeightNorm": "weight_norm", "_SpectralNorm": "spectral_norm", "_Orthogonal": "orthogonal"}
"""Those of ``torch.nn.utils.parametrizations``, by their classes."""

_INSTEAD_OF_FSDP2 = {
    "reshard": "leave the context that unshards: tfs.unsharded(model, ...) or tfs.eager(model)",
    "set_gradient_divide_factor": "call tfs.set_gradient_divide_factor(model, factor)",
    "set_modules_to_backward_prefetch": "pass fsdp(prefetch=...)",
    "set_modules_to_forward_prefetch": "pass fsdp(prefetch=...)",
    "set_requires_gradient_sync": "run the micro-batches that are not the last inside of `with model.no_sync():`",
    "set_reshard_after_forward": "pass fsdp(sharding_strategy='zero2' or 'zero3'), or a function of (module name, module)",
    "unshard": "use `with tfs.unsharded(model, ...)` to change parameters, or `with tfs.eager(model)` to call modules",
}


#
# Before sharding
#


def refuse_compiled(module: nn.Module) -> None:
    """Raise an error for a graph of ``thunder.fx``, whose parameters are its inputs, and for results of torch.compile."""
    if isinstance(module, torch.fx.GraphModule) and next(module.parameters(), None) is None:
        raise TypeError(
            "fsdp: thunder.fx gives graphs, which have no module to shard; use thunder.jit, and with thunder.compile a "
            "recipe with interpreter='thunder.jit', the default"
        )
    for path, child in module.named_modules():
        if hasattr(child, "_orig_mod"):  # of torch.compile
            raise TypeError(
                f"fsdp: {f'module {path!r}' if path else 'the module'} was compiled by torch.compile, and Thunder compiles "
                f"it itself: give thunder.jit the module without torch.compile"
            )


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


def refuse_views(model: ThunderModule, named: dict[str, nn.Parameter], ignored: set[str], options: Options) -> None:
    """Raise an error for tensors that share memory with a parameter, because sharding moves the parameter away."""

    def storage_of(tensor: torch.Tensor) -> tuple[torch.device, int]:
        return tensor.device, tensor.untyped_storage().data_ptr()

    leaves = {
        storage_of(p): n
        for n, p in named.items()
        if p.numel() and not p.is_meta and (n not in ignored or options.device not in (None, p.device))
    }
    module_param_ids = {id(param) for param in model._model.parameters()}
    others = [
        *(("ignored parameter", n, named[n]) for n in ignored),
        *(("buffer", n, b) for n, b in model.named_buffers(remove_duplicate=False)),
        # Parameters may be in lists, which get the sharded ones.
        *(("attribute", n, t) for n, t in tensors_in_containers(model._model) if id(t) not in module_param_ids),
    ]
    for kind, name, tensor in others:
        shared = None if tensor.is_meta or tensor.layout is not torch.strided else leaves.get(storage_of(tensor))
        if shared is not None and tensor is not named[shared]:
            raise ValueError(
                f"{kind} {name!r} shares memory with parameter {shared!r}. Sharding moves the parameter, so it would "
                f"keep the current values. Clone it, or read the parameter itself in forward"
            )


def refuse_reparametrized(module: nn.Module) -> None:
    """Raise an error if a parameter is computed by ``weight_norm``, ``spectral_norm`` or ``orthogonal`` of torch.

    Raises:
        NotImplementedError: names the module and what to do before ``thunder.jit``.
    """
    for path, child in module.named_modules():
        expression = f"model.get_submodule({path!r})" if path else "model"
        found = [
            (f"torch.nn.utils.{_HOOKS[kind]}", f"torch.nn.utils.remove_{_HOOKS[kind]}", getattr(hook, "name", "weight"))
            for _, hook in find_hooks([child])
            if (kind := type(hook).__module__) in _HOOKS
        ]
        found += [
            (f"{type(each).__module__}.{name}", "torch.nn.utils.parametrize.remove_parametrizations", tensor)
            for tensor, applied in (child.parametrizations.items() if parametrize.is_parametrized(child) else ())
            for each in applied
            if type(each).__module__ == "torch.nn.utils.parametrizations"
            and (name := _PARAMETRIZATIONS.get(type(each).__name__)) is not None
        ]
        for function, remove, tensor in found:
            raise NotImplementedError(
                f"module {repr(path) if path else 'the root module'}: {function} computes its parameter in a way that "
                f"thunder cannot trace. Before thunder.jit, call {remove}({expression}, {tensor!r}), which makes the "
                f"present value the parameter, or normalize the weight in the module's forward"
            )


class _WithoutFSDP2Methods(ThunderModule):
    """A jitted module that says what to do instead of the methods of FSDP2 that it does not have."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name not in vars(FSDPModule):
                raise
        instead = _INSTEAD_OF_FSDP2.get(name, "see the table of methods under 'From FSDP2' in the documentation")
        raise AttributeError(
            f"{name} is a method of FSDP2, and this module is sharded by thunder_fsdp_sched: {instead}",
            name=name,
            obj=self,
        )


_WithoutFSDP2Methods.__name__ = _WithoutFSDP2Methods.__qualname__ = ThunderModule.__name__


def refuse_fsdp2_methods(model: ThunderModule) -> None:
    """Make each public method of ``FSDPModule`` that the module does not have itself an ``AttributeError`` of ``model``."""
    model.__class__ = _WithoutFSDP2Methods


#
# Before a call or before tracing
#


def refuse_torch_compile() -> None:
    """Raise an error if the model is called by what ``torch.compile`` compiles.

    It would compile Thunder itself, and Thunder then fails somewhere.

    Raises:
        RuntimeError: ``torch.compile`` is at work.
    """
    if runs_under_torch_compile():
        raise RuntimeError(
            "the jitted module was called by a module or function that torch.compile compiles: leave torch.compile out, "
            "because Thunder compiles the module, or call the module in a function with torch.compiler.disable"
        )


def refuse_conflicts(model: ThunderModule) -> None:
    """Raise an error if the model is also compiled with CUDA graphs, or is called by what ``torch.compile`` compiles.

    A graph replays kernels. Symbols of this package make decisions on the host: which gradients of ``no_sync`` are yet
    to be reduced, whether a bucket is already resident, whether the ranks agree. With a graph, they would be made only
    once, during the capture.

    Raises:
        ValueError: names the transform.
        RuntimeError: ``torch.compile`` is at work.
    """
    refuse_torch_compile()
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


def refuse_normalizations(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise an error if a batch norm needs the number of batches as a Python number, or computes in two dtypes.

    Args:
        dtypes: the dtypes of unsharded parameters, by name.

    Raises:
        NotImplementedError: names the module and what to do.
    """
    for path, child in module.named_modules():
        if not isinstance(child, _NORMS) or child.running_mean is None:
            continue
        kind = type(child).__name__
        if child.training and child.momentum is None:
            raise NotImplementedError(
                f"module {path!r} ({kind}) has momentum=None, so it needs the number of batches as a Python number, which "
                f"no trace has. Set a momentum. torch.optim.swa_utils.update_bn sets None for a while; give it the module "
                f"that runs without compiling: with thunder_fsdp_sched.eager(model) as module: update_bn(loader, module)"
            )
        dtype, stats = dtypes.get(f"{path}.weight".lstrip(".")), child.running_mean.dtype
        if dtype is not None and dtype != stats:
            raise NotImplementedError(
                f"module {path!r} ({kind}) has parameters in {dtype} and running statistics in {stats}, which thunder "
                f"cannot trace. Let it compute in {stats}: mp_policy=lambda name, module: MixedPrecisionPolicy() if "
                f"isinstance(module, torch.nn.{kind}) else policy; or convert the module as a whole before thunder.jit"
            )
