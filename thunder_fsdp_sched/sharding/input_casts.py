"""The dtypes of inputs and outputs, of a jitted module and of modules in it, under a mixed precision policy."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

__all__ = ["attach_casts", "cast_inputs", "cast_inputs_of", "cast_outputs_of"]


def cast_inputs(policy: MixedPrecisionPolicy, inputs: Any) -> Any:
    """Return ``inputs`` with floating-point tensors cast to ``param_dtype``, if the policy requests it."""
    return _cast(inputs, policy.param_dtype if policy.cast_forward_inputs else None)


def attach_casts(model: torch.nn.Module, policy: MixedPrecisionPolicy) -> list[RemovableHandle]:
    """Make calls of ``model`` cast their inputs and outputs; autograd casts gradients back."""
    hooks = []
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        hooks.append(model.register_forward_pre_hook(lambda _, *call: cast_inputs(policy, call), with_kwargs=True))
    if policy.output_dtype is not None:
        hooks.append(model.register_forward_hook(lambda _, inputs, output: _cast(output, policy.output_dtype)))
    return hooks


def cast_inputs_of(dtype: torch.dtype, _: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Return a module's inputs cast to ``dtype``: a forward pre-hook that Thunder traces."""
    return _cast_traced((args, kwargs), dtype)


def cast_outputs_of(dtype: torch.dtype, _: torch.nn.Module, args: Any, output: Any) -> Any:
    """Return a module's outputs cast to ``dtype``: a forward hook that Thunder traces."""
    return _cast_traced(output, dtype)


def _cast_traced(tree: Any, dtype: torch.dtype) -> Any:
    # Thunder interprets this line by line, and takes five times as long for tree_map.
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if type(tree) is tuple:
        return tuple([_cast_traced(item, dtype) for item in tree])
    if type(tree) is list:
        return [_cast_traced(item, dtype) for item in tree]
    if type(tree) is dict:
        return {key: _cast_traced(item, dtype) for key, item in tree.items()}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    return _cast(tree, dtype)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree
    return tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, tree)
