"""The module's side: builds shard buffers from a module and makes its parameters views of them."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from thunder.core.module import ThunderModule
from torch.distributed.fsdp import CPUOffloadPolicy

from .buckets import BucketSpec, ParamSpec, Plan, ShardedOver, Travel, make_plan
from .buffers import Arena, Bucket, handle_name
from .consistency import Agreement
from .initialize import initialize
from .options import Options, check_transport
from .placing import Placing, everyone_of
from .transports import TRANSPORTS, choose_transport

__all__ = ["ShardedModule", "gather_param"]

_AGREEMENT_TIMEOUT = timedelta(seconds=300)
"""How long a rank that compiles waits for the others to compile the same: tracing may be slower on some."""

_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
"""Numbers the modules of each process group: the ranks of a group shard the same ones in the same order, but some of
them may shard others over another group in between."""


class ShardedModule:
    """The shards of one module on this rank.

    Attributes:
        module: the user's module; its sharded parameters are on the meta device from now on, for tracing.
        plan: the buckets as planned.
        buckets: the buckets with their memory, in the order of the plan.
        everyone: all ranks that parameters are shared with.
        kept: those of the buckets that stay unsharded between forward and backward.
        places: bucket and index in it of each sharded parameter, by each of its names.
        shards: this rank's rows of each sharded parameter, a view of its bucket's shard buffer, by each of its names.
        running_eagerly: whether the module's own forward may be called right now (``eager``).
    """

    def __init__(self, module: torch.nn.Module, plan: Plan, buckets: list[Bucket], agreement: Agreement) -> None:
        self.module = module
        self.plan = plan
        self.buckets = buckets
        self.everyone = agreement.group
        self.agreement = agreement
        self.places: dict[str, tuple[Bucket, int]] = {}
        self.shards: dict[str, torch.nn.Parameter] = {}
        self.replaced: dict[str, torch.Tensor] = {}  # ignored parameters and buffers on their new device
        self.kept = {bucket for bucket in buckets if not bucket.spec.reshard_after_forward}
        self.running_eagerly = False
        for bucket in buckets:
            bucket.explain_failure = self.agreement.explain
            for index, param in enumerate(bucket.spec.params):
                if bucket.spec.layout.placements[index].is_cut:  # for optimizers that rows will not do for
                    bucket.params[index]._fsdp_rows_of = param.name  # type: ignore[attr-defined]
                for name in param.names:
                    self.places[name] = (bucket, index)
                    self.shards[name] = bucket.params[index]

    @classmethod
    def shard(cls, model: ThunderModule, options: Options) -> ShardedModule:
        """Plans, allocates the shard buffers, fills them, and moves the module's own parameters to the meta device.

        The peak is one unsharded parameter above module and shards, and the module's memory is freed as far as nobody
        else holds its parameters.

        Raises:
            TypeError: the jitted function is not a module, or a parameter is no plain strided tensor.
            ValueError: parameters that share memory without being tied, unknown ``ignored_params``, a
                ``broadcast_from`` outside the process group, a transport that cannot carry a bucket, parameters of one
                bucket that are sharded over different groups.
            RuntimeError: no process group.
            ScheduleDisagreement: ranks have other versions of this package or of what it stands on, other options, or other
                parameters.
        """
        everyone = everyone_of(options)
        agreement = Agreement(everyone, f"module {next(_numbers[everyone.name])}", _AGREEMENT_TIMEOUT)
        # Before anything that ranks do together: groups are made, parameters are broadcast.
        agreement.check_same("what fsdp(...) was given", [*_versions(), *options.lines()])
        placing = Placing(options, everyone)
        module = model._model
        named = dict(model.named_parameters(remove_duplicate=False))
        usual = placing.key(placing.usual)
        with agreement.all_or_none("whether the module can be sharded"):
            ignored = _ignored_names(named, options)
            moved = _move(model, ignored, options)
            specs = _specs({n: p for n, p in named.items() if n not in ignored}, options)
            over = {spec.name: placing.of(spec.name, param) for spec, param in specs}
        for key in dict.fromkeys(over.values()):  # ranks of different groups may have different experts
            lines = [str(spec) for spec, _ in specs if over[spec.name] == key]
            agreement.about("parameters", placing.ranks(key).group).check_same("what is to be sharded", lines)
        if options.broadcast_from is not None:
            if options.param_init_fn is None and any(p.is_meta for _, p in specs):
                raise ValueError(
                    "broadcast_from: the module is on the meta device, so there is nothing to broadcast; param_init_fn says "
                    "how to initialize it"
                )
            _broadcast(((p, over[s.name]) for s, p in specs), options.broadcast_from, placing)
            _broadcast(((t, usual) for t in moved.values()), options.broadcast_from, placing)
        plan = make_plan(
            module,
            specs,
            strategy=options.bucketing,
            world_size=usual.size,
            group=usual.group,
            reshard_after_forward=options.reshard_after_forward,
            over=over,
            travel=partial(_travel, options, placing),
        )
        sharded = cls(module, plan, _allocate(plan, placing), agreement)
        sharded.replaced = moved
        for spec, param in specs:
            bucket, index = sharded.places[spec.name]
            if not param.is_meta:
                with torch.no_grad():
                    bucket.copy_in(index, param)
            elif not bucket.shard.is_meta and bucket.shard.numel():
                bucket.blank_version = bucket.shard._version
            _release(module, spec, bucket.spec)
        if options.param_init_fn is not None:
            sharded.initialize(options, placing)
        return sharded

    def initialize(self, options: Options, placing: Placing) -> None:
        """Fills the shards, buffers and ignored parameters that were on the meta device."""
        assert options.param_init_fn is not None and options.device is not None

        def take(name: str, tensor: torch.Tensor) -> None:
            bucket, index = self.places.get(name, (None, 0))
            over = placing.key(placing.usual if bucket is None else bucket.ranks)
            if options.broadcast_from is not None:
                _broadcast([(tensor, over)], options.broadcast_from, placing)
            if bucket is None:
                self.replaced[name] = tensor
            else:
                with torch.no_grad():
                    bucket.copy_in(index, tensor)

        initialize(self.module, options.param_init_fn, options.device, self.places, take)

    def keep(self, names: Collection[str]) -> None:
        """Lets the named buckets stay unsharded between forward and backward from now on, and no others."""
        self.plan = replace(
            self.plan, buckets=tuple(replace(b, reshard_after_forward=b.name not in names) for b in self.plan)
        )
        for bucket, spec in zip(self.buckets, self.plan, strict=True):
            bucket.spec = spec
        self.kept = {bucket for bucket in self.buckets if bucket.spec.name in names}

    def attach(self, model: ThunderModule) -> None:
        """Makes ``model`` use the shards: what its prologue unpacks, what ``parameters()`` gives to the optimizer."""
        model._overrides_parameters.update(self.shards)
        for name, tensor in self.replaced.items():
            overrides = (
                model._overrides_parameters if isinstance(tensor, torch.nn.Parameter) else model._overrides_buffers
            )
            overrides[name] = tensor

    def names_of(self, name: str) -> tuple[str, ...]:
        """All names of a parameter, the leading one first; what is not sharded has the one that is given."""
        if name not in self.places:
            return (name,)
        bucket, index = self.places[name]
        return bucket.spec.params[index].names

    def check_dtypes(self) -> None:
        """Refuses what has converted the module since: ``module.double()`` reaches its own parameters, not the shards.

        Raises:
            RuntimeError: naming the parameter.
        """
        own = dict(self.module.named_parameters())
        for bucket in self.buckets:
            for spec in bucket.spec.params:
                param = own.get(spec.name)  # a transform before this one may have made it
                if param is not None and param.dtype != bucket.spec.param_dtype:
                    raise RuntimeError(
                        f"parameter {spec.name!r} was sharded as {bucket.spec.param_dtype}, but the module was converted to "
                        f"{param.dtype} afterwards: convert it before thunder.jit(module, transforms=[fsdp(...)])"
                    )

    def check_initialized(self) -> None:
        """Refuses to compute with parameters that nobody has given values.

        Raises:
            RuntimeError: naming the parameters.
        """
        blank = [b for b in self.buckets if b.blank_version == b.shard._version]
        if blank and self.everyone.backend != "fake":  # a plan needs no values
            names = [param.name for bucket in blank for param in bucket.spec.params]
            raise RuntimeError(
                f"parameters that were on the meta device have no values yet: {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}. Give fsdp(param_init_fn=...), or load them "
                f"(load_checkpoint, load_safetensors) before the first call"
            )

    def shard_entry(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """This rank's rows of an unsharded state dict entry; entries that are not sharded pass through.

        Raises:
            ValueError: the entry has another shape than the parameter.
        """
        if name not in self.places:
            return value
        bucket, index = self.places[name]
        expected = bucket.spec.params[index].shape
        if tuple(value.shape) != expected:
            raise ValueError(f"state dict entry {name!r}: expected shape {expected}, got {tuple(value.shape)}")
        return bucket.own_rows(index, value).to(device=bucket.spec.shard_device, dtype=bucket.spec.dtype)


def gather_param(bucket: Bucket, index: int, shard: torch.Tensor) -> torch.Tensor:
    """The whole parameter ``index`` of ``bucket``, bit for bit, from every rank's rows; a collective.

    Args:
        shard: this rank's rows.

    Returns:
        A new tensor of the unsharded shape on the bucket's device, on every rank.
    """
    placement = bucket.spec.layout.placements[index]
    whole = torch.empty(placement.shape, dtype=bucket.spec.dtype, device=bucket.spec.device)
    rows = whole.reshape(1) if whole.ndim == 0 else whole
    bucket.own_rows(index, whole).copy_(shard)
    for rank, global_rank in enumerate(bucket.ranks.group.global_ranks):
        start, end = placement.row_starts[rank : rank + 2]
        if rows[start:end].numel():
            dist.broadcast(rows[start:end], src=global_rank, group=bucket.ranks.group.process_group)
    return whole


def _versions() -> list[str]:
    return [
        f"{name} {importlib.metadata.version(name)}" for name in ("thunder_fsdp_sched", "lightning-thunder", "torch")
    ]


def _travel(options: Options, placing: Placing, name: str, params: tuple[ParamSpec, ...], over: ShardedOver) -> Travel:
    """How a bucket travels, as the options say; checked."""
    first, ranks = params[0], placing.ranks(over)
    asked, reason = options.transport, "asked for"
    if callable(asked):
        asked, reason = check_transport(asked(name, params)), "asked for by the callable"
    param_dtype = options.mp_policy.param_dtype if first.dtype.is_floating_point else None
    reduce_dtype = (options.mp_policy.reduce_dtype or param_dtype) if first.dtype.is_floating_point else None
    dtypes = (param_dtype or first.dtype, reduce_dtype or param_dtype or first.dtype)
    if asked == "auto":
        itemsize = min(d.itemsize for d in (first.dtype, *dtypes))
        asked, reason = choose_transport([p.shape for p in params], over.size, itemsize, ranks.group.backend)
    transport = TRANSPORTS[asked]
    try:
        transport.check(first.device, dtypes, ranks)
    except ValueError as error:
        raise ValueError(f"{error} (bucket {name!r})") from error
    policy = options.offload_policy
    offload = isinstance(policy, CPUOffloadPolicy)
    if offload and transport.peers_read_shards:
        raise ValueError(
            f"transport={asked!r}: peers read shards in the memory of the GPU, but offload_policy keeps them on "
            f"the CPU (bucket {name!r}); choose another transport"
        )
    if offload:
        reason += "; shards on the CPU"
    pin_memory = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and first.device.type == "cuda"
    return Travel(asked, reason, transport.per_param, transport.staging, param_dtype, reduce_dtype, offload, pin_memory)


def _ignored_names(named: dict[str, torch.nn.Parameter], options: Options) -> set[str]:
    ignored = set()
    for wanted in options.ignored_params:
        matches = {n for n, p in named.items() if (n == wanted if isinstance(wanted, str) else p is wanted)}
        if not matches:
            what = repr(wanted) if isinstance(wanted, str) else f"a parameter of shape {tuple(wanted.shape)}"
            raise ValueError(f"ignored_params: {what} is not a parameter of the module")
        ignored |= {n for n, p in named.items() if any(p is named[m] for m in matches)}
    return ignored


def _specs(named: dict[str, torch.nn.Parameter], options: Options) -> list[tuple[ParamSpec, torch.nn.Parameter]]:
    """One spec for each different parameter, its tied names together, in the order of the module tree."""
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
        device = options.device or torch.device(getattr(param, "_thunder_device", param.device))
        specs.append((ParamSpec(tuple(names), tuple(param.shape), param.dtype, device, param.requires_grad), param))
    return specs


def _move(model: ThunderModule, ignored: set[str], options: Options) -> dict[str, torch.Tensor]:
    """Ignored parameters and buffers, on the device that was asked for."""
    moved: dict[str, torch.Tensor] = {}
    copies: dict[int, torch.Tensor] = {}  # what has several names stays one tensor

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if options.device is None or tensor.device == options.device or tensor.is_meta:
            return tensor
        if id(tensor) not in copies:
            copy = tensor.detach().to(options.device)
            is_param = isinstance(tensor, torch.nn.Parameter)
            copies[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if is_param else copy
        return copies[id(tensor)]

    for name, param in model.named_parameters(remove_duplicate=False):
        if name in ignored:
            moved[name] = move(param)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        moved[name] = move(buffer)
    return moved


def _broadcast(tensors: Iterable[tuple[torch.Tensor, ShardedOver]], source: int, placing: Placing) -> None:
    with torch.no_grad():
        for tensor, over in tensors:
            if tensor.is_meta:
                continue  # param_init_fn is still to make it
            placing.broadcast(tensor.detach(), source, over)


def _allocate(plan: Plan, placing: Placing) -> list[Bucket]:
    arenas: dict[torch.device, Arena] = {}
    handles: set[str] = set()
    buckets = []
    for spec in plan:
        handle = handle_name(spec.name)
        while handle in handles:
            handle += "_"
        handles.add(handle)
        arena = arenas.setdefault(spec.device, Arena(spec.device))
        ranks = placing.ranks(ShardedOver(spec.group, spec.layout.world_size, spec.replicas))
        buckets.append(Bucket(spec, ranks, TRANSPORTS[spec.travel.transport], arena, handle))
    return buckets


def _release(module: torch.nn.Module, spec: ParamSpec, bucket: BucketSpec) -> None:
    """Replaces the module's own parameter by one on the meta device: tracing reads its shape, nobody its values.

    Its dtype is that of the unsharded parameter: in lower precision if the bucket travels so.
    """
    meta = torch.nn.Parameter(torch.empty(spec.shape, dtype=bucket.param_dtype, device="meta"), spec.requires_grad)
    meta._thunder_device = spec.device  # type: ignore[attr-defined]  # what Thunder takes for the device of a parameter on the meta device
    for name in spec.names:
        path, _, leaf = name.rpartition(".")
        try:
            owner = module.get_submodule(path)
        except AttributeError:  # a transform before this one made the parameter
            continue
        if leaf in owner._parameters:
            owner.register_parameter(leaf, meta)
