"""The options of each module, if functions of the module decide them.

[Note: Options of single modules]
``Sharding``'s ``strategy`` and ``secondary_ranks``, ``mp_policy``, ``comm_policy`` and ``gradient_divide_factor`` may be
functions of (module name, module). They are called once for each module, from the root down. A module for which they
return ``None`` inherits the decision for the module that contains it. A decision applies to the parameters that the
module owns directly. So a function may decide for blocks or for single layers, and ``mp_policy`` works like nested
calls of FSDP2's ``fully_shard``: the innermost policy counts, and the module for which it was returned casts its inputs
and outputs. From torch 2.15 on, a policy may have a function of the parameter, ``param_dtype_override_fn``, which is
called once for each.

Parameters that are kept, gathered or reduced differently are in different buckets. Ranks compare the decisions together
with the parameters, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..errors import coded_error
from ..option_checks import override_of
from ..options import Options
from ..plan.specs import BucketOptions, ParamSpec
from ..private_torch import default_reduce_dtype


def _for_bucket(decision: BucketOptions, spec: ParamSpec) -> BucketOptions:
    """Return the options of a parameter's bucket, given those of the parameter."""
    if not spec.dtype.is_floating_point:
        return replace(decision, mp_policy=MixedPrecisionPolicy(), comm_policy=None, gradient_divide_factor=None)
    computed = decision.mp_policy.param_dtype or spec.dtype
    reduced = decision.mp_policy.reduce_dtype or default_reduce_dtype(spec.dtype, computed)
    param_dtype = None if computed == spec.dtype else computed
    reduce_dtype = None if computed == reduced == spec.dtype else reduced
    sent = decision.comm_policy and decision.comm_policy.in_dtype(computed)
    return replace(decision, mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype), comm_policy=sent)


def _for_param(decision: BucketOptions, spec: ParamSpec, param: torch.nn.Parameter) -> BucketOptions:
    """Return the options of a parameter, given those of a module that owns it."""
    policy = decision.mp_policy
    if (override := override_of(policy)) is None:
        return decision
    dtype = override(param) if spec.dtype.is_floating_point else None
    if dtype not in (None, policy.param_dtype, spec.dtype):
        raise coded_error(
            ValueError,
            "option.override-returned-other-dtype",
            got=dtype,
            parameter=spec.name,
            param_dtype=policy.param_dtype,
            own_dtype=spec.dtype,
        )
    resolved: Any = {"param_dtype": dtype or policy.param_dtype, "param_dtype_override_fn": None}
    return replace(decision, mp_policy=replace(policy, **resolved))


class ModulePolicies:
    """The options of each module; see [Note: Options of single modules].

    Args:
        module: the module to shard.
        options: the options of ``fsdp``.

    Attributes:
        root: the precision of the whole module, whose inputs and outputs are cast outside of the trace.

    Raises:
        TypeError, ValueError: a function returned something wrong; the message names the option and the module.
    """

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        given = list(options.by_module())
        functions = {option: (function, check) for option, function, check in given if callable(function)}
        fixed = BucketOptions(**{option: value for option, value, _ in given if option not in functions})
        self._of: dict[str, BucketOptions] = {}
        self._of_params: dict[str, BucketOptions] = {}
        self._casts: list[tuple[torch.nn.Module, MixedPrecisionPolicy]] = []
        decided: dict[torch.nn.Module, BucketOptions] = {}
        for path, child in module.named_modules(remove_duplicate=False):
            if child not in decided:
                decision = self._of[path.rpartition(".")[0]] if path else fixed
                for option, (function, check) in functions.items():
                    if (answer := function(path, child)) is not None:
                        name = f"{option}, returned by the callable for {_shown(path)}"
                        decision = replace(decision, **{option: check(name, answer)})
                        if option == "mp_policy" and path:
                            self._casts.append((child, decision.mp_policy))
                decided[child] = decision
            self._of[path] = decided[child]
        self.root = self._of[""].mp_policy
        overrides = any(override_of(decision.mp_policy) is not None for decision in self._of.values())
        self._functions = {*functions, *["mp_policy"] * overrides}

    def of(self, spec: ParamSpec, param: torch.nn.Parameter) -> BucketOptions:
        """Return the options of a parameter's bucket.

        Args:
            param: the module's own object, which a ``param_dtype_override_fn`` gets.

        Raises:
            ValueError: the parameter is tied, and the functions decide differently for the modules that own it; or a
                ``param_dtype_override_fn`` returned another dtype than it may.
        """
        decisions = {name: self._of_owner(name) for name in spec.names}
        resolved = {decision: _for_param(decision, spec, param) for decision in dict.fromkeys(decisions.values())}
        first = self._of_params[spec.name] = resolved[decisions[spec.name]]
        for name in spec.names[1:]:
            other = resolved[decisions[name]]
            if _for_bucket(other, spec) != _for_bucket(first, spec):
                option = next(o for o in vars(first) if getattr(first, o) != getattr(other, o))
                raise coded_error(
                    ValueError,
                    "option.tied-parameter-decided-twice",
                    option=option,
                    parameter=spec.name,
                    other_name=name,
                    first=getattr(first, option),
                    second=getattr(other, option),
                )
        return _for_bucket(first, spec)

    def check_exempt(self, specs: Iterable[ParamSpec]) -> None:
        """Raise ValueError for a name in ``comm_policy`` that belongs to no parameter or module."""
        names = [name for spec in specs for name in spec.names]
        for policy in dict.fromkeys(decision.comm_policy for decision in self._of.values()):
            if policy is not None:
                policy.check_exempt(names)

    def line(self, spec: ParamSpec) -> str:
        """Return the decisions of functions for a parameter, for ranks to compare; empty if there are none."""
        decision = self._of_params[spec.name]
        return "".join(f", {option} {value}" for option, value in vars(decision).items() if option in self._functions)

    def attach_casts(self) -> None:
        """Make each module for which a function returned a policy cast its inputs and outputs, in traces and eagerly."""
        for module, policy in self._casts:
            from .casts import attach_casts  # here, because by default nothing is cast

            attach_casts(module, policy)

    def _of_owner(self, name: str) -> BucketOptions:
        path = name.rpartition(".")[0]
        while path not in self._of:  # another transform has created the parameter
            path = path.rpartition(".")[0]
        return self._of[path]


def _shown(path: str) -> str:
    return f"module {path!r}" if path else "the root module"
