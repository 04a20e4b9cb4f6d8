"""A strategy for Lightning Fabric: ``Fabric(strategy=FSDPSchedStrategy(...))``. It needs the extra ``fabric``."""

from .precision import ShardedMixedPrecision
from .strategy import FSDPSchedStrategy

__all__ = ["FSDPSchedStrategy", "ShardedMixedPrecision"]
