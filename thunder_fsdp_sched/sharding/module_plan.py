"""Plan the buckets of a module: which parameters, over which ranks, and how they travel. It changes nothing."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from thunder.core.module import ThunderModule
from torch.distributed.fsdp import CPUOffloadPolicy

from ..options import Options, check_transport
from ..plan.bucketing import make_plan
from ..plan.plan import Plan
from ..plan.specs import BucketOptions, CommSpec, GroupKey, ParamSpec, Strided
from ..private_torch import state_name
from ..ranks.assignment import GroupAssignment, check_source
from ..ranks.control import Control
from ..ranks.process_groups import Ranks
from ..transports import TRANSPORTS, choose_transport
from .initial_values import ValueSource, check_initial_values, resolve_device
from .module_parameters import find_owner
from .module_policies import ModulePolicies
from .refusals import refuse_renamed, refuse_reparametrized, refuse_shards_and_grads, refuse_views


class PlannedParam(NamedTuple):
    """A parameter to shard.

    Attributes:
        param: the jitted module's object. Another transform may have created it.
        own: the original module's object; ``param`` if that has none.
        ranks: the ranks that share it.
    """

    spec: ParamSpec
    param: torch.nn.Parameter
    own: torch.nn.Parameter
    ranks: Ranks


class PlannedModule(NamedTuple):
    """The result of planning.

    Attributes:
        moved: ignored parameters and buffers on their new device, which are not filled yet if they were on meta.
    """

    params: list[PlannedParam]
    moved: dict[str, torch.Tensor]
    policies: ModulePolicies
    plan: Plan


def plan_module(
    model: ThunderModule, options: Options, assignment: GroupAssignment, source: ValueSource
) -> PlannedModule:
    """Check that this rank can shard the module, and plan its buckets."""
    module = model._model
    named = dict(model.named_parameters(remove_duplicate=False))
    default_key = assignment.key(assignment.default_ranks)
    refuse_renamed(module)
    refuse_shards_and_grads(named)
    refuse_reparametrized(module)
    ignored = _ignored_names(named, options)
    specs = _param_specs({n: p for n, p in named.items() if n not in ignored}, options, source)
    source.check({spec.name for spec, _ in specs}, initializes=options.param_init_fn is not None)
    refuse_views(model, named, ignored, options)
    moved = _move_unsharded(model, ignored, options, source)
    params = [
        PlannedParam(spec, param, _module_param(module, spec.name, param), assignment.of(spec.name, param))
        for spec, param in specs
    ]
    policies = ModulePolicies(module, options)
    for spec, _, _, ranks in params:
        for group in ranks.groups:
            group.check_sends(spec.device, f"parameter {spec.name!r}")
    if source.rank is not None:
        for ranks in (assignment.default_ranks, *(param.ranks for param in params)):
            check_source(source.rank, ranks)
    plan = make_plan(
        module,
        specs,
        strategy=options.bucketing_strategy,
        world_size=default_key.size,
        group=default_key.group,
        options={spec.name: policies.of(spec) for spec, _ in specs},
        group_keys={param.spec.name: assignment.key(param.ranks) for param in params},
        comm_spec=partial(_comm_spec, options, assignment),
    )
    return PlannedModule(params, moved, policies, plan)


def compare_plans(planned: PlannedModule, options: Options, control: Control, source: ValueSource) -> None:
    """Check that all ranks have planned the same, and have the same values unless one of them broadcasts its own."""
    bucket_of = {param.name: bucket for bucket in planned.plan for param in bucket.params}
    lines = []  # ranks of different groups may have different experts
    for spec, _, _, ranks in planned.params:
        bucket, on_meta = bucket_of[spec.name], "" if source.has_value(spec.name) else " on meta"
        line = f"{spec}{on_meta}{planned.policies.line(spec)}, in bucket {bucket.name!r} with transport "
        lines.append((ranks.group, f"{line}{bucket.comm.transport!r}"))
    control.check_same_in_groups("the parameters to shard", lines)
    if source.rank is not None:
        moved = [f"{n}: {t.dtype}{list(t.shape)} on {t.device.type}" for n, t in planned.moved.items()]
        control.check_same("the buffers and ignored parameters to broadcast", moved)
    elif not options.allow_different_initialization and not control.is_single_rank:
        # With replicas all of them at once, unless some parameters have other ranks.
        every = None if options.process_group_for is not None else (control.group,)
        check_initial_values(
            control, ((spec.name, param, every or ranks.groups) for spec, param, _, ranks in planned.params)
        )


def _ignored_names(named: dict[str, torch.nn.Parameter], options: Options) -> set[str]:
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


def _param_specs(
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
            other = owners.setdefault((param.device, param.untyped_storage().data_ptr()), names[0])
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


def _move_unsharded(
    model: ThunderModule, ignored: set[str], options: Options, source: ValueSource
) -> dict[str, torch.Tensor]:
    """Return ignored parameters and buffers on the requested device, with memory for those that are to be received."""
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

    params = {n: p for n, p in model.named_parameters(remove_duplicate=False) if n in ignored}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {name: move(name, tensor) for name, tensor in (*params.items(), *buffers.items())}


def _module_param(module: torch.nn.Module, name: str, param: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return the module's own object for a parameter; ``param`` itself if another transform has replaced it."""
    found = find_owner(module, name)
    own = None if found is None else found[0]._parameters[found[1]]
    return param if own is None or own.shape != param.shape or own.dtype != param.dtype else own


def _comm_spec(
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
        asked, reason = check_transport("transport", asked(name, params)), "asked for by the callable"
    param_dtype = own.mp_policy.param_dtype or first.dtype
    dtypes = (param_dtype, own.mp_policy.reduce_dtype or param_dtype)
    if asked == "auto":
        itemsize = min(d.itemsize for d in (first.dtype, *dtypes))
        backend = ranks.group.backend_for(first.device)
        asked, reason = choose_transport([p.shape for p in params], group_key.size, itemsize, backend)
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
    pin_memory = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and first.device.type == "cuda"
    return CommSpec(
        asked,
        f"{reason}; shards on the CPU" if offload else reason,
        transport.per_param,
        transport.staging,
        offload,
        pin_memory,
    )
