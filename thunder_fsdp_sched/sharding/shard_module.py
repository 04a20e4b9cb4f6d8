"""Shard a module: plan its buckets, allocate shard buffers, fill them, and turn its parameters into views of them.

The module's own parameters become the shards: see [Note: The module's own parameters] in ``module_parameters``.
"""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from thunder.core.module import ThunderModule
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..compat import __version__
from ..options import Options
from ..plan.plan import Plan
from ..private_torch import replace_data
from ..proof.audit import FormerMemory
from ..ranks.assignment import GroupAssignment, broadcast, find_world_group
from ..ranks.control import Control
from ..ranks.process_groups import Ranks
from ..runtime.autograd import take_hooks
from ..runtime.bucket import Bucket, handle_name
from ..runtime.memory import Arena
from ..transports import TRANSPORTS
from ..transports.peer_memory import announce_all
from .former_parameters import retire
from .initial_values import ValueSource, make_blank, resolve_device
from .module_parameters import replace_in_containers
from .module_plan import PlannedModule, compare_plans, plan_module
from .refusals import refuse_graph
from .sharded_module import ShardedModule
from .state_entries import check_before_step

register_optimizer_step_pre_hook(check_before_step)


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
    refuse_graph(model._model)
    if options.device is not None:  # not earlier: fsdp(...) may be called before torch.cuda.set_device
        options = replace(options, device=resolve_device(options.device))
    control = _agree_on_options(model, options)
    source = ValueSource(model, options, control)
    assignment = GroupAssignment(
        control.group,
        mesh=options.mesh,
        process_group_for=options.process_group_for,
        separate_reductions=options.separate_reduce_scatter_group,
    )
    with control.all_or_none("whether the module can be sharded"):
        planned = plan_module(model, options, assignment, source)
    compare_plans(planned, options, control, source)
    buckets = _allocate(planned.plan, assignment)
    for bucket in buckets:
        bucket.all_reduce_hook = options.all_reduce_hook
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    began_on_meta = {name for name, tensor in named if tensor.is_meta and not source.has_value(name)}
    locations = {n: (b, i) for b in buckets for i, param in enumerate(b.spec.params) for n in param.names}
    former_memory = _Filling(planned, locations, options, assignment.default_ranks, control, source).fill(model._model)
    new_of: dict[int, torch.Tensor] = {id(buffer): planned.moved[name] for name, buffer in model.named_buffers()}
    former_params = []
    for spec, _, former, _ in planned.params:
        bucket, index = locations[spec.name]
        new_of[id(former)] = param = bucket.params[index]
        param.__dict__.update({key: value for key, value in vars(former).items() if key != "_thunder_device"})
        take_hooks(former, param)
        former_params.append(retire(former, spec.name))
    sharded = ShardedModule(
        model._model,
        planned.plan,
        buckets,
        locations,
        control,
        planned.policies.root,
        former_memory,
        former_params,
        planned.moved,
        began_on_meta,
    )
    planned.policies.attach_casts()
    replace_in_containers(model._model, new_of)
    sharded.update_module()
    return sharded


def _agree_on_options(model: ThunderModule, options: Options) -> Control:
    """Check that all ranks shard with the same options; this precedes everything else that they do together."""
    control = Control.of_module(
        find_world_group(options.mesh, options.process_group),
        type(model._model).__name__,
        compares_computation=not options.allow_different_computation,
    )
    versions = [f"{package} {importlib.metadata.version(package)}" for package in ("lightning-thunder", "torch")]
    lines = [f"thunder_fsdp_sched {__version__}", *versions, *options.lines()]
    control.check_same("versions and options of fsdp(...)", lines)
    return control


def _allocate(plan: Plan, assignment: GroupAssignment) -> list[Bucket]:
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
        buckets.append(
            Bucket(
                spec,
                assignment.ranks_of(spec),
                TRANSPORTS[spec.comm.transport],
                arena,
                handle,
                secondary_ranks=assignment.secondary_ranks_of(spec),
                peer_memory=peer_memory.get(spec.name),
            )
        )
    return buckets


@dataclass(frozen=True)
class _Filling:
    """Fills shards, ignored parameters and buffers: with the module's values, those of one rank, or initialized ones."""

    planned: PlannedModule
    locations: dict[str, tuple[Bucket, int]]
    options: Options
    default_ranks: Ranks
    control: Control
    source: ValueSource

    def fill(self, module: nn.Module) -> FormerMemory:
        """Fill all of them, free the memory of the module's parameters, and return which memory it was."""
        planned, source = self.planned, self.source
        for spec, *_ in planned.params:
            bucket, index = self.locations[spec.name]
            if not source.has_value(spec.name):
                make_blank(bucket.shard_views[index])
        if self.options.param_init_fn is not None:
            self._initialize(module, self.options.param_init_fn)
        first = planned.params[0].spec.device if planned.params else self.options.device
        for name, tensor in planned.moved.items():
            if source.has_value(name):
                self._broadcast(tensor, self.default_ranks, first)
        former_memory, receive = FormerMemory(), self._receiver()
        for spec, param, own, ranks in planned.params:
            if source.has_value(spec.name):
                whole = receive(spec.name, param) if param.is_meta else param
                self._broadcast(whole, ranks, spec.device)
                self._copy_in(spec.name, whole)
            if not param.is_meta:
                former_memory.add(spec.name, param)
            for former in (param, own):  # another transform may have created the first
                if not former.is_meta:
                    former.data = former.new_empty(0)
        return former_memory

    def _initialize(self, module: nn.Module, init: Callable[[nn.Module], object]) -> None:
        """Materialize the tensors that each submodule owns on the meta device, initialize them, and shard them.

        Submodules are visited in the order of the module tree, so random numbers are drawn as for the whole module.
        Besides the shards, only the tensors of one submodule exist at a time. Changes that ``init`` makes to other
        submodules are lost. Afterwards the sharded parameters are on the meta device again; all others are the same
        objects, with memory.
        """
        for path, submodule in module.named_modules():
            on_meta = [
                (own, leaf, tensor, name)
                for own in (submodule._parameters, submodule._buffers)
                for leaf, tensor in own.items()
                if tensor is not None
                and tensor.is_meta
                and not self.source.has_value(name := f"{path}.{leaf}".lstrip("."))
            ]
            for own, leaf, tensor, name in on_meta:
                # In the dtype of the shards: the module's own parameter may already have that of unsharded parameters.
                dtype = self.locations[name][0].spec.dtype if name in self.locations else tensor.dtype
                real = torch.empty_like(tensor, device=self.options.device, dtype=dtype)
                make_blank(real)
                own[leaf] = nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real
            if on_meta:
                with torch.no_grad():
                    init(submodule)
            for own, leaf, tensor, name in on_meta:
                made = own[leaf]
                assert made is not None
                if isinstance(tensor, nn.Parameter):
                    own[leaf] = tensor
                if name in self.locations:
                    self._broadcast(made, self.locations[name][0].ranks, self.options.device)
                    self._copy_in(name, made)
                    continue
                if isinstance(tensor, nn.Parameter):
                    replace_data(tensor, made.detach())
                    made = tensor
                self._broadcast(made, self.default_ranks, self.options.device)
                self.planned.moved[name] = made

    def _copy_in(self, name: str, whole: torch.Tensor) -> None:
        bucket, index = self.locations[name]
        with torch.no_grad():
            bucket.copy_in(index, whole)

    def _broadcast(self, tensor: torch.Tensor, ranks: Ranks, via: torch.device | None) -> None:
        """With ``broadcast_from``, broadcast a tensor over its ranks, if necessary by way of the device ``via``."""
        if self.source.rank is not None:
            with torch.no_grad(), self.control.doing("broadcast_from"):
                broadcast(tensor.detach(), self.source.rank, ranks, via=via)

    def _receiver(self) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Return a function that gives a parameter's memory to receive it, which the next parameter reuses.

        Memory of its own would be freed too late: gloo refers to it for a while after the broadcast.
        """
        source = self.source
        nbytes: dict[torch.device, int] = defaultdict(int)
        for spec, param, *_ in self.planned.params:
            if param.is_meta and source.has_value(spec.name):
                device = source.device_of(spec.name, param)
                nbytes[device] = max(nbytes[device], param.nbytes)
        buffers = {device: torch.empty(size, dtype=torch.uint8, device=device) for device, size in nbytes.items()}

        def receive(name: str, param: torch.Tensor) -> torch.Tensor:
            return buffers[source.device_of(name, param)][: param.nbytes].view(param.dtype).view(param.shape)

        return receive
