"""Shard a module: build shard buffers from its parameters, and turn the parameters into views of them.

The module's own parameters become the shards: see [Note: The module's own parameters] in ``module_parameters``.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import thunder
import torch
from thunder.core.module import ThunderModule
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..agreement.channel import announce
from ..agreement.consistency import Agreement
from ..agreement.control import Control
from ..logs import Progress
from ..options import Options
from ..plan.bucketing import make_plan
from ..plan.plan import Plan
from ..plan.specs import BucketSpec
from ..private_api import parameters_of_running_ddp, refuse_ddp, replace_data, state_name, timeout_of, watch_cache_misses
from ..runtime.bucket import Bucket
from ..runtime.former_memory import FormerMemory
from ..runtime.row_dtensor import RowDTensor
from ..runtime.shard_source import finish_copies
from ..tracing import CollectsLess
from .adoption import module_param_of, refuse_shards_and_grads, refuse_views
from .conflicts import refuse_backward_hooks, refuse_conflicts, refuse_old_backward_hooks
from .containers import replace_in_containers
from .devices import resolve_device
from .group_assignment import GroupAssignment, find_world_group
from .initial_values import check_initial_values
from .meta_init import is_blank, make_blank
from .module_parameters import ModuleParameters, find_owner
from .module_policies import ModulePolicies
from .replacement import replace_param, replaced_by
from .setup import (
    allocate_buckets,
    broadcast,
    comm_spec_of,
    ignored_names,
    initialize_shards,
    move_unsharded,
    param_specs,
    versions,
)

__all__ = ["ShardedModule"]

_AGREEMENT_TIMEOUT = timedelta(seconds=300)
"""How long a rank waits at most for the others to shard or compile the same; tracing may be slower on some ranks. The
timeout of the process group applies instead if it is shorter."""

_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
"""Counters that number the modules of each process group. The ranks of a group shard the same modules in the same
order, but some of them may shard other modules over another group in between."""


class ShardedModule:
    """The shards of one module on this rank.

    Attributes:
        module: the user's module, whose own parameters are now the shards.
        module_params: the parameters of ``module``.
        plan: the buckets as planned.
        buckets: the buckets with their memory, in the order of the plan.
        world_group: all ranks that share parameters with this one.
        control: agrees with these ranks on what runs next.
        kept: the buckets that stay unsharded between forward and backward.
        locations: the bucket of each sharded parameter and its index there, keyed by each of its names, also those in a
            state dict (see [Note: Names in state dicts] in ``jitted_state``).
        shards: each sharded parameter, a DTensor over this rank's rows in the shard buffer, keyed by each of its names.
        kept_is_final: whether ``max_unsharded_bytes`` has settled that already.
        former_memory: the memory in which the parameters were stored before.
        former_params: the parameters that the sharded ones have replaced.
        mp_policy: the mixed precision of the module's own inputs and outputs.
        running_eagerly: whether the module's own forward may be called right now (``eager``).
        progress: logs the progress of compiling.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        plan: Plan,
        buckets: list[Bucket],
        agreement: Agreement,
        control: Control,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        self.module = module
        self.mp_policy = mp_policy
        self.plan = plan
        self.buckets = buckets
        self.world_group = agreement.group
        self.agreement = agreement
        self.control = control
        self.locations: dict[str, tuple[Bucket, int]] = {}
        self.shards: dict[str, torch.nn.Parameter] = {}
        self.former_memory = FormerMemory()
        self.former_params: list[weakref.ref[torch.nn.Parameter]] = []
        self.replaced: dict[str, torch.Tensor] = {}  # ignored parameters and buffers on their new device
        self.began_on_meta: set[str] = set()  # until all of them are known to have values
        self.kept = {bucket for bucket in buckets if not bucket.spec.reshard_after_forward}
        self.kept_is_final = False
        self.running_eagerly = False
        self.progress = Progress(control.title, self.world_group.rank)
        self._collects_less = CollectsLess()
        for bucket in buckets:
            bucket.control = control
            bucket.issue_counts = control.issue_counts
            for index, param in enumerate(bucket.spec.params):
                for name in param.names:
                    self.locations[name] = self.locations[state_name(name)] = (bucket, index)
                    self.shards[name] = bucket.params[index]
        self.module_params = ModuleParameters(module, buckets)
        self._model: weakref.ref[ThunderModule] | None = None

    @classmethod
    def shard(cls, model: ThunderModule, options: Options) -> ShardedModule:
        """Plan the buckets, allocate and fill the shard buffers, and turn the module's parameters into views of them.

        Peak memory is one unsharded parameter more than the module and its shards. The module's memory is freed unless
        something else refers to it.

        Raises:
            TypeError: the jitted function is not a module, or a parameter is not a plain strided tensor.
            ValueError: parameters share memory with buffers, or with other parameters without being tied; parameters
                have gradients or are already shards; unknown ``ignored_params``; ``broadcast_from`` is not in the
                process group; a transport cannot send a bucket; parameters of one bucket are sharded over different
                groups.
            RuntimeError: there is no process group.
            ScheduleDisagreement: ranks differ in the versions of this package, Thunder or torch, in options, or in
                parameters or their values.
        """
        if options.device is not None:  # not earlier: fsdp(...) may be called before torch.cuda.set_device
            options = replace(options, device=resolve_device(options.device))
        world_group = find_world_group(options)
        name = f"module {next(_numbers[world_group.name])}"
        timeout = _AGREEMENT_TIMEOUT
        if world_group.is_alive and not world_group.is_fake:
            timeout = min(timeout, timeout_of(world_group.process_group))
        agreement = Agreement(world_group, name, timeout, compares_computation=not options.allow_different_computation)
        find_channel = None if agreement.is_single_rank else announce(world_group, f"{world_group.name} {name}")
        # This precedes everything that ranks do together: creating groups, broadcasting parameters.
        agreement.check_same("versions and options of fsdp(...)", [*versions(), *options.lines()])
        title = f"{name} ({type(model._model).__name__})"
        control = Control(world_group, find_channel and find_channel(), f"{world_group.name} {name}", title)
        agreement.control = control
        assignment = GroupAssignment(options, world_group)
        module = model._model
        named = dict(model.named_parameters(remove_duplicate=False))
        default_key = assignment.key(assignment.default_ranks)
        with agreement.all_or_none("whether the module can be sharded"):
            refuse_shards_and_grads(named)
            ignored = ignored_names(named, options)
            specs = param_specs({n: p for n, p in named.items() if n not in ignored}, options)
            refuse_views(model, named, ignored, options)
            module_params = {spec.name: module_param_of(module, spec, param) for spec, param in specs}
            moved = move_unsharded(model, ignored, options)
            group_keys = {spec.name: assignment.of(spec.name, param) for spec, param in specs}
            policies = ModulePolicies(module, options)
            bucket_options = {spec.name: policies.of(spec) for spec, _ in specs}
            for spec, _ in specs:
                assignment.check_sends(spec, group_keys[spec.name])
            plan = make_plan(
                module,
                specs,
                strategy=options.bucketing,
                world_size=default_key.size,
                group=default_key.group,
                options=bucket_options,
                group_keys=group_keys,
                comm_spec=partial(comm_spec_of, options, assignment),
            )
            bucket_of = {param.name: bucket for bucket in plan for param in bucket.params}
        for key in dict.fromkeys(group_keys.values()):  # ranks of different groups may have different experts
            lines = [
                f"{spec}{' on meta' * p.is_meta}{policies.line(spec)}, in {_described(bucket_of[spec.name])}"
                for spec, p in specs
                if group_keys[spec.name] == key
            ]
            agreement.about("parameters", assignment.ranks(key).group).check_same("the parameters to shard", lines)
        check_initial_values(specs, group_keys, options, assignment, agreement)
        if options.broadcast_from is not None:
            if options.param_init_fn is None and any(p.is_meta for _, p in specs):
                raise ValueError(
                    "broadcast_from: the module is on the meta device, so there is nothing to broadcast; pass param_init_fn "
                    "to initialize it"
                )
            broadcast(((p, group_keys[s.name], s.device) for s, p in specs), options.broadcast_from, assignment)
            via = specs[0][0].device if specs else options.device
            broadcast(((t, default_key, via) for t in moved.values()), options.broadcast_from, assignment)
        buckets = allocate_buckets(plan, assignment)
        for bucket in buckets:
            bucket.all_reduce_hook = options.all_reduce_hook
        locations = {name: (b, i) for b in buckets for i, param in enumerate(b.spec.params) for name in param.names}
        began_on_meta = {n for n, p in (*named.items(), *model.named_buffers()) if p.is_meta}
        for spec, param in specs:
            bucket, index = locations[spec.name]
            if param.is_meta:
                make_blank(bucket.shard_views[index])
        if options.param_init_fn is not None:
            initialize_shards(module, options, assignment, locations, moved)
        former_memory, former_params = FormerMemory(), []
        for spec, param in specs:
            bucket, index = locations[spec.name]
            if not param.is_meta:
                former_memory.add(spec.name, param)
                with torch.no_grad():
                    bucket.copy_in(index, param)
                param.data = param.new_empty(
                    0
                )  # frees its memory if another transform created it besides the module's own
            former_params.append(replace_param(module_params[spec.name], bucket, index))
        sharded = cls(module, plan, buckets, agreement, control, policies.root)
        policies.attach_casts()
        sharded.former_memory, sharded.former_params = former_memory, former_params
        sharded.replaced = moved
        sharded.began_on_meta = began_on_meta
        replace_in_containers(module, lambda _, tensor: replaced_by(tensor))
        sharded._update_module()
        return sharded

    def _update_module(self) -> None:
        """Move the module's ignored parameters and buffers to their new device, keeping its parameter objects."""
        for name, tensor in self.replaced.items():
            path, _, leaf = name.rpartition(".")
            if isinstance(tensor, torch.nn.Parameter):
                found = find_owner(self.module, name)
                if found is None:
                    continue
                owner, leaf = found
                module_param = owner._parameters[leaf]
                if (
                    module_param is tensor
                    or module_param is None
                    or module_param.shape != tensor.shape
                    or module_param.dtype != tensor.dtype
                ):
                    continue  # a transform has replaced it
                if module_param.is_meta == tensor.is_meta:
                    replace_data(module_param, tensor.detach())
                    self.replaced[name] = module_param
                else:
                    owner._parameters[leaf] = tensor
            else:
                with contextlib.suppress(AttributeError):  # a transform has added it
                    buffers = self.module.get_submodule(path)._buffers
                    if leaf in buffers:
                        buffers[leaf] = tensor

    def set_kept_buckets(self, names: Collection[str]) -> None:
        """Keep exactly the named buckets unsharded between forward and backward from now on."""
        self._set_specs(replace(b, reshard_after_forward=b.name not in names) for b in self.plan)
        self.kept = {bucket for bucket in self.buckets if bucket.spec.name in names}

    def set_divide_factor(self, names: Collection[str], factor: float | None) -> None:
        """Divide the sum of gradients in the named buckets by ``factor`` from now on."""
        self._set_specs(replace(b, divide_factor=factor) if b.name in names else b for b in self.plan)

    def _set_specs(self, specs: Iterable[BucketSpec]) -> None:
        self.plan = replace(self.plan, buckets=tuple(specs))
        for bucket, spec in zip(self.buckets, self.plan, strict=True):
            bucket.spec = spec

    def attach(self, model: ThunderModule) -> None:
        """Make ``model`` use the shards, in its prologue and in ``parameters()``."""
        self._model = weakref.ref(model)
        model._overrides_parameters.update(self.shards)
        for name, tensor in self.replaced.items():
            overrides = (
                model._overrides_parameters if isinstance(tensor, torch.nn.Parameter) else model._overrides_buffers
            )
            overrides[name] = tensor
        install_placeholders_on_miss = watch_cache_misses(model, partial(self.before_trace, weakref.ref(model)))

        def before_call(jitted: torch.nn.Module, *_: Any) -> None:
            self._collects_less.end()  # compiling without a call may have failed
            if not self.running_eagerly:
                refuse_old_backward_hooks(jitted)
                # Compiling without a call may have failed and left placeholders in the module.
                self.module_params.install_shards()
                self.module_params.check()
                if any(isinstance(param, RowDTensor) for param in parameters_of_running_ddp()):
                    refuse_ddp()
                install_placeholders_on_miss()

        def after_call(*_: Any) -> None:
            self._collects_less.end()
            finish_copies()
            if not self.running_eagerly and self.module_params.has_placeholders:  # tracing failed
                self.module_params.install_shards()
                self._warn_of_containers()

        model.register_forward_pre_hook(before_call)
        model.register_forward_hook(after_call, always_call=True)

    def before_trace(self, model: weakref.ref[ThunderModule]) -> None:
        """Check the module and replace its parameters with placeholders of whole shape, before Thunder traces ``model``."""
        if (jitted := model()) is not None:
            refuse_conflicts(jitted)
        refuse_backward_hooks(self.module)
        self.module_params.install_shards()
        self.module_params.check()
        self.module_params.check_shards()
        self.check_initialized()
        self.progress.begin("tracing the module for new inputs", stage="tracing")
        self.module_params.install_placeholders()
        self._collects_less.begin()

    def compile(self, model: ThunderModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Compile ``model`` for a call without running it; return Thunder's cache entry, and the inputs of its traces."""
        try:
            entry, inputs, _ = thunder.compile_data(model).get_computation_and_inputs(*args, **kwargs)
        finally:
            self._collects_less.end()
        return entry, inputs

    def known(self) -> Collection[str]:
        """Return the names of all parameters that Thunder may unpack, including those that other transforms created."""
        model = None if self._model is None else self._model()
        return self.shards.keys() if model is None else model._overrides_parameters.keys()

    def _warn_of_containers(self) -> None:
        for path, name in self.module_params.in_containers().items():
            warnings.warn(
                f"fsdp: {path} holds parameter {name!r}, which is sharded: if forward reads it there, tracing sees only "
                f"this rank's rows. Read it as {name}",
                stacklevel=3,
            )

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return all names of a parameter in a state dict, the leading one first; if it is not sharded, only ``name``."""
        if name not in self.locations:
            return (name,)
        bucket, index = self.locations[name]
        return tuple(map(state_name, bucket.spec.params[index].names))

    def check_initialized(self) -> None:
        """Raise an error on all ranks if parameters or buffers have not been initialized; only before the first run.

        Raises:
            RuntimeError: names them.
            ScheduleDisagreement: names those of another rank.
        """
        if not self.began_on_meta or self.world_group.is_fake:  # a plan needs no values
            return
        with self.agreement.all_or_none("whether all parameters have values"):
            assert self._model is not None
            model = self._model()
            assert model is not None
            tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
            blank = [n for n, t in tensors.items() if t.is_meta or (n in self.began_on_meta and is_blank(t))]
            if blank:
                raise RuntimeError(
                    f"parameters or buffers that were on the meta device have no values yet: {', '.join(blank[:3])}"
                    f"{f' and {len(blank) - 3} more' if len(blank) > 3 else ''}. Give fsdp(param_init_fn=...), or load "
                    f"parameters (load_checkpoint, load_safetensors) before the first call"
                )
        self.began_on_meta.clear()

    def shard_entry(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of an unsharded state dict entry; other entries are returned unchanged.

        Raises:
            ValueError: the entry's shape is not that of the parameter.
        """
        if name not in self.locations:
            return value
        bucket, index = self.locations[name]
        expected = bucket.spec.params[index].shape
        if tuple(value.shape) != expected:
            raise ValueError(f"state dict entry {name!r}: expected shape {expected}, got {tuple(value.shape)}")
        rows = bucket.local_rows(index, value).to(device=bucket.spec.shard_device, dtype=bucket.spec.dtype)
        return RowDTensor.wrap(rows, bucket.rows[index])


def _described(bucket: BucketSpec) -> str:
    return f"bucket {bucket.name!r} with transport {bucket.comm.transport!r}"
