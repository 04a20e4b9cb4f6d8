"""Checks of users' options. Each takes the option's name, for messages, and the user's value; it returns the kept value."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from functools import partial
from typing import Any, get_args

import torch
from thunder.distributed import FSDPBucketingStrategy, FSDPType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .errors import coded_error
from .extensions import load
from .plan.bucketing import BucketingStrategy, BucketRule
from .plan.specs import ShardingStrategy
from .transports import TRANSPORTS

Check = Callable[[str, Any], Any]
"""Takes the name of an option and the user's argument; raises TypeError or ValueError with the name."""


def _wrong_type(name: str, expected: str, got: Any) -> TypeError:
    return coded_error(TypeError, "option.wrong-type", name=name, expected=expected, got=got, type=type(got).__name__)


def is_a(types: Any, expected: str, then: Check = lambda name, value: value, none: Any = None) -> Check:
    """Accept an instance of some types, which ``then`` checks and converts, and ``None`` if ``expected`` ends with it.

    Args:
        none: the value to keep for ``None``.
    """

    def check(name: str, value: Any) -> Any:
        if value is None and expected.endswith("or None"):
            return none
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise _wrong_type(name, expected, value)
        return then(name, value)

    return check


def or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def or_word(word: str, check: Check) -> Check:
    return lambda name, value: word if isinstance(value, str) and value == word else check(name, value)


def at_least(least: int, unit: str) -> Check:
    def check(name: str, value: int) -> int:
        if value < least:
            raise coded_error(ValueError, "option.too-small", name=name, least=least, unit=unit, got=value)
        return value

    return check


def one_of(*choices: str | None) -> Check:
    """Accept some strings, or ``None`` if it is among them."""
    first, last = ", ".join(map(repr, choices[:-1])), repr(choices[-1])

    def check(name: str, value: Any) -> Any:
        if value not in choices:
            raise coded_error(ValueError, "option.unknown-choice", name=name, choices=first, last=last, got=value)
        return value

    return check


def takes(arguments: str) -> Check:
    """Accept a function that can be called with two arguments, which a text such as ``"(name, module)"`` names."""

    def check(name: str, function: Any) -> Any:
        try:
            signature = inspect.signature(function)
        except ValueError:  # some builtins have none
            return function
        try:
            signature.bind(None, None)
        except TypeError as error:
            got = f"{signature}: {error}"
            raise coded_error(
                TypeError, "option.callable-takes-other-arguments", name=name, arguments=arguments, got=got
            ) from None
        return function

    return check


def function(arguments: str, returns: str) -> Check:
    """Accept such a function, or ``None``."""
    return is_a(Callable, f"a callable {arguments} -> {returns} or None", takes(arguments))


flag = is_a(bool, "a bool")


def names(name: str, value: Any) -> tuple[str, ...]:
    """Accept a list or tuple of strings."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise _wrong_type(name, "a list or tuple of names", value)
    return tuple(value)


def _named(value: Any, enum: type[Enum], known: tuple[str, ...]) -> Any:
    """Return which of some strings a user names, in any case or by a member of Thunder's enum; ``None`` if none."""
    text = value.name if isinstance(value, enum) else value
    return text.lower() if isinstance(text, str) and text.lower() in known else None


def strategy(name: str, value: Any) -> ShardingStrategy:
    if known := _named(value, FSDPType, get_args(ShardingStrategy)):
        return known
    raise coded_error(ValueError, "option.unknown-strategy", name=name, got=value)


def bucketing(name: str, value: Any) -> BucketingStrategy | int | BucketRule:
    if known := _named(value, FSDPBucketingStrategy, get_args(BucketingStrategy)):
        return known
    if callable(value):
        return takes("(parameter name, parameter)")(name, value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, str) and re.match(r"\s*[-+.\d]", value)):
        raise coded_error(ValueError, "option.unknown-bucketing-strategy", name=name, got=value)
    size = nbytes(name, value)
    if is_number and size < 1024:
        warnings.warn(
            f"{name}={size} is a size of {size} bytes, so that nearly each parameter gets a bucket of its own. "
            f"Megabytes are '{size}MB'; if you mean a bucket for each parameter, write 'none'",
            stacklevel=7,  # of the call of `fsdp`
        )
    return size


def nbytes(name: str, value: Any) -> int:
    """Accept a number of bytes, or a text such as ``"40GiB"``."""
    from .sizes import parse_bytes  # here, because most options are none

    return parse_bytes(name, value)


def transport(name: str, value: Any) -> Any:
    """Accept a callable or the name of a transport."""
    if callable(value):
        return takes("(bucket name, parameters)")(name, value)
    if isinstance(value, str) and (value == "auto" or value in TRANSPORTS):
        return value
    raise coded_error(ValueError, "option.unknown-transport", name=name, transports=sorted(TRANSPORTS), got=value)


schedule = or_none(lambda name, value: load("extras.replay:check_schedule")(name, value))
cluster = or_none(lambda _, value: load("extras.planning.clusters:cluster")(value))


@or_none
def encoding(name: str, value: Any) -> Any:
    return is_a(load("extras.low_precision.policy:CommPolicy"), "a CommPolicy or None")(name, value)


_OBEYED = [
    "param_dtype",
    "reduce_dtype",
    "output_dtype",
    "cast_forward_inputs",
    "param_dtype_override_fn",
    "pin_memory",
]
"""The fields of torch's policies that this package supports. Other releases of torch may have more."""


def _only_obeyed(name: str, policy: Any) -> Any:
    """Return a policy of torch; raise an error if a field is set that this package would ignore."""
    for option in (option for option in fields(policy) if option.name not in _OBEYED):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        if (value := getattr(policy, option.name)) is not default and value != default:
            field, kind = f"{option.name}={value!r}", type(policy).__name__
            raise coded_error(ValueError, "option.unknown-policy-field", name=name, field=field, policy=kind)
    return policy


@partial(is_a, MixedPrecisionPolicy, "a MixedPrecisionPolicy or None", none=MixedPrecisionPolicy())
def mixed_precision(name: str, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    for attribute in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, attribute)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise coded_error(ValueError, "option.dtype-not-floating-point", name=name, field=attribute, got=dtype)
    override = is_a(Callable, "a callable (parameter) -> dtype or None, or None")
    override(f"{name}: param_dtype_override_fn", override_of(policy))
    return _only_obeyed(name, policy)


def override_of(policy: MixedPrecisionPolicy) -> Callable[[torch.nn.Parameter], torch.dtype | None] | None:
    """Return the function that overrides ``param_dtype`` for single parameters (torch 2.15); ``None`` if there is none."""
    return getattr(policy, "param_dtype_override_fn", None)


@partial(is_a, OffloadPolicy, "a CPUOffloadPolicy, OffloadPolicy or None", none=OffloadPolicy())
def offload(name: str, policy: OffloadPolicy) -> OffloadPolicy:
    if type(policy) is not OffloadPolicy and not isinstance(policy, CPUOffloadPolicy):
        raise coded_error(ValueError, "option.unknown-offload-policy", name=name, got=policy)
    return _only_obeyed(name, policy)


@partial(is_a, (int, float), "a positive number or None")
def factor(name: str, number: float) -> float:
    if not 0 < number < math.inf:
        raise coded_error(ValueError, "option.expected-positive-number", name=name, got=number)
    return float(number)


def parameters(name: str, value: Any) -> tuple[torch.nn.Parameter | str, ...]:
    """Accept an iterable of parameters and names of parameters."""
    expected = "parameters or their names"
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _wrong_type(name, expected, value)
    return tuple(is_a((torch.nn.Parameter, str), expected)(name, each) for each in value)


@partial(is_a, DeviceMesh, "a 1-D or 2-D torch.distributed.device_mesh.DeviceMesh or None")
def mesh(name: str, value: DeviceMesh) -> DeviceMesh:
    if value.ndim > 2:
        raise coded_error(ValueError, "option.wrong-mesh-dimensions", name=name, got=value.ndim)
    return value


@partial(is_a, (torch.device, str, int), "a torch.device, its name or None")
def device(name: str, value: Any) -> torch.device:
    try:
        found = torch.device(value)
    except RuntimeError as error:
        raise coded_error(ValueError, "option.invalid-device", name=name, got=value, error=error) from error
    if found.type == "meta":
        raise coded_error(ValueError, "option.meta-device-for-shards", name=name, got=found)
    return found


def leaves(name: str, value: Any) -> tuple[Any, ...]:
    """Accept "auto", or a sequence of names, classes, functions, and pairs of one of these with a function."""
    if value == "auto":
        return (value,)
    if isinstance(value, str | type) or not isinstance(value, Sequence):
        raise _wrong_type(name, "'auto', or a sequence such as ('model.layers.*.mlp',)", value)
    for each in value:
        match, like = each if isinstance(each, tuple) and len(each) == 2 else (each, None)
        if not (isinstance(match, str | type) or callable(match)) or not (like is None or callable(like)):
            raise _wrong_type(name, "names, classes or functions (name, module) -> bool", each)
    return tuple(value)
