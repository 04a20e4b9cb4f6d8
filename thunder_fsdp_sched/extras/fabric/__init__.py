"""A strategy for Lightning Fabric: ``Fabric(strategy=FSDPSchedStrategy(...))``. It needs the extra ``fabric``."""

from .strategy import FSDPSchedStrategy, ShardedMixedPrecision

__all__ = ["FSDPSchedStrategy", "ShardedMixedPrecision"]
