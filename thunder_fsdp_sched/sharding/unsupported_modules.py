"""Modules of torch that Thunder cannot trace, with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..private_interpreter import find_hooks

__all__ = ["refuse_normalizations", "refuse_reparametrized"]

_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)

_HOOKS = {"torch.nn.utils.weight_norm": "weight_norm", "torch.nn.utils.spectral_norm": "spectral_norm"}
"""The functions that add a hook which computes a parameter, by the module of the hook's class."""

_PARAMETRIZATIONS = {"_WeightNorm": "weight_norm", "_SpectralNorm": "spectral_norm", "_Orthogonal": "orthogonal"}
"""Those of ``torch.nn.utils.parametrizations``, by their classes."""


def refuse_reparametrized(module: nn.Module) -> None:
    """Raise an error if a parameter is computed by ``weight_norm``, ``spectral_norm`` or ``orthogonal`` of torch.

    Raises:
        NotImplementedError: names the module and what to do before ``thunder.jit``.
    """
    for path, child in module.named_modules():
        name = repr(path) if path else "the root module"
        for _, hook in find_hooks([child]):
            if (function := _HOOKS.get(type(hook).__module__)) is not None:
                remove = f"torch.nn.utils.remove_{function}({_expression(path)}, {getattr(hook, 'name', 'weight')!r})"
                raise NotImplementedError(_reparametrized(name, f"torch.nn.utils.{function}", remove))
        if not parametrize.is_parametrized(child):
            continue
        for tensor, applied in child.parametrizations.items():
            for each in applied:
                kind = type(each)
                if kind.__module__ == "torch.nn.utils.parametrizations" and kind.__name__ in _PARAMETRIZATIONS:
                    function = f"torch.nn.utils.parametrizations.{_PARAMETRIZATIONS[kind.__name__]}"
                    remove = f"torch.nn.utils.parametrize.remove_parametrizations({_expression(path)}, {tensor!r})"
                    raise NotImplementedError(_reparametrized(name, function, remove))


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


def _reparametrized(name: str, function: str, remove: str) -> str:
    return (
        f"module {name}: {function} computes its parameter in a way that thunder cannot trace. Before thunder.jit, call "
        f"{remove}, which makes the present value the parameter, or normalize the weight in the module's forward"
    )


def _expression(path: str) -> str:
    return f"model.get_submodule({path!r})" if path else "model"
