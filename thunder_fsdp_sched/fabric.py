"""A strategy for Lightning Fabric: ``Fabric(strategy=FSDPSchedStrategy(...))``. It needs the extra ``fabric``."""

from .extras.fabric import FSDPSchedStrategy, ShardedMixedPrecision

__all__ = ["FSDPSchedStrategy", "ShardedMixedPrecision"]
