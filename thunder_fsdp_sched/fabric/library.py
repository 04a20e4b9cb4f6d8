"""Lightning Fabric, from whichever of its two distributions the program uses.

``lightning`` has it as ``lightning.fabric``, ``lightning-fabric`` as ``lightning_fabric``. Each has its own classes, and a
``Fabric`` accepts strategies of its own distribution only. If both are installed, the one that has been imported first
is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

__all__ = ["DDPStrategy", "DoublePrecision", "FSDPPrecision", "HalfPrecision", "MixedPrecision", "Precision"]

_PACKAGES = ("lightning.fabric", "lightning_fabric")


def _find_package() -> str:
    for name in _PACKAGES:
        if name in sys.modules:
            return name
    for name in _PACKAGES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise ImportError(
        "thunder_fsdp_sched.fabric needs Lightning Fabric: pip install 'thunder_fsdp_sched[fabric]', or lightning"
    )


_package = _find_package()
_strategies: Any = importlib.import_module(f"{_package}.strategies")
_precisions: Any = importlib.import_module(f"{_package}.plugins")

DDPStrategy = _strategies.DDPStrategy
DoublePrecision = _precisions.DoublePrecision
FSDPPrecision = _precisions.FSDPPrecision
HalfPrecision = _precisions.HalfPrecision
MixedPrecision = _precisions.MixedPrecision
Precision = _precisions.Precision
