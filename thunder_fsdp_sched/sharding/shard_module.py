"""Shard a module: plan its buckets, allocate shard buffers, fill them, and turn its parameters into views of them.

The module's own parameters become the shards: see [Note: The module's own parameters] in ``module_parameters``.
"""

from __future__ import annotations

import importlib.metadata
import weakref
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from thunder.core.module import ThunderModule
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import option_checks as checks
from ..capture.leaves import AUTO, Leaves
from ..compat import __version__
from ..errors import coded_error
from ..extensions import load
from ..options import Options
from ..plan.bucketing import make_plan
from ..plan.specs import BucketOptions, CommSpec, GroupKey, ParamSpec, Plan, StridedView
from ..private_torch import hooks_of, memory_of, replace_data
from ..proof.audit import PreShardStorages
from ..ranks.assignment import GroupAssignment, find_world_group
from ..ranks.open_control import open_control
from ..ranks.process_groups import BucketRanks
from ..runtime.accumulation import Accumulation
from ..runtime.bucket import Bucket, handle_name
from ..runtime.memory import Arena
from ..runtime.row_dtensor import DTENSORS
from ..transports import choose_transport, find_transport, transport_of
from .former_parameters import retire
from .initial_values import ShardedParam, resolve_device, source_of
from .module_parameters import find_owner, replace_in_containers
from .module_policies import ModulePolicies
from .optimizer_steps import prepare_step
from .refusals import (
    refuse_compiled,
    refuse_grad_dtypes,
    refuse_overlaps,
    refuse_renamed,
    refuse_shards_and_grads,
    refuse_views,
    refuse_wrapped,
    run_compiled_as_leaves,
)
from .sharded_module import ShardedModule

register_optimizer_step_pre_hook(prepare_step)


def shard_module(model: ThunderModule, options: Options) -> ShardedModule:
    """Plan the buckets, allocate and fill the shard buffers, and turn the module's parameters into views of them.

    Peak memory is one unsharded parameter more than the module and its shards. The module's memory is freed unless
    something else refers to it.

    Cost, on any number of ranks: four exchanges, only of digests if the ranks agree; with ``broadcast_from`` also a
    broadcast of each tensor. The memory of a layout does not grow with the number of ranks: see ``RowStarts``.

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
    refuse_compiled(model._model)
    refuse_wrapped(model._model)
    if options.init.device is not None:  # not earlier: fsdp(...) may be called before torch.cuda.set_device
        options = replace(options, init=replace(options.init, device=resolve_device(options.init.device)))
    sharding = ShardingSteps(model, options)
    control = sharding.control
    with control.all_or_none("whether the module can be sharded"):
        sharding.plan_buckets()
    sharding.compare()
    buckets = sharding.allocate()
    pre_shard_storage = sharding.fill()
    former_params = sharding.replace_parameters()
    return ShardedModule(
        model._model,
        sharding.plan,
        buckets,
        sharding.locations,
        control,
        sharding.policies.root,
        pre_shard_storage,
        former_params,
        sharding.moved,
        set(sharding.source.began_on_meta),
        sharding.leaves,
    )


class ShardingSteps:
    """The steps of sharding a module, each of which uses the results of those before it.

    Attributes:
        moved: ignored parameters and buffers on their new device, which are not filled yet if they were on meta.
        locations: the bucket of each parameter and its index there, by each of its names.
    """

    params: list[ShardedParam]
    moved: dict[str, torch.Tensor]
    policies: ModulePolicies
    leaves: Leaves
    plan: Plan
    locations: dict[str, tuple[Bucket, int]]

    def __init__(self, model: ThunderModule, options: Options) -> None:
        self.model, self.module, self.options = model, model._model, options
        self.control = open_control(
            find_world_group(options.ranks.mesh, options.ranks.process_group),
            type(self.module).__name__,
            agreement=options.agree,
        )
        # This precedes everything else that ranks do together.
        versions = [f"{package} {importlib.metadata.version(package)}" for package in ("lightning-thunder", "torch")]
        lines = [f"thunder_fsdp_sched {__version__}", *versions, *options.lines("fsdp")]
        self.control.check_same("versions and options of fsdp(...)", lines)
        self.source = source_of(model, options, self.control)
        self.assignment = GroupAssignment(
            self.control.group,
            mesh=options.ranks.mesh,
            process_group_for=options.ranks.process_group_for,
            separate_reductions=options.ranks.separate_reduce_scatter_group,
        )

    #
    # Planning, which changes nothing
    #

    def plan_buckets(self) -> None:
        """Check that this rank can shard the module, and plan its buckets."""
        module, options, assignment, source = self.module, self.options, self.assignment, self.source
        named = dict(self.model.named_parameters(remove_duplicate=False))
        default_key = assignment.key(assignment.default_ranks)
        refuse_renamed(module)
        refuse_shards_and_grads(named)
        ignored: set[str] = set()
        if options.init.ignored_params:
            ignored = load("extras.initial_values:ignored_names")(options.init.ignored_params, named)
        to_shard = {n: p for n, p in named.items() if n not in ignored}
        refuse_grad_dtypes(to_shard)
        specs = self._param_specs(to_shard)
        source.check({spec.name for spec, _ in specs}, initializes=options.init.param_init_fn is not None)
        refuse_views(self.model, named, ignored, options.init.device)
        self.moved = self._move_unsharded(ignored)
        self.params = [
            ShardedParam(spec, param, _own_param(module, spec.name, param), assignment.of(spec.name, param))
            for spec, param in specs
        ]
        self.leaves = Leaves(module, automatic=AUTO in options.leaf_modules)
        if set(options.leaf_modules) - {AUTO}:
            self.leaves = load("extras.leaf_modules.choose:find_leaves")(module, options.leaf_modules)
        run_compiled_as_leaves(self.leaves)
        self.policies = ModulePolicies(module, options)
        self.policies.check_exempt(spec for spec, _ in specs)
        for spec, _, _, ranks in self.params:
            for group in ranks.groups:
                group.check_sends(spec.device, f"parameter {spec.name!r}")
        if source.rank is not None:
            for ranks in (assignment.default_ranks, *(param.ranks for param in self.params)):
                if source.rank not in ranks.all_ranks:
                    raise coded_error(ValueError, "option.broadcast-rank-outside-group", rank=source.rank)
        self.plan = make_plan(
            module,
            [(p.spec, p.param, assignment.key(p.ranks), self.policies.of(p.spec, p.own)) for p in self.params],
            strategy=options.bucketing_strategy,
            default_group=default_key,
            comm_spec=self._comm_spec,
            leaves=self.leaves,
        )

    def _param_specs(self, named: dict[str, nn.Parameter]) -> list[tuple[ParamSpec, nn.Parameter]]:
        """Return a spec for each distinct parameter, with all its tied names, in the order of the module tree."""
        tied: dict[nn.Parameter, list[str]] = {}
        for name, param in named.items():
            if isinstance(param, DTENSORS):
                raise coded_error(TypeError, "parameter.already-a-dtensor", name=name, placements=param.placements)
            if type(param) is not nn.Parameter or param.layout is not torch.strided:
                raise coded_error(
                    TypeError, "parameter.not-plain-strided", name=name, type=type(param).__name__, layout=param.layout
                )
            tied.setdefault(param, []).append(name)
        specs = []
        in_storage: dict[Any, list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for param, names in tied.items():
            if param.numel():
                in_storage[memory_of(param)].append((names[0], param))
        for neighbours in in_storage.values():
            refuse_overlaps(neighbours)
        for param, names in tied.items():
            own = getattr(param, "_thunder_device", self.source.device_of(names[0], param))
            device = self.options.init.device or resolve_device(torch.device(own))
            # In a storage of several parameters, an offset says where the others are.
            is_plain = param.is_contiguous() and (param.storage_offset() == 0 or len(in_storage[memory_of(param)]) > 1)
            strided = None if is_plain else StridedView(param.stride(), int(param.storage_offset()))
            spec = ParamSpec(tuple(names), tuple(param.shape), param.dtype, device, param.requires_grad, strided)
            specs.append((spec, param))
        return specs

    def _move_unsharded(self, ignored: set[str]) -> dict[str, torch.Tensor]:
        """Return ignored parameters and buffers on the requested device, with memory for those that are to be received."""
        copies: dict[torch.Tensor, torch.Tensor] = {}  # a tensor with several names stays one tensor

        def move(name: str, tensor: torch.Tensor) -> torch.Tensor:
            device = self.options.init.device or self.source.device_of(name, tensor)
            if tensor.device == device or not self.source.has_value(name):
                return tensor
            if tensor not in copies:
                copy = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
                is_param = isinstance(tensor, nn.Parameter)
                copies[tensor] = nn.Parameter(copy, tensor.requires_grad) if is_param else copy
            return copies[tensor]

        params = {n: p for n, p in self.model.named_parameters(remove_duplicate=False) if n in ignored}
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        return {name: move(name, tensor) for name, tensor in (*params.items(), *buffers.items())}

    def _comm_spec(self, name: str, params: tuple[ParamSpec, ...], group_key: GroupKey, own: BucketOptions) -> CommSpec:
        """Return how a bucket is sent according to the options, and raise an error if that is impossible."""
        first, ranks = params[0], self.assignment.ranks(group_key)
        asked, reason = self.options.transport, "asked for"
        if callable(asked):
            asked, reason = checks.transport("transport", asked(name, params)), "asked for by the callable"
        param_dtype = own.mp_policy.param_dtype or first.dtype
        dtypes = (param_dtype, own.mp_policy.reduce_dtype or param_dtype)
        if asked == "auto":
            itemsize = min(d.itemsize for d in (first.dtype, *dtypes))
            backend = ranks.group.backend_for(first.device)
            asked, reason = choose_transport([p.shape for p in params], group_key.size, itemsize, backend)
        transport = find_transport(asked)
        try:
            transport.check(first.device, dtypes, ranks)
            if own.comm_policy is not None and (why := transport.refuses_encoded(first.device)):
                raise coded_error(
                    ValueError, "transport.cannot-send-encoded", policy=own.comm_policy, transport=asked, reason=why
                )
        except ValueError as error:
            raise coded_error(ValueError, "transport.refused-for-bucket", error=error, bucket=name) from error
        policy, computes_on = self.options.offload_policy, ranks.group.device_type_for(first.device)
        if not isinstance(policy, CPUOffloadPolicy):
            return CommSpec(asked, reason, transport.per_param, computes_on=computes_on)
        if transport.peers_read_shards:
            raise coded_error(ValueError, "transport.shards-on-cpu", transport=asked, bucket=name)
        return CommSpec(
            asked,
            f"{reason}; shards on the CPU",
            transport.per_param,
            offload=True,
            pin_memory=policy.pin_memory and first.device.type == "cuda",
            computes_on=computes_on,
        )

    def compare(self) -> None:
        """Check that all ranks have planned the same, and have the same values unless one of them broadcasts its own."""
        options, control, source = self.options, self.control, self.source
        bucket_of = {param.name: bucket for bucket in self.plan for param in bucket.params}
        lines = []  # ranks of different groups may have different experts
        for spec, _, _, ranks in self.params:
            bucket, on_meta = bucket_of[spec.name], "" if source.has_value(spec.name) else " on meta"
            line = f"{spec}{on_meta}{self.policies.line(spec)}, in bucket {bucket.name!r} with transport "
            lines.append((ranks.group, f"{line}{bucket.comm.transport!r}"))
        control.check_same_in_groups("the parameters to shard", lines)
        if source.rank is not None:
            moved = [f"{n}: {t.dtype}{list(t.shape)} on {t.device.type}" for n, t in self.moved.items()]
            control.check_same("the buffers and ignored parameters to broadcast", moved)
        elif not options.init.allow_different_values and not control.is_single_rank:
            from .initial_digests import check_initial_values  # here, because one rank compares nothing

            # With replicas all of them at once, unless some parameters have other ranks.
            every = None if options.ranks.process_group_for is not None else (control.group,)
            check_initial_values(control, ((p.spec.name, p.param, every or p.ranks.groups) for p in self.params))

    #
    # Memory and values
    #

    def allocate(self) -> list[Bucket]:
        assignment = self.assignment
        arenas: dict[torch.device, Arena] = {}
        buckets: dict[str, Bucket] = {}  # by handle
        shared: dict[tuple[str, torch.device, BucketRanks], Any] = {}
        peer_memory = {}
        accumulation: type[Accumulation] = Accumulation
        if self.options.ranks_may_differ:
            accumulation = load("extras.ranks_differ.start:AccumulationOfAll")
        read_by_peers = [spec for spec in self.plan if find_transport(spec.comm.transport).peers_read_shards]
        make_memory: Any = load("extras.symmetric_memory:PeerMemory") if read_by_peers else None
        for spec in read_by_peers:
            key = spec.comm.transport, spec.device, assignment.ranks_of(spec)
            if key not in shared:
                shared[key] = make_memory(find_transport(key[0]), *key[1:])
            peer_memory[spec.name] = memory = shared[key]
            memory.announce(spec.name, *spec.sent_shard, workspace=transport_of(spec).reduce_workspace(spec))
        for spec in self.plan:
            handle = handle_name(spec.name)
            while handle in buckets:
                handle += "_"
            buckets[handle] = Bucket(
                spec,
                assignment.ranks_of(spec),
                arenas.setdefault(spec.device, Arena(spec.device)),
                handle,
                secondary_ranks=assignment.secondary_ranks_of(spec),
                peer_memory=peer_memory.get(spec.name),
                accumulation=accumulation,
            )
            buckets[handle].all_reduce_hook = self.options.all_reduce_hook
        self.locations = {n: (b, i) for b in buckets.values() for i, p in enumerate(b.spec.params) for n in p.names}
        return list(buckets.values())

    def fill(self) -> PreShardStorages:
        """Fill shards, ignored parameters and buffers: with the module's values, those of one rank, or initialized ones.

        Free the memory of the module's parameters, and return which memory it was.
        """
        source, pre_shard_storage = self.source, PreShardStorages()
        values_of = source.begin(self)
        for each in self.params:
            spec, param, own, _ = each
            if source.has_value(spec.name):
                self.copy_in(spec.name, values_of(each))
            if not param.is_meta:
                pre_shard_storage.add(spec.name, param)
            for former in (param, own):  # another transform may have created the first
                if not former.is_meta:
                    former.data = former.new_empty(0)
        return pre_shard_storage

    @torch.no_grad()
    def copy_in(self, name: str, whole: torch.Tensor) -> None:
        bucket, index = self.locations[name]
        bucket.write_rows(index, bucket.rows[index].of(whole))

    def replace_parameters(self) -> list[weakref.ref[nn.Parameter]]:
        """Put shards and moved tensors into the module, and retire the parameters that they replace; return these."""
        self.policies.attach_casts()
        module, moved, former_params = self.module, self.moved, []
        new_of: dict[int, torch.Tensor] = {id(buffer): moved[name] for name, buffer in self.model.named_buffers()}
        is_hooked = any(any(hooks_of(former)) for _, _, former, _ in self.params)
        take_hooks: Any = load("extras.parameter_hooks:take_hooks") if is_hooked else None
        for spec, _, former, _ in self.params:
            bucket, index = self.locations[spec.name]
            new_of[id(former)] = param = bucket.params[index]
            param.__dict__.update({key: value for key, value in vars(former).items() if key != "_thunder_device"})
            if any(hooks_of(former)):
                take_hooks(former, param)
            former_params.append(retire(former, spec.name))
        replace_in_containers(module, new_of)
        for path, submodule in module.named_modules(remove_duplicate=False):
            for leaf, buffer in submodule._buffers.items():
                submodule._buffers[leaf] = moved.get(f"{path}.{leaf}".lstrip("."), buffer)
        for name, tensor in moved.items():
            if isinstance(tensor, nn.Parameter) and (own := _own_param(module, name, tensor)) is not tensor:
                replace_data(own, tensor.detach())
                moved[name] = own
        return former_params


def _own_param(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter:
    """Return the module's own object for a parameter; ``param`` itself if another transform has replaced it."""
    found = find_owner(module, name)
    own = None if found is None else found[0]._parameters[found[1]]
    return param if own is None or own.shape != param.shape or own.dtype != param.dtype else own
