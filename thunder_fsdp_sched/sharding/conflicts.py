"""Compilers, transforms and hooks that cannot be combined with this one."""

from __future__ import annotations

import torch
from thunder.core.module import ThunderModule
from thunder.transforms.cudagraph import CUDAGraphTransform

from ..private_api import runs_under_torch_compile
from ..private_interpreter import find_backward_hooks, has_old_backward_hooks

__all__ = ["refuse_backward_hooks", "refuse_conflicts", "refuse_old_backward_hooks"]


def refuse_conflicts(model: ThunderModule) -> None:
    """Raise an error if the model is also compiled with CUDA graphs, or is called by what ``torch.compile`` compiles.

    A graph replays kernels. Symbols of this package make decisions on the host: which gradients of ``no_sync`` are yet
    to be reduced, whether a bucket is already resident, whether the ranks agree. With a graph, they would be made only
    once, during the capture. ``torch.compile`` would compile Thunder itself, and Thunder then fails somewhere.

    Raises:
        ValueError: names the transform.
        RuntimeError: ``torch.compile`` is at work.
    """
    if runs_under_torch_compile():
        raise RuntimeError(
            "the jitted module was called by a module or function that torch.compile compiles: leave torch.compile out, "
            "because Thunder compiles the module, or call the module in a function with torch.compiler.disable"
        )
    for transform in model._lc_transforms:
        if isinstance(transform, CUDAGraphTransform):
            raise ValueError(
                f"transforms: {type(transform).__name__} would capture the collectives of fsdp(...) in CUDA graphs, which "
                f"replay the capture even after no_sync or an exception has changed what to do, so gradients would be "
                f"wrong. Remove it"
            )


def refuse_backward_hooks(module: torch.nn.Module) -> None:
    """Raise an error if a module that Thunder is about to trace has backward hooks, which Thunder ignores.

    A call with other hooks than the traced ones is traced again, so hooks that are added later are refused, too.

    Raises:
        NotImplementedError: names the module.
    """
    for name in find_backward_hooks(module):
        if name is None:
            owner = "all modules (torch.nn.modules.module.register_module_full_backward_hook)"
        elif name:
            owner = f"submodule {name!r}"
        else:
            owner = "the module that was given to thunder.jit"
        raise NotImplementedError(
            f"backward hooks of {owner} do not run, because Thunder compiles backward: gradients would be wrong without "
            f"them. Remove them. What works: hooks of parameters (register_hook, register_post_accumulate_grad_hook), "
            f"register_full_backward_hook of the jitted module, and in forward a torch.autograd.Function, which a forward "
            f"hook may call as well"
        )


def refuse_old_backward_hooks(model: torch.nn.Module) -> None:
    """Raise an error if the jitted module has a hook of ``register_backward_hook``, which sees other values than in eager.

    Raises:
        NotImplementedError: says what to call instead.
    """
    if has_old_backward_hooks(model):
        raise NotImplementedError(
            "register_backward_hook: gradients that it returns are lost, because Thunder computes backward in one node. "
            "Call register_full_backward_hook of the jitted module instead"
        )
