"""Shard a module: plan its buckets, allocate shard buffers, fill them, and turn its parameters into views of them.

The module's own parameters become the shards: see [Note: The module's own parameters] in ``module_parameters``.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
from thunder.core.module import ThunderModule

from ..agreement.channel import announce
from ..agreement.consistency import Agreement
from ..agreement.control import Control
from ..options import Options
from ..plan.bucketing import make_plan
from ..plan.plan import Plan
from ..plan.specs import BucketSpec, GroupKey, ParamSpec
from ..private_api import timeout_of
from ..runtime.bucket import Bucket
from ..runtime.former_memory import FormerMemory
from ..runtime.param_hooks import take_hooks
from .adoption import module_param_of, refuse_graph, refuse_renamed, refuse_shards_and_grads, refuse_views
from .containers import replace_in_containers
from .devices import resolve_device
from .former_parameters import FormerParameters, retire
from .group_assignment import GroupAssignment, find_world_group
from .initial_values import check_initial_values
from .meta_init import make_blank
from .module_policies import ModulePolicies
from .setup import (
    allocate_buckets,
    broadcast,
    comm_spec_of,
    ignored_names,
    initialize_shards,
    move_unsharded,
    param_specs,
    receiver,
    versions,
)
from .sharded_module import ShardedModule
from .unsupported_modules import refuse_reparametrized
from .value_source import ValueSource

__all__ = ["shard_module"]

_AGREEMENT_TIMEOUT = timedelta(seconds=300)
"""How long a rank waits at most for the others to shard or compile the same; tracing may be slower on some ranks. The
timeout of the process group applies instead if it is shorter."""

_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
"""Counters that number the modules of each process group. The ranks of a group shard the same modules in the same
order, but some of them may shard other modules over another group in between."""


class _Planned(NamedTuple):
    """The result of planning, which changes nothing in the module.

    Attributes:
        specs: the parameters to shard.
        group_keys: the ranks that share each of them.
        module_params: the module's own object of each of them.
        moved: ignored parameters and buffers on their new device, which are not filled yet if they were on meta.
    """

    specs: list[tuple[ParamSpec, torch.nn.Parameter]]
    group_keys: dict[str, GroupKey]
    module_params: dict[str, torch.nn.Parameter]
    moved: dict[str, torch.Tensor]
    policies: ModulePolicies
    plan: Plan


def shard_module(model: ThunderModule, options: Options) -> ShardedModule:
    """Plan the buckets, allocate and fill the shard buffers, and turn the module's parameters into views of them.

    Peak memory is one unsharded parameter more than the module and its shards. The module's memory is freed unless
    something else refers to it.

    Raises:
        TypeError: the jitted function is not a module, or a parameter is not a plain strided tensor.
        ValueError: parameters share memory with buffers, or with other parameters without being tied; parameters have
            gradients or are already shards; unknown ``ignored_params``; ``broadcast_from`` is not in the process group,
            or that rank has no values; a transport cannot send a bucket; parameters of one bucket are sharded over
            different groups.
        RuntimeError: there is no process group.
        ScheduleDisagreement: ranks differ in the versions of this package, Thunder or torch, in options, or in
            parameters or their values.
    """
    if options.device is not None:  # not earlier: fsdp(...) may be called before torch.cuda.set_device
        options = replace(options, device=resolve_device(options.device))
    refuse_graph(model._model)
    agreement, control = _agree_on_options(model, options)
    source = ValueSource(model, options, agreement.group, control)
    assignment = GroupAssignment(options, agreement.group)
    with agreement.all_or_none("whether the module can be sharded"):
        planned = _plan(model, options, assignment, source)
    _compare(planned, options, assignment, agreement, source)
    buckets = allocate_buckets(planned.plan, assignment)
    for bucket in buckets:
        bucket.all_reduce_hook = options.all_reduce_hook
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    began_on_meta = {name for name, tensor in named if tensor.is_meta and not source.has_value(name)}
    former_memory = _fill(model._model, planned, buckets, options, assignment, source)
    replaced: dict[int, torch.Tensor] = {id(buffer): planned.moved[name] for name, buffer in model.named_buffers()}
    former_params: FormerParameters = []
    for bucket in buckets:
        for spec, param in zip(bucket.spec.params, bucket.params, strict=True):
            former = planned.module_params[spec.name]
            replaced[id(former)] = param
            former_params.append(_replace(former, param, spec.name))
    sharded = ShardedModule(model._model, planned.plan, buckets, agreement, control, planned.policies.root)
    planned.policies.attach_casts()
    sharded.former_memory, sharded.former_params = former_memory, former_params
    sharded.replaced = planned.moved
    sharded.began_on_meta = began_on_meta

    replace_in_containers(model._model, lambda _, tensor: replaced.get(id(tensor)))
    sharded.update_module()
    return sharded


def _agree_on_options(model: ThunderModule, options: Options) -> tuple[Agreement, Control]:
    """Check that all ranks shard with the same options; this precedes everything else that they do together."""
    world_group = find_world_group(options)
    name = f"module {next(_numbers[world_group.name])}"
    timeout = _AGREEMENT_TIMEOUT
    if world_group.is_alive and not world_group.is_fake:
        timeout = min(timeout, timeout_of(world_group.process_group))
    agreement = Agreement(world_group, name, timeout, compares_computation=not options.allow_different_computation)
    find_channel = None if agreement.is_single_rank else announce(world_group, f"{world_group.name} {name}")
    agreement.check_same("versions and options of fsdp(...)", [*versions(), *options.lines()])
    title = f"{name} ({type(model._model).__name__})"
    control = Control(world_group, find_channel and find_channel(), f"{world_group.name} {name}", title)
    agreement.control = control
    return agreement, control


def _plan(model: ThunderModule, options: Options, assignment: GroupAssignment, source: ValueSource) -> _Planned:
    """Check that this rank can shard the module, and plan its buckets."""
    module = model._model
    named = dict(model.named_parameters(remove_duplicate=False))
    default_key = assignment.key(assignment.default_ranks)
    refuse_renamed(module)
    refuse_shards_and_grads(named)
    refuse_reparametrized(module)
    ignored = ignored_names(named, options)
    specs = param_specs({n: p for n, p in named.items() if n not in ignored}, options, source)
    source.check({spec.name for spec, _ in specs}, initializes=options.param_init_fn is not None)
    refuse_views(model, named, ignored, options)
    module_params = {spec.name: module_param_of(module, spec, param) for spec, param in specs}
    moved = move_unsharded(model, ignored, options, source)
    group_keys = {spec.name: assignment.of(spec.name, param) for spec, param in specs}
    policies = ModulePolicies(module, options)
    for spec, _ in specs:
        assignment.check_sends(spec, group_keys[spec.name])
    if source.rank is not None:
        for key in dict.fromkeys([default_key, *group_keys.values()]):
            assignment.check_source(source.rank, key)
    plan = make_plan(
        module,
        specs,
        strategy=options.bucketing,
        world_size=default_key.size,
        group=default_key.group,
        options={spec.name: policies.of(spec) for spec, _ in specs},
        group_keys=group_keys,
        comm_spec=partial(comm_spec_of, options, assignment),
    )
    return _Planned(specs, group_keys, module_params, moved, policies, plan)


def _compare(
    planned: _Planned, options: Options, assignment: GroupAssignment, agreement: Agreement, source: ValueSource
) -> None:
    """Check that all ranks have planned the same, and have the same values unless one of them broadcasts its own."""
    bucket_of = {param.name: bucket for bucket in planned.plan for param in bucket.params}
    for key in dict.fromkeys(planned.group_keys.values()):  # ranks of different groups may have different experts
        lines = [
            f"{spec}{' on meta' * (not source.has_value(spec.name))}{planned.policies.line(spec)}, in "
            f"{_described(bucket_of[spec.name])}"
            for spec, _ in planned.specs
            if planned.group_keys[spec.name] == key
        ]
        agreement.about("parameters", assignment.ranks(key).group).check_same("the parameters to shard", lines)
    if source.rank is not None:
        lines = [f"{n}: {t.dtype}{list(t.shape)} on {t.device.type}" for n, t in planned.moved.items()]
        agreement.about("buffers", agreement.group).check_same("the buffers and ignored parameters to broadcast", lines)
    check_initial_values(planned.specs, planned.group_keys, options, assignment, agreement)


def _fill(
    module: torch.nn.Module,
    planned: _Planned,
    buckets: list[Bucket],
    options: Options,
    assignment: GroupAssignment,
    source: ValueSource,
) -> FormerMemory:
    """Fill shards, ignored parameters and buffers, free the parameters' memory, and return which memory it was."""
    locations = {name: (b, i) for b in buckets for i, param in enumerate(b.spec.params) for name in param.names}
    for spec, _ in planned.specs:
        bucket, index = locations[spec.name]
        if not source.has_value(spec.name):
            make_blank(bucket.shard_views[index])
    if options.param_init_fn is not None:
        initialize_shards(module, options, assignment, locations, planned.moved, source)
    if source.rank is not None:
        first = planned.specs[0][0].device if planned.specs else options.device
        key = assignment.key(assignment.default_ranks)
        for name, tensor in planned.moved.items():
            if source.has_value(name):
                broadcast(tensor, key, first, source.rank, assignment)
    former_memory = FormerMemory()
    receive = receiver(planned.specs, source)
    for spec, param in planned.specs:
        bucket, index = locations[spec.name]
        if source.has_value(spec.name):
            whole = receive(spec.name, param) if param.is_meta else param
            if source.rank is not None:
                broadcast(whole, planned.group_keys[spec.name], spec.device, source.rank, assignment)
            with torch.no_grad():
                bucket.copy_in(index, whole)
        if not param.is_meta:
            former_memory.add(spec.name, param)
        for former in (param, planned.module_params[spec.name]):  # another transform may have created the first
            if not former.is_meta:
                former.data = former.new_empty(0)
    return former_memory


def _replace(former: torch.nn.Parameter, new: torch.nn.Parameter, name: str) -> weakref.ref[torch.nn.Parameter]:
    """Give a sharded parameter the attributes and hooks of the former one, which ``ModuleParameters`` removes."""
    new.__dict__.update({key: value for key, value in former.__dict__.items() if key != "_thunder_device"})
    take_hooks(former, new)
    return retire(former, name)


def _described(bucket: BucketSpec) -> str:
    return f"bucket {bucket.name!r} with transport {bucket.comm.transport!r}"
