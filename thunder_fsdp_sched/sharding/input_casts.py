"""The dtypes of a jitted module's inputs and outputs under a mixed precision policy."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

__all__ = ["attach_casts", "cast_inputs"]


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


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tree
    return tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, tree)
