"""The options of :func:`thunder_fsdp_sched.fsdp`, and their validation.

An option has one name everywhere: an argument of ``fsdp``, a field of :class:`Options`, and, if functions may decide it for
each module, a field of :class:`~thunder_fsdp_sched.plan.specs.BucketOptions`. There are no groups of options (memory,
accumulation, checks): each reader needs one or two options, never such a group, so a group would only add a second name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from thunder.distributed import FSDPBucketingStrategy, FSDPType
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from .ir.schedule import StepSchedule, load_schedules
from .plan.bucketing import BucketingStrategy, BucketRule
from .plan.specs import ParamSpec, ShardingStrategy
from .ranks.process_groups import ProcessGroupRef
from .runtime.accumulation import Way
from .sizes import parse_bytes
from .transports import TRANSPORTS

if TYPE_CHECKING:
    from .planning.clusters import ClusterSpec

Check = Callable[[str, Any], Any]
"""Takes the name of an option, for messages, and the user's argument; returns the value of the field."""

ByModule = Callable[[str, torch.nn.Module], Any]
"""A function of (module name, module) that decides an option for each module."""

#
# Kinds of options
#


def _is(types: Any, expected: str, then: Check = lambda name, value: value) -> Check:
    """Accept an instance of some types, or ``None`` if ``expected`` says so; ``then`` checks and converts it."""
    accepted = (types, type(None)) if expected.endswith("or None") else types

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, accepted):
            raise TypeError(f"{name}: expected {expected}, got {value!r} of type {type(value).__name__}")
        return then(name, value)

    return check


_flag = _is(bool, "a bool")


def _int(expected: str, *, words: tuple[str, ...] = (), least: tuple[int, str] | None = None) -> Check:
    """Accept an int, ``None`` or one of some words.

    Args:
        least: the smallest int, and the noun for what it counts.
    """

    def check(name: str, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value in words):
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected {expected}, got {value!r}")
        if least is not None and value < least[0]:
            raise ValueError(f"{name}: expected {least[0]} or more {least[1]}, got {value}")
        return value

    return check


def _one_of(*choices: str | None) -> Check:
    def check(name: str, value: Any) -> Any:
        if value not in choices:
            *first, last = map(repr, choices)
            raise ValueError(f"{name}: expected {', '.join(first)} or {last}, got {value!r}")
        return value

    return check


def _function(expected: str) -> Check:
    def check(name: str, value: Any) -> Any:
        if value is not None and not callable(value):
            raise TypeError(f"{name}: expected a callable {expected}, got {value!r}")
        return value

    return check


def _bytes(name: str, value: Any) -> int | None:
    return None if value is None else parse_bytes(name, value)


def _by_module(name: str, value: Any) -> Any:
    is_function = callable(value) and not isinstance(value, type)
    return value if is_function else CHECKS_BY_MODULE[name](name, value)


#
# Options that a function may decide for each module
#


def _named(value: Any, enum: type[Enum], known: tuple[str, ...]) -> Any:
    """Return which of some strings a user names, in any case or by a member of Thunder's enum; ``None`` if none."""
    text = value.name if isinstance(value, enum) else value
    return text.lower() if isinstance(text, str) and text.lower() in known else None


def _strategy(name: str, strategy: Any) -> ShardingStrategy:
    if known := _named(strategy, FSDPType, get_args(ShardingStrategy)):
        return known
    raise ValueError(f"{name}: expected 'zero2', 'zero3' or a thunder.distributed.FSDPType, got {strategy!r}")


def _floating_point(name: str, policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    policy = policy or MixedPrecisionPolicy()
    for attribute in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, attribute)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{name}: {attribute} must be a floating-point dtype, got {dtype}")
    return policy


def check_factor(name: str, factor: Any) -> float | None:
    """Return ``gradient_divide_factor`` as a float, or ``None``.

    Raises:
        TypeError, ValueError: it is neither a positive number nor ``None``.
    """
    if isinstance(factor, bool) or not isinstance(factor, (int, float, type(None))):
        raise TypeError(f"{name}: expected a positive number or None, got {factor!r}")
    if factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"{name}: expected a positive number or None, got {factor!r}")
    return None if factor is None else float(factor)


def _secondary_size(name: str, size: Any) -> int | None:
    if isinstance(size, bool):
        strategy = "zero3" if size else "zero2"
        raise TypeError(f"{name}: expected a number of ranks or None, got {size}; use sharding_strategy={strategy!r}")
    if isinstance(size, int) and size < 2:
        raise ValueError(
            f"{name}: expected a number of ranks or None, at least 2, got {size}; sharding_strategy='zero2' keeps whole "
            f"parameters"
        )
    return _int("a number of ranks or None")(name, size)


CHECKS_BY_MODULE: dict[str, Check] = {
    "sharding_strategy": _strategy,
    "mp_policy": _is(MixedPrecisionPolicy, "a MixedPrecisionPolicy or None", _floating_point),
    "gradient_divide_factor": check_factor,
    "reshard_after_forward": _secondary_size,
}
"""The checks of options that a function may decide for each module, also of what it returns."""


#
# Options that are like no other
#


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
    return tuple(load_schedules(schedule))


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


_CHECKS: dict[str, Check] = {
    "sharding_strategy": _by_module,
    "bucketing_strategy": _bucketing,
    "prefetch": _int("a number of buckets (int), 'auto' or None", words=("auto",), least=(0, "buckets")),
    "max_memory": _bytes,
    "max_unsharded_bytes": _bytes,
    "release": _one_of("never", "step", "bucket"),
    "reshard_after_forward": _by_module,
    "reshard_after_backward": _flag,
    "accumulate": _one_of(*get_args(Way), None),
    "max_gathers_in_flight": _int("a number of gathers (int) or None", least=(1, "gathers")),
    "cluster": _cluster,
    "schedule": _is((str, Path, StepSchedule), "a path to a saved schedule, a StepSchedule or None", _load),
    "transport": check_transport,
    "mp_policy": _by_module,
    "gradient_divide_factor": _by_module,
    "all_reduce_hook": _function("(bucket name, gradients) -> None, or None"),
    "offload_policy": _is(
        OffloadPolicy, "a CPUOffloadPolicy, OffloadPolicy or None", lambda _, p: p or OffloadPolicy()
    ),
    "process_group": _is(
        ProcessGroup, "a torch.distributed.ProcessGroup or None", lambda _, g: g and ProcessGroupRef.of(g)
    ),
    "mesh": _is(DeviceMesh, "a 1-D or 2-D torch.distributed.device_mesh.DeviceMesh or None", _one_or_two_dimensions),
    "process_group_for": _function("(parameter name, parameter) -> process group, mesh or None"),
    "separate_reduce_scatter_group": _flag,
    "device": _device,
    "param_init_fn": _function("that initializes a module"),
    "broadcast_from": _int("a global rank (int) or None"),
    "ignored_params": _ignored,
    "allow_different_computation": _flag,
    "allow_different_initialization": _flag,
    "audit": _flag,
    "trace_modules_once": _flag,
    "move_state_dict_to_cpu": _flag,
}

_NOT_COMPARED = {"process_group", "ignored_params"}
"""Options that refer to objects of this process. Ranks compare their effect instead."""


@dataclass(frozen=True)
class Options:
    """The validated options of one transform; :func:`thunder_fsdp_sched.fsdp` documents them."""

    sharding_strategy: ShardingStrategy | ByModule
    bucketing_strategy: BucketingStrategy | int | BucketRule
    prefetch: int | Literal["auto"]
    max_memory: int | None
    max_unsharded_bytes: int | None
    release: Literal["never", "step", "bucket"]
    reshard_after_forward: int | ByModule | None
    reshard_after_backward: bool
    accumulate: Way | None
    max_gathers_in_flight: int | None
    cluster: ClusterSpec | None
    schedule: tuple[StepSchedule, ...] | None
    transport: str | Callable[[str, tuple[ParamSpec, ...]], str]
    mp_policy: MixedPrecisionPolicy | ByModule
    gradient_divide_factor: float | ByModule | None
    all_reduce_hook: Callable[[str, torch.Tensor], None] | None
    offload_policy: OffloadPolicy
    process_group: ProcessGroupRef | None
    mesh: DeviceMesh | None
    process_group_for: Callable[[str, torch.nn.Parameter], Any] | None
    separate_reduce_scatter_group: bool
    device: torch.device | None
    param_init_fn: Callable[[torch.nn.Module], Any] | None
    broadcast_from: int | None
    ignored_params: tuple[torch.nn.Parameter | str, ...]
    allow_different_computation: bool
    allow_different_initialization: bool
    audit: bool
    trace_modules_once: bool
    move_state_dict_to_cpu: bool

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
        for name in ("max_memory", "max_unsharded_bytes") if self.release == "bucket" else ():
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}: cannot be combined with release='bucket', because it plans slots that share memory; use "
                    f"release='step' or 'never'"
                )

    @property
    def needs_search(self) -> bool:
        """Whether the planner chooses settings: the prefetch distance, or what keeps a limit on memory."""
        return self.prefetch == "auto" or (self.max_memory, self.max_unsharded_bytes) != (None, None)

    def lines(self) -> list[str]:
        """Return one line for each option that must be the same on all ranks."""
        compared = [name for name in _CHECKS if name not in _NOT_COMPARED]
        return [f"fsdp({name}={_comparable(getattr(self, name))})" for name in compared]

    def __str__(self) -> str:
        shown = ("sharding_strategy", "bucketing_strategy", "prefetch", "transport")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)


def _comparable(value: Any) -> str:
    """Return a string that is equal on all ranks if the option is."""
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, DeviceMesh):
        return f"mesh of {tuple(value.shape)} ranks, dimensions {value.mesh_dim_names}"
    if isinstance(value, tuple):  # schedules
        return str([(step.forward.compute, step.backward and step.backward.compute) for step in value])
    if callable(value) and not isinstance(value, type):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return str(value)


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
    assert arguments.keys() == _CHECKS.keys(), arguments.keys() ^ _CHECKS.keys()
    return Options(**{name: check(name, arguments[name]) for name, check in _CHECKS.items()})
