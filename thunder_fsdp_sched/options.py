"""The options of :func:`thunder_fsdp_sched.fsdp`, and their validation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from thunder.distributed import FSDPBucketingStrategy
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from .ir.schedule import StepSchedule, load_schedules
from .module_options import check_factor, check_precision, check_secondary_size, check_strategy
from .plan.bucketing import BucketingStrategy
from .plan.specs import ParamSpec
from .ranks.process_groups import ProcessGroupRef
from .runtime.accumulation import Way
from .sizes import parse_bytes
from .transports import TRANSPORTS

if TYPE_CHECKING:
    from .planning.clusters import ClusterSpec

_BUCKETINGS = {
    **{s.value: s for s in BucketingStrategy},
    FSDPBucketingStrategy.NONE: BucketingStrategy.NONE,
    FSDPBucketingStrategy.LAYER: BucketingStrategy.LAYER,
    FSDPBucketingStrategy.BLOCK: BucketingStrategy.BLOCK,
}


def check_transport(transport: Any) -> Any:
    """Return ``transport`` if it is a callable or the name of a transport; raise ValueError otherwise."""
    if callable(transport) or (isinstance(transport, str) and (transport == "auto" or transport in TRANSPORTS)):
        return transport
    raise ValueError(
        f"transport: expected 'auto', one of {sorted(TRANSPORTS)}, or a callable (bucket name, parameters) -> one of these, "
        f"got {transport!r}"
    )


def _precision(policy: Any) -> MixedPrecisionPolicy | Callable[[str, torch.nn.Module], MixedPrecisionPolicy | None]:
    return policy if callable(policy) and not isinstance(policy, type) else check_precision(policy)


def _bucketing(strategy: Any) -> BucketingStrategy | int | Callable[[str, torch.nn.Parameter], str]:
    if isinstance(strategy, bool):
        raise TypeError(f"bucketing_strategy: expected a strategy, a size in bytes or a callable, got {strategy!r}")
    if isinstance(strategy, int):
        if strategy <= 0:
            raise ValueError(f"bucketing_strategy: a size in bytes must be positive, got {strategy}")
        return strategy
    if isinstance(strategy, BucketingStrategy):
        return strategy
    key = strategy.lower() if isinstance(strategy, str) else strategy
    if isinstance(key, (str, FSDPBucketingStrategy)):
        if key in _BUCKETINGS:
            return _BUCKETINGS[key]
        if isinstance(key, str) and re.match(r"\s*[-+.\d]", key):
            return parse_bytes("bucketing_strategy", strategy)
    elif callable(strategy):
        return strategy
    raise ValueError(
        f"bucketing_strategy: expected 'none', 'layer', 'block', a thunder.distributed.FSDPBucketingStrategy, a size in "
        f"bytes (an int, or a string such as '25MB') or a callable (name, parameter) -> bucket name, got {strategy!r}"
    )


def _bytes(name: str) -> Callable[[Any], int | None]:
    return lambda value: None if value is None else parse_bytes(name, value)


def _schedule(schedule: Any) -> tuple[StepSchedule, ...] | None:
    if schedule is None:
        return None
    if isinstance(schedule, StepSchedule):
        return (schedule,)
    _check_type("schedule", schedule, (str, Path), "a path to a saved schedule, a StepSchedule or None")
    if not Path(schedule).is_file():
        raise ValueError(f"schedule: there is no file {str(schedule)!r}; transform.save_schedules(path) writes one")
    return tuple(load_schedules(schedule))


def _ignored(params: Any) -> tuple[torch.nn.Parameter | str, ...]:
    if params is None:
        return ()
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise TypeError(f"ignored_params: expected parameters or their names, got {type(params).__name__}")
    params = tuple(params)
    for param in params:
        _check_type("ignored_params", param, (torch.nn.Parameter, str), "parameters or their names")
    return params


def _check_type(name: str, value: Any, types: Any, expected: str) -> None:
    if not isinstance(value, types):
        raise TypeError(f"{name}: expected {expected}, got {value!r} of type {type(value).__name__}")


def _factor(factor: Any) -> float | Callable[[str, torch.nn.Module], float | None] | None:
    return factor if callable(factor) and not isinstance(factor, type) else check_factor(factor)


def _hook(hook: Any) -> Callable[[str, torch.Tensor], None] | None:
    if hook is not None and not callable(hook):
        raise TypeError(f"all_reduce_hook: expected a callable (bucket name, gradients) -> None, or None, got {hook!r}")
    return hook


def _reshard(strategy: Any) -> bool | Callable[[str, torch.nn.Module], Any]:
    return strategy if callable(strategy) and not isinstance(strategy, type) else check_strategy(strategy)


def _prefetch(prefetch: Any) -> int | Literal["auto"]:
    if prefetch != "auto" and (isinstance(prefetch, bool) or not isinstance(prefetch, int)):
        raise TypeError(f"prefetch: expected a number of buckets (int), 'auto' or None, got {prefetch!r}")
    if prefetch != "auto" and prefetch < 0:
        raise ValueError(f"prefetch: expected 0 or more buckets, got {prefetch}")
    return prefetch


def _in_flight(number: Any) -> int | None:
    if isinstance(number, bool) or not isinstance(number, (int, type(None))):
        raise TypeError(f"max_gathers_in_flight: expected a number of gathers (int) or None, got {number!r}")
    if number is not None and number < 1:
        raise ValueError(f"max_gathers_in_flight: expected 1 or more gathers, got {number}")
    return number


def _cluster(cluster: Any) -> ClusterSpec | None:
    if cluster is None:
        return None
    from .planning.clusters import cluster as cluster_by_name  # here, because a default step needs no planner

    return cluster_by_name(cluster)


def _offload(policy: Any) -> OffloadPolicy:
    expected = "a CPUOffloadPolicy, OffloadPolicy or None"
    _check_type("offload_policy", policy, (OffloadPolicy, type(None)), expected)
    return policy or OffloadPolicy()


def _process_group(group: Any) -> ProcessGroupRef | None:
    _check_type("process_group", group, (ProcessGroup, type(None)), "a torch.distributed.ProcessGroup or None")
    return None if group is None else ProcessGroupRef.of(group)


def _mesh(mesh: Any) -> DeviceMesh | None:
    _check_type("mesh", mesh, (DeviceMesh, type(None)), "a 1-D or 2-D torch.distributed.device_mesh.DeviceMesh or None")
    if mesh is not None and mesh.ndim > 2:
        raise ValueError(
            f"mesh: expected one dimension (to shard over) or two (to replicate and to shard over), got {mesh.ndim}; pass "
            f"only those, mesh['name'] or mesh['replicate', 'shard']"
        )
    return mesh


def _group_for(choose: Any) -> Callable[[str, torch.nn.Parameter], Any] | None:
    if choose is not None and not callable(choose):
        raise TypeError(
            f"process_group_for: expected a callable (parameter name, parameter) -> process group, mesh or None, got "
            f"{choose!r}"
        )
    return choose


def _device(device: Any) -> torch.device | None:
    if isinstance(device, (str, int)):
        device = torch.device(device)
    _check_type("device", device, (torch.device, type(None)), "a torch.device, its name or None")
    return device


def _init_fn(initialize: Any) -> Callable[[torch.nn.Module], Any] | None:
    if initialize is not None and not callable(initialize):
        raise TypeError(f"param_init_fn: expected a callable that initializes a module, got {initialize!r}")
    return initialize


def _global_rank(rank: Any) -> int | None:
    if isinstance(rank, bool) or not isinstance(rank, (int, type(None))):
        raise TypeError(f"broadcast_from: expected a global rank (int) or None, got {rank!r}")
    return rank


def _flag(name: str) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        _check_type(name, value, bool, "a bool")
        return value

    return check


def _comparable(value: Any) -> str:
    """Return a string that is equal on all ranks if the option is."""
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, DeviceMesh):
        return f"mesh of {tuple(value.shape)} ranks, dimensions {value.mesh_dim_names}"
    if isinstance(value, tuple):  # schedules
        return f"{[_comparable(v) for v in value]}"
    if isinstance(value, StepSchedule):
        return f"{value.forward.compute} {value.backward.compute if value.backward else None}"
    if callable(value) and not isinstance(value, type):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return str(value)


def _secondary_size(size: Any) -> int | Callable[[str, torch.nn.Module], int | None] | None:
    return size if callable(size) and not isinstance(size, type) else check_secondary_size(size)


def _release(when: Any) -> Literal["never", "step", "bucket"]:
    if when not in ("never", "step", "bucket"):
        raise ValueError(f"release: expected 'never', 'step' or 'bucket', got {when!r}")
    return when


def _accumulate(how: Any) -> Way | None:
    if how not in (None, *get_args(Way)):
        raise ValueError(f"accumulate: expected 'unsharded', 'sharded' or None, got {how!r}")
    return how


def _by(
    check: Callable[[Any], Any], argument: str = "", *, label: str = "", is_compared: bool = True
) -> dict[str, Any]:
    """Return how an option is made of a user's argument.

    Args:
        check: validates and converts the user's argument.
        argument: name of the argument, if it is not that of the field.
        label: its name in messages, if it is not that of the argument.
        is_compared: whether it must be the same on all ranks. Options that refer to objects of this process are not
            compared; ranks compare their effect instead.
    """
    return {"check": check, "argument": argument, "label": label, "is_compared": is_compared}


@dataclass(frozen=True)
class Options:
    """The validated options of one transform, each with its validation; :func:`thunder_fsdp_sched.fsdp` documents them."""

    reshard_after_forward: bool | Callable[[str, torch.nn.Module], Any] = field(
        metadata=_by(_reshard, "sharding_strategy", label="zero3")
    )
    bucketing: BucketingStrategy | int | Callable[[str, torch.nn.Parameter], str] = field(
        metadata=_by(_bucketing, "bucketing_strategy")
    )
    prefetch: int | Literal["auto"] = field(metadata=_by(_prefetch))
    max_memory: int | None = field(metadata=_by(_bytes("max_memory")))
    max_unsharded_bytes: int | None = field(metadata=_by(_bytes("max_unsharded_bytes")))
    release: Literal["never", "step", "bucket"] = field(metadata=_by(_release))
    secondary_size: int | Callable[[str, torch.nn.Module], int | None] | None = field(
        metadata=_by(_secondary_size, "reshard_after_forward")
    )
    reshard_after_backward: bool = field(metadata=_by(_flag("reshard_after_backward")))
    accumulate: Way | None = field(metadata=_by(_accumulate))
    max_gathers_in_flight: int | None = field(metadata=_by(_in_flight))
    cluster: ClusterSpec | None = field(metadata=_by(_cluster))
    schedule: tuple[StepSchedule, ...] | None = field(metadata=_by(_schedule))
    transport: str | Callable[[str, tuple[ParamSpec, ...]], str] = field(metadata=_by(check_transport))
    mp_policy: MixedPrecisionPolicy | Callable[[str, torch.nn.Module], MixedPrecisionPolicy | None] = field(
        metadata=_by(_precision)
    )
    gradient_divide_factor: float | Callable[[str, torch.nn.Module], float | None] | None = field(metadata=_by(_factor))
    all_reduce_hook: Callable[[str, torch.Tensor], None] | None = field(metadata=_by(_hook))
    offload_policy: OffloadPolicy = field(metadata=_by(_offload))
    process_group: ProcessGroupRef | None = field(metadata=_by(_process_group, is_compared=False))
    mesh: DeviceMesh | None = field(metadata=_by(_mesh))
    process_group_for: Callable[[str, torch.nn.Parameter], Any] | None = field(metadata=_by(_group_for))
    separate_reduce_scatter_group: bool = field(metadata=_by(_flag("separate_reduce_scatter_group")))
    device: torch.device | None = field(metadata=_by(_device))
    param_init_fn: Callable[[torch.nn.Module], Any] | None = field(metadata=_by(_init_fn))
    broadcast_from: int | None = field(metadata=_by(_global_rank))
    ignored_params: tuple[torch.nn.Parameter | str, ...] = field(metadata=_by(_ignored, is_compared=False))
    allow_different_computation: bool = field(metadata=_by(_flag("allow_different_computation")))
    allow_different_initialization: bool = field(metadata=_by(_flag("allow_different_initialization")))
    audit: bool = field(metadata=_by(_flag("audit")))
    trace_modules_once: bool = field(metadata=_by(_flag("trace_modules_once")))
    move_state_dict_to_cpu: bool = field(metadata=_by(_flag("move_state_dict_to_cpu")))

    def __post_init__(self) -> None:
        if self.mesh is not None and self.process_group is not None:
            raise ValueError("mesh and process_group: pass one of them, not both")
        if self.param_init_fn is not None and self.device is None:
            raise ValueError(
                "param_init_fn: also pass device=..., on which to create the parameters of a module on the meta device"
            )
        if self.secondary_size is not None and not self.reshard_after_forward:
            raise ValueError(
                "reshard_after_forward: sharding_strategy='zero2' keeps whole parameters until backward; use 'zero3', or a "
                "function of (module name, module) that returns 'zero3' for some modules"
            )
        if self.max_unsharded_bytes is not None and not self.reshard_after_forward:
            raise ValueError(
                "max_unsharded_bytes: sharding_strategy='zero2' keeps every bucket unsharded, so there is nothing to "
                "choose; use 'zero3', which keeps buckets that fit"
            )

        limits = (("max_memory", self.max_memory), ("max_unsharded_bytes", self.max_unsharded_bytes))
        for name, limit in limits if self.release == "bucket" else ():
            if limit is not None:
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
        return [
            f"fsdp({f.metadata['label'] or f.metadata['argument'] or f.name}={_comparable(getattr(self, f.name))})"
            for f in fields(self)
            if f.metadata["is_compared"]
        ]

    def __str__(self) -> str:
        strategy = self.reshard_after_forward if callable(self.reshard_after_forward) else "zero3"
        strategy = strategy if self.reshard_after_forward else "zero2"
        bucketing = self.bucketing.value if isinstance(self.bucketing, BucketingStrategy) else self.bucketing
        return (
            f"sharding_strategy={strategy!r}, bucketing_strategy={bucketing!r}, prefetch={self.prefetch}, "
            f"transport={self.transport!r}"
        )


def refuse_positional(arguments: tuple[Any, ...]) -> None:
    """Raise TypeError if there are positional arguments; with advice if the first is a module."""
    if arguments and isinstance(arguments[0], torch.nn.Module):
        raise TypeError(
            "fsdp: the model is not an argument of fsdp(...), which only makes a transform. Pass the model to thunder.jit: "
            "model = thunder.jit(model, transforms=[fsdp(...)])"
        )
    if arguments:
        raise TypeError(
            f"fsdp: takes no positional arguments, got {arguments[0]!r}; give each option by its name, such as "
            f"fsdp(sharding_strategy='zero2')"
        )


def check_options(**arguments: Any) -> Options:
    """Validate the arguments of :func:`thunder_fsdp_sched.fsdp`, all of which must be given, and return them as options.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has an unsupported value, or conflicts with another.
    """
    if arguments["prefetch"] is None:
        arguments["prefetch"] = 1 if arguments["max_memory"] is None else "auto"
    checked = {f.name: f.metadata["check"](arguments.pop(f.metadata["argument"] or f.name)) for f in fields(Options)}
    assert not arguments, f"no field of Options declares {sorted(arguments)}"
    return Options(**checked)
