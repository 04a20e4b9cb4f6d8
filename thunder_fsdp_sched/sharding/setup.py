"""Steps of sharding a module: which parameters, how their buckets travel, what is moved, allocated and filled."""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Callable

import torch
from thunder.core.module import ThunderModule
from torch.distributed.fsdp import CPUOffloadPolicy

from ..agreement.control import control_of
from ..compat import __version__
from ..options import Options, check_transport
from ..plan.plan import Plan
from ..plan.specs import BucketOptions, CommSpec, GroupKey, ParamSpec, Strided
from ..private_api import state_name
from ..runtime.bucket import Bucket, handle_name
from ..runtime.memory import Arena
from ..transports import TRANSPORTS, choose_transport
from ..transports.peer_memory import announce_all
from .devices import resolve_device
from .group_assignment import GroupAssignment
from .meta_init import initialize
from .value_source import ValueSource

__all__ = [
    "allocate_buckets",
    "broadcast",
    "ignored_names",
    "initialize_shards",
    "move_unsharded",
    "param_specs",
    "receiver",
    "comm_spec_of",
    "versions",
]


def versions() -> list[str]:
    others = [f"{name} {importlib.metadata.version(name)}" for name in ("lightning-thunder", "torch")]
    return [f"thunder_fsdp_sched {__version__}", *others]


def comm_spec_of(
    options: Options,
    assignment: GroupAssignment,
    name: str,
    params: tuple[ParamSpec, ...],
    group_key: GroupKey,
    own: BucketOptions,
) -> CommSpec:
    """Return how a bucket is sent according to the options, and raise an error if that is impossible."""
    first, ranks = params[0], assignment.ranks(group_key)
    asked, reason = options.transport, "asked for"
    if callable(asked):
        asked, reason = check_transport(asked(name, params)), "asked for by the callable"
    param_dtype, reduce_dtype = own.param_dtype, own.reduce_dtype
    dtypes = (param_dtype or first.dtype, reduce_dtype or param_dtype or first.dtype)
    if asked == "auto":
        itemsize = min(d.itemsize for d in (first.dtype, *dtypes))
        asked, reason = choose_transport(
            [p.shape for p in params], group_key.size, itemsize, ranks.group.backend_for(first.device)
        )
    transport = TRANSPORTS[asked]
    try:
        transport.check(first.device, dtypes, ranks)
    except ValueError as error:
        raise ValueError(f"{error} (bucket {name!r})") from error
    policy = options.offload_policy
    offload = isinstance(policy, CPUOffloadPolicy)
    if offload and transport.peers_read_shards:
        raise ValueError(
            f"transport={asked!r}: peers read shards in GPU memory, but offload_policy keeps them on the CPU "
            f"(bucket {name!r}); choose another transport"
        )
    if offload:
        reason += "; shards on the CPU"
    pin_memory = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and first.device.type == "cuda"
    return CommSpec(
        asked, reason, transport.per_param, transport.staging, param_dtype, reduce_dtype, offload, pin_memory
    )


def ignored_names(named: dict[str, torch.nn.Parameter], options: Options) -> set[str]:
    ignored = set()
    for wanted in options.ignored_params:
        matches = {
            n for n, p in named.items() if (wanted in (n, state_name(n)) if isinstance(wanted, str) else p is wanted)
        }
        if not matches:
            what = repr(wanted) if isinstance(wanted, str) else f"a parameter of shape {tuple(wanted.shape)}"
            raise ValueError(f"ignored_params: {what} is not a parameter of the module")
        ignored |= {n for n, p in named.items() if any(p is named[m] for m in matches)}
    return ignored


def param_specs(
    named: dict[str, torch.nn.Parameter], options: Options, source: ValueSource
) -> list[tuple[ParamSpec, torch.nn.Parameter]]:
    """Return a spec for each distinct parameter, with all its tied names, in the order of the module tree."""
    tied: dict[int, list[str]] = {}
    for name, param in named.items():
        if type(param) is not torch.nn.Parameter or param.layout is not torch.strided:
            raise TypeError(
                f"parameter {name!r} is a {type(param).__name__} with layout {param.layout}; only plain strided "
                f"parameters can be sharded. Convert it, or list it in ignored_params"
            )
        tied.setdefault(id(param), []).append(name)
    specs = []
    owners: dict[tuple[torch.device, int], str] = {}
    for names in tied.values():
        param = named[names[0]]
        if param.numel() and not param.is_meta:
            storage = (param.device, param.untyped_storage().data_ptr())
            other = owners.setdefault(storage, names[0])
            if other != names[0]:
                raise ValueError(
                    f"parameters {other!r} ({named[other].dtype}) and {names[0]!r} ({param.dtype}) share memory, but are "
                    f"two Parameter objects: their shards would drift apart. Tie them (assign the same Parameter to "
                    f"both names), or clone one"
                )
        own = getattr(param, "_thunder_device", source.device_of(names[0], param))
        device = options.device or resolve_device(torch.device(own))
        is_plain = param.is_contiguous() and param.storage_offset() == 0
        strided = None if is_plain else Strided(param.stride(), int(param.storage_offset()))
        spec = ParamSpec(tuple(names), tuple(param.shape), param.dtype, device, param.requires_grad, strided)
        specs.append((spec, param))
    return specs


def move_unsharded(
    model: ThunderModule, ignored: set[str], options: Options, source: ValueSource
) -> dict[str, torch.Tensor]:
    """Return ignored parameters and buffers on the requested device, with memory for those that are to be received."""
    moved: dict[str, torch.Tensor] = {}
    copies: dict[int, torch.Tensor] = {}  # a tensor with several names stays one tensor

    def move(name: str, tensor: torch.Tensor) -> torch.Tensor:
        device = options.device or source.device_of(name, tensor)
        if tensor.device == device or not source.has_value(name):
            return tensor
        if id(tensor) not in copies:
            copy = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
            is_param = isinstance(tensor, torch.nn.Parameter)
            copies[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if is_param else copy
        return copies[id(tensor)]

    for name, param in model.named_parameters(remove_duplicate=False):
        if name in ignored:
            moved[name] = move(name, param)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        moved[name] = move(name, buffer)
    return moved


def broadcast(
    tensor: torch.Tensor, group_key: GroupKey, via: torch.device | None, source: int, assignment: GroupAssignment
) -> None:
    """Broadcast a tensor over its ranks, from the given device if they cannot send it from its own."""
    with torch.no_grad(), control_of(assignment.world_group).doing("broadcast_from"):
        assignment.broadcast(tensor.detach(), source, group_key, via=via)


def receiver(
    specs: list[tuple[ParamSpec, torch.nn.Parameter]], source: ValueSource
) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return a function that gives a parameter's memory to receive it, which the next parameter reuses.

    Memory of its own would be freed too late: gloo refers to it for a while after the broadcast.
    """
    nbytes: dict[torch.device, int] = defaultdict(int)
    for spec, param in specs:
        if param.is_meta and source.has_value(spec.name):
            device = source.device_of(spec.name, param)
            nbytes[device] = max(nbytes[device], param.nbytes)
    buffers = {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in nbytes.items()}

    def receive(name: str, param: torch.Tensor) -> torch.Tensor:
        return buffers[source.device_of(name, param)][: param.nbytes].view(param.dtype).view(param.shape)

    return receive


def allocate_buckets(plan: Plan, assignment: GroupAssignment) -> list[Bucket]:
    arenas: dict[torch.device, Arena] = {}
    handles: set[str] = set()
    buckets = []
    peer_memory = announce_all((spec, assignment.ranks_of(spec)) for spec in plan)
    for spec in plan:
        handle = handle_name(spec.name)
        while handle in handles:
            handle += "_"
        handles.add(handle)
        arena = arenas.setdefault(spec.device, Arena(spec.device))
        transport = TRANSPORTS[spec.comm.transport]
        buckets.append(
            Bucket(
                spec,
                assignment.ranks_of(spec),
                transport,
                arena,
                handle,
                secondary_ranks=assignment.secondary_ranks_of(spec),
                peer_memory=peer_memory.get(spec.name),
            )
        )
    return buckets


def initialize_shards(
    module: torch.nn.Module,
    options: Options,
    assignment: GroupAssignment,
    locations: dict[str, tuple[Bucket, int]],
    moved: dict[str, torch.Tensor],
    source: ValueSource,
) -> None:
    """Initialize the shards, buffers and ignored parameters that have no values anywhere."""
    assert options.param_init_fn is not None and options.device is not None

    def take(name: str, tensor: torch.Tensor) -> None:
        bucket, index = locations.get(name, (None, 0))
        group_key = assignment.key(assignment.default_ranks if bucket is None else bucket.ranks)
        if options.broadcast_from is not None:
            broadcast(tensor, group_key, options.device, options.broadcast_from, assignment)
        if bucket is None:
            moved[name] = tensor
        else:
            with torch.no_grad():
                bucket.copy_in(index, tensor)

    initialize(module, options.param_init_fn, options.device, locations, take, keeps=source.has_value)
