"""Error feedback in a checkpoint: what rounding each rank's gradients has lost, which differs between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from ..runtime.bucket import Bucket
from ..sharding.sharded_module import ShardedModule
from .storage import Paths

FEEDBACK = "error_feedback"
"""The name under which it is saved, by bucket, layout and rank."""


def entries(sharded: ShardedModule) -> dict[str, torch.Tensor]:
    """Return what this rank saves, by name; empty before the first reduction."""
    return {
        _name(bucket, bucket.rank): bucket.feedback for bucket in _with_feedback(sharded) if "feedback" in vars(bucket)
    }


class Loading:
    """Error feedback that is being loaded. What was saved for other buckets, or by another number of ranks, does not fit.

    Args:
        paths: those below :data:`FEEDBACK`.

    Attributes:
        memory: where to load it, by its names in the checkpoint.
        starts_from_zero: whether the checkpoint has none for some bucket.
    """

    def __init__(self, sharded: ShardedModule, paths: Paths) -> None:
        self.memory: dict[str, torch.Tensor] = {}
        self._places: list[tuple[Bucket, str | None]] = []
        for bucket in _with_feedback(sharded):
            names = [paths.get((_name(bucket, rank),)) for rank in range(bucket.spec.layout.world_size)]
            name = None if None in names else names[bucket.rank]
            self._places.append((bucket, name))
            if name is not None:
                self.memory[name] = torch.empty(bucket.spec.layout.unsharded_numel, dtype=bucket.spec.reduce_dtype)
        self.starts_from_zero = any(name is None for _, name in self._places)

    def finish(self) -> None:
        """Copy what was loaded, and fill the rest with zeros."""
        for bucket, name in self._places:
            if name is not None:
                bucket.feedback.copy_(self.memory[name])
            elif "feedback" in vars(bucket):
                bucket.feedback.zero_()


def _with_feedback(sharded: ShardedModule) -> Iterator[Bucket]:
    return (b for b in sharded.buckets if b.spec.options.comm_policy.error_feedback and b.spec.reduce_wire is not None)


def _name(bucket: Bucket, rank: int) -> str:
    """Return a name that fits the same bucket with the same layout only."""
    spec = bucket.spec
    layout = hashlib.sha256(repr((spec.layout, [p.names for p in spec.params], spec.reduce_dtype)).encode()).hexdigest()
    return f"{spec.name} {layout[:16]} {bucket.ranks.group.global_ranks[rank]}"
