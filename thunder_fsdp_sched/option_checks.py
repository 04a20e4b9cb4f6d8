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

from .errors import coded_error
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
            raise coded_error(
                TypeError, "option.wrong-type", name=name, expected=expected, got=value, type=type(value).__name__
            )
        return then(name, value)

    return check


def _at_least(least: int, what: str) -> Check:
    def check(name: str, value: int | None) -> int | None:
        if value is not None and value < least:
            raise coded_error(ValueError, "option.too-small", name=name, least=least, unit=what, got=value)
        return value

    return check


def one_of(*choices: str | None) -> Check:
    """Accept some strings, or ``None`` if it is among them."""

    def check(name: str, value: Any) -> Any:
        if value not in choices:
            *first, last = map(repr, choices)
            raise coded_error(
                ValueError, "option.unknown-choice", name=name, choices=", ".join(first), last=last, got=value
            )
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
        raise coded_error(
            TypeError,
            "option.callable-takes-other-arguments",
            name=name,
            arguments=arguments,
            signature=signature,
            error=error,
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
    raise coded_error(ValueError, "option.unknown-strategy", name=name, got=strategy)


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
            raise coded_error(
                ValueError,
                "option.unknown-policy-field",
                name=name,
                field=option.name,
                value=value,
                policy=type(policy).__name__,
            )
    return policy


def _mixed_precision(name: str, policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    policy = _only_known(name, policy or MixedPrecisionPolicy())
    for attribute in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, attribute)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise coded_error(ValueError, "option.dtype-not-floating-point", name=name, field=attribute, got=dtype)
    override = override_of(policy)
    if override is not None and not callable(override):
        raise coded_error(TypeError, "option.dtype-override-not-callable", name=name, got=override)
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
        raise coded_error(ValueError, "option.unknown-offload-policy", name=name, got=policy)
    return policy


def _positive(name: str, factor: float | None) -> float | None:
    if factor is not None and not 0 < factor < math.inf:
        raise coded_error(ValueError, "option.expected-positive-number", name=name, got=factor)
    return None if factor is None else float(factor)


def _secondary_ranks(name: str, number: int | None) -> int | None:
    if number is not None and number < 2:
        raise coded_error(ValueError, "option.too-few-secondary-ranks", name=name, got=number)
    return number


def check_bucketing(name: str, strategy: Any) -> BucketingStrategy | int | BucketRule:
    if isinstance(strategy, bool):
        raise coded_error(TypeError, "option.bool-as-bucketing-strategy", name=name, got=strategy)
    if isinstance(strategy, int):
        if strategy <= 0:
            raise coded_error(ValueError, "option.bucket-size-not-positive", name=name, got=strategy)
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
    raise coded_error(ValueError, "option.unknown-bucketing-strategy", name=name, got=strategy)


def check_transport(name: str, transport: Any) -> Any:
    """Return ``transport`` if it is a callable or the name of a transport; raise ValueError otherwise."""
    if callable(transport):
        return _of_two(name, transport, "(bucket name, parameters)")
    if isinstance(transport, str) and (transport == "auto" or transport in TRANSPORTS):
        return transport
    raise coded_error(ValueError, "option.unknown-transport", name=name, transports=sorted(TRANSPORTS), got=transport)


def check_schedule(name: str, schedule: Any) -> tuple[Any, ...] | None:
    if schedule is None:
        return None
    checked: tuple[Any, ...] = load("extras.replay:check_schedule")(name, schedule)
    return checked


def check_ignored(name: str, params: Any) -> tuple[torch.nn.Parameter | str, ...]:
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise coded_error(TypeError, "option.expected-parameters-or-names", name=name, got=type(params).__name__)
    check = is_a((torch.nn.Parameter, str), "parameters or their names")
    return tuple(check(name, param) for param in params)


def check_cluster(name: str, cluster: Any) -> ClusterSpec | None:
    found: ClusterSpec | None = None if cluster is None else load("extras.planning.clusters:cluster")(cluster)
    return found


def _one_or_two_dimensions(name: str, mesh: DeviceMesh | None) -> DeviceMesh | None:
    if mesh is not None and mesh.ndim > 2:
        raise coded_error(ValueError, "option.wrong-mesh-dimensions", name=name, got=mesh.ndim)
    return mesh


def check_device(name: str, device: Any) -> torch.device | None:
    expected = "a torch.device, its name or None"
    if isinstance(device, (str, int)) and not isinstance(device, bool):
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise coded_error(
                ValueError, "option.invalid-device", name=name, expected=expected, got=device, error=error
            ) from error
    checked: torch.device | None = is_a(torch.device, expected)(name, device)
    if checked is not None and checked.type == "meta":
        raise coded_error(ValueError, "option.meta-device-for-shards", name=name, got=device)
    return checked


flag = is_a(bool, "a bool")


def check_names(name: str, names: Any) -> tuple[str, ...]:
    """Return ``names`` if it is a tuple of strings; raise TypeError otherwise."""
    if not isinstance(names, tuple) or not all(isinstance(each, str) for each in names):
        raise coded_error(TypeError, "option.expected-tuple-of-names", name=name, got=names)
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
        raise coded_error(TypeError, "option.expected-auto-or-sequence", name=name, got=value)
    for each in value:
        match, like = each if isinstance(each, tuple) and len(each) == 2 else (each, None)
        if not (isinstance(match, str | type) or callable(match)) or not (like is None or callable(like)):
            raise coded_error(TypeError, "option.expected-names-classes-or-functions", name=name, got=each)
    return tuple(value)
