"""Bucketing by size, or by a function of the user."""

from __future__ import annotations

import torch

from ..errors import coded_error
from .bucketing import BucketRule, Kind, Rule
from .specs import ParamSpec


def rule_of(strategy: int | BucketRule) -> Rule:
    """Return the rule of buckets of a size in bytes, or of those that a function names."""
    if isinstance(strategy, int):
        return _by_size(strategy)

    def named_by_user(spec: ParamSpec, param: torch.nn.Parameter, kind: Kind) -> str:
        name = strategy(spec.name, param)
        if not isinstance(name, str) or not name:
            raise coded_error(TypeError, "option.invalid-bucket-name", got=name, parameter=spec.name)
        return name

    return named_by_user


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
