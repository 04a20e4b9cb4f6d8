"""Cast the inputs and outputs of modules as FSDP2 does, in traces and in eager calls."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle


def cast_inputs(policy: MixedPrecisionPolicy, inputs: Any) -> Any:
    """Return ``inputs`` with floating-point tensors cast to ``param_dtype``, if the policy requests it."""
    return cast_tensors(policy.param_dtype, inputs) if policy.param_dtype and policy.cast_forward_inputs else inputs


def attach_casts(module: torch.nn.Module, policy: MixedPrecisionPolicy) -> list[RemovableHandle]:
    """Make calls of ``module`` cast their inputs and outputs; autograd casts gradients back."""
    hooks = []
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        pre_hook = partial(_cast_inputs_of, policy.param_dtype)
        hooks.append(module.register_forward_pre_hook(pre_hook, with_kwargs=True))
    if policy.output_dtype is not None:
        hooks.append(module.register_forward_hook(partial(_cast_outputs_of, policy.output_dtype)))
    return hooks


def _cast_inputs_of(dtype: torch.dtype, _: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    return cast_tensors(dtype, args), cast_tensors(dtype, kwargs)


def _cast_outputs_of(dtype: torch.dtype, _: torch.nn.Module, args: Any, output: Any) -> Any:
    return cast_tensors(dtype, output)


def cast_tensors(dtype: torch.dtype, tree: Any) -> Any:
    """Return ``tree`` with its floating-point tensors cast to ``dtype``.

    It looks into the same containers as FSDP2, with the same results; a packed sequence is not cast. Thunder interprets
    this code, and fails with the named tuples of torch's ``_apply_to_tensors``, so this does not call it.
    """
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if tree is None or isinstance(tree, (bool, int, float, str, PackedSequence)):
        return tree
    if hasattr(type(tree), "__dataclass_fields__"):  # some are dictionaries, too
        cast = {f.name: cast_tensors(dtype, getattr(tree, f.name)) for f in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **cast)
    if isinstance(tree, OrderedDict):
        ordered = type(tree)()
        for key, value in tree.items():
            ordered[key] = cast_tensors(dtype, value)
        return ordered
    if isinstance(tree, dict):
        return {key: cast_tensors(dtype, value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple, set)):
        values = [cast_tensors(dtype, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree
