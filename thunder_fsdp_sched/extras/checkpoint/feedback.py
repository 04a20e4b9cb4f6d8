"""Error feedback in a checkpoint: the quantization residual of each bucket, which differs between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from ...runtime.bucket import Bucket
from ...sharding.sharded_module import ShardedModule
from .storage import Paths

FEEDBACK = "error_feedback"
"""The name under which it is saved, by bucket, layout and rank."""


def entries(sharded: ShardedModule) -> dict[str, torch.Tensor]:
    """Return what this rank saves, by name; empty before the first reduction."""
    buckets = (bucket for bucket in _with_feedback(sharded) if "feedback" in vars(bucket))
    return {_name(bucket): bucket.feedback.lost for bucket in buckets}


class Loading:
    """Error feedback that is being loaded. What was saved for other buckets, or by another number of ranks, does not fit.

    Args:
        paths: those below :data:`FEEDBACK`.

    Attributes:
        memory: where to load it, by its names in the checkpoint.
        drops: whether the checkpoint has some of this rank that fits no bucket.
    """

    def __init__(self, sharded: ShardedModule, paths: Paths) -> None:
        self._places = [(bucket, paths.get((_name(bucket),))) for bucket in _with_feedback(sharded)]
        self.memory = {
            name: torch.empty(bucket.spec.layout.unsharded_numel, dtype=bucket.spec.reduce_dtype)
            for bucket, name in self._places
            if name is not None
        }
        rank = sharded.world_group.global_ranks[sharded.world_group.rank]
        own = {name for path, name in paths.items() if str(path[-1]).rpartition(" ")[2] == str(rank)}
        self.drops = bool(self._places) and not own <= self.memory.keys()

    def finish(self) -> None:
        """Copy what was loaded, and fill the rest with zeros."""
        for bucket, name in self._places:
            if name is not None:
                bucket.feedback.lost.copy_(self.memory[name])
            elif "feedback" in vars(bucket):
                bucket.feedback.lost.zero_()


def _with_feedback(sharded: ShardedModule) -> Iterator[Bucket]:
    return (b for b in sharded.buckets if b.spec.has_error_feedback)


def _name(bucket: Bucket) -> str:
    """Return a name that fits the same bucket, with the same layout, on the same rank of as many ranks."""
    spec, ranks = bucket.spec, bucket.ranks
    facts = spec.layout, [p.names for p in spec.params], spec.reduce_dtype, ranks.averaged
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return f"{spec.name} {digest[:16]} {ranks.group.global_ranks[bucket.rank]}"
