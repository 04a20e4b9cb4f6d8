"""The options of :func:`thunder_fsdp_sched.fsdp`, and their validation.

An option has one name everywhere: an argument of ``fsdp``, a field of :class:`Options`, and, if functions may decide it for
each module, a field of :class:`~thunder_fsdp_sched.plan.specs.BucketOptions`. There are no groups of options (memory,
accumulation, checks): each reader needs one or two options, never such a group, so a group would only add a second name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from thunder.distributed import FSDPBucketingStrategy, FSDPType
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .extensions import load
from .ir.schedule import StepSchedule
from .plan.bucketing import BucketingStrategy, BucketRule
from .plan.specs import BucketOptions, Encoding, ParamSpec, ShardingStrategy
from .ranks.messages import remark
from .ranks.process_groups import ProcessGroupRef
from .runtime.accumulation import AccumulationMode
from .sizes import parse_bytes
from .transports import TRANSPORTS

if TYPE_CHECKING:
    from .planning.clusters import ClusterSpec

Check = Callable[[str, Any], Any]
"""Takes the name of an option, for messages, and the user's argument; returns the value of the field."""

ByModule = Callable[[str, torch.nn.Module], Any]
"""A function of (module name, module) that decides an option for each module."""

#
# Checks
#


def _is(types: Any, expected: str, then: Check = lambda name, value: value, *, words: tuple[str, ...] = ()) -> Check:
    """Accept an instance of some types, ``None`` if ``expected`` says so, or a word; ``then`` checks and converts it."""
    accepted = (types, type(None)) if expected.endswith("or None") else types

    def check(name: str, value: Any) -> Any:
        if isinstance(value, str) and value in words:
            return value
        if not isinstance(value, accepted) or (isinstance(value, bool) and types is not bool):
            raise TypeError(f"{name}: expected {expected}, got {value!r} of type {type(value).__name__}")
        return then(name, value)

    return check


_flag = _is(bool, "a bool")


def _at_least(least: int, what: str) -> Check:
    def check(name: str, value: int | None) -> int | None:
        if value is not None and value < least:
            raise ValueError(f"{name}: expected {least} or more {what}, got {value}")
        return value

    return check


def _one_of(*choices: str | None) -> Check:
    def check(name: str, value: Any) -> Any:
        if value not in choices:
            *first, last = map(repr, choices)
            raise ValueError(f"{name}: expected {', '.join(first)} or {last}, got {value!r}")
        return value

    return check


def _bytes(name: str, value: Any) -> int | None:
    return None if value is None else parse_bytes(name, value)


def _named(value: Any, enum: type[Enum], known: tuple[str, ...]) -> Any:
    """Return which of some strings a user names, in any case or by a member of Thunder's enum; ``None`` if none."""
    text = value.name if isinstance(value, enum) else value
    return text.lower() if isinstance(text, str) and text.lower() in known else None


def _strategy(name: str, strategy: Any) -> ShardingStrategy:
    if known := _named(strategy, FSDPType, get_args(ShardingStrategy)):
        return known
    raise ValueError(f"{name}: expected 'zero2', 'zero3' or a thunder.distributed.FSDPType, got {strategy!r}")


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
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{name}: {attribute} must be a floating-point dtype, got {dtype}")
    override = override_of(policy)
    if override is not None and not callable(override):
        raise TypeError(
            f"{name}: param_dtype_override_fn: expected a callable (parameter) -> dtype or None, or None, got {override!r}"
        )
    return policy


def _encoding(name: str, policy: Any) -> Encoding | None:
    if policy is None:
        return None
    checked: Encoding = _is(load("encoding.policy:CommPolicy"), "a CommPolicy or None")(name, policy)
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


check_factor = _is((int, float), "a positive number or None", _positive)
"""The check of ``gradient_divide_factor``."""


def _secondary_size(name: str, size: Any) -> int | None:
    if isinstance(size, bool):
        strategy = "zero3" if size else "zero2"
        raise TypeError(f"{name}: expected a number of ranks or None, got {size}; use sharding_strategy={strategy!r}")
    if isinstance(size, int) and size < 2:
        raise ValueError(
            f"{name}: expected a number of ranks or None, at least 2, got {size}; sharding_strategy='zero2' keeps whole "
            f"parameters"
        )
    return _is(int, "a number of ranks or None")(name, size)


def _bucketing(name: str, strategy: Any) -> BucketingStrategy | int | BucketRule:
    if isinstance(strategy, bool):
        raise TypeError(f"{name}: expected a strategy, a size in bytes or a callable, got {strategy!r}")
    if isinstance(strategy, int):
        if strategy <= 0:
            raise ValueError(f"{name}: a size in bytes must be positive, got {strategy}")
        return strategy
    if known := _named(strategy, FSDPBucketingStrategy, get_args(BucketingStrategy)):
        return known
    if isinstance(strategy, str) and re.match(r"\s*[-+.\d]", strategy):
        return parse_bytes(name, strategy)
    if callable(strategy):
        return strategy
    raise ValueError(
        f"{name}: expected 'none', 'layer', 'block', a thunder.distributed.FSDPBucketingStrategy, a size in "
        f"bytes (an int, or a string such as '25MB') or a callable (name, parameter) -> bucket name, got {strategy!r}"
    )


def check_transport(name: str, transport: Any) -> Any:
    """Return ``transport`` if it is a callable or the name of a transport; raise ValueError otherwise."""
    if callable(transport) or (isinstance(transport, str) and (transport == "auto" or transport in TRANSPORTS)):
        return transport
    raise ValueError(
        f"{name}: expected 'auto', one of {sorted(TRANSPORTS)}, or a callable (bucket name, parameters) -> one of these, "
        f"got {transport!r}"
    )


def _load(name: str, schedule: Any) -> tuple[StepSchedule, ...] | None:
    if schedule is None:
        return None
    if isinstance(schedule, StepSchedule):
        return (schedule,)
    if not Path(schedule).is_file():
        raise ValueError(f"{name}: there is no file {str(schedule)!r}; transform.save_schedules(path) writes one")
    return tuple(load("ir.schedule_files:load_schedules")(schedule))


def _ignored(name: str, params: Any) -> tuple[torch.nn.Parameter | str, ...]:
    if isinstance(params, str) or not isinstance(params, (Iterable, type(None))):
        raise TypeError(f"{name}: expected parameters or their names, got {type(params).__name__}")
    check = _is((torch.nn.Parameter, str), "parameters or their names")
    return tuple(check(name, param) for param in (() if params is None else params))


def _cluster(name: str, cluster: Any) -> ClusterSpec | None:
    if cluster is None:
        return None
    from .planning.clusters import cluster as cluster_by_name  # here, because a default step needs no planner

    return cluster_by_name(cluster)


def _one_or_two_dimensions(name: str, mesh: DeviceMesh | None) -> DeviceMesh | None:
    if mesh is not None and mesh.ndim > 2:
        raise ValueError(
            f"{name}: expected one dimension (to shard over) or two (to replicate and to shard over), got {mesh.ndim}; pass "
            f"only those, mesh['name'] or mesh['replicate', 'shard']"
        )
    return mesh


def _device(name: str, device: Any) -> torch.device | None:
    if isinstance(device, (str, int)):
        device = torch.device(device)
    return _is(torch.device, "a torch.device, its name or None")(name, device)


def _option(check: Check, *, compared: bool = True, captured: bool = False) -> Any:
    """Return the field of an option.

    Args:
        compared: whether ranks compare it. What refers to objects of this process is compared by its effect instead.
        captured: whether they also compare what a function captures; otherwise they compare its answers.
    """
    return field(metadata={"check": check, "compared": compared, "captured": captured})


@dataclass(frozen=True)
class Options:
    """The validated options of one transform; :func:`thunder_fsdp_sched.fsdp` documents them."""

    sharding_strategy: ShardingStrategy | ByModule = _option(_strategy)
    bucketing_strategy: BucketingStrategy | int | BucketRule = _option(_bucketing)
    prefetch: int | Literal["auto"] = _option(
        _is(int, "a number of buckets (int), 'auto' or None", _at_least(0, "buckets"), words=("auto",))
    )
    max_memory: int | None = _option(_bytes)
    max_unsharded_bytes: int | None = _option(_bytes)
    release: Literal["never", "step"] = _option(_one_of("never", "step"))
    reshard_after_forward: int | ByModule | None = _option(_secondary_size)
    reshard_after_backward: bool = _option(_flag)
    accumulate: AccumulationMode | None = _option(_one_of(*get_args(AccumulationMode), None))
    max_gathers_in_flight: int | None = _option(_is(int, "a number of gathers (int) or None", _at_least(1, "gathers")))
    cluster: ClusterSpec | None = _option(_cluster)
    schedule: tuple[StepSchedule, ...] | None = _option(
        _is((str, Path, StepSchedule), "a path to a saved schedule, a StepSchedule or None", _load)
    )
    transport: str | Callable[[str, tuple[ParamSpec, ...]], str] = _option(check_transport)
    mp_policy: MixedPrecisionPolicy | ByModule = _option(
        _is(MixedPrecisionPolicy, "a MixedPrecisionPolicy or None", _mixed_precision)
    )
    comm_policy: Encoding | ByModule | None = _option(_encoding)
    gradient_divide_factor: float | ByModule | None = _option(check_factor)
    all_reduce_hook: Callable[[str, torch.Tensor], None] | None = _option(
        _is(Callable, "a callable (bucket name, gradients) -> None, or None"), captured=True
    )
    offload_policy: OffloadPolicy = _option(_is(OffloadPolicy, "a CPUOffloadPolicy, OffloadPolicy or None", _offload))
    process_group: ProcessGroupRef | None = _option(
        _is(ProcessGroup, "a torch.distributed.ProcessGroup or None", lambda _, g: g and ProcessGroupRef.of(g)),
        compared=False,
    )
    mesh: DeviceMesh | None = _option(
        _is(DeviceMesh, "a 1-D or 2-D torch.distributed.device_mesh.DeviceMesh or None", _one_or_two_dimensions)
    )
    process_group_for: Callable[[str, torch.nn.Parameter], Any] | None = _option(
        _is(Callable, "a callable (parameter name, parameter) -> process group, mesh or None")
    )
    separate_reduce_scatter_group: bool = _option(_flag)
    device: torch.device | None = _option(_device)
    param_init_fn: Callable[[torch.nn.Module], Any] | None = _option(
        _is(Callable, "a callable that initializes a module, or None")
    )
    broadcast_from: int | None = _option(_is(int, "a global rank (int) or None"))
    ignored_params: tuple[torch.nn.Parameter | str, ...] = _option(_ignored, compared=False)
    allow_different_computation: bool = _option(_flag)
    allow_different_initialization: bool = _option(_flag)
    audit: bool = _option(_flag)
    trace_modules_once: bool = _option(_flag)

    def __post_init__(self) -> None:
        if self.mesh is not None and self.process_group is not None:
            raise ValueError("mesh and process_group: pass one of them, not both")
        if self.param_init_fn is not None and self.device is None:
            raise ValueError(
                "param_init_fn: also pass device=..., on which to create the parameters of a module on the meta device"
            )
        if self.sharding_strategy == "zero2" and self.reshard_after_forward is not None:
            raise ValueError(
                "reshard_after_forward: sharding_strategy='zero2' keeps whole parameters until backward; use 'zero3', or a "
                "function of (module name, module) that returns 'zero3' for some modules"
            )
        if self.sharding_strategy == "zero2" and self.max_unsharded_bytes is not None:
            raise ValueError(
                "max_unsharded_bytes: sharding_strategy='zero2' keeps every bucket unsharded, so there is nothing to "
                "choose; use 'zero3', which keeps buckets that fit"
            )

    @property
    def needs_search(self) -> bool:
        """Whether the planner chooses settings: the prefetch distance, or what keeps a limit on memory."""
        return self.prefetch == "auto" or (self.max_memory, self.max_unsharded_bytes) != (None, None)

    def lines(self) -> list[str]:
        """Return one line for each option that must be the same on all ranks."""
        compared = [option for option in fields(self) if option.metadata["compared"]]
        return [
            f"fsdp({option.name}={_comparable(getattr(self, option.name), option.metadata['captured'])})"
            for option in compared
        ]

    def __str__(self) -> str:
        shown = ("sharding_strategy", "bucketing_strategy", "prefetch", "transport")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)


CHECKS: dict[str, Check] = {option.name: option.metadata["check"] for option in fields(Options)}

BY_MODULE = tuple(option.name for option in fields(BucketOptions))
"""The options that a function may decide for each module; their checks also check what it returns."""


def _comparable(value: Any, captured: bool) -> str:
    """Return a string that is equal on all ranks if the option is.

    Args:
        captured: see :func:`_option`.
    """
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, DeviceMesh):
        return f"mesh of {tuple(value.shape)} ranks, dimensions {value.mesh_dim_names}"
    if isinstance(value, tuple):  # schedules
        return str([(step.forward.compute, step.backward and step.backward.compute) for step in value])
    if isinstance(value, (MixedPrecisionPolicy, OffloadPolicy)):
        of_fields = [f"{f.name}={_comparable(getattr(value, f.name), captured)}" for f in fields(value)]
        return f"{type(value).__name__}({', '.join(of_fields)})"
    if not callable(value):
        return str(value)
    from .callables import describe, place_of  # here, because most options are no functions

    return describe(value, captured=captured) + remark(place_of(value))


def check_options(*positional: Any, **arguments: Any) -> Options:
    """Validate the arguments of :func:`thunder_fsdp_sched.fsdp`, all of which must be given, and return them as options.

    Raises:
        TypeError: an argument has the wrong type or is positional.
        ValueError: an argument has an unsupported value, or conflicts with another.
    """
    if positional and isinstance(positional[0], torch.nn.Module):
        raise TypeError(
            "fsdp: the model is not an argument of fsdp(...), which only makes a transform. Pass the model to thunder.jit: "
            "model = thunder.jit(model, transforms=[fsdp(...)])"
        )
    if positional:
        raise TypeError(
            f"fsdp: takes no positional arguments, got {positional[0]!r}; give each option by its name, such as "
            f"fsdp(sharding_strategy='zero2')"
        )
    if arguments["prefetch"] is None:
        arguments["prefetch"] = 1 if arguments["max_memory"] is None else "auto"
    for name, value in arguments.items():
        is_decided_by_module = name in BY_MODULE and callable(value) and not isinstance(value, type)
        arguments[name] = value if is_decided_by_module else CHECKS[name](name, value)
    return Options(**arguments)
