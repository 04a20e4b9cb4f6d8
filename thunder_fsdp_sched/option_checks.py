"""Checks of what users give as options. Each takes the option's name, for messages, and returns the value of its field."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, get_args

import torch
from thunder.distributed import FSDPBucketingStrategy, FSDPType
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .extensions import load
from .plan.bucketing import BucketingStrategy, BucketRule
from .plan.specs import Encoding, ShardingStrategy
from .ranks.control import Agreement
from .ranks.process_groups import ProcessGroupRef
from .runtime.accumulation import AccumulationMode
from .sizes import parse_bytes
from .transports import TRANSPORTS

if TYPE_CHECKING:
    from .extras.planning.clusters import ClusterSpec

Check = Callable[[str, Any], Any]
"""Takes the name of an option and the user's argument; raises TypeError or ValueError with the name."""


def is_a(types: Any, expected: str, then: Check = lambda name, value: value, *, words: tuple[str, ...] = ()) -> Check:
    """Accept an instance of some types, ``None`` if ``expected`` says so, or a word; ``then`` checks and converts it."""
    accepted = (types, type(None)) if expected.endswith("or None") else types

    def check(name: str, value: Any) -> Any:
        if isinstance(value, str) and value in words:
            return value
        if not isinstance(value, accepted) or (isinstance(value, bool) and types is not bool):
            raise TypeError(f"{name}: expected {expected}, got {value!r} of type {type(value).__name__}")
        return then(name, value)

    return check


def _at_least(least: int, what: str) -> Check:
    def check(name: str, value: int | None) -> int | None:
        if value is not None and value < least:
            raise ValueError(f"{name}: expected {least} or more {what}, got {value}")
        return value

    return check


def one_of(*choices: str | None) -> Check:
    """Accept some strings, or ``None`` if it is among them."""

    def check(name: str, value: Any) -> Any:
        if value not in choices:
            *first, last = map(repr, choices)
            raise ValueError(f"{name}: expected {', '.join(first)} or {last}, got {value!r}")
        return value

    return check


def or_by_module(check: Check) -> Check:
    """Accept a function of (module name, module) as well; ``check`` then checks each of its answers."""

    def check_either(name: str, value: Any) -> Any:
        if callable(value) and not isinstance(value, type):
            return _of_two(name, value, "(module name, module)")
        return check(name, value)

    return check_either


def _of_two(name: str, function: Callable[..., Any], arguments: str) -> Callable[..., Any]:
    """Return ``function`` if it can be called with two arguments; raise TypeError otherwise."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return function
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"{name}: the callable must accept {arguments}, but its parameters are {signature}: {error}"
        ) from None
    return function


def check_bytes(name: str, value: Any) -> int | None:
    return None if value is None else parse_bytes(name, value)


def _named(value: Any, enum: type[Enum], known: tuple[str, ...]) -> Any:
    """Return which of some strings a user names, in any case or by a member of Thunder's enum; ``None`` if none."""
    text = value.name if isinstance(value, enum) else value
    return text.lower() if isinstance(text, str) and text.lower() in known else None


def check_strategy(name: str, strategy: Any) -> ShardingStrategy:
    if known := _named(strategy, FSDPType, get_args(ShardingStrategy)):
        return known
    raise ValueError(
        f"{name}: expected 'zero2', 'zero3' or a thunder.distributed.FSDPType, got {strategy!r}; FSDP's SHARD_GRAD_OP and "
        f"DeepSpeed's stage 2 are 'zero2', FULL_SHARD and stage 3 are 'zero3'"
    )


_FIELDS = {
    MixedPrecisionPolicy: {
        "param_dtype",
        "reduce_dtype",
        "output_dtype",
        "cast_forward_inputs",
        "param_dtype_override_fn",
    },
    OffloadPolicy: {"pin_memory"},
}
"""The fields of torch's policies that this package obeys. Other releases of torch may have more."""


def _only_known(name: str, policy: Any) -> Any:
    """Return a policy of torch; raise an error if a field is set that this package would ignore."""
    known = next(names for kind, names in _FIELDS.items() if isinstance(policy, kind))
    for option in (option for option in fields(policy) if option.name not in known):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        if (value := getattr(policy, option.name)) is not default and value != default:
            raise ValueError(
                f"{name}: {option.name}={value!r} is a field of {type(policy).__name__} that this package does not know, so "
                f"it would be ignored; leave it at its default"
            )
    return policy


def _mixed_precision(name: str, policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    policy = _only_known(name, policy or MixedPrecisionPolicy())
    for attribute in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, attribute)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{name}: {attribute} must be a floating-point dtype, got {dtype!r}")
    override = override_of(policy)
    if override is not None and not callable(override):
        raise TypeError(
            f"{name}: param_dtype_override_fn: expected a callable (parameter) -> dtype or None, or None, got {override!r}"
        )
    return policy


def check_comm_policy(name: str, policy: Any) -> Encoding | None:
    if policy is None:
        return None
    checked: Encoding = is_a(load("extras.low_precision.policy:CommPolicy"), "a CommPolicy or None")(name, policy)
    return checked


def override_of(policy: MixedPrecisionPolicy) -> Callable[[torch.nn.Parameter], torch.dtype | None] | None:
    """Return the function that overrides ``param_dtype`` for single parameters (torch 2.15); ``None`` if there is none."""
    return getattr(policy, "param_dtype_override_fn", None)


def _offload(name: str, policy: OffloadPolicy | None) -> OffloadPolicy:
    policy = _only_known(name, policy or OffloadPolicy())
    if type(policy) is not OffloadPolicy and not isinstance(policy, CPUOffloadPolicy):
        raise ValueError(
            f"{name}: expected a CPUOffloadPolicy, OffloadPolicy or None, got {policy!r}, which is neither"
        )
    return policy


def _positive(name: str, factor: float | None) -> float | None:
    if factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"{name}: expected a positive number or None, got {factor!r}")
    return None if factor is None else float(factor)


def _secondary_ranks(name: str, number: int | None) -> int | None:
    if number is not None and number < 2:
        raise ValueError(
            f"{name}: expected a number of ranks or None, at least 2, got {number}; the strategy 'zero2' keeps whole "
            f"parameters"
        )
    return number


def check_bucketing(name: str, strategy: Any) -> BucketingStrategy | int | BucketRule:
    if isinstance(strategy, bool):
        raise TypeError(f"{name}: expected a strategy, a size in bytes or a callable, got {strategy!r}")
    if isinstance(strategy, int):
        if strategy <= 0:
            raise ValueError(f"{name}: a size in bytes must be positive, got {strategy}")
        if strategy < 1024:
            warnings.warn(
                f"{name}={strategy} is a size of {strategy} bytes, so that nearly each parameter gets a bucket of its own. "
                f"Megabytes are '{strategy}MB'; if you mean a bucket for each parameter, write 'none'",
                stacklevel=4,
            )
        return strategy
    if known := _named(strategy, FSDPBucketingStrategy, get_args(BucketingStrategy)):
        return known
    if isinstance(strategy, str) and re.match(r"\s*[-+.\d]", strategy):
        return parse_bytes(name, strategy)
    if callable(strategy):
        return _of_two(name, strategy, "(parameter name, parameter)")
    raise ValueError(
        f"{name}: expected 'none', 'layer', 'block', a thunder.distributed.FSDPBucketingStrategy, a size in "
        f"bytes (an int, or a string such as '25MB') or a callable (name, parameter) -> bucket name, got {strategy!r}"
    )


def check_transport(name: str, transport: Any) -> Any:
    """Return ``transport`` if it is a callable or the name of a transport; raise ValueError otherwise."""
    if callable(transport):
        return _of_two(name, transport, "(bucket name, parameters)")
    if isinstance(transport, str) and (transport == "auto" or transport in TRANSPORTS):
        return transport
    raise ValueError(
        f"{name}: expected 'auto', one of {sorted(TRANSPORTS)}, or a callable (bucket name, parameters) -> one of these, "
        f"got {transport!r}"
    )


def check_schedule(name: str, schedule: Any) -> tuple[Any, ...] | None:
    if schedule is None:
        return None
    checked: tuple[Any, ...] = load("extras.replay:check_schedule")(name, schedule)
    return checked


def check_ignored(name: str, params: Any) -> tuple[torch.nn.Parameter | str, ...]:
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise TypeError(f"{name}: expected parameters or their names, got {type(params).__name__}")
    check = is_a((torch.nn.Parameter, str), "parameters or their names")
    return tuple(check(name, param) for param in params)


def check_cluster(name: str, cluster: Any) -> ClusterSpec | None:
    found: ClusterSpec | None = None if cluster is None else load("extras.planning.clusters:cluster")(cluster)
    return found


def _one_or_two_dimensions(name: str, mesh: DeviceMesh | None) -> DeviceMesh | None:
    if mesh is not None and mesh.ndim > 2:
        raise ValueError(
            f"{name}: expected one dimension (to shard over) or two (to replicate and to shard over), got {mesh.ndim}; pass "
            f"only those, mesh['name'] or mesh['replicate', 'shard']"
        )
    return mesh


def check_device(name: str, device: Any) -> torch.device | None:
    expected = "a torch.device, its name or None"
    if isinstance(device, (str, int)) and not isinstance(device, bool):
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"{name}: expected {expected}, got {device!r}: {error}") from error
    checked: torch.device | None = is_a(torch.device, expected)(name, device)
    if checked is not None and checked.type == "meta":
        raise ValueError(
            f"{name}: shards need memory, got {device!r}; to shard a module on the meta device, name the device on which to "
            f"train it"
        )
    return checked


flag = is_a(bool, "a bool")


def check_names(name: str, names: Any) -> tuple[str, ...]:
    """Return ``names`` if it is a tuple of strings; raise TypeError otherwise."""
    if not isinstance(names, tuple) or not all(isinstance(each, str) for each in names):
        raise TypeError(f"{name}: expected a tuple of names, got {names!r}")
    return names


check_prefetch = is_a(int, "a number of buckets (int), 'auto' or None", _at_least(0, "buckets"), words=("auto",))
check_gathers = is_a(int, "a number of gathers (int) or None", _at_least(1, "gathers"))
check_secondary_ranks = is_a(int, "a number of ranks or None", _secondary_ranks)
check_accumulate = one_of(*get_args(AccumulationMode), None)
check_agree = one_of(*get_args(Agreement))
check_mp_policy = is_a(MixedPrecisionPolicy, "a MixedPrecisionPolicy or None", _mixed_precision)
check_offload_policy = is_a(OffloadPolicy, "a CPUOffloadPolicy, OffloadPolicy or None", _offload)
check_factor = is_a((int, float), "a positive number or None", _positive)
check_hook = is_a(
    Callable,
    "a callable (bucket name, gradients) -> None, or None",
    lambda name, hook: hook if hook is None else _of_two(name, hook, "(bucket name, gradients)"),
)
check_process_group = is_a(
    (ProcessGroup, ProcessGroupRef),
    "a torch.distributed.ProcessGroup or None",
    lambda _, group: ProcessGroupRef.of(group) if isinstance(group, ProcessGroup) else group,
)
check_mesh = is_a(DeviceMesh, "a 1-D or 2-D torch.distributed.device_mesh.DeviceMesh or None", _one_or_two_dimensions)
check_group_rule = is_a(
    Callable,
    "a callable (parameter name, parameter) -> process group, mesh or None",
    lambda name, rule: rule if rule is None else _of_two(name, rule, "(parameter name, parameter)"),
)
check_init_fn = is_a(Callable, "a callable that initializes a module, or None")
check_rank = is_a(int, "a global rank (int) or None")

BY_MODULE: dict[str, Check] = {
    "sharding_strategy": check_strategy,
    "mp_policy": check_mp_policy,
    "comm_policy": check_comm_policy,
    "gradient_divide_factor": check_factor,
    "secondary_ranks": check_secondary_ranks,
}
"""The check of each answer of a function of (module name, module), by the field of ``BucketOptions`` that it decides."""


def check_leaves(name: str, value: Any) -> tuple[Any, ...]:
    """Accept "auto", or a sequence of names, classes, functions, and pairs of one of these with a function."""
    if value == "auto":
        return (value,)
    if isinstance(value, str | type) or not isinstance(value, Sequence):
        raise TypeError(f"{name}: expected 'auto', or a sequence such as ('model.layers.*.mlp',), got {value!r}")
    for each in value:
        match, like = each if isinstance(each, tuple) and len(each) == 2 else (each, None)
        if not (isinstance(match, str | type) or callable(match)) or not (like is None or callable(like)):
            raise TypeError(f"{name}: expected names, classes or functions (name, module) -> bool, got {each!r}")
    return tuple(value)
