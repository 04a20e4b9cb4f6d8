"""The options of each module, if functions of the module decide them.

[Note: Options of single modules]
``sharding_strategy``, ``reshard_after_forward``, ``mp_policy``, ``comm_policy`` and ``gradient_divide_factor`` may be
functions of (module name, module). They are asked once for each module, from the root down. A module for which they return
``None`` is treated as the module that contains it. What is decided for a module applies to the parameters that it owns
directly. So a function may decide by blocks or by single layers, and ``mp_policy`` decides as nested calls of FSDP2's
``fully_shard`` do: the innermost one that names a policy counts, and the module that it names casts its inputs and outputs.

Parameters that are kept, gathered or reduced differently are in different buckets. Ranks compare the decisions together
with the parameters, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from ..encoding.policy import CommPolicy, matches
from ..options import BY_MODULE, CHECKS, Options
from ..plan.specs import BucketOptions, ParamSpec


def _for_bucket(decision: BucketOptions, spec: ParamSpec) -> BucketOptions:
    """Return what the bucket of a parameter needs, given the options of a module that owns it."""
    if not spec.dtype.is_floating_point:
        exact = {"mp_policy": MixedPrecisionPolicy(), "comm_policy": CommPolicy()}
        return replace(decision, **exact, gradient_divide_factor=None)  # type: ignore[arg-type]
    policy = decision.mp_policy
    param_dtype, reduce_dtype = policy.param_dtype, policy.reduce_dtype or policy.param_dtype
    if param_dtype == spec.dtype:
        param_dtype = None
    if param_dtype is None and reduce_dtype == spec.dtype:
        reduce_dtype = None
    decision = replace(decision, mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype))
    if decision.comm_policy.gather == "bfloat16" and (param_dtype or spec.dtype).itemsize <= 2:  # no longer exactly
        return replace(decision, comm_policy=replace(decision.comm_policy, gather=None))
    return decision


class ModulePolicies:
    """The options of each module; see [Note: Options of single modules].

    Args:
        module: the module to shard.
        options: those of ``fsdp``.

    Attributes:
        root: the precision of the whole module, whose inputs and outputs are cast outside of the trace.

    Raises:
        TypeError, ValueError: a function returned something wrong; the message names the option and the module.
    """

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        given = {option: getattr(options, option) for option in BY_MODULE}
        functions = {option: value for option, value in given.items() if callable(value)}
        fixed = BucketOptions(**{option: value for option, value in given.items() if option not in functions})
        self._functions = tuple(functions)
        self._of: dict[str, BucketOptions] = {}
        self._casts: list[tuple[torch.nn.Module, MixedPrecisionPolicy]] = []
        decided: dict[torch.nn.Module, BucketOptions] = {}
        for path, child in module.named_modules(remove_duplicate=False):
            if child not in decided:
                decision = self._of[path.rpartition(".")[0]] if path else fixed
                for option, function in functions.items():
                    if (answer := function(path, child)) is not None:
                        name = f"{option}, returned by the callable for {_shown(path)}"
                        decision = replace(decision, **{option: CHECKS[option](name, answer)})
                        if option == "mp_policy" and path:
                            self._casts.append((child, decision.mp_policy))
                decided[child] = decision
            self._of[path] = decided[child]
        self.root = self._of[""].mp_policy

    def of(self, spec: ParamSpec) -> BucketOptions:
        """Return what the bucket of a parameter needs.

        Raises:
            ValueError: the parameter is tied, and the functions decide differently for the modules that own it.
        """
        first = self._of_owner(spec.name)
        for name in spec.names[1:]:
            other = self._of_owner(name)
            if _for_bucket(other, spec) != _for_bucket(first, spec):
                option = next(o for o in BY_MODULE if getattr(first, o) != getattr(other, o))
                raise ValueError(
                    f"{option}: parameter {spec.name!r} is also {name!r}, but the callable decides differently for the two "
                    f"modules: {getattr(first, option)} and {getattr(other, option)}. Let it return the same for both"
                )
        return _for_bucket(first, spec)

    def check_exempt(self, specs: Iterable[ParamSpec]) -> None:
        """Check that each name in ``CommPolicy.exempt`` is one of a parameter or a module.

        Raises:
            ValueError: it is not.
        """
        names = [name for spec in specs for name in spec.names]
        for pattern in dict.fromkeys(p for decision in self._of.values() for p in decision.comm_policy.exempt):
            if not any(matches(pattern, name) for name in names):
                raise ValueError(
                    f"comm_policy: exempt: {pattern!r} matches no parameter; give the name of a parameter or a module, or "
                    f"a pattern such as '*.bias'. Parameters are {', '.join(map(repr, names[:3]))}, ..."
                )

    def line(self, spec: ParamSpec) -> str:
        """Return what functions have decided for a parameter, for ranks to compare; empty if there are none."""
        decision = self._of_owner(spec.name)
        return "".join(f", {option} {getattr(decision, option)}" for option in self._functions)

    def attach_casts(self) -> None:
        """Make each module for which a function returned a policy cast its inputs and outputs, in traces and eagerly."""
        for module, policy in self._casts:
            attach_casts(module, policy, _cast_traced)

    def _of_owner(self, name: str) -> BucketOptions:
        path = name.rpartition(".")[0]
        while path not in self._of:  # another transform has created the parameter
            path = path.rpartition(".")[0]
        return self._of[path]


def _shown(path: str) -> str:
    return f"module {path!r}" if path else "the root module"


def cast_inputs(policy: MixedPrecisionPolicy, inputs: Any) -> Any:
    """Return ``inputs`` with floating-point tensors cast to ``param_dtype``, if the policy requests it."""
    return _cast(policy.param_dtype, inputs) if policy.param_dtype and policy.cast_forward_inputs else inputs


def attach_casts(
    module: torch.nn.Module, policy: MixedPrecisionPolicy, cast: Callable[[torch.dtype, Any], Any] | None = None
) -> list[RemovableHandle]:
    """Make calls of ``module`` cast their inputs and outputs; autograd casts gradients back.

    Args:
        cast: casts a nested structure, if Thunder traces the hooks.
    """
    cast, hooks = cast or _cast, []
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        pre_hook = partial(_cast_inputs_of, cast, policy.param_dtype)
        hooks.append(module.register_forward_pre_hook(pre_hook, with_kwargs=True))
    if policy.output_dtype is not None:
        hooks.append(module.register_forward_hook(partial(_cast_outputs_of, cast, policy.output_dtype)))
    return hooks


def _cast_inputs_of(cast: Any, dtype: torch.dtype, _: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    return cast(dtype, (args, kwargs))


def _cast_outputs_of(cast: Any, dtype: torch.dtype, _: torch.nn.Module, args: Any, output: Any) -> Any:
    return cast(dtype, output)


def _cast(dtype: torch.dtype, tree: Any) -> Any:
    return tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, tree)


def _cast_traced(dtype: torch.dtype, tree: Any) -> Any:
    # Thunder interprets this line by line, and takes five times as long for tree_map.
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if type(tree) is tuple:
        return tuple([_cast_traced(dtype, item) for item in tree])
    if type(tree) is list:
        return [_cast_traced(dtype, item) for item in tree]
    if type(tree) is dict:
        return {key: _cast_traced(dtype, item) for key, item in tree.items()}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    return _cast(dtype, tree)
