"""The plan: which parameters travel together. Pure data, no tensors are touched, no collectives are run."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from .layout import Layout, plan_layout

__all__ = ["BucketSpec", "BucketingStrategy", "ParamSpec", "Plan", "make_plan", "named_blocks"]

BucketRule = Callable[[str, torch.nn.Parameter], str]


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


@dataclass(frozen=True)
class BucketSpec:
    """Parameters that travel in one collective. They share dtype, device and ``requires_grad``.

    Attributes:
        name: unique in the plan, made from the module path (``transformer.h.0``).
        reshard_after_forward: ZeRO-3 (gathered again for backward) if true, ZeRO-2 (stays unsharded) if not.
    """

    name: str
    params: tuple[ParamSpec, ...]
    layout: Layout
    reshard_after_forward: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.params[0].dtype

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    @property
    def requires_grad(self) -> bool:
        return self.params[0].requires_grad

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded buffer, padding included."""
        return self.layout.unsharded_numel * self.dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard buffer, padding included."""
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def param_bytes(self) -> int:
        """Bytes of the unsharded parameters without padding."""
        return sum(p.numel for p in self.params) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """Every bucket of a model, in the order of the module tree.

    Attributes:
        world_size: ranks of the process group over which the buckets are sharded.
        group: name of that process group.
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
) -> Plan:
    """Groups parameters into buckets, never across dtype, device or ``requires_grad``.

    Args:
        module: the module that owns the parameters, for its tree.
        params: the parameters to shard, in the order of the module tree.
        strategy: a strategy, the bytes of unsharded parameters from which on a bucket is full, or a rule that gives a
            parameter's bucket name.
        world_size: ranks to shard over.
        group: name of the process group, for the reader.
        reshard_after_forward: ZeRO-3 if true, ZeRO-2 if not.

    Raises:
        TypeError: the rule returned something else than a name.
    """
    rule = _rule(module, strategy)
    grouped: dict[tuple[str, torch.dtype, torch.device, bool], list[ParamSpec]] = {}
    for spec, param in params:
        name = rule(spec, param)
        grouped.setdefault((name, spec.dtype, spec.device, spec.requires_grad), []).append(spec)
    taken: set[str] = set()
    buckets = []
    for (name, dtype, device, requires_grad), specs in grouped.items():
        unique = name
        details = ["" if requires_grad else "frozen", str(dtype).removeprefix("torch."), str(device)]
        while unique in taken:
            unique = f"{unique}.{details.pop(0)}" if details else f"{unique}_"
            unique = unique.rstrip(".")
        taken.add(unique)
        layout = plan_layout([s.shape for s in specs], world_size, dtype.itemsize)
        buckets.append(BucketSpec(unique, tuple(specs), layout, reshard_after_forward))
    return Plan(tuple(buckets), world_size, group)


def _rule(
    module: torch.nn.Module, strategy: BucketingStrategy | int | BucketRule
) -> Callable[[ParamSpec, torch.nn.Parameter], str]:
    if strategy is BucketingStrategy.NONE:
        return lambda spec, param: spec.name
    if strategy is BucketingStrategy.LAYER:
        return lambda spec, param: spec.name.rpartition(".")[0] or "root"
    if strategy is BucketingStrategy.BLOCK:
        blocks = named_blocks(module)
        return lambda spec, param: _innermost(spec.name, blocks)
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
