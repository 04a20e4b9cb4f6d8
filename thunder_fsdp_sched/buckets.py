"""The plan: which parameters travel together. Pure data, no tensors are touched, no collectives are run."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .layout import Layout, plan_layout

__all__ = ["BucketSpec", "BucketingStrategy", "ParamSpec", "Plan", "ShardedOver", "Travel", "make_plan", "named_blocks"]

BucketRule = Callable[[str, torch.nn.Parameter], str]

# [Note: Edges]
# Nothing hides the first gather of a forward, the last reduction of a backward (both of the first block) and, under
# ZeRO-3, the first gather of a backward (of the last block). The smaller these are the less is exposed, so the two
# blocks are cut into parts, runs of modules in order, which cost a collective each and hide one another.
_PARTS = 6
"""Into how many buckets an edge block is cut at most: a part has at least this share of it."""

_LEAST_PART_BYTES = 1 << 19
"""Bytes from which on a part is worth a collective of its own: with fewer, starting it takes longer than sending it."""


class BucketingStrategy(enum.Enum):
    """How parameters are grouped; see :func:`thunder_fsdp_sched.fsdp`."""

    NONE = "none"
    LAYER = "layer"
    BLOCK = "block"


@dataclass(frozen=True)
class ParamSpec:
    """One parameter; tied parameters are one.

    Attributes:
        names: every name of the parameter in the module, the first one leads.
        shape: shape of the unsharded parameter.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        trained = "" if self.requires_grad else ", frozen"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{' = '.join(self.names)}: {dtype}{list(self.shape)} on {self.device.type}{trained}"


class ShardedOver(NamedTuple):
    """Ranks over which parameters are sharded, and those that have copies of the shards; by what they are for."""

    group: str
    size: int
    replicas: int = 1


@dataclass(frozen=True)
class Travel:
    """How a bucket travels.

    Attributes:
        transport: name of the transport.
        reason: why this one.
        per_param: whether it needs a layout that cuts every parameter into even rows.
        staging: whether its slots have a second half, for the order in which ranks send.
        param_dtype: of unsharded parameters; ``None`` for their own.
        reduce_dtype: of gradients on the wire; ``None`` for ``param_dtype``.
        offload: whether shards and their gradients live on the CPU, and shards are copied to the device to be sent.
        pin_memory: whether they lie in page-locked memory there.
    """

    transport: str = "flat"
    reason: str = "default"
    per_param: bool = False
    staging: bool = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    offload: bool = False
    pin_memory: bool = False


@dataclass(frozen=True)
class BucketSpec:
    """Parameters that travel in one collective. They share dtype, device, ``requires_grad`` and process group.

    Attributes:
        name: unique in the plan, made from the module path (``transformer.h.0``).
        reshard_after_forward: ZeRO-3 (gathered again for backward) if true, ZeRO-2 (stays unsharded) if not.
        group: description of the process group over which it is sharded.
        replicas: ranks that hold a copy of each shard, this one included.
    """

    name: str
    params: tuple[ParamSpec, ...]
    layout: Layout
    reshard_after_forward: bool
    travel: Travel = Travel()
    group: str = ""
    replicas: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """Of the shards, and of sharded gradients."""
        return self.params[0].dtype

    @property
    def param_dtype(self) -> torch.dtype:
        """Of unsharded parameters."""
        return self.travel.param_dtype or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Of unsharded gradients in their slot, and on the wire."""
        return self.travel.reduce_dtype or self.param_dtype

    @property
    def device(self) -> torch.device:
        """Of unsharded parameters and gradients, and of the collectives."""
        return self.params[0].device

    @property
    def shard_device(self) -> torch.device:
        """Of shards and sharded gradients."""
        return torch.device("cpu") if self.travel.offload else self.device

    @property
    def requires_grad(self) -> bool:
        return self.params[0].requires_grad

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded parameters as they travel, padding included."""
        return self.layout.unsharded_numel * self.param_dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of the unsharded gradients as they travel, padding included."""
        return self.layout.unsharded_numel * self.reduce_dtype.itemsize

    @property
    def padding_bytes(self) -> int:
        """Bytes of the unsharded buffer that belong to no parameter."""
        return self.layout.padding_numel * self.param_dtype.itemsize

    @property
    def sent_numel(self) -> int:
        """Elements of all ranks' shards together."""
        return self.layout.shard_numel * self.layout.world_size

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard buffer, padding included."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def param_bytes(self) -> int:
        """Bytes of the unsharded parameters without padding, in their own dtype."""
        return sum(p.numel for p in self.params) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """Every bucket of a model, in the order of the module tree.

    Attributes:
        world_size: ranks of the process group over which buckets are sharded, unless they have one of their own.
        group: what that process group is for.
    """

    buckets: tuple[BucketSpec, ...]
    world_size: int
    group: str

    def __iter__(self) -> Iterator[BucketSpec]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __getitem__(self, name: str) -> BucketSpec:
        for bucket in self.buckets:
            if bucket.name == name:
                return bucket
        raise KeyError(f"no bucket {name!r}; buckets are {[b.name for b in self.buckets]}")

    @property
    def param_bytes(self) -> int:
        """Bytes of all unsharded parameters without padding."""
        return sum(b.param_bytes for b in self.buckets)


def make_plan(
    module: torch.nn.Module,
    params: Iterable[tuple[ParamSpec, torch.nn.Parameter]],
    *,
    strategy: BucketingStrategy | int | BucketRule,
    world_size: int,
    group: str,
    reshard_after_forward: bool,
    over: Mapping[str, ShardedOver] | None = None,
    travel: Callable[[str, tuple[ParamSpec, ...], ShardedOver], Travel] = lambda name, params, over: Travel(),
) -> Plan:
    """Groups parameters into buckets, never across dtype, device, ``requires_grad`` or process group.

    Args:
        module: the module that owns the parameters, for its tree.
        params: the parameters to shard, in the order of the module tree.
        strategy: a strategy, the bytes of unsharded parameters from which on a bucket is full, or a rule that gives a
            parameter's bucket name.
        world_size: ranks to shard over.
        group: name of the process group, for the reader.
        reshard_after_forward: ZeRO-3 if true, ZeRO-2 if not.
        over: for parameters, by name, that are sharded over other ranks.
        travel: says how a bucket travels, from its name, its parameters and its ranks.

    Raises:
        TypeError: the rule returned something else than a name.
        ValueError: the rule puts parameters that are sharded over different groups into one bucket.
    """
    rule = _rule(module, strategy)
    usual = ShardedOver(group, world_size)
    grouped: dict[tuple[str, torch.dtype, torch.device, bool, ShardedOver], list[ParamSpec]] = {}
    groups_of: dict[str, tuple[ShardedOver, str]] = {}
    for spec, param in params:
        name, ranks = rule(spec, param), (over or {}).get(spec.name, usual)
        other, first = groups_of.setdefault(name, (ranks, spec.name))
        if other != ranks and not isinstance(strategy, BucketingStrategy | int):
            raise ValueError(
                f"bucketing_strategy: the callable puts {first!r} and {spec.name!r} into one bucket {name!r}, but they are "
                f"sharded over two process groups, {other.group!r} and {ranks.group!r}"
            )
        grouped.setdefault((name, spec.dtype, spec.device, spec.requires_grad, ranks), []).append(spec)
    taken: set[str] = set()
    buckets = []
    for (name, dtype, device, requires_grad, ranks), specs in grouped.items():
        unique = name
        details = [
            "" if ranks == groups_of[name][0] else ranks.group,
            "" if requires_grad else "frozen",
            str(dtype).removeprefix("torch."),
            str(device),
        ]
        while unique in taken:
            unique = f"{unique}.{details.pop(0)}" if details else f"{unique}_"
            unique = unique.rstrip(".")
        taken.add(unique)
        how = travel(unique, tuple(specs), ranks)
        narrowest = min((d or dtype).itemsize for d in (dtype, how.param_dtype, how.reduce_dtype))
        layout = plan_layout([s.shape for s in specs], ranks.size, narrowest, per_param=how.per_param)
        buckets.append(
            BucketSpec(unique, tuple(specs), layout, reshard_after_forward, how, ranks.group, ranks.replicas)
        )
    return Plan(tuple(buckets), world_size, group)


def _rule(
    module: torch.nn.Module, strategy: BucketingStrategy | int | BucketRule
) -> Callable[[ParamSpec, torch.nn.Parameter], str]:
    if strategy is BucketingStrategy.NONE:
        return lambda spec, param: spec.name
    if strategy is BucketingStrategy.LAYER:
        return lambda spec, param: spec.name.rpartition(".")[0] or "root"
    if strategy is BucketingStrategy.BLOCK:
        return _by_block(module)
    if isinstance(strategy, int):
        return _by_size(strategy)

    def named_by_user(spec: ParamSpec, param: torch.nn.Parameter) -> str:
        name = strategy(spec.name, param)
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"bucketing_strategy: the callable must return a bucket's name (a non-empty str) for each parameter, "
                f"but returned {name!r} for {spec.name!r}"
            )
        return name

    return named_by_user


def _by_size(limit: int) -> Callable[[ParamSpec, torch.nn.Parameter], str]:
    # A bucket of each kind is open at a time: parameters of another dtype in between do not close it.
    open_buckets: dict[tuple[torch.dtype, torch.device, bool], tuple[str, int]] = {}

    def rule(spec: ParamSpec, param: torch.nn.Parameter) -> str:
        kind = (spec.dtype, spec.device, spec.requires_grad)
        name, size = open_buckets.get(kind, (spec.name, 0))
        open_buckets[kind] = (name, size + spec.numel * spec.dtype.itemsize)
        if open_buckets[kind][1] >= limit:
            del open_buckets[kind]
        return name

    return rule


def _by_block(module: torch.nn.Module) -> Callable[[ParamSpec, torch.nn.Parameter], str]:
    """A bucket for each block, but several for the first and the last big one: see [Note: Edges]."""
    blocks = named_blocks(module)
    modules = dict(module.named_modules(remove_duplicate=False))
    in_turn = [b for b in blocks if _is_container(modules[b.rpartition(".")[0]])]  # not an embedding, not a head
    bucket_of: dict[str, str] = {}
    for block in dict.fromkeys((*in_turn[:1], *in_turn[-1:])):
        bucket_of.update(_parts_of(modules[block], block))

    def rule(spec: ParamSpec, param: torch.nn.Parameter) -> str:
        block = _innermost(spec.name, blocks)
        return bucket_of.get(spec.name.rpartition(".")[0], block)

    return rule


def _parts_of(block: torch.nn.Module, path: str) -> dict[str, str]:
    """The bucket of each module of a block that owns parameters itself, if the block is big enough to be cut."""
    sizes = {
        f"{path}.{name}" if name else path: sum(p.nbytes for p in owner.parameters(recurse=False))
        for name, owner in block.named_modules()
    }
    sizes = {name: size for name, size in sizes.items() if size}
    least = sum(sizes.values()) / _PARTS
    if least < _LEAST_PART_BYTES:
        return {}
    runs: list[list[str]] = [[]]
    for name in sizes:
        if sum(sizes[n] for n in runs[-1]) >= least:
            runs.append([])
        runs[-1].append(name)
    if len(runs) > 1 and sum(sizes[n] for n in runs[-1]) < least:
        last = runs.pop()
        runs[-1] += last
    if len(runs) == 1:
        return {}
    return {name: max(run, key=sizes.__getitem__) for run in runs for name in run}


def _innermost(param_name: str, blocks: Iterable[str]) -> str:
    best = ""
    for block in blocks:
        if param_name.startswith(f"{block}.") and len(block) > len(best):
            best = block
    return best or "root"


def named_blocks(module: torch.nn.Module) -> tuple[str, ...]:
    """Module paths that make a bucket each under ``bucketing_strategy="block"``, in the order of the module tree.

    A child of a ``ModuleList`` or ``Sequential`` is a block, except when it holds such a container of
    composite modules itself, directly: then its children are (stages of a vision model). What lies outside every
    container is cut where it leaves the path to one: an embedding, a final norm and a head are blocks of their own.
    A parameter that a module on such a path owns itself belongs to no block (its bucket is named after that module).
    """
    blocks: list[str] = []

    def visit(node: torch.nn.Module, path: str) -> None:
        for name, child in node.named_children():
            child_path = f"{path}.{name}" if path else name
            if next(child.parameters(), None) is None:
                continue
            if _holds_blocks(child, inside_container=_is_container(node)):
                visit(child, child_path)
                if any(True for _ in child.parameters(recurse=False)):
                    blocks.append(child_path)
            else:
                blocks.append(child_path)

    visit(module, "")
    return tuple(blocks)


def _is_container(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))


def _holds_blocks(module: torch.nn.Module, *, inside_container: bool) -> bool:
    """Whether the walk for blocks goes on inside ``module`` instead of taking it as one block."""
    if inside_container:
        containers = [module] if _is_container(module) else [c for c in module.children() if _is_container(c)]
        return any(_has_repeated_composites(c) for c in containers)
    return any(_is_container(m) for m in module.modules())


def _has_repeated_composites(container: torch.nn.Module) -> bool:
    composites = [
        type(child)
        for child in container.children()
        if next(child.children(), None) is not None and next(child.parameters(), None) is not None
    ]
    return len(composites) > len(set(composites))
