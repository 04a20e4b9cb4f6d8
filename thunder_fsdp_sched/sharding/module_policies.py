"""The sharding strategy and the mixed precision of each module, if functions of the module decide.

[Note: Options of single modules]
``sharding_strategy`` and ``mp_policy`` may be functions of (module name, module). They are asked once for each module, from
the root down. A module for which they return ``None`` is treated as the module that contains it. What is decided for a
module applies to the parameters that it owns directly. So a function may decide by blocks or by single layers, and
``mp_policy`` decides as nested calls of FSDP2's ``fully_shard`` do: the innermost one that names a policy counts, and the
module that it names casts its inputs and outputs.

Parameters that are gathered, kept or reduced differently are in different buckets. Ranks compare the decisions together
with the parameters, before anything is allocated.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..options import Options, check_precision, check_strategy
from ..plan.specs import BucketOptions, ParamSpec
from .input_casts import cast_inputs_of, cast_outputs_of

__all__ = ["ModulePolicies"]


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
        strategy, precision = options.reshard_after_forward, options.mp_policy
        self._by_function = [name for name, f in (("mp_policy", precision), ("strategy", strategy)) if callable(f)]
        self._of: dict[str, tuple[bool, MixedPrecisionPolicy]] = {}
        self._casts: list[tuple[torch.nn.Module, MixedPrecisionPolicy]] = []
        decided: dict[torch.nn.Module, tuple[bool, MixedPrecisionPolicy]] = {}
        for path, child in module.named_modules(remove_duplicate=False):
            if child not in decided:
                reshard, policy = self._of[path.rpartition(".")[0]] if path else (True, MixedPrecisionPolicy())
                if not callable(strategy):
                    reshard = strategy
                elif (answer := strategy(path, child)) is not None:
                    reshard = check_strategy(answer, f"for {_shown(path)}, the callable must return None or")
                if not callable(precision):
                    policy = precision
                elif (answer := precision(path, child)) is not None:
                    policy = check_precision(answer, f"for {_shown(path)}, the callable must return")
                    if path:
                        self._casts.append((child, policy))
                decided[child] = reshard, policy
            self._of[path] = decided[child]
        self.root = self._of[""][1]

    def of(self, spec: ParamSpec) -> BucketOptions:
        """Return what a bucket with this parameter needs.

        Raises:
            ValueError: the parameter is tied, and the functions decide differently for the modules that own it.
        """
        owners = {name: self._of_owner(name) for name in spec.names}
        decisions = {name: _bucket_options(spec, *owner) for name, owner in owners.items()}
        first = decisions[spec.name]
        for name, decision in decisions.items():
            if decision != first:
                is_precision = decision.reshard_after_forward == first.reshard_after_forward
                option = "mp_policy" if is_precision else "sharding_strategy"
                raise ValueError(
                    f"{option}: parameter {spec.name!r} is also {name!r}, but the callable decides differently for the two "
                    f"modules: {first} and {decision}. Let it return the same for both"
                )
        return first

    def line(self, spec: ParamSpec) -> str:
        """Return what functions have decided for a parameter, for ranks to compare; empty if there are none."""
        if not self._by_function:
            return ""
        reshard, policy = self._of_owner(spec.name)
        return f", sharding_strategy {'zero3' if reshard else 'zero2'}, mp_policy {policy}"

    def attach_casts(self) -> None:
        """Make each module for which a function returned a policy cast its inputs and outputs, in traces and eagerly."""
        for module, policy in self._casts:
            if policy.param_dtype is not None and policy.cast_forward_inputs:
                module.register_forward_pre_hook(partial(cast_inputs_of, policy.param_dtype), with_kwargs=True)
            if policy.output_dtype is not None:
                module.register_forward_hook(partial(cast_outputs_of, policy.output_dtype))

    def _of_owner(self, name: str) -> tuple[bool, MixedPrecisionPolicy]:
        path = name.rpartition(".")[0]
        while path not in self._of:  # another transform has created the parameter
            path = path.rpartition(".")[0]
        return self._of[path]


def _bucket_options(spec: ParamSpec, reshard: bool, policy: MixedPrecisionPolicy) -> BucketOptions:
    if not spec.dtype.is_floating_point:
        return BucketOptions(reshard)
    param_dtype, reduce_dtype = policy.param_dtype, policy.reduce_dtype or policy.param_dtype
    if param_dtype == spec.dtype:
        param_dtype = None
    if param_dtype is None and reduce_dtype == spec.dtype:
        reduce_dtype = None
    return BucketOptions(reshard, param_dtype, reduce_dtype)


def _shown(path: str) -> str:
    return f"module {path!r}" if path else "the root module"
