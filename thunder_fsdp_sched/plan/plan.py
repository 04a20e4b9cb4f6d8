"""The buckets of a model, together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import coded_error
from ..extensions import load
from .specs import BucketSpec


@dataclass(frozen=True)
class Plan:
    """All buckets of a model, in the order of the module tree. ``print`` shows them as a table.

    Attributes:
        world_size: size of the process group over which buckets are sharded by default.
        group: description of that process group.
    """

    buckets: tuple[BucketSpec, ...]
    world_size: int
    group: str

    def __iter__(self) -> Iterator[BucketSpec]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __str__(self) -> str:
        return str(load("extras.reports.texts:plan_text")(self))

    def __getitem__(self, name: str) -> BucketSpec:
        for bucket in self.buckets:
            if bucket.name == name:
                return bucket
        raise coded_error(KeyError, "plan.unknown-bucket", name=name, buckets=[b.name for b in self.buckets])

    @property
    def param_bytes(self) -> int:
        """Bytes of all unsharded parameters without padding."""
        return sum(b.param_bytes for b in self.buckets)
