"""Rules that group parameters into buckets. No tensors are touched, no collectives are run."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from ..errors import coded_error
from .layout import make_layout
from .specs import BucketOptions, BucketSpec, CommSpec, GroupKey, ParamSpec, Plan

BucketRule = Callable[[str, torch.nn.Parameter], str]

# [Note: Edges]
# No compute hides the first gather of forward and the last reduction of backward (both of the first block), nor, under
# ZeRO-3, the first gather of backward (of the last block). The smaller these collectives are, the less communication is
# exposed. So these two blocks are cut into edge pieces: runs of consecutive modules, each with a collective of its own.
# The compute of one piece hides the collective of another.
_EDGE_PIECES = 6
"""The largest number of edge pieces of a block. Each piece has at least this share (1/6) of the block."""

_MIN_EDGE_PIECE_BYTES = 1 << 19
"""The smallest edge piece (bytes). For fewer bytes, starting a collective takes longer than sending them."""


BucketingStrategy = Literal["none", "layer", "block"]
"""The rule by which parameters are grouped into buckets; see :func:`thunder_fsdp_sched.fsdp`."""


def make_plan(
    module: torch.nn.Module,
    params: Iterable[tuple[ParamSpec, torch.nn.Parameter, GroupKey, BucketOptions]],
    *,
    strategy: BucketingStrategy | int | BucketRule,
    default_group: GroupKey,
    comm_spec: Callable[[str, tuple[ParamSpec, ...], GroupKey, BucketOptions], CommSpec],
    leaves: Container[torch.nn.Module] = (),
) -> Plan:
    """Group parameters into buckets, never across dtype, device, ``requires_grad``, process group or options.

    Args:
        module: the module that owns the parameters, for its tree.
        params: the parameters to shard, in the order of the module tree, each with its ranks and its options.
        strategy: a strategy, the size (bytes of unsharded parameters) at which a bucket is full, or a rule that returns
            the name of a parameter's bucket.
        default_group: the ranks of parameters for which ``process_group_for`` names no others.
        comm_spec: returns how a bucket is sent, given its name, its parameters, its ranks and its options.
        leaves: modules that need all their parameters at once, so that blocks are not searched within them.

    Raises:
        TypeError: the rule did not return a name.
        ValueError: the rule puts parameters that are sharded over different groups into one bucket, or the ranks of a
            bucket cannot be divided into groups for secondary shards.
    """
    rule = _rule(module, strategy, leaves)
    grouped: dict[tuple[str, Kind], list[ParamSpec]] = {}
    first_of: dict[str, tuple[Kind, str]] = {}
    for spec, param, ranks, options in params:
        kind = Kind(spec.dtype, spec.device, spec.requires_grad, ranks, options)
        name = rule(spec, param, kind)
        (_, _, _, other, _), first = first_of.setdefault(name, (kind, spec.name))
        if other != ranks and callable(strategy):
            raise coded_error(
                ValueError,
                "option.bucket-over-two-groups",
                first=first,
                second=spec.name,
                bucket=name,
                first_group=other.group,
                second_group=ranks.group,
            )
        grouped.setdefault((name, kind), []).append(spec)
    taken: set[str] = set()
    buckets = []
    for (name, kind), specs in grouped.items():
        unique, ranks, dtype = name, kind.ranks, kind.dtype
        details = kind.labels(first_of[name][0])
        while unique in taken:
            unique = f"{unique}.{details.pop(0)}" if details else f"{unique}_"
            unique = unique.rstrip(".")
        taken.add(unique)
        policy, sending = kind.options.mp_policy, kind.options.comm_policy
        exempt = {i for i, spec in enumerate(specs) if sending and sending.exempts(spec.names, len(spec.shape))}
        if all(i in exempt or not spec.numel for i, spec in enumerate(specs)):  # nothing to encode
            kind, exempt = kind._replace(options=replace(kind.options, comm_policy=None)), set()
        comm = comm_spec(unique, tuple(specs), ranks, kind.options)
        narrowest = min((d or dtype).itemsize for d in (dtype, policy.param_dtype, policy.reduce_dtype))
        shapes = [spec.shape for spec in specs]
        layout = make_layout(shapes, ranks.size, narrowest, per_param=comm.per_param, exempt=exempt)
        buckets.append(
            BucketSpec(
                unique,
                tuple(specs),
                layout,
                replace(kind.options, secondary_ranks=_secondary_size(unique, kind.options, ranks.size)),
                comm,
                ranks.group,
                ranks.replicas,
            )
        )
    return Plan(tuple(buckets), default_group.size, default_group.group)


def _secondary_size(name: str, options: BucketOptions, ranks: int) -> int | None:
    size = options.secondary_ranks
    if size is None or options.sharding_strategy == "zero2" or size == ranks:
        return None
    if ranks % size:
        raise coded_error(ValueError, "option.secondary-ranks-do-not-divide", size=size, name=name, ranks=ranks)
    return size


class Kind(NamedTuple):
    """Properties in which all parameters of a bucket agree."""

    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    ranks: GroupKey
    options: BucketOptions

    def labels(self, first: Kind) -> list[str]:
        """Return suffixes that distinguish a bucket from the first one of its name; some are empty."""
        own, other = self.options, first.options
        policy, others = own.mp_policy, other.mp_policy
        param_dtype = policy.param_dtype or self.dtype
        reduce_dtype = policy.reduce_dtype or param_dtype
        factor, size = own.gradient_divide_factor, own.secondary_ranks
        return [
            "" if self.ranks == first.ranks else self.ranks.group,
            "" if self.requires_grad else "frozen",
            "" if own.sharding_strategy == other.sharding_strategy else own.sharding_strategy,
            "" if policy.param_dtype == others.param_dtype else _named(param_dtype),
            "" if policy.reduce_dtype == others.reduce_dtype else f"reduced_{_named(reduce_dtype)}",
            "" if own.comm_policy == other.comm_policy else _sent_as(*own.formats),
            "" if factor == other.gradient_divide_factor else f"divided_by_{factor or 'ranks'}",
            "" if size == other.secondary_ranks else f"secondary_{size or 'none'}",
            _named(self.dtype),
            str(self.device),
        ]


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sent_as(gather: str | None, reduce: str | None) -> str:
    return f"sent_as_{gather or 'exact'}_{reduce or 'exact'}"


Rule = Callable[[ParamSpec, torch.nn.Parameter, Kind], str]


def _rule(
    module: torch.nn.Module, strategy: BucketingStrategy | int | BucketRule, leaves: Container[torch.nn.Module]
) -> Rule:
    if strategy == "none":
        return lambda spec, *_: spec.name
    if strategy == "layer":
        return lambda spec, *_: spec.name.rpartition(".")[0] or "root"
    if strategy == "block":
        return _by_block(module, leaves)
    return _by_size(strategy) if isinstance(strategy, int) else _by_user(strategy)


def _by_block(module: torch.nn.Module, leaves: Container[torch.nn.Module]) -> Rule:
    """Return the rule of one bucket per block, and several for the first and last block: see [Note: Edges]."""
    blocks = named_blocks(module, leaves)
    modules = dict(module.named_modules(remove_duplicate=False))
    in_turn = [b for b in blocks if _is_container(modules[b.rpartition(".")[0]])]  # not an embedding, not a head
    bucket_of: dict[str, str] = {}
    for block in dict.fromkeys((*in_turn[:1], *in_turn[-1:])):
        if modules[block] in leaves:
            continue
        bucket_of.update(_edge_pieces(modules[block], block))

    def rule(spec: ParamSpec, *_: object) -> str:
        block = _innermost(spec.name, blocks)
        return bucket_of.get(spec.name.rpartition(".")[0], block)

    return rule


def _edge_pieces(block: torch.nn.Module, path: str) -> dict[str, str]:
    """Return the bucket of each module in a block that owns parameters directly; empty if the block is too small to cut."""
    sizes = {
        f"{path}.{name}" if name else path: sum(p.nbytes for p in owner.parameters(recurse=False))
        for name, owner in block.named_modules()
    }
    sizes = {name: size for name, size in sizes.items() if size}
    least = sum(sizes.values()) / _EDGE_PIECES
    if least < _MIN_EDGE_PIECE_BYTES:
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
    return max((block for block in blocks if param_name.startswith(f"{block}.")), key=len, default="root")


def named_blocks(module: torch.nn.Module, leaves: Container[torch.nn.Module] = ()) -> tuple[str, ...]:
    """Return the paths of the modules that form one bucket each under ``bucketing_strategy="block"``, in module order.

    A child of a ``ModuleList`` or ``Sequential`` is a block. Exception: if it directly holds another such container of
    repeated composite modules, as a stage of a vision model does, the children of that container are blocks instead.
    Outside of containers, each module that branches off the path to a container is a block: an embedding, a final norm,
    a head. A parameter that a module on such a path owns directly belongs to no block; its bucket is named after that
    module. Leaf modules are not searched.
    """
    blocks: list[str] = []

    def visit(node: torch.nn.Module, path: str) -> None:
        for name, child in node.named_children():
            child_path = f"{path}.{name}" if path else name
            if next(child.parameters(), None) is None:
                continue
            if child not in leaves and _holds_blocks(child, leaves, inside_container=_is_container(node)):
                visit(child, child_path)
                if any(True for _ in child.parameters(recurse=False)):
                    blocks.append(child_path)
            else:
                blocks.append(child_path)

    visit(module, "")
    return tuple(blocks)


def _is_container(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))


def _holds_blocks(module: torch.nn.Module, leaves: Container[torch.nn.Module], *, inside_container: bool) -> bool:
    """Return whether blocks are to be searched within ``module``, instead of making it one block."""
    if inside_container:
        containers = [module] if _is_container(module) else [c for c in module.children() if _is_container(c)]
        return any(_has_repeated_composites(c) for c in containers if c not in leaves)
    if module in leaves:
        return False
    return _is_container(module) or any(_holds_blocks(m, leaves, inside_container=False) for m in module.children())


def _has_repeated_composites(container: torch.nn.Module) -> bool:
    composites = [
        type(child)
        for child in container.children()
        if next(child.children(), None) is not None and next(child.parameters(), None) is not None
    ]
    return len(composites) > len(set(composites))


def _by_user(strategy: BucketRule) -> Rule:
    def rule(spec: ParamSpec, param: torch.nn.Parameter, kind: Kind) -> str:
        name = strategy(spec.name, param)
        if not isinstance(name, str) or not name:
            raise coded_error(TypeError, "option.invalid-bucket-name", got=name, parameter=spec.name)
        return name

    return rule


def _by_size(limit: int) -> Rule:
    # One bucket of each kind is open at a time; a parameter of another kind does not close it.
    open_buckets: dict[Kind, tuple[str, int]] = {}

    def rule(spec: ParamSpec, param: torch.nn.Parameter, kind: Kind) -> str:
        name, size = open_buckets.get(kind, (spec.name, 0))
        open_buckets[kind] = (name, size + spec.numel * spec.dtype.itemsize)
        if open_buckets[kind][1] >= limit:
            del open_buckets[kind]
        return name

    return rule
